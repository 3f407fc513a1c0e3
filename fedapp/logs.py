"""The log: as JSON, an object a line, where ``log-format`` asks for it; and a copy in the run's folder."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strategies.flower.messages import clean

LOGGERS = ("flwr.fedapp", "flwr.strategies")  # Flower's own lines stay as they are
ALL = ("flwr", *LOGGERS)

# Fields that a line may have beside its message: ``extra`` of the call that logs it.
FIELDS = ("aggregation", "client", "device", "node", "clients")

LONGEST_LINE = 4000  # characters of a message

NAME = "log.txt"


class JsonLines(logging.Formatter):
    """Makes a line of JSON of what is logged.

    Attributes
    ----------
    run : str
        Name of the run, once it has one.
    aggregation : callable
        Returns the number of aggregations so far, for lines without that field.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run = ""
        self.aggregation: Callable[[], int | None] = lambda: None

    def format(self, record: logging.LogRecord) -> str:
        """Return a line that holds no control character."""
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": clean(record.getMessage(), LONGEST_LINE),
            "run": self.run,
            "aggregation": self.aggregation(),
        }
        content |= {key: _known(value) for key in FIELDS if (value := getattr(record, key, None)) is not None}
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            content["traceback"] = [clean(line, LONGEST_LINE) for line in lines]
        return json.dumps({key: value for key, value in content.items() if value not in (None, "")})


@contextmanager
def logging_as(log_format: object) -> Iterator[JsonLines | None]:
    """Log as ``log-format`` says; within a block that does so already, go on. Yields what makes the lines, if any."""
    if log_format != "json":
        yield None
        return
    if (already := _in_use()) is not None:
        yield already
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines := JsonLines())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield lines
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


@contextmanager
def shown_from(level: int) -> Iterator[None]:
    """Show nothing below a level, of Flower's own lines neither; the ``log.txt`` of runs has all lines."""

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= level or record.name.partition(".")[0] != "flwr"

    handlers = {handler for name in (*ALL, None) for handler in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


class _Copy(logging.FileHandler):
    """Writes lines into a file until the first error, then no more."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        """Stop: a full disk mustn't end the run, nor every line be followed by a traceback."""
        self.setLevel(logging.CRITICAL + 1)


class _Kept(logging.Handler):
    """Keeps lines in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record)


@contextmanager
def _handled_by(handler: logging.Handler) -> Iterator[None]:
    """Give a handler what Flower and the app log within the block."""
    flower = logging.getLogger("flwr")
    loggers = [flower, *(each for name in LOGGERS if not (each := logging.getLogger(name)).propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def kept_lines() -> Iterator[list[logging.LogRecord]]:
    """Yield the lines that Flower and the app log within the block, before there is a folder for them."""
    handler = _Kept()
    with _handled_by(handler):
        yield handler.lines


@contextmanager
def copied_to(
    folder: Path, in_one_line: tuple[type[Exception], ...] = (), *, before: Iterable[logging.LogRecord] = ()
) -> Iterator[None]:
    """Copy what Flower and the app log into ``log.txt`` of a folder, at its end the error that ended the block.

    Errors are recorded with their traceback, but for those of some types, which one line says all of. The file begins
    with the lines of ``before``.
    """
    handler = _Copy(folder / NAME)
    for earlier in before:
        handler.handle(earlier)
    try:
        with _handled_by(handler):
            yield
    except Exception as error:
        text = clean(str(error) or type(error).__name__, LONGEST_LINE)
        line: dict[str, Any] = {"levelno": logging.ERROR, "levelname": "ERROR", "msg": "%s", "args": (text,)}
        if not isinstance(error, in_one_line):
            line["exc_info"] = (type(error), error, error.__traceback__)
        handler.handle(logging.makeLogRecord(line))
        raise
    finally:
        with suppress(OSError):
            handler.close()


def is_shown(record: logging.LogRecord) -> bool:
    """Tell whether a line goes beyond the run's ``log.txt``: most lines of progress don't."""
    return bool(getattr(record, "shown", True))


def plain_where_piped() -> None:
    """Leave out Flower's colours where nobody sees them, in a pipe or a file, and with NO_COLOR; few of progress."""
    for handler in logging.getLogger("flwr").handlers:
        if not isinstance(handler, _Copy):
            handler.addFilter(is_shown)  # not again if it is there
        stream = getattr(handler, "stream", None)
        if hasattr(handler, "colored") and (os.environ.get("NO_COLOR") or not (stream and stream.isatty())):
            handler.colored = False


def _in_use() -> JsonLines | None:
    formatters = (handler.formatter for handler in logging.getLogger(LOGGERS[0]).handlers)
    return next((formatter for formatter in formatters if isinstance(formatter, JsonLines)), None)


def _known(value: Any) -> Any:
    """Leave out the empty fields of each of several clients."""
    if isinstance(value, list):
        return [{key: known for key, known in each.items() if known != ""} for each in value]
    return value
