"""Time, as strategies see it: what time is it, and wait until. The only module that reads the machine's clock."""

import time
from typing import Protocol

# Due times closer than this are equal (seconds).
RESOLUTION = 1e-9


class Clock(Protocol):
    """Seconds since the run began."""

    name: str

    def now(self) -> float:
        """Return the current time in seconds; it never runs backwards."""

    def wait_until(self, deadline: float) -> None:
        """Return once ``now() >= deadline`` (seconds)."""

    def resume(self, time: float) -> None:
        """Go on from ``time`` (seconds), as far as an earlier run came."""


class VirtualClock:
    """Time that follows from the time scenario alone: it jumps to the next event and takes no real time."""

    name = "virtual"

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def wait_until(self, deadline: float) -> None:
        """Jump to ``deadline`` (seconds).

        Raises
        ------
        ValueError
            If ``deadline`` lies in the past by more than ``RESOLUTION``.
        """
        if deadline < self._now - RESOLUTION:
            raise ValueError(f"virtual time can't run backwards: now {self._now} s, asked for {deadline} s")
        self._now = max(self._now, deadline)

    def resume(self, time: float) -> None:
        """Take up an earlier run's time (seconds)."""
        self._now = time


class WallClock:
    """Real seconds since this object was made, unmoved by changes of the system's date."""

    name = "wall"

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        """Return the seconds passed."""
        return time.monotonic() - self._start

    def wait_until(self, deadline: float) -> None:
        """Sleep until ``deadline`` (seconds); return at once if it has passed."""
        if (rest := deadline - self.now()) > 0:
            time.sleep(rest)

    def resume(self, time: float) -> None:
        """Count on from an earlier run's time (seconds); what passed between the two doesn't count."""
        self._start += self.now() - time
