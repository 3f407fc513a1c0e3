"""Experiments small enough for a test, and run folders with numbers made up by hand."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedapp.config import RunConfig
from fedapp.reproduce.plan import Plan, PlannedRun
from fedapp.reproduce.runs import Run

# A run takes a tenth of a second.
TINY = {
    "num-clients": 3,
    "dataset": "digits",
    "model": "logistic",
    "batch-size": 0,
    "num-server-rounds": 2,
}


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Build a plan over the embedded digits."""

    def build(**changes: Any) -> Plan:
        content = {
            "title": "A test",
            "source": "nowhere",
            "report": "beyond:comparison",
            "base": TINY,
            "grid": {"seed": [0, 1]},
            "quick": {"note": "one seed", "grid": {"seed": [0]}},
        }
        return Plan.model_validate({**content, **changes})

    return build


@pytest.fixture
def plan_file(plan: Callable[..., Plan], tmp_path: Path) -> Callable[..., str]:
    """Write a plan to a TOML file and return its path."""

    def write(**changes: Any) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(tomli_w.dumps(plan(**changes).model_dump()), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def folder_with(tmp_path: Path) -> Callable[..., Run]:
    """Write a finished run's folder: metrics by name, one number per evaluation."""

    def write(labels: Mapping[str, Any], metrics: Mapping[str, Sequence[float]], **config: Any) -> Run:
        planned = PlannedRun(labels, RunConfig.load({}), 2)
        path = tmp_path / "runs" / "-".join(str(label) for label in labels.values())
        path.mkdir(parents=True)
        number = len(next(iter(metrics.values())))
        columns = {"aggregation": range(number), "time": range(number), **metrics}
        records = [
            {key: values[i] for key, values in columns.items() if values[i] is not None}
            for i in range(number)
        ]
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        (path / "summary.json").write_text(json.dumps({"status": "finished", "wall-seconds": 1.0}))
        (path / "config.toml").write_text(tomli_w.dumps(config))
        return Run(planned, path)

    return write
