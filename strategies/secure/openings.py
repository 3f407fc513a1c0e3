"""The secure sums that were opened, so that a repeated one doesn't tell a single update.

A run that goes on from a checkpoint repeats the rounds since then, and their clients may send the same updates. Of
two sums of the same updates, one with a client and one without, the difference is that client's update. So a sum is
opened only if, of each sum that was opened before and has an update in common with it, it is one of the same updates,
or differs by ``least`` updates or more. An update is known by its client and the version of the model that the client
was sent. Each sum is noted before it is opened.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

Update = tuple[int, int]  # a client's index, and the version of the model that it was sent


class Openings:
    """The updates in each sum that was opened.

    Parameters
    ----------
    path : Path, optional
        A file that outlives the process, with a line for each sum; what it has is known at once.
    of : Update, optional
        The update whose sums alone matter.
    """

    def __init__(self, path: Path | None = None, of: Update | None = None) -> None:
        self._path, self._sums = path, list[frozenset[Update]]()
        if path is not None and path.exists():
            with path.open(encoding="ascii") as lines:
                for line in lines:
                    if of is None or json.dumps(of) in line:
                        self._sums.append(frozenset((each, version) for each, version in json.loads(line)))

    def refusal(self, updates: Collection[Update], least: int) -> str:
        """Return why the sum of these updates isn't opened; "" if it may be, and is noted now."""
        mine = frozenset(updates)
        for earlier in self._sums:
            if mine & earlier and 0 < (number := len(mine ^ earlier)) < least:
                return (
                    f"it differs by {number} updates from a sum of the same updates that was opened before, and "
                    f"the difference of the two would tell them; allowed are the same clients, or {least} others"
                )
        if mine not in self._sums:
            self._note(mine)
        return ""

    def _note(self, updates: frozenset[Update]) -> None:
        self._sums.append(updates)
        if self._path is None:
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write(json.dumps(sorted(updates)) + "\n")
            file.flush()
            os.fsync(file.fileno())
