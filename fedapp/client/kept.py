"""What a client keeps of a run for itself: in Flower's ``context.state``, and on a device in a file beside it.

Flower 1.41 keeps a SuperNode's contexts in memory: when it is started anew they are gone. So where the node's config
names a folder, ``state-path``, what is kept is written there, too, by the run's own number; of a few runs, the last.
Frozen arrays of the model, where a client had to be sent them, are there by their digest.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from fedapp.data import DataError
from strategies.flower import internals as flower_internals
from strategies.flower import messages
from strategies.flower.arrays import unpack
from strategies.flower.frozen import keep_frozen, kept_frozen

log = logging.getLogger("flwr.fedapp")

# Records of ``context.state``.
RECORD = "strategies.personal"
RECORD_OF = "strategies.personal-of"  # the run's number

STATE_PATH = "state-path"  # in the node's config
ENDING, FROZEN_ENDING = ".personal", ".frozen"

# A run's file is there as long as so many other runs haven't written theirs.
MOST_FILES = 4


def kept_model(context: Context, record: ConfigRecord) -> ArrayRecord | None:
    """Return the model that this client keeps for the run of a request; None if it has none yet.

    Raises
    ------
    DataError
        If its file can't be read.
    """
    kept, of = context.state.get(RECORD), context.state.get(RECORD_OF)
    if (
        isinstance(kept, ArrayRecord)
        and isinstance(of, ConfigRecord)
        and of[messages.KEPT_FOR] == _run(record)
    ):
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
    context.state[RECORD_OF] = ConfigRecord({messages.KEPT_FOR: _run(record)})
    if (path := _path(context, record)) is None:
        return
    alone = Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config={},
        state=RecordDict({RECORD: arrays}),
        run_config={},
    )
    _write(path, flower_internals.context_to_bytes(alone), "this client's own model")


def kept_frozen_file(context: Context, digest: str) -> bytes | None:
    """Return the safetensors file with a digest's frozen arrays that this client keeps; None if it keeps none."""
    if (kept := kept_frozen(context, digest)) is not None:
        return _file_of(kept)
    path = _frozen_path(context, digest)
    return path.read_bytes() if path is not None and path.is_file() else None


def keep_frozen_file(context: Context, digest: str, arrays: ArrayRecord) -> bytes:
    """Keep frozen arrays in the device's folder; without a folder, in the context's state, where they replace others.

    Returns
    -------
    bytes
        The arrays as a safetensors file.

    Raises
    ------
    DataError
        If the folder can't be written to.
    """
    data = _file_of(arrays)
    if (path := _frozen_path(context, digest)) is not None:
        _write(path, data, "the model's frozen arrays")
    else:
        keep_frozen(context, digest, arrays)
    return data


def _file_of(arrays: ArrayRecord) -> bytes:
    return unpack(next(iter(arrays.values()))).tobytes()


def _write(path: Path, content: bytes, what: str) -> None:
    """Replace a file; of the files with its ending, the newest ``MOST_FILES`` stay."""
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        files = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda each: each.stat().st_mtime_ns)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(
            f"{STATE_PATH} = {str(path.parent)!r}: can't be written to ({error.strerror}); {what} would be lost when "
            "its SuperNode starts anew"
        ) from None


def _frozen_path(context: Context, digest: str) -> Path | None:
    folder = context.node_config.get(STATE_PATH)
    return None if folder is None else Path(str(folder)) / f"{digest[:32]}{FROZEN_ENDING}"


def _run(record: ConfigRecord) -> int:
    """Return the number of a request's run; 0 if it has none."""
    return int(record.get(messages.KEPT_FOR, 0))  # type: ignore[arg-type]


def _path(context: Context, record: ConfigRecord) -> Path | None:
    """Return the path of the client's own model on a device; None without a folder, or if the run has no number."""
    run, folder = _run(record), context.node_config.get(STATE_PATH)
    return None if not run or folder is None else Path(str(folder)) / f"{run}{ENDING}"
