"""Parts of Flower that log a line for every message, called without those lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def _matters(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


@contextmanager
def without_chatter() -> Iterator[None]:
    """Keep what Flower logs, and is no warning, from the log; loggers below its own are as always."""
    logger = logging.getLogger("flwr")
    logger.addFilter(_matters)
    try:
        yield
    finally:
        logger.removeFilter(_matters)
