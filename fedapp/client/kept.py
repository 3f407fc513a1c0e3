"""What a client keeps of a run for itself: in Flower's ``context.state``, and on a device in a file beside it.

Flower 1.41 keeps a SuperNode's contexts in memory: when it is started anew they are gone. So where the node's config
names a folder, ``state-path``, what is kept is written there, too, by the run's own number; of a few runs, the last.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from fedapp.data import DataError
from strategies.flower import internals as flower_internals
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")

# Records of ``context.state``.
RECORD = "strategies.personal"

STATE_PATH = "state-path"  # in the node's config
ENDING = ".personal"

# A run's file is there as long as so many other runs haven't written theirs.
MOST_FILES = 4


def kept_model(context: Context, record: ConfigRecord) -> ArrayRecord | None:
    """Return the model that this client keeps for the run of a request; None if it has none yet.

    Raises
    ------
    DataError
        If its file can't be read.
    """
    kept = context.state.get(RECORD)
    if isinstance(kept, ArrayRecord):
        return kept
    path = _path(context, record)
    if path is None or not path.is_file():
        return None
    try:
        found = flower_internals.context_from_bytes(path.read_bytes()).state.get(RECORD)
    except Exception as error:  # whatever protobuf raises on bytes that are none
        raise DataError(f"{STATE_PATH} = {str(path.parent)!r}: {path.name} can't be read ({error})") from None
    if not isinstance(found, ArrayRecord):
        raise DataError(f"{STATE_PATH} = {str(path.parent)!r}: {path.name} holds no model")
    log.info("This client's own model of this run is back from %s", path)
    return found


def keep_model(context: Context, record: ConfigRecord, arrays: ArrayRecord) -> None:
    """Keep a model for the run of a request, in place of the one before.

    Raises
    ------
    DataError
        If the folder can't be written to.
    """
    context.state[RECORD] = arrays
    if (path := _path(context, record)) is None:
        return
    alone = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={},
        state=RecordDict({RECORD: arrays}),
        run_config={},
    )
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(flower_internals.context_to_bytes(alone))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        files = sorted(path.parent.glob(f"*{ENDING}"), key=lambda each: each.stat().st_mtime_ns)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(
            f"{STATE_PATH} = {str(path.parent)!r}: can't be written to ({error.strerror}); this client's own model "
            "would be lost when its SuperNode starts anew"
        ) from None


def _path(context: Context, record: ConfigRecord) -> Path | None:
    """Return where it is on a device; None in a simulation, and on a device without a folder for it."""
    run, folder = int(record.get(messages.KEPT_FOR, 0)), context.node_config.get(STATE_PATH)  # type: ignore[arg-type]
    return None if not run or folder is None else Path(str(folder)) / f"{run}{ENDING}"
