"""The asynchronous spectral method: a simulation in float64, exact limits, and clients that come and go."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strategies import REGISTRY, Progress
from strategies.clock import VirtualClock, WallClock
from strategies.flower import messages
from strategies.methods.shared.neighbours import discounted
from tests.strategies.methods.spectral_requests import MANY, sent, vectors

STEPS, GAMMA, BETA = 3, 0.2, 0.4
SIZES, CURVATURES = (1, 2, 3, 4, 5, 6), (1.0, 0.7, 1.3, 0.5, 0.9, 1.1)
DIRECTIONS = np.random.default_rng(6).normal(size=(6, 5))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=1, keepdims=True)
INITIAL = (1.0, -2.0, 0.5)

# Seconds of a task, and when clients are there: [start, end) of every PERIOD. No two things happen at one time.
SECONDS = (1.0, 1.37, 1.73, 2.91, 3.33, 5.03)
STAYS = {1: [(0.0, 7.13), (9.21, 20.0)], 4: [(2.57, 13.07)]}
PERIOD = 20.0


class Run:
    """What a run was reported to be, and its grid."""

    def __init__(self, grid: Any) -> None:
        self.grid, self.seen, self.strategy = grid, list[Progress](), None

    @property
    def models(self) -> np.ndarray:
        return np.array([vectors(progress.arrays) for progress in self.seen], dtype=np.float64)

    @property
    def bits(self) -> list[list[bytes]]:
        return [[array.data for array in progress.arrays.values()] for progress in self.seen]

    @property
    def averages(self) -> dict[tuple[Any, Any], bytes]:
        """Every u that was sent, by version of the model and client."""
        configs = [(message, message.content.config_records["config"]) for message in self.grid.requests()]
        return {
            (config["server-round"], config[messages.CLIENT]): sent(message, "neighbours").tobytes()
            for message, config in configs
        }


@pytest.fixture
def go(federation, model, train_config):
    def start(name: str, number: int, *, clock: Any = None, look: Any = None, **options: Any) -> Run:
        run = Run(federation(MANY, SIZES, CURVATURES, directions=DIRECTIONS.tolist()))
        usual: dict[str, Any] = {"client_weights": "adjacency", "eval_every": 1}
        run.strategy = REGISTRY[name](
            clock=clock or VirtualClock(),
            observer=lambda progress: (run.seen.append(progress), look and look(run, progress)),
            fraction_evaluate=0.0,
            **usual | options,
        )
        config = train_config(STEPS, GAMMA)
        run.strategy.start(run.grid, model(*INITIAL), num_rounds=number, timeout=5.0, train_config=config)
        return run

    return start


# ---- An event simulation ---------------------------------------------------------------------------------------


def graph_of() -> tuple[np.ndarray, np.ndarray]:
    """Return A_ij and p_i, by their definitions."""
    A = np.zeros((6, 6))
    for i in range(6):
        for j in range(i):
            A[i, j] = A[j, i] = -np.log(np.sum((DIRECTIONS[i] - DIRECTIONS[j]) ** 2) / 4)
    return A, A.sum(axis=1) / A.sum()


def simulate(
    number: int, m: int, s: Callable[[int], float], d: np.ndarray, momentum: float, eta: float, *, away: bool
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Return the models 0 to ``number``, each client's contributions, and what happened beside."""
    A, _ = graph_of()
    models, v = [np.array(INITIAL)], np.zeros(3)
    last, arrived = [models[0]] * 6, [0] * 6
    events: list[tuple[float, int, str, Any]] = []
    waiting: list[tuple[int, np.ndarray]] = []
    counts, seen = np.zeros(6), {"lost": 0, "oldest": 0}

    def hand_out(i: int, now: float) -> None:
        stays = [
            (a + k * PERIOD, b + k * PERIOD) for k in range(20) for a, b in STAYS.get(i, [(0.0, PERIOD)])
        ]
        if away and i in STAYS:
            if not (own := [b for a, b in stays if a <= now + 1e-9 < b]):
                heapq.heappush(events, (min(a for a, _ in stays if a > now), i, "comes", None))
                return
            # A stay that ends where the next begins goes on.
            ends = own[0] if own[0] % PERIOD or stays[0][0] else own[0] + STAYS[i][0][1]
            if now + SECONDS[i] > ends:
                heapq.heappush(events, (ends, i, "lost", None))
                return
        ages = [max(len(models) - 1 - n, 0) for n in arrived]
        seen["oldest"] = max(seen["oldest"], *ages)
        factors = [A[i, j] * s(ages[j]) for j in range(6)]
        u = sum(factor * w for factor, w in zip(factors, last, strict=True)) / sum(factors)
        w = W = models[-1]
        for _ in range(STEPS):
            w = w - GAMMA * CURVATURES[i] * (BETA * w + (1 - BETA) * u - MANY[i])
        heapq.heappush(events, (now + SECONDS[i], i, "done", (w, w - W)))

    for i in range(6):
        hand_out(i, 0.0)
    while len(models) <= number:
        now, i, what, work = heapq.heappop(events)
        if what != "done":
            seen["lost"] += what == "lost"
            hand_out(i, now)
            continue
        last[i], arrived[i] = work[0], len(models)
        waiting.append((i, work[1]))
        if len(waiting) == m:
            v = momentum * v + sum(d[k] * delta for k, delta in waiting)
            models.append(models[-1] + eta * v)
            owners, waiting = sorted(k for k, _ in waiting), []
            for k in owners:
                counts[k] += 1
                hand_out(k, now)
    return np.array(models), counts, seen


@pytest.mark.parametrize(
    ("discount", "s"),
    [
        ("constant", lambda age: 1.0),
        ("polynomial:0.5", lambda age: (1 + age) ** -0.5),
        ("hinge:2,1", lambda age: 1.0 if age <= 1 else 1 / (2 * (age - 1) + 1)),
    ],
)
@pytest.mark.parametrize(
    ("m", "options"),
    [(1, {}), (1, {"server_optimizer": "momentum", "server_lr": 0.1}), (3, {}), (3, {"availability": True})],
)
def test_a_run_is_its_rule_in_float64(go, tmp_path, m, options, discount, s):
    number, away = 40, "availability" in options
    (tmp_path / "times.csv").write_text("".join(f"{i},{seconds}\n" for i, seconds in enumerate(SECONDS)))
    own = [(i, *stay) for i in range(6) for stay in STAYS.get(i, [(0.0, PERIOD)])]
    stays = "client,start,end,period\n" + "".join(f"{i},{a},{b},{PERIOD}\n" for i, a, b in own)
    (tmp_path / "there.csv").write_text(stays)
    there = {"availability": f"trace:{tmp_path / 'there.csv'}"} if away else {}
    run = go(
        "async-spectral",
        number,
        perturbation_beta=BETA,
        buffer_size=m,
        staleness_discount=discount,
        time_scenario=f"trace:{tmp_path / 'times.csv'}",
        **options | {"server_lr": 0.3} | options | there,
    )
    settings = m, s, 0.9 if "server_optimizer" in options else 0.0, run.strategy.config.server_lr
    counts = simulate(number, m, s, np.zeros(6), 0.0, 0.0, away=away)[1]
    d = graph_of()[1] * number / counts
    expected, _, seen = simulate(number, m, s, d, *settings[2:], away=away)
    assert run.models == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert bool(seen["lost"]) == away
    assert seen["oldest"] >= 2
    # It could fail: without the discount, and with another β, the models are others.
    other = simulate(number, m, lambda age: 1.0, d, *settings[2:], away=away)[0]
    assert (np.abs(other - expected).max() > 1e-3) == (discount != "constant")


# ---- Exact limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", ["constant", "polynomial:0.7"])
@pytest.mark.parametrize(
    "options",
    [{}, {"neighbours": 2}, {"server_optimizer": "adam", "server_lr": 0.1}, {"graph_source": "updates"}],
)
def test_with_a_buffer_of_all_and_equal_speeds_it_is_spectral_bit_for_bit(go, options, discount):
    common = {"perturbation_beta": BETA, "time_scenario": "F0", **options}
    spectral = go("spectral", 8, **common)
    run = go("async-spectral", 8, buffer_size=6, staleness_discount=discount, **common)
    assert run.bits == spectral.bits
    assert run.averages == spectral.averages
    unequal = common | {"time_scenario": "F80"}
    assert go("async-spectral", 8, buffer_size=5, **unequal).bits != spectral.bits


@pytest.mark.parametrize(
    "options",
    [
        {"buffer_size": 2},
        {"buffer_size": 2, "aggregation_weights": "identical", "server_optimizer": "momentum"},
        {"buffer_size": 1, "concurrency": 3, "task_failure": 0.2, "time_scenario": "exponential"},
    ],
)
def test_at_one_it_is_fedbuff_with_adjacency_weights_bit_for_bit(go, options):
    run = go("async-spectral", 20, perturbation_beta=1.0, staleness_discount="polynomial:1", **options)
    fedbuff = go("fedbuff", 20, **options)
    assert run.bits == fedbuff.bits
    assert [progress.clients for progress in run.seen] == [progress.clients for progress in fedbuff.seen]
    assert go("async-spectral", 20, perturbation_beta=0.9, **options).bits != fedbuff.bits


def test_without_a_discount_the_averages_of_one_time_have_the_mean_of_the_last_models(go):
    last: dict[int, np.ndarray] = {}
    run = go(
        "async-spectral",
        30,
        buffer_size=1,
        on_client_model=lambda index, model: last.update({index: model.copy()}),
    )
    strategy, p = run.strategy, graph_of()[1]
    u = np.stack([each["neighbours"] for each in strategy.extra_vectors(strategy.session.clients)])
    assert p @ u == pytest.approx(p @ np.stack([last[i] for i in range(6)]), abs=1e-6)
    assert np.ptp(u, axis=0).min() > 0.1
    assert run.seen[-1].metrics["bytes-kept"] == 4 * 6 * 3


def test_all_count_by_their_importance_however_stale_their_models_are(go):
    last = go("async-spectral", 60, buffer_size=2, staleness_discount="polynomial:2").seen[-1].clients
    p = graph_of()[1].tolist()
    assert last["importance"] == pytest.approx(p, rel=1e-9)
    assert last["expected-share"] == pytest.approx(p, rel=1e-9)
    assert last["observed-share"] == pytest.approx(p, rel=1e-9)


def test_factors_of_staleness():
    rows = np.array([[0.0, 0.25, 0.75], [0.5, 0.0, 0.5]])
    assert discounted(rows, np.full(3, 0.3)) is rows
    halved = discounted(rows, np.array([1.0, 1.0, 0.5]))
    assert halved == pytest.approx(np.array([[0.0, 0.4, 0.6], [2 / 3, 0.0, 1 / 3]]))
    # In float64 the discounts may all be 0: the first row has no other.
    assert discounted(rows, np.array([1.0, 0.0, 0.0])).tolist() == [[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]


# ---- Clients that come and go ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedbuff", {}), ("async-spectral", {}), ("async-spectral", {"graph_source": "updates"})],
)
def test_a_node_that_goes_while_it_works_and_one_that_comes(name, options, go, add_node):
    stays, done = (0, 2, 3, 4, 5, 6), False

    def look(run: Run, progress: Progress) -> None:
        nonlocal done
        for node in run.grid.nodes.values():
            node.delay = 0.02
        run.grid.node(1).present = progress.aggregation < 6
        if progress.aggregation == 9:
            add_node(run.grid, like=0, partition=6, node_id=99, direction=[1.0, 2.0, -1.0, 0.5, 0.0])
        done = (
            run.strategy.session.graph.clients == stays
            and sum(progress.clients.get("participation", [])[6:]) > 1
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.01)
        common = {"clock": WallClock(), "look": look, "should_stop": lambda: done, "safeguards": "off"}
        run = go(name, 10**4, buffer_size=1, server_lr=0.1, **common, **options)
    assert done
    assert np.isfinite(run.models).all()
