"""The log of the app on a device, in a file of the node's ``state-path``, if the site shares it (``share-logs``)."""

import logging
import time
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

SHARE_LOGS, STATE_PATH = "share-logs", "state-path"
FILE = "device.log"  # in the folder of state-path
LINES = 200  # last lines that are shared
LARGEST = 1 << 20  # bytes of a file; there are two

_handlers: dict[str, logging.Handler] = {}


def write_log(node_config: Mapping[str, Any]) -> None:
    """Let this process write its log into the file, if the site shares it; once is enough."""
    folder = str(node_config.get(STATE_PATH, ""))
    if node_config.get(SHARE_LOGS) is not True or not folder or folder in _handlers:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(Path(folder, FILE), maxBytes=LARGEST, backupCount=1, encoding="utf-8")
    except OSError as error:
        logging.getLogger("flwr.fedapp").warning("%s: the log can't be written (%s)", folder, error.strerror)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%SZ"))
    assert handler.formatter is not None
    handler.formatter.converter = time.gmtime
    _handlers[folder] = handler
    logging.getLogger("flwr").addHandler(handler)


def tail(file: Path) -> list[str]:
    """Return the last lines of a log; none if it can't be read."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - LARGEST // 4))
            return content.read().decode("utf-8", "replace").splitlines()[-LINES:]
    except OSError:
        return []
