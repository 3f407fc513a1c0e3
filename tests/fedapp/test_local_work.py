"""Each client's share of work: how it is decided, that clients do it, and what it does to the model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedapp import client_app
from fedapp.client_app import to_arrays
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.local_work import local_work, of_client, to_text
from fedapp.recorder import Experiment
from fedapp.server_app import prepare, run, task_config
from strategies import messages

F80 = np.linspace(0.2, 1, 5)


# Deciding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "usual", "times", "expected"),
    [
        ("none", 4, F80, [4, 4, 4, 4, 4]),
        ("list:3,1,5,1,2", 4, F80, [3, 1, 5, 1, 2]),
        ("list:3", 4, [1.0], [3]),
        ("range:1-9", 4, F80, [1, 3, 5, 7, 9]),
        ("range:9-1", 4, F80, [9, 7, 5, 3, 1]),
        ("range:2-7", 4, [1.0], [2]),
        # τ = 0.2, 0.4, … 1: in 0.2 s a client does 0.2/τ of its E = 10: 10, 5, 3.3, 2.5, 2
        ("speed", 10, F80, [10, 5, 3, 2, 2]),
        ("speed", 2, F80, [2, 1, 1, 1, 1]),  # 0.67, 0.5, 0.4 steps: never less than one
        ("speed", 3, [0.1 + 0.2, 0.3], [3, 3]),  # 0.30000000000000004 isn't slower
        ("lognormal:0", 4, F80, [4, 4, 4, 4, 4]),
        ("uniform:6-6", 4, F80, [6, 6, 6, 6, 6]),
    ],
)
def test_work_by_hand(kind: str, usual: int, times: Sequence[float], expected: list[int]) -> None:
    assert local_work(kind, usual, np.asarray(times), seed=0) == expected


def test_drawn_work_has_its_distribution() -> None:
    uniform = local_work("uniform:1-4", 1, np.ones(40_000), seed=3)
    assert np.bincount(uniform).tolist()[1:] == pytest.approx([10_000] * 4, rel=0.03)  # σ ≈ 87 of 10,000
    drawn = np.array(local_work("lognormal:0.25", 1000, np.ones(40_000), seed=3))
    assert drawn.mean() == pytest.approx(1000, rel=0.01)  # σ ≈ 533/200 = 2.7
    assert np.log(drawn).var() == pytest.approx(0.25, rel=0.03)


@given(
    st.sampled_from(
        ["none", "range:1-50", "range:50-1", "uniform:2-9", "uniform:9-2", "lognormal:2", "speed"]
    ),
    st.integers(1, 1000),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30),
    st.integers(0, 2**63 - 1),
)
def test_everyone_works_and_the_same_whenever_asked(
    kind: str, usual: int, times: list[float], seed: int
) -> None:
    work = local_work(kind, usual, np.array(times), seed)
    assert work == local_work(kind, usual, np.array(times), seed)
    assert len(work) == len(times)
    assert min(work) >= 1
    if kind == "speed":
        assert work[int(np.argmin(times))] == usual == max(work)
    for client, own in enumerate(work):  # what a client reads from its message
        assert of_client(to_text(work), 0, usual, client) == (0, own)
        assert of_client(to_text(work), usual, 0, client) == (own, 0)
    assert of_client(to_text(work), usual, 0, len(work) + 5) == (work[-1], 0)


def test_seeds_differ() -> None:
    assert len({tuple(local_work("uniform:1-100", 1, np.ones(5), seed)) for seed in range(20)}) == 20


# Doing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Message]:
    """Let one client of an experiment train, as a strategy would."""
    for name, value in (("_task_id", 1), ("_run_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)

    def train(experiment: Experiment, client: int) -> Message:
        fields = {messages.SERVER_ROUND: 1, messages.CLIENT: client, messages.TASK: 1}
        request = messages.request(
            messages.TRAIN,
            7,
            ConfigRecord({**task_config(experiment), **fields}),
            ttl=60.0,
            arrays=to_arrays(experiment.model.state_dict()),
        )
        node = {"partition-id": client, "num-partitions": experiment.num_clients}
        reply = client_app.app(request, Context(2, 7, node, RecordDict(), {}))
        assert reply.has_content(), reply.error.reason
        return reply

    return train


def num_steps(reply: Message) -> int:
    return int(reply.content.metric_records[messages.METRICS][messages.NUM_STEPS])  # type: ignore[call-overload]


def trained(reply: Message) -> list[bytes]:
    return [array.data for array in reply.content.array_records[messages.ARRAYS].values()]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_each_client_does_its_own_work(
    unit: str, configure: Callable[..., RunConfig], ask: Callable[..., Message]
) -> None:
    work = [3, 1, 4]
    length = (
        {"local_epochs": 1, "local_steps": 0} if unit == "epochs" else {"local_epochs": 0, "local_steps": 1}
    )
    config = configure(model="logistic", step_heterogeneity="list:3,1,4", batch_size=64, **length)
    experiment = prepare(config, 3)
    batches = [-(-size // 64) if unit == "epochs" else 1 for size in experiment.partition.sizes.tolist()]
    expected = [own * number for own, number in zip(work, batches, strict=True)]
    assert [num_steps(ask(experiment, client)) for client in range(3)] == expected


def test_normalized_steps_are_steps_of_a_smaller_rate(
    configure: Callable[..., RunConfig], ask: Callable[..., Message]
) -> None:
    same = {"model": "logistic", "local_epochs": 0, "batch_size": 32}
    normalized = prepare(
        configure(**same, lr=0.4, local_steps=1, step_heterogeneity="range:4-8", normalize_steps=True), 3
    )
    plain = prepare(configure(**same, lr=0.05, local_steps=8), 3)  # client 2: E = 8, μ / E = 0.05
    assert trained(ask(normalized, 2)) == trained(ask(plain, 2))


def test_a_message_says_all_there_is_to_know(configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    # A device hasn't the server's trace, nor the number of clients: the message has the list.
    trace = tmp_path / "times.csv"
    trace.write_text("0,1.0\n1,3.0\n1,5.0\n2,2.0\n")  # τ = 1, 4, 2
    config = configure(step_heterogeneity="speed", local_epochs=8, time_scenario=f"trace:{trace}")
    experiment = prepare(config, 3)
    assert experiment.config.step_heterogeneity == "speed"
    assert task_config(experiment)["step-heterogeneity"] == "list:8,2,4"


# What comes of it ------------------------------------------------------------------------------------------


def minimiser(experiment: Experiment, weights: np.ndarray, l2: float) -> np.ndarray:
    """Minimise Σ_k weights_k f_k of multinomial logistic regression with ½ λ ‖w‖² in float64, shape (650,)."""
    dataset, partition = experiment.dataset, experiment.partition
    rows = partition.client_indices
    x = dataset.inputs(rows, False).reshape(len(rows), -1).astype(np.float64)
    x = np.hstack([x, np.ones((len(x), 1))])
    hit = np.eye(10)[dataset.y[rows]]
    share = np.repeat(weights / weights.sum() / partition.sizes, partition.sizes)[:, None]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = flat.reshape(10, 65)
        log_p = log_softmax(x @ w.T, axis=1)
        gradient = (share * (np.exp(log_p) - hit)).T @ x + l2 * w
        return float(-(share * hit * log_p).sum() + l2 / 2 * flat @ flat), gradient.ravel()

    found = minimize(
        objective, np.zeros(650), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9}
    )
    assert found.success
    return np.asarray(found.x)


@pytest.mark.parametrize("normalize", [False, True])
def test_on_digits_the_bias_is_there_without_normalization_and_gone_with_it(
    normalize: bool, configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    work, l2 = np.array([1, 2, 10]), 0.1
    config = configure(
        model="logistic",
        init="zeros",
        l2=l2,
        class_imbalance=20.0,
        client_weights="uniform",
        local_epochs=0,
        local_steps=1,
        step_heterogeneity="list:1,2,10",
        normalize_steps=normalize,
        batch_size=0,
        lr=0.1 if normalize else 0.02,
        num_server_rounds=400,
        eval_every=400,
        client_device="cpu",
        server_device="cpu",
        results_dir=str(tmp_path),
    )
    experiment = prepare(config, len(work))
    directory = run(SequentialGrid(client_app.app, len(work)), experiment)
    state = load_file(directory.path / "model.safetensors")
    found = np.hstack([state["1.weight"], state["1.bias"][:, None]]).ravel()
    biased, unbiased = (minimiser(experiment, weights, l2) for weights in (work, np.ones(len(work))))
    expected, other = (unbiased, biased) if normalize else (biased, unbiased)
    apart = np.linalg.norm(biased - unbiased)
    assert apart > 0.2 * np.linalg.norm(unbiased)
    assert np.linalg.norm(found - expected) < 0.1 * apart
    assert np.linalg.norm(found - other) > 0.9 * apart
