"""A sweep: makes the runs of a plan, and collects their outcome."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from fedapp.config import ConfigError, RunConfig, Value
from fedapp.federation import absolute, local_folders, renew
from fedapp.report.cells import UNTUNED, Cell, Tuning, equal_time, why_unlike
from fedapp.report.differences import DATA_PATH, has_own_data
from fedapp.report.files import LOSS
from fedapp.report.recorded import UNREADABLE, RecordedRun, metrics_of
from fedapp.report.verdict.of_runs import verdict_of
from fedapp.report.verdict.verdict import Verdict
from fedapp.sweeps.plan import DATASET, SEED, SweepPlan, keys_of, read_file
from fedapp.sweeps.point import (
    DIVERGED,
    FINISHED,
    LABEL,
    PlannedRun,
    folder_of,
    is_finished,
    unfinished,
)
from fedapp.sweeps.runner import only_one, run_missing
from fedapp.sweeps.shards import Shard, failures_in, refuse_beside_shards, shard_record, shards_of
from fedapp.sweeps.tuning import (
    Pick,
    Setting,
    check_direction,
    check_tested_rows,
    pick,
    setting_of,
    tuning_doubts,
)

RUNS, TUNING = "runs", "tuning"
PLAN, KEYS, REPORT, FIGURE = "plan.toml", "keys.json", "report.md", "curves.png"
CSV, PARQUET, TUNING_CSV = "runs.csv", "runs.parquet", "tuning.csv"


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a sweep.

    Attributes
    ----------
    path : Path
        Its folder.
    planned : sequence of PlannedRun
        The runs that are reported, in the order of the grid.
    failures : mapping of str to str
        Why runs failed or diverged, by `PlannedRun.name`; those on tuning seeds too.
    by : str
        The metric by which settings are compared and tuned.
    picks : mapping
        The picked values of each cell, if the plan tunes.
    tried : sequence of PlannedRun
        The runs on tuning seeds.
    """

    path: Path
    plan: SweepPlan
    planned: Sequence[PlannedRun]
    failures: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    picks: Mapping[Setting, Pick] = field(default_factory=dict)
    tried: Sequence[PlannedRun] = ()

    def run_of(self, planned: PlannedRun) -> RecordedRun:
        """Return a planned run's record."""
        return RecordedRun(folder_of(planned, self.path / RUNS))

    def status_of(self, planned: PlannedRun) -> tuple[str, str]:
        """Return how a planned run ended, and why, if it failed or diverged, or is damaged."""
        run = self.run_of(planned)
        if run.standing == UNREADABLE:
            return UNREADABLE, run.reason
        if run.status == FINISHED:
            return FINISHED, ""
        told = self.failures.get(planned.name, "")
        status = run.status if run.status != "?" else "failed" if told else "not run"
        return status, told or run.reason

    @property
    def cells(self) -> list[Cell]:
        """The runs by setting, the seeds of each together, in the order of the grid."""
        groups: dict[Setting, list[PlannedRun]] = {}
        for each in self.planned:
            groups.setdefault(setting_of(each, self.plan.cell_axes + self.plan.tune), []).append(each)
        return [self._cell(members) for members in groups.values()] + self._unpicked()

    @cached_property
    def time(self) -> float | None:
        """The time at which settings are compared; None for the end of each run."""
        return equal_time(self.cells)

    @property
    def leader(self) -> str:
        """The setting that leads by ``by``; empty if the tests tell none apart from all others."""
        return self.verdict.leader

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the settings by ``by``, at `time` or the end of their runs."""
        files = f"{CSV} in {self.path}" + f", and {TUNING_CSV} of the tuning" * bool(self.picks)
        return verdict_of(
            self.cells,
            self.by,
            time=self.time,
            stated=self.plan.stated,
            tuning=self.tuning,
            files=files,
        )

    @cached_property
    def tuning(self) -> Tuning:
        """The tuning of the settings; without one the metric by which they are compared alone."""
        plan = self.plan
        names = {folder_of(each, self.path / RUNS).name: self._names(each.labels) for each in self.planned}
        if not plan.tune:
            return Tuning(by=self.by, names=names)
        number = len(plan.seeds_to_tune_on)
        return Tuning(
            tuple(key for axis in plan.tune for key in keys_of(axis, plan.grid[axis])),
            f"{', '.join(plan.tune)} tuned for each setting by {self.by} on {number} other seed{'s' * (number > 1)}",
            self.by,
            tuple(tuning_doubts(plan, self.picks, self.tried, self.path / TUNING)),
            names,
        )

    @property
    def verdict_lines(self) -> list[str]:
        """The lines of the verdict; [] of one setting that isn't tuned."""
        return self.verdict.lines if self.picks or sum(bool(cell.runs) for cell in self.cells) > 1 else []

    @cached_property
    def unlike(self) -> str:
        """Why the settings can't be compared by ``by``; "" if they can."""
        return why_unlike(self.cells, self.by)

    @cached_property
    def columns(self) -> dict[str, str]:
        """The column of each axis in tables: its name, or NAME-key if runs have a metric of that name."""
        measured = {LOSS, *(key for each in self.planned for key in self.run_of(each).columns)}
        taken = {*measured, *(f"{key}-std" for key in measured)}
        return {axis: f"{axis}-key" if axis in taken else axis for axis in self.plan.grid}

    def labelled(self, labels: Mapping[str, object]) -> dict[str, object]:
        """Return labels by the names of their columns."""
        return {self.columns.get(axis, axis): label for axis, label in labels.items()}

    @property
    def finished(self) -> bool:
        """Whether a run came to its end."""
        return any(self.status_of(each)[0] == FINISHED for each in self.planned)

    @property
    def all_runs(self) -> list[tuple[PlannedRun, str]]:
        """The runs that are reported and those on tuning seeds, with the part of the folder that they are in."""
        return [(each, RUNS) for each in self.planned] + [(each, TUNING) for each in self.tried]

    @property
    def failed(self) -> int:
        """How many runs neither came to their end nor diverged, which is a result too."""
        runs = [RecordedRun(folder_of(each, self.path / part)) for each, part in self.all_runs]
        return sum(run.status not in (FINISHED, DIVERGED) for run in runs)

    @property
    def metrics(self) -> list[str]:
        """The metrics of the runs' models, the one by which settings are compared first."""
        runs = [self.run_of(each) for each in self.planned]
        found = metrics_of(runs)
        if self.by not in found and any(self.by in run.columns for run in runs):
            found.append(self.by)  # one of clients
        return sorted(found, key=lambda key: key != self.by)

    def _cell(self, members: Sequence[PlannedRun]) -> Cell:
        labels = {axis: members[0].labels[axis] for axis in self.plan.grid if axis != SEED}
        ends = [(each, self.status_of(each)[0]) for each in members]
        runs = [self.run_of(each) for each, status in ends if status == FINISHED]
        lacking = [status for _, status in ends if status != FINISHED]
        name, label = self._names(labels)
        return Cell(name, runs, lacking, labels, label)

    def _names(self, labels: Mapping[str, Value]) -> tuple[str, str]:
        """Return a setting's name, and its label in legends, without axes that are tuned."""
        untuned = {axis: labels[axis] for axis in self.plan.cell_axes}
        name = self.plan.name_of(labels)
        return name, self.plan.name_of(untuned) if untuned else name

    def _unpicked(self) -> list[Cell]:
        """Return the cells that have no run, as no value could be picked for them."""
        lost = [each for each in self.picks.values() if each.value is None]
        cells = [dict(zip(self.plan.cell_axes, each.cell, strict=True)) for each in lost]
        lacking = ["not run"] * len(self.plan.seeds)
        return [
            Cell(self.plan.name_of(labels), [], lacking, {**labels, **dict.fromkeys(self.plan.tune, "none")})
            for labels in cells
        ]


def make_sweep(plan: SweepPlan, folder: Path, *, engine: str, jobs: int, console: Console) -> Outcome:
    """Make the runs that a plan lacks in a folder, and write what comes of all of them.

    Raises
    ------
    ConfigError
        If a run's config isn't possible, or another process makes runs in this folder: before a run begins.
    """
    planned, on_other_seeds = _checked_runs(plan)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder):  # a plan that is refused mustn't take the place of one whose runs are being made
        refuse_beside_shards(folder, console)
        _write_plan(plan, folder, planned, on_other_seeds)
        failures: dict[str, str] = {}
        picks: dict[Setting, Pick] = {}
        by: str = plan.metric
        if plan.tune:
            console.print(_tuning_text(plan), markup=False, highlight=False)
            failures = run_missing(on_other_seeds, folder / TUNING, engine=engine, jobs=jobs, console=console)
            by, picks, planned = _picked(plan, planned, on_other_seeds, folder)
            _refuse_unknown_metric(plan, picks, on_other_seeds, folder)
        if planned:
            failures |= run_missing(planned, folder / RUNS, engine=engine, jobs=jobs, console=console)
    by = by or _usual([RecordedRun(folder_of(each, folder / RUNS)) for each in planned])
    return Outcome(folder, plan, planned, failures, by, picks, on_other_seeds)


def make_shard(
    plan: SweepPlan, folder: Path, shard: Shard, *, engine: str, jobs: int, console: Console
) -> tuple[int, int]:
    """Make the runs of one shard of a plan that aren't finished yet.

    Values are picked once the tuning runs of all shards are finished; until then a shard makes only its tuning runs.

    Returns
    -------
    made, failed : int
        How many runs the shard has, and how many of them neither came to their end nor diverged.

    Raises
    ------
    ConfigError
        As `make_sweep`; if another process makes the same shard, too.
    """
    planned, on_other_seeds = _checked_runs(plan)
    own: list[Path] = []
    with shard_record(shard, folder, console) as record:

        def make(every: Sequence[PlannedRun], part: str) -> None:
            if mine := shard.part_of(every):
                record.failures |= run_missing(
                    mine, folder / part, engine=engine, jobs=jobs, console=console, shared=True
                )
            own.extend(folder_of(each, folder / part) for each in mine)

        if plan.tune:
            console.print(_tuning_text(plan), markup=False, highlight=False)
            make(on_other_seeds, TUNING)
            lacking = _lacking_for_picks(on_other_seeds, folder)
            if lacking:
                console.print(lacking, markup=False, highlight=False)
                return len(own), sum(not is_finished(path) for path in own)
            _, picks, planned = _picked(plan, planned, on_other_seeds, folder)
            _refuse_unknown_metric(plan, picks, on_other_seeds, folder)
        make(planned, RUNS)
    return len(own), sum(not is_finished(path) for path in own)


def merge_shards(plan: SweepPlan, folder: Path) -> Outcome:
    """Return what came of the shards of a plan so far, and put the plan into their folder.

    Raises
    ------
    ConfigError
        If the folder has no run, a tuning run isn't finished, or another process makes the whole sweep in it.
    """
    planned, on_other_seeds = _checked_runs(plan)
    if not any((folder / part).is_dir() for part in (RUNS, TUNING)):
        raise ConfigError(
            f"{folder}: has no run to merge; --shard 1/2 in place of --merge makes half of them"
        )
    if lacking := _lacking_for_picks(on_other_seeds, folder):
        raise ConfigError(f"{folder}: {lacking}")
    with only_one(folder):
        _write_plan(plan, folder, planned, on_other_seeds)
    by: str = plan.metric
    picks: dict[Setting, Pick] = {}
    if plan.tune:
        by, picks, planned = _picked(plan, planned, on_other_seeds, folder)
        _refuse_unknown_metric(plan, picks, on_other_seeds, folder)
    by = by or _usual([RecordedRun(folder_of(each, folder / RUNS)) for each in planned])
    return Outcome(folder, plan, planned, failures_in(folder), by, picks, on_other_seeds)


def _lacking_for_picks(on_other_seeds: Sequence[PlannedRun], folder: Path) -> str:
    """Say which tuning runs of all shards must still be made before values are picked; "" if none is."""
    missing = unfinished(on_other_seeds, folder / TUNING)
    if not missing:
        return ""
    total = len({each.key for each in on_other_seeds})
    return (
        f"no value is picked yet, as {len(missing)} of {total} tuning runs aren't finished: "
        f"{_how_to_make(missing, on_other_seeds, folder)}, and once more the runs that are reported; the command "
        "without --shard picks without those that always fail"
    )


def missing_text(outcome: Outcome) -> str:
    """Say how many reported runs are missing after a merge, how they stand, and what makes them; "" if none is."""
    missing = unfinished(outcome.planned, outcome.path / RUNS)
    if not missing:
        return ""
    stands = Counter(outcome.status_of(each)[0] for each in missing)
    how = ", ".join(f"{number} {status}" for status, number in stands.items())
    total = len({each.key for each in outcome.planned})
    what = _how_to_make(missing, outcome.planned, outcome.path)
    return f"{len(missing)} of {total} runs are missing ({how}): {what}"


def _how_to_make(missing: Sequence[PlannedRun], planned: Sequence[PlannedRun], folder: Path) -> str:
    """Say which command makes runs that are missing."""
    if shards := shards_of(missing, planned, folder):
        return f"the same command with --shard makes them, for shards {shards}"
    return "the same command without --merge makes them"


def _checked_runs(plan: SweepPlan) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """Return the runs of a plan that may be reported, and those on tuning seeds."""
    renew()  # data may have changed since the last sweep of this process
    planned = plan.runs()
    if plan.tune:
        check_direction(plan, planned)
    on_other_seeds = plan.runs(plan.seeds_to_tune_on) if plan.tune else []
    check_tested_rows(plan, on_other_seeds)
    return planned, on_other_seeds


def _write_plan(
    plan: SweepPlan, folder: Path, planned: Sequence[PlannedRun], on_other_seeds: Sequence[PlannedRun]
) -> None:
    (folder / PLAN).write_text(tomli_w.dumps(_from_anywhere(plan)), "utf-8")
    (folder / KEYS).write_text(json.dumps({RUNS: _keys(planned), TUNING: _keys(on_other_seeds)}), "utf-8")


def _tuning_text(plan: SweepPlan) -> str:
    return f"{', '.join(plan.tune)} on seeds {', '.join(map(str, plan.seeds_to_tune_on))}"


def _picked(
    plan: SweepPlan, planned: Sequence[PlannedRun], on_other_seeds: Sequence[PlannedRun], folder: Path
) -> tuple[str, dict[Setting, Pick], list[PlannedRun]]:
    """Return the metric by which values are picked, the picks, and the planned runs with picked values."""
    by = plan.metric or _usual([RecordedRun(folder_of(each, folder / TUNING)) for each in on_other_seeds])
    picks = pick(plan, on_other_seeds, folder / TUNING, by)
    return by, picks, [each for each in planned if _is_picked(plan, each, picks)]


def outcome_in(folder: Path) -> Outcome:
    """Read a sweep's folder back, as far as it has come.

    Raises
    ------
    ConfigError
        If there is no sweep in it.
    """
    if not (folder / PLAN).is_file():
        raise ConfigError(f"{folder}: no sweep is there, a folder with a {PLAN}")
    plan = read_file(folder / PLAN, SweepPlan)
    planned, by = _as_made(plan.runs(), folder, RUNS), plan.metric
    picks: dict[Setting, Pick] = {}
    on_other_seeds: list[PlannedRun] = []
    if plan.tune:
        on_other_seeds = _as_made(plan.runs(plan.seeds_to_tune_on), folder, TUNING)
        by, picks, planned = _picked(plan, planned, on_other_seeds, folder)
    by = by or _usual([RecordedRun(folder_of(each, folder / RUNS)) for each in planned])
    return Outcome(folder, plan, planned, failures_in(folder), by, picks, on_other_seeds)


def tuning_of(runs: Iterable[Path]) -> Tuning:
    """Return the tuning of the sweep in whose folder all runs are; `UNTUNED` where they aren't of one sweep.

    Raises
    ------
    ConfigError
        If the sweep's plan can't be read.
    """
    folders = {run.resolve().parent for run in runs}
    if len(folders) != 1 or (here := folders.pop()).name != RUNS or not (here.parent / PLAN).is_file():
        return UNTUNED
    return outcome_in(here.parent).tuning


def _from_anywhere(plan: SweepPlan) -> dict[str, Any]:
    """Return a plan's content with absolute paths of data, for any working directory; labels stay as they are."""
    content = plan.model_dump(by_alias=True)
    content["base"] |= _moved(content["base"])
    for axis, choices in content["grid"].items():
        for at, choice in enumerate(choices):
            own = choice if isinstance(choice, dict) else {axis: choice}
            if moved := _moved(own):
                choices[at] = {LABEL: choice} | own | moved
    return content


def _moved(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the keys whose values are relative paths of data, with the absolute paths."""
    found: dict[str, Value] = {DATA_PATH: absolute(str(values.get(DATA_PATH, "")))}
    if has_own_data(dataset := str(values.get(DATASET, ""))):
        found |= local_folders(RunConfig.load({}).model_copy(update={DATASET: dataset}))
    return {key: place for key, place in found.items() if values.get(key) and place and place != values[key]}


def _keys(planned: Sequence[PlannedRun]) -> list[str]:
    return [each.key for each in planned]


def _as_made(planned: Sequence[PlannedRun], folder: Path, part: str) -> list[PlannedRun]:
    """Return a plan's runs by the keys that they were made by, whatever has become of the user's sources since."""
    try:
        keys = json.loads((folder / KEYS).read_text("utf-8"))[part]
        return [replace(each, made_as=str(key)) for each, key in zip(planned, keys, strict=True)]
    except (OSError, ValueError, KeyError, TypeError):  # the folder was changed by hand
        return list(planned)


def _usual(runs: Sequence[RecordedRun]) -> str:
    """Return the metric by which settings are compared by default: the runs' first, or loss without one."""
    return next(iter(metrics_of(runs)), "loss")


def _is_picked(plan: SweepPlan, planned: PlannedRun, picks: Mapping[Setting, Pick]) -> bool:
    return picks[setting_of(planned, plan.cell_axes)].value == setting_of(planned, plan.tune)


def _refuse_unknown_metric(
    plan: SweepPlan, picks: Mapping[Setting, Pick], planned: Sequence[PlannedRun], folder: Path
) -> None:
    """Refuse the plan's metric ``by`` if nothing was picked because no run has that metric."""
    if any(each.value is not None for each in picks.values()):
        return
    runs = [RecordedRun(folder_of(each, folder / TUNING)) for each in planned]
    there = metrics_of(runs)
    if plan.by and there and plan.metric not in there and any(run.status == FINISHED for run in runs):
        raise ConfigError(f"by = {plan.metric!r}: no run has that metric; allowed are {', '.join(there)}")


def score_text(score: float) -> str:
    """Write a score, or that there is none."""
    return f"{score:.4f}" if math.isfinite(score) else "failed"
