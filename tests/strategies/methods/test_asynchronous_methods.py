"""Rules of FedAsync, delay-adaptive steps, Ringmaster, Rennala, Malenia, CA²FL, ACE, AREA, FADAS, FedBuff's discount.

Clients are quadratics: one step takes w to w + γ (c_i − w).
"""

from typing import Any

import numpy as np
import pytest

from strategies import REGISTRY, Progress
from strategies.clock import VirtualClock, WallClock
from strategies.methods.shared.staleness import Discount, discount_of
from strategies.timing.time_scenario import TimeScenario
from tests.selection import methods
from tests.strategies.events.event_reference import simulate
from tests.strategies.events.runs import KINDS

pytestmark = pytest.mark.timeout(600)

CENTRES, SIZES, GAMMA = (4.0, 0.0, -2.0, 6.0), (1, 2, 3, 4), 0.25
P = np.array(SIZES) / 10
# The others are in tests/strategies/events.
NEW = [name for name in methods(has_rounds=False) if REGISTRY[name] not in KINDS.values()]
CACHED = ("ca2fl", "ace", "aced", "area", "malenia")  # in float32


class Run:
    """What a run was reported to be."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []
        self.strategy: Any = None

    @property
    def values(self) -> list[float]:
        return [float(p.arrays["w"].numpy()[0]) for p in self.seen]

    @property
    def bits(self) -> list[bytes]:
        return [p.arrays["w"].data for p in self.seen]


@pytest.fixture
def go(federation, model, train_config):
    def run(name: str, rounds: int, *, grid: Any = None, clock: Any = None, **options: Any) -> Run:
        done = Run()
        kind = REGISTRY[name]
        usual = {"eval_every": 1, "server_lr": 1.0} | (
            {"buffer_size": 2} if hasattr(kind.Config(), "buffer_size") else {}
        )
        done.strategy = kind(
            kind.Config(**usual | options),
            clock=clock or VirtualClock(),
            observer=done.seen.append,
            fraction_evaluate=0.0,
        )
        done.strategy.start(
            grid or federation(CENTRES, SIZES),
            model(1.0),
            num_rounds=rounds,
            timeout=5.0,
            train_config=train_config(1, GAMMA),
        )
        return done

    return run


# ---- Against the papers' rules -----------------------------------------------------------------------------

ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "fedbuff",
        {"aggregation_weights": "identical", "staleness_discount": "polynomial:0.5"},
        {"s": lambda delay: (1 + delay) ** -0.5},
    ),
    (
        "fedbuff",
        {"aggregation_weights": "identical", "staleness_discount": "hinge:2,1", "buffer_size": 3},
        {"s": lambda delay: 1.0 if delay <= 1 else 1 / (2 * (delay - 1) + 1), "m": 3},
    ),
    ("fedasync", {}, {}),
    (
        "fedasync",
        {"mixing_alpha": 0.9, "staleness_discount": "polynomial:1"},
        {"alpha": 0.9, "s": lambda delay: 1 / (1 + delay)},
    ),
    ("delay-adaptive", {"aggregation_weights": "identical"}, {}),
    ("ringmaster", {"delay_threshold": 0}, {}),
    ("ringmaster", {"delay_threshold": 3}, {"R": 3}),
    ("rennala", {}, {}),
    ("rennala", {"buffer_size": 6}, {"m": 6}),
    ("malenia", {"buffer_size": 0}, {"m": 4}),
    ("malenia", {"buffer_size": 9}, {"m": 9}),
    ("ca2fl", {}, {}),
    ("ca2fl", {"buffer_size": 3}, {"m": 3}),
    ("ace", {}, {}),
    ("aced", {}, {}),
    ("aced", {"cache_age": 5}, {"age": 5}),
    ("aced", {"cache_age": 1}, {"age": 1}),
    ("area", {}, {}),
    ("area", {"buffer_size": 1}, {"m": 1}),
    ("fadas", {}, {}),
    ("fadas", {"buffer_size": 1}, {"m": 1}),
]


@pytest.mark.parametrize("scenario", ["F80", "exponential"])
@pytest.mark.parametrize(
    ("name", "options", "rule"), ROWS, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o, _ in ROWS]
)
def test_a_run_is_its_papers_rule(go, name, options, rule, scenario):
    times = TimeScenario(scenario, 4, 3)
    eta = 1.0 if name == "fedasync" else 0.3
    expected = simulate(
        name,
        times.task_time,
        lambda i, w: w + GAMMA * (CENTRES[i] - w),
        P,
        np.array([1.0]),
        30,
        eta=eta,
        **rule,
    )
    run = go(name, 30, server_lr=eta, time_scenario=scenario, seed=3, **options)
    assert run.values == pytest.approx([float(w[0]) for w in expected], rel=1e-5 if name in CACHED else 1e-11)
    assert len(set(run.values)) > 20


def test_what_late_work_is_worth():
    assert discount_of("constant") == Discount("constant")
    assert [discount_of("polynomial:0.5")(delay) for delay in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [discount_of("hinge:10,4")(delay) for delay in (0, 4, 5, 6)] == [1.0, 1.0, 1 / 11, 1 / 21]


@pytest.mark.parametrize(
    "text", ["", "linear:1", "constant:1", "polynomial", "polynomial:-1", "hinge:1", "hinge:1,inf"]
)
@pytest.mark.parametrize("name", ["fedbuff", "fedasync"])
def test_a_discount_that_is_none(name, text):
    with pytest.raises(
        ValueError, match=r"^staleness_discount = .*: must be constant, polynomial:A or hinge:A,B"
    ):
        REGISTRY[name](staleness_discount=text)


@pytest.mark.parametrize("name", ["ca2fl", "area", "fadas"])
def test_a_buffer_that_would_never_fill(go, name):
    with pytest.raises(ValueError, match=r"^buffer_size = 5: there are 4 clients, must be at most that"):
        go(name, 1, buffer_size=5)


# ---- Exact limits ------------------------------------------------------------------------------------------


def test_without_a_discount_fedbuff_is_as_it_was(go):
    plain, none = go("fedbuff", 12), go("fedbuff", 12, staleness_discount="polynomial:0")
    assert plain.bits == none.bits
    # What is known beforehand and what is seen in the run come to the same.
    assert none.seen[-1].clients["weight"] == pytest.approx(plain.seen[-1].clients["weight"], rel=1e-12)


def test_ringmaster_without_a_threshold_is_asynchronous_fedavg_bit_for_bit(go):
    one = go("ringmaster", 20, delay_threshold=0, server_lr=0.0)
    other = go("async-fedavg", 20, aggregation_weights="identical", server_lr=0.0)
    assert one.bits == other.bits
    assert [p.clients for p in one.seen] == [p.clients for p in other.seen]


def test_asynchronous_fedavg_by_time_is_rescaled_asgd(go, federation, tmp_path):
    # Workers with τ = (1, 3) s and gradients (w − 4, w − 0): steps in proportion to τ, γ (1/4, 3/4) with γ = 1/4.
    #   0@1   W = 1 + (1/4)² (4 − 1) = 1.1875
    #   0@2   W = 1.1875 + (1/4)² (4 − 1.1875) = 1.36328125
    #   0@3   W = 1.36328125 + (1/4)² (4 − 1.36328125) = 1.528076171875
    #   1@3   its gradient is that of the first model: W = 1.528076171875 + (1/4) (3/4) (0 − 1) = 1.340576171875
    # d_i = p_i τ_i Σ 1/τ_j = ½ (1, 3) 4/3 = (2/3, 2), and η_g = 1/Σ d_i = 3/8: η_g d_i = (1/4, 3/4).
    path = tmp_path / "times.csv"
    path.write_text("client,seconds\n0,1\n1,3\n")
    common = {"time_scenario": f"trace:{path}", "server_lr": 0.0, "client_weights": "uniform"}
    run = go("async-fedavg", 40, grid=federation([4.0, 0.0], [1, 3]), **common)
    assert run.values[:5] == pytest.approx(
        [1.0, 1.1875, 1.36328125, 1.528076171875, 1.340576171875], rel=1e-15
    )
    # The paper's rule: x ← x − γ_i ∇f_i(the model that worker i was sent), γ_i = γ τ_i / Σ τ.
    expected = simulate(
        "rescaled",
        lambda i, _: (1.0, 3.0)[i],
        lambda i, w: w - GAMMA * (w - (4.0, 0.0)[i]) * (1 / 4, 3 / 4)[i],
        np.array([0.5, 0.5]),
        np.array([1.0]),
        40,
        eta=1.0,
    )
    assert run.values == pytest.approx([float(w[0]) for w in expected], rel=1e-12)


@pytest.mark.parametrize("weights", ["time-based", "identical"])
def test_without_delays_delay_adaptive_steps_are_asynchronous_fedavg_bit_for_bit(go, weights):
    common = {"aggregation_weights": weights, "server_lr": 0.0, "time_scenario": "F0"}
    assert go("delay-adaptive", 20, **common).bits == go("async-fedavg", 20, **common).bits
    late = common | {"time_scenario": "F80"}
    assert go("delay-adaptive", 20, **late).bits != go("async-fedavg", 20, **late).bits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedasync", {"mixing_alpha": 1.0}),
        ("rennala", {"buffer_size": 1}),
        ("malenia", {"buffer_size": 1}),
        ("ace", {}),
        ("aced", {}),
        ("ca2fl", {"buffer_size": 1}),
        ("area", {"buffer_size": 1}),
        ("ringmaster", {}),
        ("delay-adaptive", {}),
    ],
)
def test_of_one_client_all_are_fedavg(go, federation, name, options):
    def alone() -> Any:
        return federation([4.0], [3])

    sync = go("fedavg", 8, grid=alone(), min_clients=1)
    run = go(name, 8, grid=alone(), min_clients=1, **options)
    if name in CACHED:  # as precise as what is kept
        assert run.values == pytest.approx(sync.values, rel=1e-6)
    else:
        assert run.bits == sync.bits


def test_the_first_model_of_ace_is_that_of_fedavg(go):
    run = go("ace", 3)
    assert run.values[1] == pytest.approx(go("fedavg", 1).values[1], rel=1e-6)
    assert [p.metrics["contributions"] for p in run.seen[1:]] == [4, 1, 1]


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_so_it_is_where_safeguards_hold_the_first_back(clients, go, federation):
    def model_of(name: str, **options: Any) -> float:
        grid = federation(CENTRES[:clients], SIZES[:clients])
        return go(name, 1, grid=grid, min_clients=1, **options).values[1]  # type: ignore[no-any-return]

    assert model_of("ace", safeguards="on", norm_ratio_bound=5.0) == pytest.approx(
        model_of("fedavg"), rel=1e-6
    )


def test_aced_without_a_limit_is_ace_bit_for_bit(go):
    common = {"server_lr": 0.3, "time_scenario": "exponential"}
    one, none, other = (
        go("ace", 40, **common),
        go("aced", 40, cache_age=0, **common),
        go("aced", 40, **common),
    )
    assert one.bits == none.bits == other.bits  # no update gets as old as the default
    assert [p.clients for p in one.seen] == [p.clients for p in none.seen]
    assert go("aced", 40, cache_age=4, **common).bits != one.bits


def shares_in_aced(times: list[float], p: list[float], age: int, number: int) -> np.ndarray:
    """Return the mean over ``number`` aggregations of p_i 1{i ∈ A_n} / Σ_{A_n} p_j, for back-to-back tasks."""
    # Who has arrived before the first model waits for it; all begin their second task then.
    first = max(times)
    latest = dict.fromkeys(range(len(times)), 1)
    due = [(first + time, i) for i, time in enumerate(times)]
    shares = np.array(p)  # the first step is over all
    for n in range(2, number + 1):
        moment, i = min(due, key=lambda event: (round(event[0], 9), event[1]))
        due[i] = (moment + times[i], i)
        latest[i] = n
        fresh = np.array([n - latest[j] <= age for j in range(len(times))])
        shares = shares + fresh * p / np.sum(fresh * p)
    return shares / number


@pytest.mark.parametrize("age", [1, 4])
def test_in_aced_a_client_that_takes_longer_than_the_limit_counts_for_a_part_of_its_time(go, age):
    # F80: τ = (3, 7, 11, 15)/15 s. Without A's mean the shares would be ∝ p min(P, τ + 1) / P, P = τ Σ 1/τ.
    last = go("aced", 200, cache_age=age, server_lr=0.01).seen[-1].clients
    periods = np.array([3, 7, 11, 15]) * (1 / 3 + 1 / 7 + 1 / 11 + 1 / 15)
    shares = shares_in_aced([3 / 15, 7 / 15, 11 / 15, 1.0], list(P), age, 200)
    assert last["expected-share"] == pytest.approx(shares, rel=1e-9)
    assert last["observed-share"] == pytest.approx(shares, rel=1e-9)
    assert last["weight"] == pytest.approx(200 * shares / last["participation"], rel=1e-9)
    apart = P * np.minimum(periods, age + 1) / periods
    assert np.abs(shares - apart / apart.sum()).sum() > 0.02


def test_in_aced_the_shares_of_six_clients_are_those_of_a_simulation_in_float64(go, federation):
    # F80, cache-age 1. p min(P, 2) / P, which leaves out that A's mean is taken, gives .182 .434 .162 .076 .115 .031.
    sizes = [80, 342, 184, 113, 212, 69]
    grid = federation([float(i) for i in range(6)], sizes)
    last = go("aced", 600, grid=grid, min_clients=6, cache_age=1, server_lr=0.01).seen[-1].clients
    expected = [0.245, 0.317, 0.171, 0.103, 0.111, 0.052]
    assert last["expected-share"] == pytest.approx(expected, abs=0.004)


def test_ca2fl_with_equal_clients_that_all_answer_is_fedavg(go):
    common = {"client_weights": "uniform", "time_scenario": "F0"}
    assert go("ca2fl", 8, buffer_size=4, **common).values == pytest.approx(
        go("fedavg", 8, **common).values, rel=1e-6
    )


def test_area_with_equal_speeds_and_a_buffer_of_all_is_fedavg(go):
    for optimizer in ("sgd", "momentum", "adam"):
        common = {"time_scenario": "F0", "server_lr": 0.1, "server_optimizer": optimizer}
        area, fedavg = go("area", 8, buffer_size=4, **common), go("fedavg", 8, **common)
        assert area.values == pytest.approx(fedavg.values, rel=1e-6)


@pytest.mark.parametrize("weights", ["identical", "observed"])
def test_a_buffer_of_one_is_asynchronous_fedavg_bit_for_bit(go, weights):
    common = {"aggregation_weights": weights, "server_lr": 0.3}
    assert go("fedbuff", 14, buffer_size=1, **common).bits == go("async-fedavg", 14, **common).bits


def test_rennala_of_one_piece_of_work_is_ringmaster_without_delays_bit_for_bit(go):
    one = go("rennala", 14, buffer_size=1, server_lr=0.3)
    assert one.bits == go("ringmaster", 14, delay_threshold=1, server_lr=0.3).bits


def test_fedasync_goes_by_the_product_of_its_two_steps_bit_for_bit(go):
    one = go("fedasync", 14, mixing_alpha=0.3, server_lr=1.0)
    assert one.bits == go("fedasync", 14, mixing_alpha=0.6, server_lr=0.5).bits


def test_fadas_where_nobody_is_late_is_fedbuff_with_its_optimizer_bit_for_bit(go):
    common = {"buffer_size": 4, "server_lr": 0.1}
    one = go("fadas", 10, server_optimizer="sgd", **common)  # which stands for it
    other = go("fedbuff", 10, server_optimizer="amsgrad", aggregation_weights="identical", **common)
    assert one.bits == other.bits


# ---- What is reported --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_so_many_are_at_work(go, federation, name):
    grid, at_work = federation(range(8), [1] * 8), []
    pull = grid.pull_messages

    def watched(ids: Any) -> Any:
        at_work.append(sum(grid.under_way().values()))
        return pull(ids)

    grid.pull_messages = watched
    run = go(name, 40, grid=grid, concurrency=3, eval_every=40, server_lr=0.02)
    assert max(at_work) == 3
    asked = grid.asked()
    assert set(asked) == set(range(8))  # a free one is drawn, whoever it is
    assert np.isfinite(run.values).all()


@pytest.mark.parametrize("name", ["fedasync", "delay-adaptive"])
def test_the_objective_that_is_minimised_counts_the_discount(go, name):
    options = {"staleness_discount": "polynomial:1"} if name == "fedasync" else {}
    last = go(name, 200, server_lr=0.01, **options).seen[-1].clients
    assert last["expected-share"] == pytest.approx(last["observed-share"], abs=0.01)
    assert last["expected-share"][3] < P[3] - 0.05  # the slowest counts less


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_counts_all_by_their_importance_and_says_what_it_takes(go, name):
    last = go(name, 60, server_lr=0.01).seen[-1]
    assert last.clients["expected-share"] == pytest.approx(P.tolist(), rel=1e-9)
    assert last.clients["observed-share"] == pytest.approx(P.tolist(), abs=0.06)
    # Four updates of one float32.
    assert last.metrics["bytes-kept"] == 4 * 4


def test_a_newcomer_counts_in_a_cache_from_its_first_answer_on(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.node(3).joins_after = 3
    for node in grid.nodes.values():
        node.delay = 0.05
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.02)
        run = go("ace", 30, grid=grid, clock=WallClock(), server_lr=0.1, safeguards="off")
    assert run.seen[-1].clients["participation"][3] > 0
    assert np.isfinite(run.values).all()


@pytest.mark.parametrize("name", NEW)
def test_in_real_time(go, federation, name):
    grid = federation(CENTRES, SIZES)
    for client in range(4):
        grid.node(client).delay = 0.01 * (client + 1)
    run = go(name, 8, grid=grid, clock=WallClock(), server_lr=0.1)
    last = run.seen[-1]
    assert last.aggregation == 8
    assert sum(last.clients["participation"]) == sum(p.metrics["contributions"] for p in run.seen[1:])
    assert sum(last.clients["expected-share"]) == pytest.approx(1)
    assert len(set(run.values)) > 4


def test_how_often_a_run_is_evaluated_does_not_change_it(go):
    common = {"concurrency": 2, "server_lr": 0.1}
    assert go("async-fedavg", 30, **common).bits == go("async-fedavg", 30, eval_every=7, **common).bits
