"""The releases of a private run, on the disk before they are made, so that a resumed run knows what it repeats.

A run that is killed and resumed goes on from its checkpoint. Rounds and tasks since the checkpoint are done again,
with new noise, and what was sent before can't be taken back: both count in ``dp-epsilon``.
"""

import os
from collections.abc import Sequence
from pathlib import Path

NAME = "releases.txt"


class Releases:
    """The file of a run's releases: a line for each round, or with the indices of the clients that are sent a task.

    Parameters
    ----------
    folder : Path
        The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def note(self, clients: Sequence[int] = ()) -> None:
        """Write to the disk that a round is about to begin, or that clients are about to be sent tasks."""
        with self._path.open("a", encoding="ascii") as file:
            file.write(" ".join(map(str, clients)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def size(self) -> int:
        """Return the bytes of the file; 0 if there is none."""
        return self._path.stat().st_size if self._path.exists() else 0

    def since(self, size: int) -> list[list[int]]:
        """Return the clients of each line after the file's first ``size`` bytes."""
        if self.size() <= size:
            return []
        lines = self._path.read_bytes()[size:].decode("ascii", errors="replace").splitlines()
        return [[int(word) for word in line.split() if word.isdigit()] for line in lines]
