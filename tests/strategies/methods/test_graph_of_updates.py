"""The graph of clients by their last updates: the paper's graph where an update has the direction of the data."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from strategies import REGISTRY, Spectral
from strategies.client.direction import direction_of
from strategies.clients import graph
from strategies.clients.roster import Client
from strategies.core.last_updates import LastUpdates, UpdateGraph
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.testing import MemoryGrid
from strategies.updates.pipeline import LocalModel
from tests.strategies.methods.spectral_requests import MANY, sent, vectors
from tests.strategies.methods.test_spectral_averages import graph_of

C, D, STEPS, LR, BETA = 6, 5, 3, 0.02, 0.4


# ---- The paper's graph, where updates have the direction of the data --------------------------------------------


def rows_of(client: int) -> np.ndarray:
    """Return a data matrix (n, D) of rank one, whose first principal direction is that of all its rows."""
    rng = np.random.default_rng(client)
    return np.outer(rng.uniform(0.5, 2.0, 4 + client), rng.uniform(0.1, 1.0, D))


def least_squares() -> ClientApp:
    """Return clients that fit X w = 1 by gradient descent: every gradient is a multiple of the rows' direction."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content.config_records["config"]
        w = vectors(message.content.array_records["arrays"])
        beta, x = config.get(messages.BETA, 1.0), rows_of(context.node_config["partition-id"])
        u = vectors(message.content.array_records["neighbours"]) if beta < 1 else w
        for _ in range(STEPS):
            w = w - LR * x.T @ (x @ (beta * w + (1 - beta) * u) - 1) / len(x)
        arrays = ArrayRecord({"w": Array(w)})
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        index = context.node_config["partition-id"]
        metrics = MetricRecord({"partition-id": index, "num-examples": len(rows_of(index))})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize(
    ("name", "options", "number"), [("spectral", {}, 3), ("async-spectral", {"buffer_size": 1}, 40)]
)
def test_on_data_of_rank_one_it_is_the_graph_of_the_data(model, name, options, number, neighbours):
    grid = MemoryGrid(least_squares(), [{"partition-id": i} for i in range(C)])
    own = {"graph_source": "updates", "fraction_evaluate": 0.0, "neighbours": neighbours, **options}
    strategy = REGISTRY[name](**own)
    strategy.start(grid, model(*[0.0] * D), num_rounds=number)
    A = graph.adjacency(graph.misalignment(np.stack([direction_of(rows_of(i)) for i in range(C)])))
    A = graph.sparsify(A, neighbours)
    found = strategy.session.graph.adjacency
    assert graph.laplacian(found) == pytest.approx(graph.laplacian(A), rel=1e-6, abs=1e-6)
    assert graph.homogeneity(found) == pytest.approx(graph.homogeneity(A), rel=1e-7)
    assert strategy.session.graph.weights(strategy.session.clients) == pytest.approx(
        graph.client_weights(A), rel=1e-6
    )
    # Directions cost 4 C D bytes, as the last models do; and nobody was asked for one.
    assert strategy.session.client_state_bytes() == 2 * 4 * C * D
    assert not grid.requests(messages.ASK_DIRECTION)


# ---- A round's weights and averages, in a second way ------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("options", [{}, {"participation": "uniform", "fraction_train": 0.5}])
def test_rounds_are_those_of_the_graph_of_earlier_rounds_updates(federation, model, train_config, options, k):
    rounds, seen = 7, []
    curvatures = [1.0, 0.7, 1.3, 0.5, 0.9, 1.1]
    grid = federation(MANY, [1] * 6, curvatures)
    strategy = Spectral(
        perturbation_beta=BETA,
        graph_source="updates",
        neighbours=k,
        observer=lambda progress: seen.append(vectors(progress.arrays)),
        **options,
    )
    strategy.start(grid, model(1.0, -2.0, 0.5), num_rounds=rounds, train_config=train_config(STEPS, 0.2))
    last, updates, unlike = [seen[0]] * 6, dict[int, np.ndarray](), 0.0
    for t in range(1, rounds + 1):
        A = np.ones((6, 6))
        if len(known := sorted(updates)) > 1:
            pairs = graph_of([updates[i] for i in known], k if k < len(known) - 1 else 0)
            among = pairs[0][:, None] * pairs[1]  # A_ij / Σ A
            A = np.full((6, 6), among.sum() / (len(known) * (len(known) - 1)))
            A[np.ix_(known, known)] = among
        np.fill_diagonal(A, 0.0)
        p, total, came = A.sum(axis=1) / A.sum(), 0.0, {}
        assert p[[i for i in range(6) if i not in known]] == pytest.approx(1 / 6)
        unlike = max(unlike, float(np.ptp(p)))
        for i, request in zip(grid.asked("train", t), grid.requests("train", t), strict=True):
            w = w_bar = sent(request, "arrays")
            u = A[i] / A[i].sum() @ np.stack(last)
            assert sent(request, "neighbours") == pytest.approx(u, rel=1e-5, abs=1e-5)
            for _ in range(STEPS):
                w = w - 0.2 * curvatures[i] * (BETA * w + (1 - BETA) * u - MANY[i])
            came[i] = w, w - w_bar
            total = total + p[i] * (w - w_bar) * (2.0 if options else 1.0)  # C / L
        assert seen[t] == pytest.approx(seen[t - 1] + total, rel=1e-5, abs=1e-5)
        for i, (w, update) in came.items():
            last[i], updates[i] = w, update
    assert unlike > 0.02


# ---- What is kept ------------------------------------------------------------------------------------------------


class Progress:
    """What the updates ask of a run."""

    clients: tuple[int, ...] = ()
    aggregations = 0


def put(updates: LastUpdates, client: int, update: list[float]) -> None:
    updates(LocalModel(Client(client, client, 1, MetricRecord()), np.array(update), np.zeros(len(update))))


def test_an_update_counts_once_its_aggregation_is_over_and_one_of_zero_leaves_the_last():
    run: Any = Progress()
    updates = LastUpdates(run, 4.0)
    clients = UpdateGraph(updates)
    clients.clients = (0, 1, 2)
    assert clients.adjacency.tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    put(updates, 0, [1e-160, 0.0])  # its square is lost
    put(updates, 2, [0.0, 1e160])
    before = clients.version
    assert clients.adjacency.max() == 1
    run.aggregations = 1
    assert clients.version != before
    ln2 = np.log(2)  # mis(0, 2) = 1/2
    assert clients.adjacency == pytest.approx(
        np.array([[0, ln2, ln2], [ln2, 0, ln2], [ln2, ln2, 0]]), rel=1e-6
    )
    put(updates, 0, [0.0, 0.0])
    run.aggregations = 2
    assert clients.adjacency[0, 2] == pytest.approx(ln2, rel=1e-6)
    put(updates, 0, [0.0, -3.0])  # opposite: no edge
    put(updates, 1, [0.0, 5.0])
    run.aggregations = 3
    assert clients.adjacency[0].tolist() == [0, 0, 0]
    assert clients.adjacency[1, 2] == pytest.approx(-np.log(graph.FLOOR))


def test_bits_depend_neither_on_the_order_nor_on_a_restart(monkeypatch):
    monkeypatch.setattr("strategies.core.last_updates.WIDTH", 64)
    rng, run = np.random.default_rng(3), Progress()
    vectors_of = [rng.normal(size=301).tolist() for _ in range(9)]
    one, other, restored = (LastUpdates(run, 4.0) for _ in range(3))  # type: ignore[arg-type]
    for i in range(9):
        put(one, i, vectors_of[i])
    for i in (4, 1, 7, 0, 8, 2, 5, 3, 6):
        put(other, i, rng.normal(size=301).tolist())
        put(other, i, vectors_of[i])
        run.aggregations += 1
        other.misalignment(range(9))
    restored.restore(one.state())
    expected = one.misalignment(range(9))
    assert np.array_equal(other.misalignment(range(9)), expected)
    assert np.array_equal(restored.misalignment(range(9)), expected)
    exact = graph.misalignment(np.stack([np.array(v) / np.linalg.norm(v) for v in vectors_of]))
    assert expected == pytest.approx(exact, rel=1e-6)


def test_a_wrapper_is_refused_because_weights_follow_from_updates(federation, model):
    strategy = Spectral(perturbation_beta=1.0, graph_source="updates")
    private = DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, 3)
    with pytest.raises(RunError, match="graph_source = 'updates', allowed there is 'data'"):
        private.start(federation(), model(1.0), num_rounds=1)
