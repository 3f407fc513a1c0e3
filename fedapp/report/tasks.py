"""When each task of a client began and ended: ``tasks.parquet``, the last 200,000 of a run, written and read back."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fedapp.report.growing import GrowingTable, read_growing

# Client, when its task began and ended by the run's clock, when by the machine's, what became of it, and the seconds
# of the run's clock that the model and the reply were on their way.
TaskSpan = tuple[int, float, float, float, float, str, float | None, float | None]

NAME = "tasks"
MOST = 200_000

# Tasks that wait to be written, at most; and by how many the file may have more than it is to have.
_WAITING, _SLACK = 10_000, 100_000

_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),  # of the run's tasks, in the order in which they ended
        ("client", pa.int32()),
        ("began", pa.float64()),  # seconds of the run's clock
        ("ended", pa.float64()),
        ("wall-began", pa.float64()),  # seconds of the machine since the run began
        ("wall-ended", pa.float64()),
        ("outcome", pa.string()),
        ("receiving", pa.float64()),  # of its seconds by the run's clock; null where nobody can tell
        ("sending", pa.float64()),
    ]
)


class TasksFile:
    """Writes a run's tasks; a folder has one writer."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._table = GrowingTable(run_dir, NAME)
        self._waiting: list[TaskSpan] = []
        self.ended = 0  # tasks so far, those that aren't kept any more among them

    def add(self, spans: Sequence[TaskSpan]) -> None:
        """Add tasks, in the order in which they ended."""
        self._waiting.extend(spans)
        if len(self._waiting) >= _WAITING:
            self._write()

    def sync(self) -> int:
        """Return how many tasks have ended so far, now on the disk to stay."""
        self._write()
        self._table.sync()
        return self.ended

    def cut(self, ended: int) -> None:
        """Go on after so many tasks of the run so far; those after come again.

        Raises
        ------
        ValueError
            If there are fewer.
        """
        table = read_tasks(self.run_dir)
        there = int(table["number"][-1].as_py()) + 1 if len(table) else 0
        if there < ended:
            raise ValueError(
                f"{self._table.parquet} has lost rows since the checkpoint: {there} of {ended} are there"
            )
        self._waiting.clear()
        self._table.replace(pc.filter(table, pc.less(table["number"], ended)))
        self.ended = ended

    def publish(self, *, last: bool = False) -> None:
        """Make tasks.parquet what there is so far; the ``last`` time nothing else stays."""
        self._write(trim=last)
        self._table.publish(last=last)

    def _write(self, *, trim: bool = False) -> None:
        if self._waiting:
            numbers = range(self.ended, self.ended + len(self._waiting))
            columns = [list(numbers), *map(list, zip(*self._waiting, strict=True))]
            self._table.write(pa.table(columns, schema=_SCHEMA))
            self.ended += len(self._waiting)
            self._waiting.clear()
        if self._table.rows > MOST + (0 if trim else _SLACK):
            self._table.replace(read_tasks(self.run_dir))


def read_tasks(run_dir: Path) -> pa.Table:
    """Return a run's last 200,000 tasks in the order in which they ended; none if it is of an earlier version.

    ``outcome`` is what became of it: ``accepted``, ``late``, ``failed``, ``refused``, ``discarded`` (too old),
    ``lost`` (the device went, or came back without it), or ``under way``, where it hadn't ended when the run did.
    ``receiving`` and ``sending`` are null where nobody can tell them from work, and in runs of earlier versions.
    """
    table = read_growing(run_dir, NAME)
    if table is None:
        return _SCHEMA.empty_table()
    for added in _SCHEMA:
        if added.name not in table.column_names:  # of an earlier version
            table = table.append_column(added, pa.nulls(len(table), added.type))
    return table.slice(max(0, len(table) - MOST))
