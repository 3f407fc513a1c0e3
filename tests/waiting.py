"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    otherwise: str | Callable[[], str] = "waited in vain",
    seconds: float = 240,
) -> None:
    """Wait until a condition holds; after so many seconds fail, and say what ``otherwise`` says."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(0.05)
