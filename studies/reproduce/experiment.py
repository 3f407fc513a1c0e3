"""An experiment in two halves: what it measures, which needs runs and data, and its report, which needs neither.

``report`` in the TOML file names a module of `studies.reproduce` and a function in it: ``asynchronous:figure_2``. A
study, which is no grid of runs, names a module alone, and its function is ``report``. The module defines

    report(results: Results, plan: Plan, folder: Path) -> Report
        Works on curves.parquet alone: ``results.runs`` and ``results.numbers``. Draws its figures into ``folder``,
        takes thresholds from ``plan.threshold(claim, name)`` and other numbers from ``plan.setting(name)``, and
        judges each part of a claim for which everything is there (``results.missing(...)`` is empty); the others
        are "not run".

    measure_report(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers     (optional)
        Returns the named numbers (JSON) that the report needs beside the curves. ``known`` are those measured before:
        what is in there needn't be measured again, and mustn't be lost where a run's folder (``run.folder``) or the
        data are gone; so a name says what its number depends on (``run.planned.key``, a setting), or `sources` does.
        ``absent`` among the numbers says what is missing, and why. A study measures everything here.

    sources_report(plan: Plan, runs: Runs) -> dict[str, str]     (optional)
        Returns, for numbers whose name doesn't say it, a digest (`digest`, `data_key`) of all that each is measured
        from. It is kept beside them: where it is another now, they aren't known any more, and no report has them.

where ``report`` is the function's name: ``figure_2``, ``measure_figure_2`` and ``sources_figure_2``. A study:
``report``, ``measure`` and ``sources``.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedapp.config import RunConfig, Value
from fedapp.config.data_keys import DataKeys
from fedapp.sweeps.point import PlannedRun, folder_of, is_finished
from studies.reproduce.circumstances import circumstances, versions_text
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, write_report
from studies.reproduce.runs import Run, Runs, has_labels
from studies.reproduce.store import FILE, Stored, read_folder, read_stored, write_stored

Numbers = dict[str, Any]

RUNS = "runs"
ABSENT = "absent"

_OTHERS = "was measured from other settings or data than these"


@dataclass(frozen=True)
class Results:
    """The input of a report.

    Attributes
    ----------
    planned : sequence of PlannedRun
        Every point of the grid; where an axis is tuned, those that are known to be wanted.
    runs : Runs
        The planned points whose run is there, in the order of the grid.
    numbers : dict
        Named numbers that were measured beside the curves.
    measured : mapping
        Date, versions, machine and ``seconds`` of that measurement.
    absent : mapping of str to str
        Names of runs and numbers that are missing, each with the reason.
    """

    planned: Sequence[PlannedRun]
    runs: Runs
    numbers: Numbers
    measured: Mapping[str, Any]
    absent: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan, stored: Stored) -> "Results":
        """Pair a plan's points with the runs in a file."""
        planned = plan.runs(curves=stored.curves)
        runs = Runs(Run(each, stored.curves[each.key]) for each in planned if each.key in stored.curves)
        others = _from_others(stored, _sources_of(plan, runs))
        numbers = {name: value for name, value in stored.numbers.items() if name not in others}
        absent = {**stored.absent, **dict.fromkeys(others, _OTHERS)}
        return cls(planned, runs, numbers, stored.measured, absent)

    def missing(self, **labels: Value | Sequence[Value]) -> str:
        """Say which planned points with these labels have no run, as `Runs.where` takes them; empty if all have one.

        A label of a list that no planned point has is missing, too.
        """
        planned = [each for each in self.planned if has_labels(each, labels)]
        for axis, wanted in labels.items():
            there = {each.labels.get(axis.replace("_", "-")) for each in planned}
            for label in wanted if isinstance(wanted, list | tuple) else [wanted]:
                if label not in there:
                    return f"{label} isn't planned"
        lacking = len(planned) - len(self.runs.where(**labels))
        return f"{lacking} of {len(planned)} runs aren't there" if lacking else ""

    def unready(self, plan: Plan, claim: str, **labels: Value | Sequence[Value]) -> str:
        """Say what a claim lacks: as `missing`, or seeds, if its thresholds have a number of ``seeds``."""
        wanted = plan.claims[claim].thresholds.get("seeds", 0)
        seeds = len(self.runs.where(**labels).labels("seed")) if wanted else 0
        return self.missing(**labels) or (f"{seeds} of {wanted} seeds" if seeds < wanted else "")


class _Reporter(Protocol):
    def __call__(self, results: Results, plan: Plan, folder: Path, /) -> Report: ...


class _Measurer(Protocol):
    def __call__(self, plan: Plan, runs: Runs, known: Numbers, data_path: str, /) -> Numbers: ...


def reporter_of(plan: Plan) -> _Reporter:
    """Return the report function that a plan names."""
    module, _, function = plan.report.partition(":")
    found: _Reporter = getattr(importlib.import_module(f"studies.reproduce.{module}"), function or "report")
    return found


def measurer_of(plan: Plan) -> _Measurer | None:
    """Return the function that measures the numbers of a plan's report; None without one."""
    found: _Measurer | None = _beside(plan, "measure")
    return found


def _beside(plan: Plan, kind: str) -> Any:
    module, _, function = plan.report.partition(":")
    name = f"{kind}_{function}" if function else kind
    return getattr(importlib.import_module(f"studies.reproduce.{module}"), name, None)


def _sources_of(plan: Plan, runs: Runs) -> dict[str, str]:
    sources = _beside(plan, "sources")
    return dict(sources(plan, runs)) if sources else {}


def _from_others(stored: Stored, sources: Mapping[str, str]) -> list[str]:
    """Return the names of numbers that were measured from other sources; without recorded sources they are kept."""
    return [name for name, own in sources.items() if stored.sources.get(name, own) != own]


def digest(*sources: Any) -> str:
    """Return a hash of the sources of a measurement, which JSON can hold."""
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:10]


def data_key(planned: PlannedRun, *fields: str) -> str:
    """Return the key that a run would have by its data, clients, seed and these fields of its config alone."""
    kept = {name: getattr(planned.config, name) for name in (*DataKeys.model_fields, "seed", *fields)}
    return replace(planned, config=RunConfig.load().model_copy(update=kept), made_as="").key


def collect(
    plan: Plan, folder: Path, *, data_path: str = "", failures: Mapping[str, str] | None = None
) -> list[str]:
    """Bring ``folder/curves.parquet`` up to date with the runs in ``folder/runs`` and what is measured from them.

    Runs that are in the file stay there though their folders are gone; those that are no longer planned are dropped.

    Parameters
    ----------
    failures : mapping
        Why a run failed, by its name.

    Returns
    -------
    list of str
        Remarks: what was dropped, and what may be from elsewhere.
    """
    path = folder / FILE
    before = read_stored(path)
    planned: dict[str, PlannedRun] = {}
    for each in plan.runs(data_path):
        planned.setdefault(each.key, each)
    stored = Stored()
    for key, each in planned.items():
        at = folder_of(each, folder / RUNS)
        if key in before.curves:
            stored.curves[key] = replace(before.curves[key], name=each.name)
        elif is_finished(at):
            stored.curves[key] = read_folder(each, at)
        else:
            continue
        stored.seeds[key] = each.config.seed
    wanted = {each.key for each in plan.runs(data_path, stored.curves)}
    for key in stored.curves.keys() - wanted:
        del stored.curves[key], stored.seeds[key]
    there = {
        each.name for each in stored.curves.values()
    }  # a run that diverged has failed, and has its curves
    stored.absent = {
        name: _without(reason, data_path, str(folder))
        for name, reason in sorted((failures or {}).items())
        if name not in there
    }
    unknown = _measure(plan, stored, before, folder, data_path)
    if stored.changed_from(before) or not path.exists():
        write_stored(path, stored)
    dropped = len(before.curves.keys() - stored.curves.keys())
    remarks = [f"{dropped} runs in {path} are no longer planned: dropped"] if dropped else []
    if unknown:
        remarks.append(
            f"{path} doesn't say from which settings these are; taken as they are: {'; '.join(unknown)}"
        )
    return remarks


def _measure(plan: Plan, stored: Stored, before: Stored, folder: Path, data_path: str) -> list[str]:
    """Fill in the numbers and when they were measured; return the names of numbers without recorded sources."""
    measure = measurer_of(plan)
    if measure is None:
        return []
    points = [each for each in plan.runs(data_path, stored.curves) if each.key in stored.curves]
    runs = Runs(Run(each, stored.curves[each.key], folder_of(each, folder / RUNS)) for each in points)
    sources = _sources_of(plan, runs)
    others = _from_others(before, sources)
    began = time.monotonic()
    known = {name: value for name, value in before.numbers.items() if name not in others}
    numbers = measure(plan, runs, known, data_path)
    took = round(time.monotonic() - began, 1)
    stored.absent |= {
        name: _without(why, data_path, str(folder)) for name, why in numbers.pop(ABSENT, {}).items()
    }
    numbers = json.loads(json.dumps(numbers))  # as they will be read
    stored.numbers = numbers
    unknown = [name for name in sources if name in before.numbers and name not in before.sources]
    stored.sources = {name: own for name, own in sources.items() if name in numbers and name not in unknown}
    if numbers == before.numbers:
        stored.measured = before.measured
    elif numbers:
        stored.measured = {**circumstances(), "seconds": took}
    return unknown


def report_on(plan: Plan, folder: Path) -> Path:
    """Make the report from ``folder/curves.parquet``; return its path. Doing it twice gives the same text.

    Raises
    ------
    ConfigError
        If the report needs a threshold or setting that the plan doesn't have.
    """
    stored = read_stored(folder / FILE)
    results = Results.of(plan, stored)
    report = reporter_of(plan)(results, plan, folder) if results.runs or results.numbers else Report()
    report.notes += [f"Not there: {name}: {reason}" for name, reason in sorted(results.absent.items())]
    return write_report(folder, report, plan, setting=_setting(plan, results, stored))


def _setting(plan: Plan, results: Results, stored: Stored) -> list[str]:
    """Return lines on the share of planned runs that are there, and their dates, versions and machines."""
    planned = len({each.key for each in results.planned})
    lines = [f"**Quick**: {plan.quick.note}. No verdicts."] if plan.quick and plan.is_quick else []
    share = f"{len(stored.curves)} of {planned} runs" if planned else ""
    if len(stored.curves) == planned and not results.absent and not plan.is_quick:
        lines.append("Full settings.")
    seeds = sorted(set(stored.seeds.values())) or plan.settings.get("seeds", [])
    lines.append(
        ", ".join(
            filter(None, [share, f"seeds {', '.join(map(str, seeds))}" if seeds else "", _work(stored)])
        )
    )
    made = [each.facts for each in stored.curves.values()]
    made += [stored.measured] if stored.measured else []
    dates = sorted({each["date"] for each in made})
    lines.append(" to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no runs yet")
    lines += dict.fromkeys(versions_text(each["versions"]) for each in made)
    lines += dict.fromkeys(each["machine"] for each in made)
    return lines


def _work(stored: Stored) -> str:
    """Say how long runs and measurements took, and on which engines."""
    parts = []
    if stored.curves:
        facts = [each.facts for each in stored.curves.values()]
        minutes = sum(each["wall-seconds"] for each in facts) / 60
        engines = ", ".join(sorted({str(each["engine"]) for each in facts}))
        parts.append(f"{minutes:.1f} minutes of work, engine {engines}")
    if stored.measured:
        parts.append(f"{stored.measured['seconds']:.1f} seconds for what was measured beside")
    return ", ".join(parts)


def _without(text: str, data_path: str, folder: str) -> str:
    """Return a reason in one line, without this machine's paths."""
    for path, name in ((data_path, "DATA-PATH"), (folder, "OUT")):
        text = text.replace(path, name) if path else text
    return " ".join(text.split())
