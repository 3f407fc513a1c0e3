"""The spectral-graph method through the whole app: β = 1, Algorithm 2 in numpy, lemma 4.3, the graph, its noise."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from scipy.stats import spearmanr

from fedapp import client_app, federation, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import Experiment
from fedapp.training.autograd import batch_loss, train
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.losses import CROSS_ENTROPY
from fedapp.training.rule import LocalRule
from fedapp.training.trainee import Trainee
from strategies.clients import graph
from strategies.flower import messages
from tests.end_to_end.softmax import KEYS, Problem, assert_close, digits
from tests.runs import lines_of, summary_of

CLIENTS, ROUNDS, STEPS, LR, L2 = 7, 8, 5, KEYS["lr"], 0.01
CPU = torch.device("cpu")

# A convex problem on which all is known.
CONVEX = {
    **KEYS,
    "strategy": "spectral",
    "class-imbalance": 10.0,
    "local-steps": STEPS,
    "l2": L2,
    "num-server-rounds": ROUNDS,
    "server-device": "cpu",
    "client-device": "cpu",
}


class RecordingGrid(SequentialGrid):
    """Keeps every train request with its reply, by round and client."""

    def __init__(self, num_supernodes: int) -> None:
        super().__init__(client_app.app, num_supernodes)
        self.trained: dict[int, dict[int, tuple[Message, Message]]] = defaultdict(dict)

    def _work(self, message: Message) -> Message:
        reply = super()._work(message)
        if message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            self.trained[int(config["server-round"])][int(config[messages.CLIENT])] = (message, reply)
        return reply


class InProcess:
    """A finished run in this process."""

    def __init__(self, results: Path, config: Mapping[str, Any], clients: int) -> None:
        given = {"results-dir": str(results), **config}
        self.experiment: Experiment = server.prepare(RunConfig.load(given), clients)
        self.grid = RecordingGrid(clients)
        self.path = server.run(self.grid, self.experiment).path
        self.metrics = lines_of(self.path)
        assert self.metrics[-1]["failures"] == 0

    @property
    def model(self) -> bytes:
        return (self.path / "model.safetensors").read_bytes()

    @property
    def graph(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "graph.npz") as arrays:
            return dict(arrays)

    @property
    def homogeneity(self) -> float:
        return graph.homogeneity(self.graph["adjacency"])


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    def run(config: Mapping[str, Any], clients: int = CLIENTS) -> InProcess:
        return InProcess(tmp_path_factory.mktemp("results"), config, clients)

    return run


@pytest.fixture(scope="module")
def convex(in_process):
    return in_process(CONVEX)


# ---- β = 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"participation": "uniform", "fraction-train": 0.5}, {"neighbours": 2, "message-floor": 1e-3}],
)
def test_at_one_it_is_fedavg_with_adjacency_weights_bit_for_bit(in_process, options):
    common = {"num-server-rounds": 3, "class-imbalance": 10.0, "model": "logistic", "batch-size": 64}
    common |= options
    spectral = in_process({"strategy": "spectral", "perturbation-beta": 1.0, **common})
    fedavg = in_process({"strategy": "fedavg", "client-weights": "adjacency", **common})
    assert spectral.model == fedavg.model
    assert [m["bytes-down"] for m in spectral.metrics] == [m["bytes-down"] for m in fedavg.metrics]
    assert all(np.array_equal(spectral.graph[name], fedavg.graph[name]) for name in fedavg.graph)
    perturbed = in_process({"strategy": "spectral", "perturbation-beta": 0.5, **common})
    assert perturbed.model != fedavg.model
    # its cost: one more model down for every client
    assert perturbed.metrics[-1]["bytes-down"] == 2 * fedavg.metrics[-1]["bytes-down"]
    assert perturbed.metrics[-1]["bytes-up"] == fedavg.metrics[-1]["bytes-up"]
    by_samples = in_process({"strategy": "fedavg", **common})
    assert by_samples.model != fedavg.model


# ---- Algorithm 2 ------------------------------------------------------------------------------------------------


def algorithm_2(problem: Problem, beta: float) -> np.ndarray:
    """Return the final model: Buttaci 2024, algorithm 2."""
    C, pixels = len(problem.train), digits().data
    m = np.array([np.linalg.svd(pixels[rows], full_matrices=False)[2][0] for rows in problem.train])
    m *= np.sign(m.sum(1, keepdims=True))
    A = np.array([[0.0 if i == j else -np.log((1 - m[i] @ m[j]) / 2) for j in range(C)] for i in range(C)])
    p_ij = A / A.sum()
    p = p_ij.sum(axis=1)
    w_bar = np.zeros((10, 65))
    u = [w_bar] * C
    for _ in range(ROUNDS):
        local = []
        for i, u_i in enumerate(u):
            w = w_bar
            for _ in range(STEPS):
                at = beta * w + (1 - beta) * u_i
                w = w - LR * (problem.gradient(i, at) + L2 * at)
            local.append(w)
        w_bar = sum(p[i] * local[i] for i in range(C))
        u = [sum(p_ij[i, j] * local[j] for j in range(C)) / p[i] for i in range(C)]
    return w_bar


@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_full_batch_training_equals_algorithm_2_in_numpy(in_process, convex, beta):
    run = convex if beta == 0.5 else in_process({**CONVEX, "perturbation-beta": beta})
    problem = Problem(run.path)
    expected = algorithm_2(problem, beta)
    assert_close(run.path, expected)
    # and this could fail: without the perturbation the result is another
    assert np.linalg.norm(algorithm_2(problem, 1.0) - expected) > 1e-3 * np.linalg.norm(expected)


# ---- Lemma 4.3 --------------------------------------------------------------------------------------------------


def local_iterates(run: InProcess, request: Message, reply: Message, client: int) -> list[list[np.ndarray]]:
    """Recompute w_{t,k} and w̃_{t,k} for k = 0..E of one task, flat; the last w is what the client really sent."""
    experiment, config = run.experiment, run.experiment.config
    record = request.content.config_records["config"]
    w_bar, u = (
        federation.to_state(request.content.array_records[name], CPU) for name in ("arrays", "neighbours")
    )
    rows = experiment.partition.client(client)
    x, y = federation.to_tensors(experiment.dataset, rows, config.normalize, CPU)
    batches = plan_batches(
        len(rows),
        batch_size=config.batch_size,
        epochs=config.local_epochs,
        steps=config.local_steps,
        rng=task_rng(config.seed, client, int(record[messages.TASK])),
    ).ragged()
    beta = float(record[messages.BETA])
    w, found = w_bar, []
    for batch in [*batches, None]:
        found.append([flat(w), beta * flat(w) + (1 - beta) * flat(u)])
        if batch is not None:
            rule = LocalRule(beta=beta, l2=config.l2)
            loss = batch_loss(Trainee(experiment.model), CROSS_ENTROPY, {})
            w, _ = train(loss, w, x, y, [batch], config.lr, rule, neighbours=u)
    sent = federation.to_state(reply.content.array_records["arrays"], CPU)
    np.testing.assert_allclose(
        flat(w), flat(sent), atol=1e-6
    )  # float32, maybe by another form of the gradient
    return found


def flat(state: Mapping[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([value.detach().numpy().astype(np.float64).ravel() for value in state.values()])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="full batches"),
        pytest.param(
            {
                "batch-size": 16,
                "local-steps": 7,
                "model": "mlp",
                "init": "default",
                "lr": 0.1,
                "perturbation-beta": 0.25,
                "num-server-rounds": 5,
            },
            id="mini-batches",
        ),
        pytest.param({"neighbours": 2, "num-server-rounds": 5, "perturbation-beta": 0.1}, id="neighbours"),
    ],
)
def test_lemma_4_3_holds_at_every_local_step(in_process, convex, options):
    # Σ p_i w̃_{t,k}^i = β w̄_{t,k} + (1−β) w̄_{t,0} with w̄_{t,k} = Σ p_i w_{t,k}^i
    run = in_process({**CONVEX, **options}) if options else convex
    config = run.experiment.config
    beta, steps = config.perturbation_beta, config.local_epochs or config.local_steps
    A = run.graph["adjacency"]
    p = A.sum(axis=1) / A.sum()
    assert sorted(run.grid.trained) == list(range(1, config.num_server_rounds + 1))
    worst, spread = 0.0, 0.0
    for t, tasks in run.grid.trained.items():
        assert sorted(tasks) == list(range(CLIENTS))
        iterates = np.array([local_iterates(run, *tasks[i], i) for i in range(CLIENTS)])
        assert iterates.shape[:3] == (CLIENTS, steps + 1, 2)
        w, at = iterates[:, :, 0], iterates[:, :, 1]
        w_bar = np.tensordot(p, w, 1)
        worst = max(worst, np.abs(np.tensordot(p, at, 1) - beta * w_bar - (1 - beta) * w_bar[0]).max())
        if t > 1:
            spread = max(spread, np.abs(at - w).max())
    assert worst < 1e-6
    assert spread > 0.01  # though each client's w̃ is far from its w


# ---- The graph --------------------------------------------------------------------------------------------------


def test_the_run_directory_holds_the_graph(convex):
    arrays = convex.graph
    assert {name: arrays[name].shape for name in arrays} == {
        "clients": (7,),
        "messages": (7, 64),
        "misalignment": (7, 7),
        "adjacency": (7, 7),
        "eigenvalues": (7,),
    }
    assert arrays["clients"].tolist() == list(range(7))
    assert {arrays[name].dtype for name in arrays if name != "clients"} == {np.dtype(np.float64)}
    for i, m in enumerate(arrays["messages"]):
        pixels = digits().data[convex.experiment.partition.client(i)]
        first = np.linalg.svd(pixels)[2][0]
        np.testing.assert_allclose(m, first * np.sign(first.sum()), atol=1e-10)
    mis = graph.misalignment(arrays["messages"])
    np.testing.assert_allclose(arrays["misalignment"], mis, rtol=1e-12)
    np.testing.assert_allclose(arrays["adjacency"], graph.adjacency(mis), rtol=1e-12)
    spectrum = graph.eigenvalues(graph.laplacian(graph.adjacency(mis)))
    np.testing.assert_allclose(arrays["eigenvalues"], spectrum, atol=1e-10)


def test_only_a_run_with_a_graph_has_one(in_process):
    assert not (in_process({"strategy": "fedavg", "num-server-rounds": 1}).path / "graph.npz").exists()


def test_noise_lowers_homogeneity_and_can_be_repeated(in_process, convex):
    def noisy(**more: Any) -> InProcess:
        return in_process({**CONVEX, "num-server-rounds": 1, "message-epsilon": 4.0, **more})

    run = noisy()
    # as of random directions: mis is about ½, and ½ ln 2 = .35
    assert run.homogeneity < 0.6 < 1 < convex.homogeneity
    again = noisy()
    assert np.array_equal(run.graph["messages"], again.graph["messages"])
    assert run.model == again.model
    other = noisy(**{"message-epsilon": 1000.0})
    assert run.homogeneity < other.homogeneity < convex.homogeneity
    # every client draws its own noise: the residuals beside the clean directions aren't alike
    noise = run.graph["messages"] - convex.graph["messages"] * (
        (run.graph["messages"] * convex.graph["messages"]).sum(axis=1, keepdims=True)
    )
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    assert np.abs(noise @ noise.T - np.eye(CLIENTS)).max() < 0.6


@pytest.mark.parametrize(("epsilon", "correlation"), [(10.0, 0.05), (100.0, 0.27), (1000.0, 0.78)])
def test_noise_hides_the_graph_as_the_guide_says(in_process, epsilon, correlation):
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text("utf-8")
    assert re.search(
        rf"{correlation:.2f}( on the digits)? and −?0.\d\d( on MNIST)? at ε = {epsilon:g}[,.]",
        " ".join(page.split()),
    )
    config = {"strategy": "spectral", "model": "logistic", "class-imbalance": 10.0, "num-server-rounds": 1}
    config |= {"local-epochs": 0, "local-steps": 1}  # the graph is made of the data
    pairs = np.triu_indices(20, 1)
    clean, noisy = (
        in_process({**config, "message-epsilon": each}, 20).graph["adjacency"][pairs]
        for each in (0.0, epsilon)
    )
    assert spearmanr(clean, noisy)[0] == pytest.approx(correlation, abs=0.02)


def test_another_seed_draws_other_noise(in_process):
    def directions_of(seed: int) -> np.ndarray:  # without noise they would be alike, by IID division
        config = {
            **CONVEX,
            "num-server-rounds": 1,
            "message-epsilon": 1.0,
            "partitioner": "iid",
            "seed": seed,
        }
        return in_process(config).graph["messages"]

    one, two = directions_of(0), directions_of(1)
    assert np.abs((one * two).sum(axis=1)).max() < 0.7


@pytest.mark.thorough  # of the directions alone: tests/data/test_direction.py
def test_homogeneity_falls_as_classes_get_imbalanced(in_process):
    def mean_homogeneity(class_imbalance: float, seeds: Iterable[int] = (0, 1, 2)) -> float:
        config = {
            **CONVEX,
            "class-imbalance": class_imbalance,
            "data-imbalance": 0.0,
            "num-server-rounds": 1,
            "local-steps": 1,
        }
        return float(np.mean([in_process({**config, "seed": s}, 50).homogeneity for s in seeds]))

    found = [mean_homogeneity(imbalance) for imbalance in (0.0, 1.0, 10.0, 100.0)]
    assert (np.diff(found) < 0).all(), found


# ---- Ray --------------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.thorough
def test_on_ray_it_is_what_it_is_in_one_process(simulate):
    config = {
        "strategy": "spectral",
        "class-imbalance": 10.0,
        "num-server-rounds": 4,
        "participation": "uniform",
        "fraction-train": 0.75,
        "perturbation-beta": 0.3,
    }
    ray, sequential = (simulate(config, engine=engine) for engine in ("ray", "sequential"))
    assert ray.returncode == sequential.returncode == 0, ray.output + sequential.output
    with np.load(ray.path / "graph.npz") as one, np.load(sequential.path / "graph.npz") as other:
        assert set(one) == set(other)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert ray.model == sequential.model
    summaries = [summary_of(run.path) for run in (ray, sequential)]
    assert [s["engine"] for s in summaries] == ["ray", "sequential"]
    assert summaries[0]["bytes-down"] == summaries[1]["bytes-down"]
