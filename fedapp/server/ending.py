"""How a ServerApp's process ends: in good order when it is told to, and with one line where the user can mend it."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedapp.config import ConfigError, in_keys
from fedapp.data import DataError
from fedapp.models import ModelError
from fedapp.own import OwnPartError
from strategies import RunError

log = logging.getLogger("flwr.fedapp")

# What the user can mend by changing the config or the data.
USER_ERRORS = (ConfigError, DataError, ModelError, OwnPartError, RunError)

# What a run is whose process is told to end. Flower sends its own process SIGINT when it learns of ``flwr stop``;
# SIGTERM comes from a service that is stopped, and the run can go on when that is back.
STATUS = {signal.SIGINT: "stopped", signal.SIGTERM: "interrupted"}


class ToldToStop(KeyboardInterrupt):
    """The process was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> str:
        """What the run is."""
        return STATUS[signal.Signals(self.number)]


@contextmanager
def told_to_stop() -> Iterator[None]:
    """Let a signal end the block with ``ToldToStop``; then comes the handler that was there before.

    Flower's handlers end the process within seconds, whatever it does: too soon for a run's record.
    """
    if threading.current_thread() is not threading.main_thread():  # of Flower's simulation: has no signals
        yield
        return
    previous = {number: signal.getsignal(number) for number in STATUS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()  # a second one isn't waited for
        raise ToldToStop(number)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    except ToldToStop as ending:
        handler = previous[signal.Signals(ending.number)]
        if callable(handler):
            handler(ending.number, None)
        raise
    finally:
        restore()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Log an error that the user can mend as one line, and keep Flower from logging its traceback."""
    try:
        yield
    except USER_ERRORS as error:
        text = in_keys(error)
        for line in text.splitlines():
            log.error("%s", line)
        failure = RunError(text)
        logging.getLogger("flwr").addFilter(lambda record: not _repeats(record, failure))
        raise failure from None


def _repeats(record: logging.LogRecord, error: Exception) -> bool:
    """Tell whether a record of Flower's log repeats an error that was logged: its traceback, or its exit code."""
    ending = bool(record.exc_info) and record.exc_info[1] is error  # type: ignore[index]
    return ending or str(record.msg).startswith("Exit Code:")
