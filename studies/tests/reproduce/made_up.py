"""Runs, results and plans with numbers made up by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedapp.config import RunConfig
from fedapp.sweeps.point import PlannedRun
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan, read_plan
from studies.reproduce.report import Report
from studies.reproduce.runs import Curves, Run, Runs


def make_run(labels: Mapping[str, Any], metrics: Mapping[str, Sequence[float | None]], **config: Any) -> Run:
    """Make a run of made-up numbers, one per evaluation; ``num_clients`` and ``facts`` beside the config's keys."""
    number = len(next(iter(metrics.values())))
    columns = {"aggregation": range(number), "time": range(number), **metrics}
    arrays = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
    facts = {"evaluations": number, "wall-seconds": 1.0, "engine": "made-up", **config.pop("facts", {})}
    num_clients = config.pop("num_clients", 2)
    content = {key.replace("_", "-"): value for key, value in config.items()}
    planned = PlannedRun(labels, RunConfig.load(content), num_clients)
    return Run(planned, Curves(planned.name, arrays, facts))


def results_of(
    runs: Sequence[Run], *, numbers: dict[str, Any] | None = None, lack: Sequence[Run] = ()
) -> Results:
    """Make results of which these runs are there, and those lack."""
    planned = [run.planned for run in (*runs, *lack)]
    return Results(planned, Runs(runs), numbers or {}, {}, {})


def plan_with(
    name: str,
    thresholds: Mapping[str, Mapping[str, Any]] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> Plan:
    """Read a plan that ships, with other thresholds of some claims and other labels on some axes."""
    plan = read_plan(name)
    claims = dict(plan.claims)
    for claim, changed in (thresholds or {}).items():
        merged = {**claims[claim].thresholds, **changed}
        claims[claim] = claims[claim].model_copy(update={"thresholds": merged})
    axes = {axis: [{"label": label} for label in labels] for axis, labels in (grid or {}).items()}
    return plan.model_copy(update={"claims": claims, "grid": {**plan.grid, **axes}})


def outcome(report: Report, claim: str) -> str:
    """Return the verdict on a claim."""
    return next(verdict.outcome for verdict in report.verdicts if verdict.claim == claim)


def evidence(report: Report, claim: str) -> str:
    """Return what it rests on."""
    return next(verdict.evidence for verdict in report.verdicts if verdict.claim == claim)


def check_figures(figures: Sequence[Path]) -> None:
    """Look at the size of every figure."""
    assert figures
    for path in figures:
        assert path.stat().st_size < 200_000
        assert Image.open(path).size[0] == 1200
