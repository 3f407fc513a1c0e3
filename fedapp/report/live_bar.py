"""A progress bar: drawn over on a terminal, written over in a notebook, nothing elsewhere."""

import io
from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 0.5  # seconds between two versions of a notebook's line, each of which is a message to the browser
WIDTH = 100  # characters of a notebook's line


class LiveBar:
    """The share of a total that is done, the time that the rest takes, and a text beside them.

    Parameters
    ----------
    total : int
        Number of steps; `advance` is given what a step is called.
    waiting : str
        The text before the bar until the first step.
    now : callable
        Returns the time in seconds; limits how often a notebook's line is written over.

    Attributes
    ----------
    shown : bool
        Whether there is a terminal or a notebook to draw on.
    """

    def __init__(
        self, console: Console, total: int, waiting: str, now: Callable[[], float] = monotonic
    ) -> None:
        self.console = console
        self.shown = console.is_terminal or console.is_jupyter
        self._now = now
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[beside]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task(waiting, total=total, beside="", left="left")
        self._handle: Any = None
        self._written = -EVERY

    def start(self) -> None:
        """Draw it for the first time."""
        if self.console.is_jupyter:
            from IPython.display import display

            self._handle = display({"text/plain": self.text()}, raw=True, display_id=True)
        elif self.shown:
            self._bar.start()

    def begin_at(self, done: int, total: int) -> None:
        """Begin with ``done`` steps, which don't count in the estimate of the time left."""
        self._bar.reset(self._task, completed=done, total=total, beside="", left="left")

    def advance(self, done: int, steps: str, beside: str = "") -> None:
        """Show that ``done`` steps are done."""
        finished = done == self._bar.tasks[0].total
        left = "in all" if finished else "left"
        self._bar.update(self._task, completed=done, description=steps, beside=beside, left=left)
        if self._now() - self._written >= EVERY or finished:
            self._write()

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at the pace so far; None before there is one."""
        return self._bar.tasks[0].time_remaining

    def text(self) -> str:
        """Return the bar as a line of text."""
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self._bar.get_renderable())
        return captured.get().rstrip()

    def stop(self) -> None:
        """End the bar, which stays as it is."""
        if self.console.is_jupyter:
            self._write()
        elif self.shown:
            self._bar.stop()

    def _write(self) -> None:
        if self._handle is not None:
            self._written = self._now()
            self._handle.update({"text/plain": self.text()}, raw=True)
