"""What has become of each client's work, under any strategy: the account that metrics and reports are made from.

A task that was handed out ends as one of ``OUTCOMES``; an update that was too long and was shortened counts as
``clipped`` beside that.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from strategies.flower import messages

ACCEPTED = "accepted"
MAX_MISSES = 3  # tasks of a client that come to nothing in a row: then nobody waits for it
OUTCOMES = (ACCEPTED, messages.LATE, messages.FAILED, messages.REFUSED, messages.TOO_OLD, messages.LOST)


@dataclass
class Account:
    """What was asked of a client, and what came of it."""

    tasks: int = 0
    accepted: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    discarded: int = 0
    clipped: int = 0
    bytes: int = 0  # of its valid replies' arrays
    weight: float = 0.0  # Σ d_i of what counted, in rounds
    lost: int = 0
    seconds: float = 0.0  # of the run's clock that its tasks took
    wasted: float = 0.0  # of these, of tasks that came to nothing

    def note(self, outcome: str, *, clipped: bool = False, num_bytes: int = 0) -> None:
        """Count how a task ended, one of ``OUTCOMES``."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.clipped += clipped
        self.bytes += num_bytes


class Accounts:
    """The accounts by client index; a client has one from the first time that it is named."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with no account."""
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        self._seconds = self._wasted = 0.0

    def took(self, index: int, seconds: float, outcome: str) -> None:
        """Note how long a client's task took, by the run's clock, and what became of it."""
        account, wasted = self._accounts[index], 0.0 if outcome == ACCEPTED else seconds
        account.seconds += seconds
        account.wasted += wasted
        self._seconds += seconds
        self._wasted += wasted

    def costs(self) -> dict[str, float]:
        """Return what all tasks together took; {} before the first has ended."""
        if not self._accounts:
            return {}
        return {messages.DEVICE_SECONDS: self._seconds, messages.WASTED_SECONDS: self._wasted}

    def __getitem__(self, index: int) -> Account:
        return self._accounts[index]

    def items(self) -> list[tuple[int, Account]]:
        """Return the accounts that there are; another thread may ask."""
        return sorted(self._accounts.copy().items())

    def columns(self, least: int = 0) -> dict[str, list[float]]:
        """Return every count as a list by client index, of so many at least; zeros for those without an account."""
        size = max(least, self.size)
        accounts = [self._accounts.get(index, Account()) for index in range(size)]
        columns = {
            field.name: [float(getattr(account, field.name)) for account in accounts]
            for field in fields(Account)
            if field.name not in ("weight", "seconds", "wasted")
        }
        # As the asynchronous strategies call what counted.
        return {"participation": columns.pop(ACCEPTED), **columns}

    @property
    def size(self) -> int:
        """One more than the largest index that has an account."""
        return max(self._accounts.copy(), default=-1) + 1

    def column(self, name: str, size: int) -> list[float]:
        """Return one count as a list by client index, of so many."""
        values = [0.0] * size
        for index, account in self._accounts.copy().items():
            if index < size:
                values[index] = float(getattr(account, name))
        return values

    def state(self) -> dict[str, Any]:
        """Return the accounts as an array, a row for each client that has one."""
        rows = [(index, *vars(account).values()) for index, account in self.items()]
        accounts = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(fields(Account)))
        return {"accounts": accounts, "account-totals": [self._seconds, self._wasted]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, in which there may be none."""
        kept = state.get("accounts", ())
        kinds = [type(value) for value in vars(Account()).values()]
        if isinstance(kept, np.ndarray):
            restored = {
                int(index): Account(*(kind(value) for kind, value in zip(kinds, values, strict=False)))
                for index, *values in kept.tolist()
            }
        else:  # of an earlier version
            restored = {int(index): Account(**account) for index, account in kept}
        self._accounts = defaultdict(Account, restored)
        # Not the sums of the clients': added up in another order they differ in the last bit.
        self._seconds, self._wasted = state.get("account-totals", (0.0, 0.0))
