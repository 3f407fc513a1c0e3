"""Every u is what a second way of working it out says, with clients missing, late or replaced, in memory or file."""

import gc
import tempfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import FedAvg, Spectral
from strategies.methods.shared import neighbours
from strategies.methods.shared.neighbours import neighbour_average
from tests.strategies.methods.spectral_requests import MANY, sent

Directions = list[list[float]]
STEPS, LR = 3, 0.2


def random_directions(number: int) -> Directions:
    return np.random.default_rng(number).normal(size=(number, 5)).tolist()


def graph_of(directions: Iterable[Iterable[float]], k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return p_i and p_ij / p_i, by their definitions and loops."""
    m = [np.array(d) / np.sqrt(np.sum(np.square(d))) for d in directions]
    C = len(m)
    A = np.array(
        [[0.0 if i == j else -np.log(np.sum((m[i] - m[j]) ** 2) / 4) for j in range(C)] for i in range(C)]
    )
    if k:
        nearest = [set(np.argsort(-A[i])[:k]) for i in range(C)]
        A = np.array([[A[i, j] * (j in nearest[i] or i in nearest[j]) for j in range(C)] for i in range(C)])
    return A.sum(axis=1) / A.sum(), A / A.sum(axis=1)[:, None]


class Oracle:
    """Algorithm 2 over the requests that a grid has seen: it knows all last local models, and so every u.

    ``check`` goes through the rounds; ``present(t)`` are the clients of the graph in round t, and a reply of (round,
    client) in ``failed`` never came.
    """

    def __init__(self, grid: Any, beta: float, centres: list[float], directions: Directions) -> None:
        self.grid, self.beta, self.centres, self.directions = grid, beta, centres, directions
        self.last: dict[int, np.ndarray] = {}
        self.initial: np.ndarray | None = None

    def check(
        self,
        rounds: int,
        *,
        k: int = 0,
        present: Callable[[int], list[int]] | None = None,
        failed: Iterable[tuple[int, int]] = (),
    ) -> float:
        """Check every u; return the largest distance of a u from its w̄, which shows that the check could fail."""
        farthest = 0.0
        for t in range(1, rounds + 1):
            clients = list(range(len(self.centres))) if present is None else present(t)
            _, P = graph_of([self.directions[i] for i in clients], k)
            requests = self.grid.requests("train", t)
            asked = self.grid.asked("train", t)
            assert requests
            if self.initial is None:
                self.initial = sent(requests[0], "arrays")
            models = np.stack([self.last.get(i, self.initial) for i in clients])
            trained = {}
            for i, request in zip(asked, requests, strict=True):
                w_bar, u = sent(request, "arrays"), sent(request, "neighbours")
                np.testing.assert_allclose(u, P[clients.index(i)] @ models, rtol=2e-6, atol=1e-6)
                farthest = max(farthest, float(np.abs(u - w_bar).max()))
                w = w_bar
                for _ in range(STEPS):
                    w = w - LR * (self.beta * w + (1 - self.beta) * u - self.centres[i])
                if (t, i) not in failed:
                    trained[i] = w
            self.last |= trained
        return farthest


# ---- u in a second way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"participation": "uniform", "fraction_train": 0.5},
        {"participation": "md", "fraction_train": 0.5},
        {"participation": "fixed:0,3,5"},
        {"neighbours": 2},
        {"neighbours": 2, "participation": "uniform", "fraction_train": 0.34},
        {"neighbour_memory": 0.0},
    ],
)
def test_every_u_is_the_weighted_mean_of_the_last_local_models(
    federation, model, train_config, beta, options
):
    directions = random_directions(6)
    grid = federation(MANY, [1] * 6, directions=directions)
    strategy = Spectral(Spectral.Config(perturbation_beta=beta, **options))
    strategy.start(grid, model(1.0, -2.0, 0.5), num_rounds=6, train_config=train_config(STEPS, LR))
    oracle = Oracle(grid, beta, MANY, directions)
    assert oracle.check(6, k=options.get("neighbours", 0)) > 0.1
    if options.get("participation") == "uniform":  # some client came back after a pause
        rounds = [[t for t in range(1, 7) if i in grid.asked("train", t)] for i in range(6)]
        assert any(later - t > 1 for r in rounds for t, later in pairwise(r))


def test_every_u_with_failing_clients(federation, model, train_config):
    directions = random_directions(6)
    grid = federation(MANY, [1] * 6, directions=directions)

    def break_and_mend(progress: Any) -> None:  # rounds 2 and 3 for client 1, round 3 for client 4
        grid.spoil(1, "nan" if progress.aggregation in (1, 2) else None)
        grid.spoil(4, "shape" if progress.aggregation == 2 else None)

    strategy = Spectral(Spectral.Config(perturbation_beta=0.4), observer=break_and_mend)
    result = strategy.start(grid, model(1.0, -2.0), num_rounds=5, train_config=train_config(STEPS, LR))
    assert [m["failures"] for m in result.train_metrics_clientapp.values()] == [0, 1, 2, 0, 0]
    assert Oracle(grid, 0.4, MANY, directions).check(5, failed=[(2, 1), (3, 1), (3, 4)]) > 0.1


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_clients_that_come_late_have_rows_of_their_own_and_those_that_leave_keep_theirs(
    federation, model, train_config, add_node, memory
):
    directions = random_directions(8)
    grid = federation(MANY, [1] * 6, directions=directions[:6])
    centres = [*MANY, 10.0, -6.0]

    def come_and_go(progress: Any) -> None:
        if progress.aggregation in (1, 3):  # client 6 comes for round 2, client 7 for round 4
            i = 6 if progress.aggregation == 1 else 7
            add_node(grid, like=0, partition=i, node_id=100 + i, centre=centres[i], direction=directions[i])
        grid.node(2).present = progress.aggregation != 2  # client 2 is away in round 3

    present = {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 4, 5, 6], 3: [0, 1, 3, 4, 5, 6], 4: list(range(8))}
    config = Spectral.Config(perturbation_beta=0.4, neighbour_memory=memory)
    strategy = Spectral(config, observer=come_and_go)
    strategy.start(grid, model(1.0, -2.0), num_rounds=5, train_config=train_config(STEPS, LR))
    assert [grid.asked("train", t) for t in (1, 2, 3, 4, 5)] == [*present.values(), present[4]]
    assert Oracle(grid, 0.4, centres, directions).check(5, present=lambda t: present.get(t, present[4])) > 0.1


def test_a_node_that_takes_over_a_partition_goes_on_from_its_last_local_model(
    federation, model, train_config, add_node
):
    directions = random_directions(6)
    grid = federation(MANY, [1] * 6, directions=directions)

    def replace_node(progress: Any) -> None:
        if progress.aggregation == 2:
            add_node(grid, like=1, partition=1, node_id=99)
            next(
                node for node in grid.nodes.values() if node.node_id != 99 and is_first(node)
            ).present = False

    def is_first(node: Any) -> bool:
        return bool(node.context.node_config["partition-id"] == 1)

    strategy = Spectral(Spectral.Config(perturbation_beta=0.4), observer=replace_node)
    strategy.start(grid, model(1.0, -2.0), num_rounds=4, train_config=train_config(STEPS, LR))
    assert [
        r.metadata.dst_node_id == 99
        for r in grid.requests("train")
        if is_first(grid.nodes[r.metadata.dst_node_id])
    ] == [False, False, True, True]
    assert Oracle(grid, 0.4, MANY, directions).check(4) > 0.1


# ---- Lemma 4.3, and β = 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_weighted_mean_of_the_neighbour_averages_is_the_global_model(
    federation, model, train_config, neighbours, beta
):
    directions = random_directions(6)
    grid = federation(MANY, [1] * 6, directions=directions)
    config = Spectral.Config(perturbation_beta=beta, neighbours=neighbours)
    Spectral(config).start(grid, model(1.0, -2.0), num_rounds=8, train_config=train_config(STEPS, LR))
    p, _ = graph_of(directions, neighbours)
    for t in range(1, 9):
        requests = grid.requests("train", t)
        u = np.stack([sent(request, "neighbours") for request in requests])
        assert np.abs(p @ u - sent(requests[0], "arrays")).max() < 1e-6
        if t > 1:
            assert np.ptp(u, axis=0).max() > 0.1  # though they differ


@pytest.mark.parametrize(
    "options", [{}, {"participation": "uniform", "fraction_train": 0.5}, {"neighbours": 2}]
)
def test_at_one_it_is_fedavg_with_adjacency_weights_bit_for_bit(
    federation, model, train_config, same_bytes, options
):
    def run(strategy: Any) -> ArrayRecord:
        grid = federation(MANY, range(1, 7), directions=random_directions(6))
        result = strategy.start(grid, model(0.1, -0.2, 0.3), 5, train_config=train_config(STEPS, LR))
        return result.arrays

    fedavg = run(FedAvg(FedAvg.Config(client_weights="adjacency", **options)))
    assert same_bytes(run(Spectral(Spectral.Config(perturbation_beta=1.0, **options))), fedavg)
    assert not same_bytes(run(Spectral(Spectral.Config(perturbation_beta=0.9, **options))), fedavg)
    by_samples = {key: value for key, value in options.items() if key != "neighbours"}
    assert not same_bytes(run(FedAvg(FedAvg.Config(**by_samples))), fedavg)


def test_the_weights_are_adjacency_whatever_is_asked_for():
    assert Spectral(Spectral.Config(client_weights="samples")).config.client_weights == "adjacency"
    assert Spectral().session.graph is not None


def test_starting_the_same_strategy_twice_gives_the_same_model(federation, model, same_bytes, train_config):
    # What a client trained in the first run is no last local model of the second.
    grid, strategy = federation(), Spectral()
    first, second = (
        strategy.start(grid, model(0.1), num_rounds=3, train_config=train_config()) for _ in "ab"
    )
    assert same_bytes(first.arrays, second.arrays)


def test_a_second_run_may_be_of_another_model(federation, model, train_config):
    grid, strategy = federation(), Spectral()
    strategy.start(grid, model(0.1), num_rounds=2, train_config=train_config())
    result = strategy.start(grid, model(0.1, 0.2), num_rounds=2, train_config=train_config())
    assert result.train_metrics_clientapp[2]["failures"] == 0


# ---- The matrix of local models ---------------------------------------------------------------------------------


def mapped(folder: Path) -> list[str]:
    """Return what this process has mapped into memory, or open, of files in a folder, deleted ones too."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        maps += [target] if str(folder) in target else []
    return maps


def test_beyond_the_limit_local_models_live_in_a_file_that_nobody_is_left_with(
    federation, model, train_config, same_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(memory: float) -> tuple[ArrayRecord, list[int]]:
        found: list[int] = []

        def look(progress: Any) -> None:
            assert list(tmp_path.iterdir()) == []  # it has no name even while it is used
            found.append(len(mapped(tmp_path)))

        config = Spectral.Config(perturbation_beta=0.4, neighbour_memory=memory)
        grid = federation(MANY, [1] * 6, directions=random_directions(6))
        strategy = Spectral(config, observer=look)
        return strategy.start(
            grid, model(0.1, -0.2, 0.3), 4, train_config=train_config(STEPS, LR)
        ).arrays, found

    size = 6 * 3 * 4 / 2**30  # six clients, three numbers of float32, in GiB
    inside, maps = run(size)
    assert maps == [0] * 5
    outside, maps = run(0.99 * size)
    assert maps[0] == 0  # before the first round
    assert min(maps[1:]) >= 1
    assert same_bytes(inside, outside)
    gc.collect()
    assert mapped(tmp_path) == []


# Of six rows, the clients that are in the graph.
@pytest.mark.parametrize("order", [[4, 0, 5, 2], [0, 1, 2, 3]])
def test_local_models_are_averaged_alike_in_blocks(order, monkeypatch):
    rng = np.random.default_rng(0)
    models = rng.normal(size=(6, 11)).astype(np.float32)
    rows = rng.random((3, 4))
    expected = rows @ models.astype(np.float64)[order]
    whole = neighbour_average(rows, models, order)
    assert (whole.shape, whole.dtype) == ((3, 11), np.float32)
    np.testing.assert_allclose(whole, expected, rtol=1e-6, atol=1e-7)
    for block in (1, 64, 100, 200):  # of 1, 2, 3 and 6 columns; 11 is a multiple of none but 1
        monkeypatch.setattr(neighbours, "BLOCK", block)
        np.testing.assert_allclose(neighbour_average(rows, models, order), whole, rtol=2e-7)


@pytest.mark.parametrize("block", [1, 8 * 3 * 2, 8 * 6 * 2])
def test_every_u_in_blocks(federation, model, train_config, monkeypatch, block):
    # one client and one column at a time, two clients, four clients and two columns
    monkeypatch.setattr(neighbours, "BLOCK", block)
    monkeypatch.setattr(neighbours, "TOGETHER", 1)
    monkeypatch.setattr(neighbours, "TOGETHER_BYTES", block)
    directions = random_directions(6)
    grid = federation(MANY, [1] * 6, directions=directions)
    config = Spectral.Config(perturbation_beta=0.3, participation="uniform", fraction_train=0.8)
    Spectral(config).start(grid, model(1.0, -2.0, 0.5), num_rounds=4, train_config=train_config(STEPS, LR))
    assert Oracle(grid, 0.3, MANY, directions).check(4) > 0.1


def test_averages_are_sums_in_float64():
    # In float32 the 1 is lost beside 1e8 (its neighbours are 8 apart), and 1e8 − 1e8 leaves nothing.
    models = np.array([[1e8], [1.0], [-1e8]], np.float32)
    assert neighbour_average(np.ones((1, 3)), models, [0, 1, 2]).tolist() == [[1.0]]
