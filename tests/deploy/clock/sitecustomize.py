"""A clock that is wrong by the seconds in the file CLOCK, in the processes of the device WRONG_CLOCK; at any time."""

import os
import time
from datetime import datetime, timedelta
from pathlib import Path

if f"/{os.environ.get('WRONG_CLOCK')}/" in os.environ.get("FLWR_HOME", "") + "/":
    from flwr.supercore import date

    right, right_ns, right_now = time.time, time.time_ns, date.now

    def offset() -> float:
        """Return the seconds by which the clock is ahead."""
        return float(Path(os.environ["CLOCK"]).read_text())

    def wrong_now() -> datetime:
        """Return the wrong time, as Flower reads it."""
        return right_now() + timedelta(seconds=offset())

    time.time = lambda: right() + offset()
    time.time_ns = lambda: right_ns() + int(1e9 * offset())
    date.now = wrong_now
