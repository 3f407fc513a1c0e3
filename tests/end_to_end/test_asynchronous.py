"""The asynchronous strategies through the whole app: against a plain numpy simulation, and bit for bit on Ray."""

import heapq

import numpy as np
import pytest

from fedapp.report.client_tables import last_clients
from tests.end_to_end.server_step import server_step
from tests.end_to_end.softmax import KEYS, Problem, assert_close
from tests.runs import lines_of, summary_of
from tests.strategies.events.event_reference import simulate

CLIENTS, AGGREGATIONS, STEPS, SERVER_LR, L2 = 7, 40, 3, 0.1, 0.01

# F80 of seven clients is (3, 5, 7, 9, 11, 13, 15) fifteenths of a second; Δt = .5 s. In thirtieths all are whole.
TAU, INTERVAL, M = [6, 10, 14, 18, 22, 26, 30], 15, 3
CONFIG = {
    **KEYS,
    "server-lr": SERVER_LR,
    "buffer-size": M,
    "time-scenario": "F80",
    "local-steps": STEPS,
    "l2": L2,
    "num-server-rounds": AGGREGATIONS,
    "eval-every": 10,
}


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


@pytest.mark.parametrize(
    ("strategy", "weights", "optimizer"),
    [
        ("async-fedavg", "time-based", "sgd"),
        ("async-fedavg", "identical", "adagrad"),
        ("fedfix", "time-based", "adam"),
        ("fedbuff", "time-based", "momentum"),
        ("fedbuff", "identical", "yogi"),
    ],
)
def test_the_app_equals_a_numpy_event_simulation(run_app, strategy, weights, optimizer):
    own = {"strategy": strategy, "aggregation-weights": weights, "server-optimizer": optimizer}
    path = run_app(CONFIG | own | {"fedfix-interval": 0.5}, CLIENTS)
    problem, events = Problem(path), schedule(strategy)
    d = weights_of(strategy, weights, problem.p, events)
    W, sent, step = np.zeros((10, 65)), [np.zeros((10, 65))] * CLIENTS, server_step(optimizer, SERVER_LR)
    for _, came in events:
        moves = [d[i] * (problem.descend(i, sent[i], STEPS, l2=L2) - sent[i]) for i in came]
        W = step(W, sum(moves)) if came else W
        for i in came:
            sent[i] = W
    assert_close(path, W)

    metrics, p = lines_of(path), problem.p
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
    each = -(problem.log_probabilities(W, slice(None)) * problem.Y).sum(1)
    f = np.array([each[rows].mean() for rows in problem.train])
    assert last["federated-loss"] == pytest.approx(p @ f, rel=1e-4)
    assert last["federated-loss-std"] == pytest.approx((p @ (f - p @ f) ** 2) ** 0.5, rel=1e-3)
    q = np.array(clients_told["expected-share"])
    assert last["surrogate-loss"] == pytest.approx(q @ f, rel=1e-4)
    assert q == pytest.approx(p if weights == "time-based" else q, rel=1e-9)
    assert last["weights-distance"] == pytest.approx(0.5 * abs(q - p).sum(), abs=1e-9)
    assert (last["weights-distance"] > 0.05) == (weights == "identical")


# The other rules, among clients of unequal task times: tests/strategies/methods/test_asynchronous_methods.py.
@pytest.mark.parametrize(
    ("strategy", "own", "rule"),
    [
        (
            "fedasync",
            {"mixing-alpha": 0.5, "staleness-discount": "hinge:1,2"},
            {"alpha": 0.5, "s": lambda delay: 1.0 if delay <= 2 else 1 / (delay - 1)},
        ),
        ("rennala", {}, {}),
        ("malenia", {}, {}),
        ("aced", {"cache-age": 5}, {"age": 5}),
        ("area", {}, {}),
    ],
)
def test_the_app_equals_the_papers_rules_in_numpy(run_app, strategy, own, rule):
    eta = 1.0 if strategy == "fedasync" else SERVER_LR
    path = run_app(CONFIG | {"strategy": strategy, "server-lr": eta, **own}, CLIENTS)
    problem = Problem(path)
    models = simulate(
        strategy,
        lambda i, task: TAU[i] / 30,
        lambda i, W: problem.descend(i, W, STEPS, l2=L2),
        problem.p,
        np.zeros((10, 65)),
        AGGREGATIONS,
        eta=eta,
        m=M,
        **rule,
    )
    assert_close(path, models[-1])
    kept = 4 * CLIENTS * models[-1].size if strategy in {"aced", "area", "malenia"} else 0
    assert summary_of(path).get("bytes-kept", 0) == kept


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
    metrics = lines_of(runs[0].path)
    assert [m["aggregation"] for m in metrics] == [0, 3, 6, 9, 12]
    assert metrics[-1]["failures"] == 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]
