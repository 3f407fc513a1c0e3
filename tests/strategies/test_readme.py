"""What the library's README shows of a run that stops early, is saved, and goes on: the block as it stands there."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

import strategies
from tests.strategies.flower.test_stock_app import grid, model

(CODE,) = [
    block
    for block in re.findall(
        r"```python\n(.*?)```", Path(strategies.__file__).with_name("README.md").read_text("utf-8"), re.S
    )
    if "strategy.state()" in block
]
Evaluate = Callable[[int, ArrayRecord], MetricRecord]


class KilledError(Exception):
    """The process ends here."""


def run(evaluate: Evaluate) -> dict[str, Any]:
    names: dict[str, Any] = {"grid": grid(), "initial_arrays": model(), "evaluate": evaluate}
    exec(CODE, names)
    return names


def better(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1 / (1 + number)})


def test_a_run_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(tmp_path, monkeypatch, caplog):
    def killed(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number > 20:
            raise KilledError
        return better(number, arrays)

    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(better)
    monkeypatch.chdir(tmp_path / "cut")
    with pytest.raises(KilledError):
        run(killed)
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        rest = run(better)
    (first, *_) = rest["result"].evaluate_metrics_serverapp
    assert 15 < first < 25
    assert rest["strategy"].session.aggregations == 50
    assert rest["result"].arrays["w"].data == whole["result"].arrays["w"].data
    assert "aggregation " not in caplog.text  # who is told prints what it likes


def test_it_stops_when_it_gets_no_better(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(lambda number, arrays: MetricRecord({"loss": float(number)}))
    assert len(names["losses"]) == 6
    assert names["strategy"].session.aggregations < 50
    assert max(names["result"].evaluate_metrics_serverapp) == names["strategy"].session.aggregations
