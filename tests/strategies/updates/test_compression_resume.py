"""Runs with error feedback that are stopped after any aggregation and resumed: equal bit for bit to whole ones."""

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies import REGISTRY, Progress
from strategies.clock import VirtualClock
from strategies.flower.grids import DEPLOYMENT
from strategies.updates.compression import compresses

Make = Callable[..., Any]

CENTRES, SIZES, ROUNDS = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4), 8

CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {"compression": "topk:0.2", "participation": "uniform", "fraction_train": 0.4}),
    ("scaffold", {"compression": "int8", "participation": "uniform", "fraction_train": 0.6}),
    ("mifa", {"compression": "fp16", "participation": "uniform", "fraction_train": 0.4}),
    ("fedavg", {"compression": "qsgd:2"}),
    ("fedamp", {"compression": "topk:0.2", "participation": "uniform", "fraction_train": 0.4}),
    ("fedavg", {"compression": "topk:0.2", "round_deadline": 0.5, "late": "next"}),
    (
        "fedavg",
        {"compression": "int8", "round_deadline": 0.6, "late": "drop", "time_scenario": "exponential"},
    ),
    # Tasks are under way when these are saved, and in a simulation their clients have done them.
    ("async-fedavg", {"compression": "topk:0.2", "server_lr": 0.1, "time_scenario": "exponential"}),
    ("fedbuff", {"compression": "int8", "buffer_size": 2}),
    ("rennala", {"compression": "topk:0.2", "buffer_size": 3}),
    ("ca2fl", {"compression": "topk:0.2", "buffer_size": 2, "concurrency": 3}),
]


class CutOffError(Exception):
    """The process ends here."""


def initial() -> ArrayRecord:
    return ArrayRecord(
        {"w": Array(np.linspace(0, 1, 7, dtype=np.float32)), "b": Array(np.float32([0.3, -2]))}
    )


@pytest.fixture
def go(federation: Make, train_config: Make) -> Callable[..., Any]:
    """Run a strategy on new nodes, from a state if there is one; ``cut`` ends it in that aggregation's report."""

    def run(name: str, *, state: Any = None, cut: int = 0, grid: Any = None, **options: Any) -> Any:
        states, reports = {}, []

        def observe(progress: Progress) -> None:
            if progress.aggregation:
                found = strategy.state()
                arrays = {key: value.copy() for key, value in found.items() if isinstance(value, np.ndarray)}
                rest = json.loads(json.dumps({key: found[key] for key in found.keys() - arrays.keys()}))
                states[progress.aggregation] = rest | arrays
                reports.append((progress.aggregation, [array.data for array in progress.arrays.values()]))
            if cut and progress.aggregation == cut:
                raise CutOffError

        own = {"fraction_evaluate": 0.0, "eval_every": 1} | options
        strategy = REGISTRY[name](clock=VirtualClock(), observer=observe, **own)
        if state is not None:
            strategy.restore(state)
        grid = grid or federation(CENTRES, SIZES, seed=len(options) + cut, mods=(compresses,))
        with contextlib.suppress(CutOffError):
            strategy.start(
                grid, initial(), num_rounds=ROUNDS, timeout=10.0, train_config=train_config(2, 0.3)
            )
        return reports, states

    return run


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{o['compression']}" for n, o in CASES])
def test_resumed_after_any_aggregation_it_is_the_same_run(
    go: Make, name: str, options: dict[str, Any], thorough: bool
) -> None:
    whole, _ = go(name, **options)
    assert [number for number, _ in whole] == list(range(1, ROUNDS + 1))
    for k in range(1, ROUNDS) if thorough else (1, ROUNDS - 2):
        part, states = go(name, cut=k, **options)
        rest, _ = go(name, state=states[k], **options)
        assert part + [report for report in rest if report[0] > k] == whole
        assert ("left-out" in states[k]) == (not options["compression"].startswith("qsgd"))


@pytest.mark.parametrize(("name", "options"), [CASES[0], CASES[4]], ids=["fedavg", "async-fedavg"])
def test_without_what_was_left_out_it_is_another_run(go: Make, name: str, options: dict[str, Any]) -> None:
    whole, _ = go(name, **options)
    _, states = go(name, cut=3, **options)
    state = {key: value for key, value in states[3].items() if not key.startswith("left-out")}
    rest, _ = go(name, state=state, **options)
    assert rest[-1] != whole[-1]


def test_a_second_run_on_the_same_nodes_knows_nothing_of_the_first(go: Make, federation: Make) -> None:
    grid = federation(CENTRES, SIZES, mods=(compresses,))
    name, options = CASES[0]
    assert go(name, grid=grid, **options)[0] == go(name, grid=grid, **options)[0]


def test_on_devices_the_log_says_that_it_is_gone(
    go: Make, federation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    name, options = CASES[0]
    grids = [federation(CENTRES, SIZES, mods=(compresses,), num_partitions=5) for _ in range(2)]
    for grid in grids:
        grid.engine = DEPLOYMENT
    _, states = go(name, cut=3, grid=grids[0], **options)
    assert "left-out" not in states[3]
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        reports, _ = go(name, state=states[3], grid=grids[1], **options)
    assert reports[-1][0] == ROUNDS
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "compression = 'topk:0.2': what clients' updates had left out isn't there any more; they begin anew"
    ]
