"""Runs that are stopped after any aggregation and resumed: equal bit for bit to those that weren't."""

import json
import logging
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strategies import REGISTRY, Progress
from strategies.clock import VirtualClock, WallClock
from strategies.flower.grids import DEPLOYMENT
from strategies.updates.client_compression import compress_updates
from strategies.updates.server_optimizer import FEDEXP, OPTIMIZERS
from tests.selection import methods, spread

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("short_forecasts")]

CENTRES, SIZES = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4)
ROUNDS = 9


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a file gives it back: the arrays copied, everything else through JSON."""
    arrays = {key: value.copy() for key, value in state.items() if isinstance(value, np.ndarray)}
    rest = {key: value for key, value in state.items() if key not in arrays}
    return json.loads(json.dumps(rest)) | arrays


@dataclass
class Run:
    """What a run reported, its final model, and its state after every aggregation."""

    reports: list[Any] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: bytes = b""
    strategy: Any = None


class CutOffError(Exception):
    """The process ends here."""


@pytest.fixture
def go(federation, model, train_config):
    """Run a strategy on new nodes, from a state if there is one; ``cut`` kills it in that aggregation's report."""
    count = iter(range(1000))

    def run(
        name: str,
        *,
        state: dict[str, Any] | None = None,
        rounds: int = ROUNDS,
        cut: int | None = None,
        clock: Any = None,
        grid: Any = None,
        dtype: str = "float32",
        **options: Any,
    ) -> Run:
        kind, done = REGISTRY[name], Run()
        mods = (compress_updates,) if "compression" in options else ()
        grid = grid or federation(CENTRES, SIZES, seed=next(count), mods=mods)  # other node ids each time

        def observe(progress: Progress) -> None:
            if progress.aggregation and progress.aggregation not in done.states:
                done.states[progress.aggregation] = saved(done.strategy.state())
            report = [
                progress.aggregation,
                progress.time,
                dict(progress.metrics),
                progress.evaluated,
                dict(progress.clients),
                [array.data for array in progress.arrays.values()],
            ]
            done.reports.append(report)
            if progress.aggregation == cut:
                raise CutOffError

        def evaluate(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
            w = arrays["w"].numpy()
            return MetricRecord(
                {"loss": float(w.sum()), "client-losses": [float(w[0] - c) ** 2 for c in CENTRES]}
            )

        own = {"fraction_evaluate": 0.0, "eval_every": 1, "server_lr": 1.0} | options
        done.strategy = kind(clock=clock or VirtualClock(), observer=observe, **own)
        if state is not None:
            done.strategy.restore(state)
        try:
            result = done.strategy.start(
                grid,
                model(0.1, 0.2, 0.7, dtype=dtype),
                num_rounds=rounds,
                timeout=10.0,
                train_config=train_config(2, 0.3),
                evaluate_fn=evaluate,
            )
            done.final = b"".join(array.data for array in result.arrays.values())
        except CutOffError:
            pass
        return done

    return run


# Devices that take 0.2 to 1 s a task, and are there for some tasks of a day of 4 s.
FLEET = {"time_scenario": "lognormal:0.5,10", "availability": "diurnal:0.6,4"}
ROBUST = {
    "client_weights": "uniform",
    "aggregation_weights": "identical",
    "aggregation_rule": "median",
    "faulty_clients": 1,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"participation": "uniform", "fraction_train": 0.4, "eval_every": 4}),
    ("fedavg", {"participation": "md", "fraction_train": 0.6, "time_scenario": "exponential"}),
    ("fedavg", {"participation": "paired", "fraction_evaluate": 1.0}),
    ("fedavg", {"participation": "fixed:1,3", "client_weights": "adjacency"}),
    ("fedavg", {"time_budget": 5.5, "eval_every": 4}),
    *(("fedavg", {"server_optimizer": name, "server_lr": 0.3}) for name in OPTIMIZERS),
    ("fedavg", {"round_deadline": 0.5}),
    ("fedavg", {"round_deadline": 0.7, "time_scenario": "exponential", "eval_every": 4}),
    (
        "fedavg",
        {
            "participation": "md",
            "fraction_train": 0.6,
            "over_select": 0.7,
            "time_scenario": "exponential",
            "server_optimizer": "momentum",
        },
    ),
    (
        "fedavg",
        {"participation": "uniform", "fraction_train": 0.4, "over_select": 1.0, "round_deadline": 0.7},
    ),
    ("fedavg", {"participation": "fixed:1,3,4", "round_deadline": 0.6, "time_budget": 4.0}),
    ("fedprox", {"client_weights": "uniform"}),
    ("spectral", {}),
    ("spectral", {"participation": "uniform", "fraction_train": 0.4, "eval_every": 3}),
    ("spectral", {"neighbours": 2, "neighbour_memory": 0.0}),
    ("spectral", {"perturbation_beta": 1.0}),
    ("spectral", {"graph_source": "updates", "participation": "uniform", "fraction_train": 0.4}),
    ("async-spectral", {"graph_source": "updates", "buffer_size": 2, "time_scenario": "exponential"}),
    ("spectral", {"round_deadline": 0.5}),
    ("fednova", {"server_optimizer": "momentum"}),
    ("scaffold", {}),
    ("scaffold", {"participation": "uniform", "fraction_train": 0.4, "server_optimizer": "fedexp"}),
    ("feddyn", {"participation": "md", "fraction_train": 0.6, "server_optimizer": "adam", "server_lr": 0.1}),
    (
        "mifa",
        {"participation": "uniform", "fraction_train": 0.4, "server_optimizer": "yogi", "server_lr": 0.1},
    ),
    ("feddyn", {"round_deadline": 0.5}),
    ("fedstale", {"participation": "uniform", "fraction_train": 0.4, "stale_weight": 0.5}),
    ("fedau", {"participation": "uniform", "fraction_train": 0.4, "participation_cutoff": 3}),
    ("fedawe", {"participation": "uniform", "fraction_train": 0.4, "server_lr": 0.5}),
    ("fedawe", {**FLEET, "task_failure": 0.2, "eval_every": 3, "server_optimizer": "momentum"}),
    ("ditto", {"participation": "uniform", "fraction_train": 0.4}),
    ("ditto", {"round_deadline": 0.5}),
    ("fedamp", {"round_deadline": 0.5}),
    (
        "fedamp",
        {"participation": "uniform", "fraction_train": 0.4, "server_optimizer": "adam", "server_lr": 0.1},
    ),
    ("async-fedavg", {"server_lr": 0.1}),
    ("async-fedavg", {"server_lr": 0.1, "time_scenario": "exponential", "eval_every": 4}),
    ("async-fedavg", {"server_lr": 0.1, "server_optimizer": "momentum", "aggregation_weights": "identical"}),
    ("async-fedavg", {"server_lr": 0.1, "server_optimizer": "adam", "client_weights": "adjacency"}),
    ("async-fedavg", {"server_lr": 0.1, "time_scenario": "F0", "fraction_evaluate": 1.0}),
    ("async-fedavg", {"server_lr": 0.1, "time_budget": 1.1, "eval_every": 5}),
    ("fedfix", {}),
    ("fedfix", {"fedfix_interval": 0.25, "time_scenario": "exponential", "eval_every": 2}),
    ("fedfix", {"fedfix_interval": "auto", "time_scenario": "half-normal", "eval_every": 2}),
    ("fedfix", {"server_optimizer": "momentum", "server_lr": 0.5}),
    ("fedbuff", {"buffer_size": 2}),
    ("fedbuff", {"buffer_size": 3, "time_scenario": "exponential", "eval_every": 4}),
    ("fedbuff", {"buffer_size": 2, "server_optimizer": "adam", "aggregation_weights": "identical"}),
    *(
        ("fedbuff", {"buffer_size": 2, "server_optimizer": name, "server_lr": 0.3})
        for name in OPTIMIZERS
        if name != FEDEXP
    ),
    ("fedbuff", {"buffer_size": 2, "staleness_discount": "polynomial:0.5", "eval_every": 2}),
    (
        "async-spectral",
        {"buffer_size": 1, "staleness_discount": "polynomial:1", "time_scenario": "exponential"},
    ),
    (
        "async-spectral",
        {**FLEET, "buffer_size": 2, "neighbour_memory": 0.0, "concurrency": 3, "task_failure": 0.2},
    ),
    ("fedbuff", {**ROBUST, "buffer_size": 3, "time_scenario": "exponential"}),
    ("async-fedavg", {**ROBUST, "server_lr": 0.1, "time_scenario": "exponential", "eval_every": 4}),
    ("fedcompass", {"max_local_steps": 6, "min_local_steps": 1}),
    (
        "fedcompass",
        {"time_scenario": "exponential", "staleness_discount": "polynomial:0.5", "group_slack": 1.0},
    ),
    ("fedcompass", {**FLEET, "task_failure": 0.2, "concurrency": 3, "server_lr": 0.3}),
    ("fedasync", {}),
    ("fedasync", {"time_scenario": "exponential", "staleness_discount": "hinge:0.5,2", "concurrency": 2}),
    ("delay-adaptive", {"server_lr": 0.1}),
    ("delay-adaptive", {"server_lr": 0.1, "concurrency": 2, "server_optimizer": "momentum"}),
    ("ringmaster", {"server_lr": 0.1, "delay_threshold": 2}),
    ("ringmaster", {"server_lr": 0.1, "delay_threshold": 3, "time_scenario": "exponential", "eval_every": 4}),
    ("ringleader", {"server_lr": 0.2, "time_scenario": "exponential"}),
    ("ringleader", {**FLEET, "server_lr": 0.2, "task_failure": 0.2, "concurrency": 3}),
    ("malenia", {"buffer_size": 12, "time_scenario": "exponential"}),
    ("malenia", {**FLEET, "buffer_size": 9, "task_failure": 0.2, "concurrency": 3}),
    ("rennala", {"buffer_size": 3}),
    ("rennala", {"buffer_size": 7, "time_scenario": "exponential", "concurrency": 3}),
    ("ca2fl", {"buffer_size": 2}),
    (
        "ca2fl",
        {"buffer_size": 3, "time_scenario": "exponential", "eval_every": 4, "server_optimizer": "momentum"},
    ),
    ("ca2fl", {"buffer_size": 2, "concurrency": 3, "client_weights": "adjacency"}),
    ("ace", {"server_lr": 0.2}),
    ("aced", {"server_lr": 0.2, "cache_age": 3, "time_scenario": "exponential"}),
    ("ace", {"server_lr": 0.2, "time_scenario": "exponential", "concurrency": 2, "server_optimizer": "yogi"}),
    ("area", {"buffer_size": 1, "time_scenario": "exponential"}),
    ("area", {**FLEET, "buffer_size": 2, "server_lr": 0.5, "concurrency": 3, "task_failure": 0.2}),
    ("fadas", {"buffer_size": 2, "server_lr": 0.1}),
    ("fadas", {"buffer_size": 2, "server_lr": 0.1, "concurrency": 3, "time_scenario": "exponential"}),
    ("fedavg", {**FLEET, "task_failure": 0.2, "client_weights": "adjacency"}),
    ("scaffold", {**FLEET, "participation": "uniform", "fraction_train": 0.6}),
    ("fedau", {**FLEET, "task_failure": 0.2, "eval_every": 3}),
    ("async-fedavg", {**FLEET, "server_lr": 0.1, "task_failure": 0.2}),
    ("async-fedavg", {**FLEET, "server_lr": 0.1, "concurrency": 2, "eval_every": 3}),
    ("async-fedavg", {**FLEET, "server_lr": 0.0, "concurrency": 2}),
    ("fedbuff", {"buffer_size": 2, "server_lr": 0.0, "aggregation_weights": "observed"}),
    (
        "async-fedavg",
        {"server_lr": 0.1, "aggregation_weights": "observed", "availability": "bernoulli:0.5,0.7"},
    ),
    ("fedfix", {**FLEET, "availability": "bernoulli:0.4,0.3"}),
    ("fedbuff", {**FLEET, "buffer_size": 2, "eval_every": 2}),
    ("ca2fl", {**FLEET, "buffer_size": 2, "concurrency": 3, "task_failure": 0.3}),
    ("fedavg", {"compression_down": "int8"}),
    ("async-fedavg", {"compression_down": "int8", "server_lr": 0.1, "time_scenario": "exponential"}),
    ("ringleader", {"compression_down": "int8", "server_lr": 0.1, "time_scenario": "exponential"}),
    ("async-spectral", {"compression_down": "fp16", "server_lr": 0.1, "time_scenario": "exponential"}),
]
COMPRESSED: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"compression": "topk:0.2", "participation": "uniform", "fraction_train": 0.4}),
    ("scaffold", {"compression": "int8", "participation": "uniform", "fraction_train": 0.6}),
    ("mifa", {"compression": "fp16", "participation": "uniform", "fraction_train": 0.4}),
    ("fedavg", {"compression": "qsgd:2"}),
    ("fedamp", {"compression": "topk:0.2", "participation": "uniform", "fraction_train": 0.4}),
    ("fedavg", {"compression": "topk:0.2", "round_deadline": 0.5}),
    (
        "fedavg",
        {"compression": "int8", "round_deadline": 0.6, "time_scenario": "exponential"},
    ),
    # Tasks are under way when these are saved, and in a simulation their clients have done them.
    ("async-fedavg", {"compression": "topk:0.2", "server_lr": 0.1, "time_scenario": "exponential"}),
    ("fedbuff", {"compression": "int8", "buffer_size": 2}),
    ("rennala", {"compression": "topk:0.2", "buffer_size": 3}),
    ("ca2fl", {"compression": "topk:0.2", "buffer_size": 2, "concurrency": 3}),
]
CASES += COMPRESSED
CASES += [(name, {}) for name in REGISTRY if name not in dict(CASES)]


def stops(last: int, case: str) -> set[int]:
    """Return one of the aggregations of a run, another for another case."""
    return {1 + crc32(case.encode()) % last}


@pytest.mark.parametrize(
    ("name", "options"), spread(CASES, 40), ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in CASES]
)
def test_resumed_after_any_aggregation_it_is_the_same_run(go, name, options, thorough):
    whole = go(name, **options)
    assert whole.final
    last = whole.reports[-1][0]
    assert last == ROUNDS or options.get("time_budget")
    for k in range(1, last + 1) if thorough else stops(last, f"{name} {options}"):
        part = go(name, cut=k, **options) if thorough else whole  # test_any_number_of_stops cuts runs off
        rest = go(name, state=part.states[k], **options)
        assert part.reports[: k + 1] + rest.reports == whole.reports
        assert rest.final == whole.final
        if "compression" in options:
            assert ("left-out" in part.states[k]) == (not options["compression"].startswith("qsgd"))


# ---- Error feedback ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [COMPRESSED[0], COMPRESSED[7]], ids=["fedavg", "async-fedavg"])
def test_without_what_was_left_out_it_is_another_run(go, name, options):
    whole, part = go(name, **options), go(name, cut=3, **options)
    state = {key: value for key, value in part.states[3].items() if not key.startswith("left-out")}
    assert go(name, state=state, **options).final != whole.final


def test_a_second_run_on_the_same_nodes_knows_nothing_of_the_first(go, federation):
    grid = federation(CENTRES, SIZES, mods=(compress_updates,))
    name, options = COMPRESSED[0]
    assert go(name, grid=grid, **options).reports == go(name, grid=grid, **options).reports


def test_on_devices_the_log_says_that_it_is_gone(go, federation, caplog):
    name, options = COMPRESSED[0]
    grids = [federation(CENTRES, SIZES, mods=(compress_updates,), num_partitions=5) for _ in range(2)]
    for grid in grids:
        grid.engine = DEPLOYMENT
    state = go(name, cut=3, grid=grids[0], **options).states[3]
    assert "left-out" not in state
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        assert go(name, state=state, grid=grids[1], **options).reports[-1][0] == ROUNDS
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # The evaluations' "loss" is no loss, and the stability monitor may say that it grows.
    assert [line for line in lines if "the steps are too large" not in line] == [
        "compression = 'topk:0.2': what clients' updates had left out isn't there any more; they begin anew"
    ]


# ---- Whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "async-fedavg"])
def test_the_energy_of_devices_goes_on(go, tmp_path, name):
    rows = "".join(f"{i},{10 + i},1e6,1e6,0.1,{1 + i}\n" for i in range(len(CENTRES)))
    profile = tmp_path / "devices.csv"
    profile.write_text(f"client,speed,down,up,latency,watts\n{rows}")
    options = {"time_scenario": f"profile:{profile}", "server_lr": 0.1}
    whole, part = go(name, **options), go(name, cut=4, **options)
    rest = go(name, state=part.states[4], **options)
    assert part.reports + rest.reports == whole.reports
    for *_, clients, _ in (report for report in rest.reports if report[4]):
        seconds = clients["device-seconds"]
        assert clients["joules"] == [each * (1 + i) for i, each in enumerate(seconds)]
    assert rest.reports[-1][2]["joules"] == sum(rest.reports[-1][4]["joules"]) > 0


@settings(max_examples=settings.default.max_examples // 2)
@given(
    name=st.sampled_from(list(REGISTRY)),
    stops=st.lists(st.integers(1, ROUNDS - 1), min_size=1, max_size=4, unique=True).map(sorted),
    scenario=st.sampled_from(["F0", "F50", "F80", "exponential"]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    weights=st.sampled_from(["samples", "uniform", "adjacency"]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float32", "float64", "float16"]),
)
def test_any_number_of_stops(go, name, stops, scenario, optimizer, weights, seed, dtype):
    assume(optimizer != FEDEXP or name in methods("has_rounds", "steps_by_plain_sum"))
    options: dict[str, Any] = {
        "time_scenario": scenario,
        "server_optimizer": optimizer,
        "client_weights": weights,
        "seed": seed,
        "server_lr": 0.1,
        "eval_every": 2,
        "dtype": dtype,
    } | ({"buffer_size": 3} if hasattr(REGISTRY[name].Config(), "buffer_size") else {})
    whole = go(name, **options)
    state, reports = None, []
    for stop in [*stops, None]:
        part = go(name, state=state, cut=stop, **options)
        reports += part.reports
        state = part.states[stop] if stop else None
    assert reports == whole.reports
    assert part.final == whole.final


@pytest.mark.parametrize(
    ("name", "done"),
    [
        ("fedavg", 3),
        ("spectral", 4),
        ("scaffold", 4),
        ("feddyn", 4),
        ("mifa", 4),
        ("fedstale", 4),
        ("fedau", 3),
        ("fedawe", 3),
        ("fedamp", 4),
    ],
)
def test_a_round_that_a_stop_cuts_off_leaves_no_trace(go, federation, model, train_config, name, done):
    # The stop comes with the first model that is read in round 4: FedAvg reads the replies as they come and gives the
    # round up, the spectral method has them all by then and completes it.
    options = {"server_optimizer": "momentum", "server_lr": 0.3}
    whole = go(name, **options)
    read: list[int] = []
    strategy = REGISTRY[name](
        REGISTRY[name].Config(**options),
        on_client_model=lambda client, w: read.append(client),
        should_stop=lambda: len(read) > 3 * len(CENTRES),
    )
    strategy.start(
        federation(CENTRES, SIZES),
        model(0.1, 0.2, 0.7, dtype="float32"),
        num_rounds=ROUNDS,
        timeout=10.0,
        train_config=train_config(2, 0.3),
    )
    assert strategy.session.aggregations == done
    assert go(name, state=saved(strategy.state()), **options).final == whole.final


@pytest.mark.parametrize("name", ["fedavg", "spectral", "async-fedavg", "fedfix"])
def test_a_finished_run_goes_on_as_if_it_had_been_longer(go, name):
    options = {"server_lr": 0.1} if name == "async-fedavg" else {}
    whole, short = go(name, rounds=12, **options), go(name, rounds=5, **options)
    rest = go(name, rounds=12, state=short.states[5], **options)
    both = short.reports + rest.reports
    # The last contributors of the short run get their next task after its last report.
    assert sum(r[2].pop("bytes-down", 0) for r in both) == sum(
        r[2].pop("bytes-down", 0) for r in whole.reports
    )
    assert both == whole.reports
    assert rest.final == whole.final


def test_a_finished_run_resumed_as_it_is_does_nothing_more(go):
    whole = go("async-fedavg")
    rest = go("async-fedavg", state=whole.states[ROUNDS])
    assert (rest.reports, rest.final) == ([], whole.final)


def test_clients_that_fail_fail_alike_after_a_resume(go, federation):
    # Client 1 always fails: after three misses it is dropped, and asked again ten task times later.
    def grid() -> Any:
        made = federation(CENTRES, SIZES)
        made.spoil(1, "raise")
        return made

    options = {"server_lr": 0.1, "rounds": 60}
    whole = go("async-fedavg", grid=grid(), **options)
    assert whole.reports[-1][2]["failures"] + sum(r[2].get("failures", 0) for r in whole.reports[:-1]) >= 4
    for k in (1, 2, 5, 8, 13, 30, 47, 58):
        rest = go("async-fedavg", grid=grid(), state=whole.states[k], **options)
        assert whole.reports[: k + 1] + rest.reports == whole.reports
        assert rest.final == whole.final


def test_who_was_dropped_and_may_be_asked_again_gets_a_place_alike_after_a_resume(go, federation):
    # Clients 1 and 2 always fail. When they may be asked again, another has the only place.
    def grid() -> Any:
        made = federation(CENTRES, SIZES)
        for client in (1, 2):
            made.spoil(client, "raise")
        return made

    def waiting(state: dict[str, Any]) -> int:
        known = {index for _, index in state["retries"]} | {index for _, index, _ in state["tasks-under-way"]}
        return sum(d and i not in known for i, d in zip(state["clients"], state["dropped"], strict=True))

    options = {"server_lr": 0.1, "rounds": 60, "concurrency": 1}
    whole = go("async-fedavg", grid=grid(), **options)
    wait = [k for k, state in whole.states.items() if waiting(state) and k < 60]
    assert {waiting(whole.states[k]) for k in wait} == {1, 2}
    for k in (wait[0], wait[-1], next(k for k in wait if waiting(whole.states[k]) == 2)):
        rest = go("async-fedavg", grid=grid(), state=whole.states[k], **options)
        assert whole.reports[: k + 1] + rest.reports == whole.reports
        assert rest.final == whole.final


def test_a_state_holds_each_model_under_way_once(go):
    state = go("fedbuff", buffer_size=3).states[1]
    # Two clients haven't answered and have version 0, the three others were handed version 1.
    assert sorted(version for version, _, _ in state["tasks-under-way"]) == [0, 0, 1, 1, 1]
    assert (sorted(state["versions"]), state["bases"].shape) == ([0, 1], (2, 3))
    assert state["bases"].dtype == np.float32


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ("velocity", {"server_optimizer": "momentum"}),
        ("graph-messages", {"client_weights": "adjacency"}),
        ("clipping-norm", {"client_weights": "uniform", "dp": "central"}),
    ],
)
def test_a_state_without_what_other_settings_need_is_refused(go, federation, model, needs, options):
    state, strategy = go("fedavg").states[3], REGISTRY["fedavg"](**options)
    with pytest.raises(ValueError, match=f"^the state has no '{needs}', which a run with these settings"):
        strategy.restore(state)
    result = strategy.start(federation(CENTRES, SIZES), model(0.1, 0.2, 0.7), num_rounds=1)
    assert list(result.train_metrics_clientapp) == [1]  # the run begins anew


def test_work_that_is_held_back_counts_its_seconds_once(go):
    # Safeguards hold back the first three replies. Each makes a model; after a stop the others are worked on again.
    options = {"server_lr": 0.1, "safeguards": "on"}
    whole, part = go("async-fedavg", **options), go("async-fedavg", cut=1, **options)
    rest = go("async-fedavg", state=part.states[1], **options)
    assert part.reports + rest.reports == whole.reports


# ---- Real time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["async-fedavg", "fedfix", "fedbuff"])
def test_in_real_time_the_clock_the_books_and_the_model_go_on(go, federation, name):
    options = (
        {"buffer_size": 2} if name == "fedbuff" else {"fedfix_interval": 0.05} if name == "fedfix" else {}
    )

    def grid() -> Any:
        made = federation(CENTRES, SIZES)
        for partition in range(5):
            made.node(partition).delay = 0.01 + 0.01 * partition
        return made

    part = go(name, cut=4, clock=WallClock(), grid=grid(), **options)
    state = part.states[4]
    assert state["tasks-under-way"] == []
    state["time"] = state["time"] + 100.0
    state["origin"] = state["origin"] + 100.0
    rest = go(name, state=state, clock=WallClock(), grid=grid(), **options)
    assert [report[0] for report in rest.reports] == [5, 6, 7, 8, 9]
    times = [report[1] for report in rest.reports]
    assert times == sorted(times)
    assert 100 < times[0] < times[-1] < 110
    before, after = (report[4]["participation"] for report in (part.reports[-1], rest.reports[-1]))
    assert sum(after) == sum(before) + sum(report[2]["contributions"] for report in rest.reports)
    assert all(seconds > 0 for seconds in rest.reports[0][4]["task-time"])  # what was observed is kept


def test_a_wall_clock_counts_on_from_where_the_run_was():
    clock = WallClock()
    clock.resume(50.0)
    assert 50.0 <= clock.now() < 51.0


def test_a_client_that_is_gone_after_the_resume_is_named_and_the_run_goes_on(go, federation, caplog):
    state = go("async-fedavg", server_lr=0.1).states[4]
    grid = federation(CENTRES, SIZES)
    grid.node(2).present = False
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        rest = go("async-fedavg", state=state, grid=grid, server_lr=0.1)
    assert "client 2 of the run so far isn't there" in caplog.text
    last = rest.reports[-1][4]
    assert rest.reports[-1][0] == ROUNDS
    assert last["importance"][2] == 0.0
    # p of the others: 1, 2, 3, 4 of 10.
    assert last["importance"] == pytest.approx([0.1, 0.2, 0.0, 0.3, 0.4])


def test_a_strategy_restored_twice_goes_on_from_the_second_state_alone(go):
    done = go("fedavg", keep="best", best_of="loss")
    done.strategy.restore(done.states[6])
    done.strategy.restore(done.states[2])
    stability = done.strategy.session.reporter.stability.state()
    assert stability["moves"].tolist() == done.states[2]["moves"].tolist()
    assert stability["last-losses"] == done.states[2]["last-losses"]


# ---- Parts -------------------------------------------------------------------------------------------------------


def test_nodes_whose_direction_is_known_are_not_asked_for_it_again(go, federation):
    ids = [11, 12, 13, 14, 15]
    state = go("spectral", grid=federation(CENTRES, SIZES, node_ids=ids)).states[3]
    grid = federation(CENTRES, SIZES, node_ids=[*ids[:4], 99])
    go("spectral", state=state, grid=grid)
    assert grid.asked("query.direction") == [4]  # only the node that is new
