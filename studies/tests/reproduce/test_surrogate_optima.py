"""002-2: optima of the federated and of the surrogate loss, against scipy on the same rows."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedapp import federation
from fedapp.config import ConfigError, RunConfig
from studies.reproduce.surrogate_optima import optima, surrogate_weights

CONFIG = {
    "dataset": "digits",
    "model": "logistic",
    "strategy": "async-fedavg",
    "client-weights": "uniform",
    "l2": 1e-3,
    "partitioner": "dirichlet",
    "dirichlet-alpha": 0.5,
    "time-scenario": "F80",
}
CLIENTS = 4
TIMES = np.array([0.2, 0.2 + 0.8 / 3, 0.2 + 1.6 / 3, 1.0])


def by_scipy(config: RunConfig, q: np.ndarray, p: np.ndarray) -> float:
    """Σ p_i f_i at scipy's minimum of Σ q_i f_i; the losses by PyTorch."""
    dataset, partition = (of(config, CLIENTS) for of in (federation.dataset_of, federation.partition_of))
    pairs = [
        federation.to_tensors(dataset, partition.client(i), config.normalize, torch.device("cpu"))
        for i in range(CLIENTS)
    ]
    data = [(x.double().flatten(1), y) for x, y in pairs]

    def loss(w: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        matrix, bias = w[:640].reshape(10, 64), w[640:]
        losses = [torch.nn.functional.cross_entropy(x @ matrix.T + bias, y) for x, y in data]
        return torch.stack(losses) @ torch.tensor(weights) + config.l2 / 2 * (w @ w)

    def value_and_gradient(w: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(w, requires_grad=True)
        value = loss(point, q)
        value.backward()
        return value.item(), point.grad.numpy()

    found = minimize(
        value_and_gradient,
        np.zeros(650),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "ftol": 1e-15},
    )
    return loss(torch.tensor(found.x), p).item()


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_optima_are_scipys(weights: str) -> None:
    config = RunConfig.load({**CONFIG, "client-weights": weights, "data-imbalance": 1.0})
    sizes = federation.partition_of(config, CLIENTS).sizes
    p = sizes / sizes.sum() if weights == "samples" else np.full(CLIENTS, 0.25)
    q = 1 / TIMES / (1 / TIMES).sum()
    found = optima(config, CLIENTS)
    assert set(found) == {
        "federated-least",
        "identical",
        "time-based",
        "federated-decrement",
        "identical-decrement",
    }
    assert found["federated-least"] == pytest.approx(by_scipy(config, p, p), abs=2e-6)
    # f isn't flat at the minimum of another function: an error of 1e-6 there can be one of 1e-4 here.
    assert found["identical"] == pytest.approx(by_scipy(config, q, p), abs=2e-4)
    assert found["identical"] > found["federated-least"] + 1e-3
    assert found["time-based"] == found["federated-least"]
    assert 0 <= max(found["federated-decrement"], found["identical-decrement"]) <= 1e-6


def test_equal_times_make_all_one() -> None:
    found = optima(RunConfig.load({**CONFIG, "time-scenario": "F0"}), CLIENTS)
    assert found["identical"] == found["federated-least"] == found["time-based"]


def test_surrogate_weights_by_hand() -> None:
    # τ = (1, 3): client 0 answers three times as often. Time-based d = (4/3) τ_i p_i = (4/3) (0.2, 2.4).
    found = surrogate_weights(np.array([0.2, 0.8]), np.array([1.0, 3.0]))
    np.testing.assert_allclose(found["identical"], [0.75, 0.25])
    np.testing.assert_allclose(found["time-based"], [0.2, 0.8])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "mlp"}, "model = 'mlp': its optima are known for logistic"),
        ({"strategy": "fedfix"}, "strategy = 'fedfix': its optima are known for async-fedavg"),
        (
            {"client-weights": "adjacency"},
            "client-weights = 'adjacency': its optima are known for samples, uniform",
        ),
    ],
)
def test_other_runs_are_refused(change: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        optima(RunConfig.load({**CONFIG, **change}), CLIENTS)
