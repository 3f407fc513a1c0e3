"""The asynchronous strategies through the whole app: against a plain numpy simulation, and bit for bit on Ray."""

import heapq
import json

import numpy as np
import pytest
import safetensors.numpy
from sklearn.datasets import load_digits

from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.report.clients import last_clients
from tests.end_to_end.server_step import server_step
from tests.strategies.events.event_reference import simulate

pytestmark = pytest.mark.usefixtures("no_figures")

CLIENTS, AGGREGATIONS, STEPS, LR, SERVER_LR, L2 = 7, 40, 3, 0.5, 0.1, 0.01

# F80 of seven clients is (3, 5, 7, 9, 11, 13, 15) fifteenths of a second; Δt = .5 s. In thirtieths all are whole.
TAU, INTERVAL, M = [6, 10, 14, 18, 22, 26, 30], 15, 3


def schedule(strategy: str) -> list[tuple[int, list[int]]]:
    """Return the time of each aggregation, in thirtieths of a second, and its clients."""
    heap, events = [(tau, i) for i, tau in enumerate(TAU)], []  # by time, then by client
    while len(events) < AGGREGATIONS:
        if strategy == "fedfix":
            now, came = INTERVAL * (len(events) + 1), []
            while heap and heap[0][0] <= now:
                came.append(heapq.heappop(heap)[1])
        else:
            arrived = [heapq.heappop(heap) for _ in range(M if strategy == "fedbuff" else 1)]
            now, came = arrived[-1][0], [i for _, i in arrived]
        events.append((now, sorted(came)))
        for i in came:
            heapq.heappush(heap, (now + TAU[i], i))
    return events


def weights_of(strategy: str, weights: str, p: np.ndarray, events: list[tuple[int, list[int]]]) -> np.ndarray:
    """Return d_i, from the definitions."""
    tau = np.array(TAU)
    if weights == "identical":
        return np.full(CLIENTS, 1 / M if strategy == "fedbuff" else 1.0)
    if strategy == "async-fedavg":
        return (1 / tau).sum() * tau * p
    if strategy == "fedfix":
        return -(-tau // INTERVAL) * p
    counts = np.array([sum(i in came for _, came in events) for i in range(CLIENTS)])
    return p * len(events) / counts


def descend(X: np.ndarray, Y: np.ndarray, W: np.ndarray) -> np.ndarray:
    """Take full-batch steps of multinomial logistic regression; the last column of W is the bias."""
    for _ in range(STEPS):
        z = X @ W.T
        e = np.exp(z - z.max(1, keepdims=True))
        W = W - LR * ((e / e.sum(1, keepdims=True) - Y).T @ X / len(X) + L2 * W)
    return W


@pytest.mark.parametrize(
    ("strategy", "weights", "optimizer"),
    [
        ("async-fedavg", "time-based", "sgd"),
        ("async-fedavg", "identical", "sgd"),
        ("fedfix", "time-based", "sgd"),
        ("fedbuff", "time-based", "sgd"),
        ("fedbuff", "identical", "sgd"),
        ("fedbuff", "time-based", "momentum"),
        ("async-fedavg", "time-based", "adagrad"),
        ("fedfix", "time-based", "adam"),
        ("fedbuff", "identical", "yogi"),
    ],
)
def test_the_app_equals_a_numpy_event_simulation(tmp_path, strategy, weights, optimizer):
    config = RunConfig.load(
        {
            "strategy": strategy,
            "aggregation-weights": weights,
            "server-lr": SERVER_LR,
            "buffer-size": M,
            "server-optimizer": optimizer,
            "fedfix-interval": 0.5,
            "time-scenario": "F80",
            "dataset": "digits",
            "model": "logistic",
            "init": "zeros",
            "batch-size": 0,
            "local-epochs": 0,
            "local-steps": STEPS,
            "lr": LR,
            "l2": L2,
            "num-server-rounds": AGGREGATIONS,
            "eval-every": 10,
            "results-dir": str(tmp_path),
            "run-name": "run",
        }
    )
    grid = SequentialGrid(client_app.app, CLIENTS)
    path = server.run(grid, server.prepare(config, CLIENTS)).path

    digits = load_digits()
    X, Y = np.c_[digits.data / 16, np.ones(len(digits.data))], np.eye(10)[digits.target]
    partition = np.load(path / "partition.npz")
    clients = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
    p = np.array([len(rows) for rows in clients]) / len(partition["client_indices"])

    events = schedule(strategy)
    d = weights_of(strategy, weights, p, events)
    W, sent, step = np.zeros((10, 65)), [np.zeros((10, 65))] * CLIENTS, server_step(optimizer, SERVER_LR)
    for _, came in events:
        moves = [d[i] * (descend(X[clients[i]], Y[clients[i]], sent[i]) - sent[i]) for i in came]
        W = step(W, sum(moves)) if came else W
        for i in came:
            sent[i] = W

    model = safetensors.numpy.load_file(path / "model.safetensors")
    ours = np.c_[model["1.weight"], model["1.bias"]]
    assert np.linalg.norm(ours - W) < 1e-5 * np.linalg.norm(W)
    assert np.linalg.norm(W) > 0.5

    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [m["aggregation"] for m in metrics] == [0, 10, 20, 30, 40]
    assert [m["time"] for m in metrics[1:]] == pytest.approx(
        [events[n - 1][0] / 30 for n in (10, 20, 30, 40)]
    )
    last, clients_told = metrics[-1], last_clients(path)
    assert clients_told["weight"] == pytest.approx(d.tolist(), rel=1e-9)
    assert clients_told["importance"] == pytest.approx(p.tolist(), rel=1e-12)
    counts = [sum(i in came for _, came in events) for i in range(CLIENTS)]
    assert clients_told["participation"] == counts
    assert clients_told["observed-share"] == pytest.approx((d * counts / (d @ counts)).tolist(), rel=1e-9)
    # f_i of the final model over each client's rows; weighed by p.
    z = X @ W.T
    each = np.log(np.exp(z).sum(1)) - (z * Y).sum(1)
    f = np.array([each[rows].mean() for rows in clients])
    assert last["federated-loss"] == pytest.approx(p @ f, rel=1e-4)
    assert last["federated-loss-std"] == pytest.approx((p @ (f - p @ f) ** 2) ** 0.5, rel=1e-3)
    q = np.array(clients_told["expected-share"])
    assert last["surrogate-loss"] == pytest.approx(q @ f, rel=1e-4)
    assert q == pytest.approx(p if weights == "time-based" else q, rel=1e-9)
    assert last["weights-distance"] == pytest.approx(0.5 * abs(q - p).sum(), abs=1e-9)
    assert (last["weights-distance"] > 0.05) == (weights == "identical")


@pytest.mark.parametrize(
    ("strategy", "own", "rule"),
    [
        (
            "fedbuff",
            {"aggregation-weights": "identical", "staleness-discount": "polynomial:0.5"},
            {"s": lambda delay: (1 + delay) ** -0.5},
        ),
        (
            "fedasync",
            {"mixing-alpha": 0.5, "staleness-discount": "hinge:1,2"},
            {"alpha": 0.5, "s": lambda delay: 1.0 if delay <= 2 else 1 / (delay - 1)},
        ),
        ("delay-adaptive", {"aggregation-weights": "identical"}, {}),
        ("ringmaster", {"delay-threshold": 5}, {"R": 5}),
        ("rennala", {}, {}),
        ("ca2fl", {}, {}),
        ("ace", {}, {}),
        ("aced", {"cache-age": 5}, {"age": 5}),
        ("fadas", {}, {}),
    ],
)
def test_the_app_equals_the_papers_rules_in_numpy(tmp_path, strategy, own, rule):
    eta = {"fedasync": 1.0, "fadas": 0.02}.get(strategy, SERVER_LR)
    config = RunConfig.load(
        {
            "strategy": strategy,
            "server-lr": eta,
            "buffer-size": M,
            "time-scenario": "F80",
            "dataset": "digits",
            "model": "logistic",
            "init": "zeros",
            "batch-size": 0,
            "local-epochs": 0,
            "local-steps": STEPS,
            "lr": LR,
            "l2": L2,
            "num-server-rounds": AGGREGATIONS,
            "eval-every": 20,
            "results-dir": str(tmp_path),
            "run-name": "run",
            **own,
        }
    )
    path = server.run(SequentialGrid(client_app.app, CLIENTS), server.prepare(config, CLIENTS)).path
    digits = load_digits()
    X, Y = np.c_[digits.data / 16, np.ones(len(digits.data))], np.eye(10)[digits.target]
    partition = np.load(path / "partition.npz")
    clients = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
    p = np.array([len(rows) for rows in clients]) / len(partition["client_indices"])
    models = simulate(
        strategy,
        lambda i, task: TAU[i] / 30,
        lambda i, W: descend(X[clients[i]], Y[clients[i]], W),
        p,
        np.zeros((10, 65)),
        AGGREGATIONS,
        eta=eta,
        m=M,
        **rule,
    )
    model = safetensors.numpy.load_file(path / "model.safetensors")
    ours, W = np.c_[model["1.weight"], model["1.bias"]], models[-1]
    assert np.linalg.norm(ours - W) < 1e-5 * np.linalg.norm(W)
    assert np.linalg.norm(W) > 0.2
    memory = json.loads((path / "summary.json").read_text()).get("bytes-kept", 0)
    assert memory == (4 * CLIENTS * W.size if strategy in ("ca2fl", "ace", "aced") else 0)


# Of every strategy, two workers and the sequential engine are compared in test_ray.py, too.
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["async-fedavg", "fedfix", "fedbuff"])
def test_any_number_of_workers_and_the_sequential_engine_give_the_same_bits(simulate, strategy):
    config = {
        "strategy": strategy,
        "num-server-rounds": 12,
        "server-lr": 0.3,
        "buffer-size": 2,
        "eval-every": 3,
        "model": "logistic",
    }
    federation = "num-supernodes=5 client-resources-num-cpus="
    runs = [
        simulate(config, federation=f"{federation}2"),  # one worker: Ray has two CPUs
        simulate(config, federation=f"{federation}1"),
        simulate(config, federation=f"{federation}1", engine="sequential"),
    ]
    for run in runs:
        assert run.returncode == 0, run.output
        assert run.model == runs[0].model
        assert (run.path / "metrics.jsonl").read_bytes() == (runs[0].path / "metrics.jsonl").read_bytes()
    lines = (runs[0].path / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [m["aggregation"] for m in metrics] == [0, 3, 6, 9, 12]
    assert metrics[-1]["failures"] == 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]
