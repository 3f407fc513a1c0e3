"""Results of runs and sweeps in Python and notebooks: configs, summaries, models, and tables as pandas frames."""

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapp import federation
from fedapp.api.errors import short_errors
from fedapp.api.predictions import Predictions, predictions, preparation_of
from fedapp.config import RunConfig
from fedapp.data import DataError
from fedapp.data.errors import one_line
from fedapp.data.facts.preparation import PREPARATION
from fedapp.names import Form
from fedapp.report.comparison import Comparison
from fedapp.report.exports import frame_of
from fedapp.report.recorded import RecordedRun, metrics_of
from fedapp.report.series import mean_and_spread
from fedapp.report.verdict.verdict import Verdict
from fedapp.sweeps.results import remarks, runs_frame, tuning_frame
from fedapp.sweeps.sweep import Outcome, tuning_of

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


log = logging.getLogger("fedapp.data")


# Files whose change says that a run has gone on.
_FILES = ("config.toml", "summary.json", "metrics.jsonl", "clients.parquet")


def _changed_at(path: Path) -> int:
    """Return when a file was last written, nanoseconds; 0 without the file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class RunResult:
    """A recorded run, read from its folder at the first access, and anew when its files have changed.

    So all that it returns is of one run, also when the run has been resumed since.

    Attributes
    ----------
    path : Path
        Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] | None = None
        self._read = RecordedRun(path)
        self._tables: dict[str, Any] = {}

    @property
    def _record(self) -> RecordedRun:
        """The record of the files as they are now."""
        stamp = tuple(_changed_at(self.path / name) for name in _FILES)
        if stamp != self._stamp:
            self._stamp, self._read, self._tables = stamp, RecordedRun(self.path), {}
        return self._read

    @property
    def status(self) -> str:
        """How it stands or ended: running, finished, interrupted, stopped, diverged or failed."""
        return self._record.status

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: final metrics, totals, how it ended."""
        return self._record.summary

    @property
    def config(self) -> RunConfig:
        """The run config: ``result.config.lr``."""
        return RunConfig.recorded(
            {key: each for key, each in self._record.config.items() if key != "num-clients"}
        )

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return int(self._record.config["num-clients"])

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row for each evaluation: ``aggregation``, ``time``, and every scalar metric; NaN where it is missing."""
        import pandas as pd

        record = self._record
        if "metrics" not in self._tables:
            # There may be no evaluation yet.
            columns = {"aggregation": (), "time": ()} | dict(record.columns)
            self._tables["metrics"] = pd.DataFrame(columns).astype({"aggregation": int, "time": float})
        found: pd.DataFrame = self._tables["metrics"]
        return found

    @property
    def clients(self) -> "pd.DataFrame | None":
        """A row for each evaluation and client: clients.parquet; None if the run has none."""
        import pandas as pd

        path = self._record.path / "clients.parquet"
        if "clients" not in self._tables:
            self._tables["clients"] = pd.read_parquet(path) if path.is_file() else None
        found: pd.DataFrame | None = self._tables["clients"]
        return found

    @short_errors
    def model(self) -> "nn.Module":
        """Return the run's global model, a new one each time, on the CPU and ready to evaluate.

        It is the model of the last evaluation; with ``keep = "best"``, of the best one.

        Raises
        ------
        FileNotFoundError
            If the run has none: it ended before its first evaluation.
        DataError
            If the file is damaged, for example cut off.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / "model.safetensors"
        try:
            state = load_file(file)
        except SafetensorError as error:
            raise DataError(f"{file}: is no whole model file ({one_line(error)})") from None
        shape: tuple[str, Form, int]
        if (self.path / PREPARATION).is_file() and (known := preparation_of(self.path)).outputs:
            shape = (known.kind, known.form, known.outputs)
        else:  # outputs for each position
            dataset = federation.dataset_of(self.config, self.num_clients)
            shape = (dataset.kind, dataset.form, dataset.num_outputs)
        model = copy.deepcopy(federation.model_of(self.config, *shape))
        model.load_state_dict(state)
        return model.eval()

    @short_errors
    def predict(self, data: Any) -> "pd.DataFrame":
        """Predict new rows with the run's model, prepared as the run prepared its own.

        Parameters
        ----------
        data : pandas.DataFrame, array, str or Path
            A table with the columns that the model was trained on, in any order, or a file of one; inputs (N, …), as
            the run's data had them; or a folder of images.

        Returns
        -------
        pandas.DataFrame
            A row for each row: columns that are no inputs; then ``class`` and ``probability``, and the probability of
            each class; or numbers.

        Raises
        ------
        DataError
            If the data aren't of the form that the model was trained on.
        """
        found = self.predictions(data)
        for remark in found.remarks:
            log.warning("%s", remark)
        return found.table

    def predictions(self, data: Any) -> Predictions:
        """Return what ``predict`` returns, and what it logs: what isn't as in training."""
        preparation = preparation_of(self.path)
        if not (self.path / "model.safetensors").is_file():
            raise DataError(
                f"{self.path}: has no model.safetensors: the run ended before its first evaluation"
            )
        return predictions(self.model(), preparation, self.config, data)

    def __repr__(self) -> str:
        """Say what it is in one line."""
        return f"RunResult({self._headline()}; {_near(self.path)})"

    def _repr_html_(self) -> str:
        """Show it in a notebook: what it is, and its final numbers."""
        totals = ("aggregations", "wall-seconds", "bytes-up", "bytes-down", "failures")
        shown = [*metrics_of([self._record]), *totals]
        rows = {key: self.summary[key] for key in shown if key in self.summary}
        unread = self.summary.get("unread-keys")
        more = {"not read": ", ".join(unread)} if unread else {}
        return _html(self._headline(), {**rows, **more, "folder": _near(self.path)})

    def _headline(self) -> str:
        summary, record = self.summary, self._record
        finals = [
            f"{key} {summary[key]:.4f}" for key in metrics_of([record]) if isinstance(summary.get(key), float)
        ]
        what = f"{summary.get('strategy', '?')} on {summary.get('engine', '?')}, {self.status}"
        reason = f" ({record.reason})" if record.reason else ""
        return what + reason + (": " + ", ".join(finals) if finals else "")


class SweepResult:
    """A sweep: its runs, and tables of them.

    Attributes
    ----------
    path : Path
        Its folder, with runs.csv, runs.parquet, report.md and curves.png.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.path = outcome.path
        self._outcome = outcome

    @cached_property
    def runs(self) -> "pd.DataFrame":
        """A row for each run and evaluation, one for a run without; axes are columns, ``loss`` as ``loss-key``."""
        return runs_frame(self._outcome)

    @cached_property
    def table(self) -> "pd.DataFrame":
        """A row for each setting: its labels, ``runs`` that finished and ``lacking``, metrics and their ``-std``.

        The metrics are those at `equal_time`.
        """
        import pandas as pd

        rows = []
        for cell in self._outcome.cells:
            row = {
                **self._outcome.labelled(cell.labels),
                "runs": len(cell.runs),
                "lacking": len(cell.lacking),
            }
            for key in self._outcome.metrics:
                row[key], row[f"{key}-std"] = mean_and_spread(cell.scores(key, self.equal_time))
            rows.append(row)
        return pd.DataFrame(rows)

    @property
    def equal_time(self) -> float | None:
        """The time that every run has reached, if a method without rounds is compared; None: each run's end."""
        return self._outcome.time

    @property
    def tuning(self) -> "pd.DataFrame | None":
        """A row for each run on a tuning seed, and whether its value was picked; None if nothing was tuned."""
        return tuning_frame(self._outcome) if self._outcome.picks else None

    @property
    def results(self) -> list[RunResult]:
        """The runs that are there, in the order of the grid."""
        found = [self._outcome.run_of(each).path for each in self._outcome.planned]
        return [RunResult(path) for path in dict.fromkeys(found) if (path / "config.toml").is_file()]

    @property
    def remarks(self) -> list[str]:
        """Which runs came to no good end and why, what wasn't read, which pick is none."""
        return remarks(self._outcome)

    def verdict(self) -> Verdict:
        """Return which setting leads and by how much, what may spoil that, and what it costs."""
        return self._outcome.verdict

    def __repr__(self) -> str:
        """Say what it is, and show the table."""
        return "\n".join(
            [
                f"SweepResult({_near(self.path)})",
                self.table.to_string(index=False),
                *self.remarks,
                *self._outcome.verdict_lines,
            ]
        )

    def _repr_html_(self) -> str:
        notes = [*self.remarks, *self._outcome.verdict_lines]
        return _html_table(str(_near(self.path)), self.table, notes)


class ComparedRuns:
    """Runs beside each other, those that differ in their seed alone as one."""

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self._comparison = Comparison(runs, tuning_of(run.path for run in runs))

    @cached_property
    def table(self) -> "pd.DataFrame":
        """A row for each setting and metric: mean and ``-std`` at the end, and at equal time, rounds and bytes."""
        return frame_of(self._comparison)

    @property
    def equal(self) -> Mapping[str, float]:
        """Where runs are compared on each axis: how far all of them came; bytes in MB."""
        return self._comparison.axes

    @property
    def remarks(self) -> list[str]:
        """What can't be compared, and why."""
        return self._comparison.remarks

    def verdict(self) -> Verdict:
        """Return which setting leads and by how much, what may spoil that, and what it costs."""
        return self._comparison.verdict

    def write(self, folder: str | Path) -> list[Path]:
        """Write comparison.png and comparison.md into a folder; return the paths."""
        return self._comparison.write(Path(folder).expanduser())

    def __repr__(self) -> str:
        """Show the table."""
        return "\n".join(
            [
                f"ComparedRuns({self._comparison.title})",
                self.table.to_string(index=False),
                *self.remarks,
                *self._comparison.verdict_lines,
            ]
        )

    def _repr_html_(self) -> str:
        notes = [*self.remarks, *self._comparison.verdict_lines]
        return _html_table(self._comparison.title, self.table, notes)


def _near(path: Path) -> Path:
    """Return a path as seen from the working directory, if it is below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _html(title: str, rows: Mapping[str, object]) -> str:
    cells = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(_shown(each))}</td></tr>" for key, each in rows.items()
    )
    return f"<b>{escape(title)}</b><table>{cells}</table>"


def _html_table(title: str, table: "pd.DataFrame", remarks: Sequence[str]) -> str:
    notes = "".join(f"<div>{escape(note)}</div>" for note in remarks)
    shown: str = table.to_html(index=False, escape=True, na_rep="-", float_format="%.4f")
    return f"<b>{escape(title)}</b>{shown}{notes}"


def _shown(value: object) -> str:
    return (
        f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )
