"""The worker's socket: for its user alone, one worker each, and gone when the worker is."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedapp.worker.protocol import WorkerError

BACKLOG = 16


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket with mode 0600; one that a dead worker has left is replaced.

    Raises
    ------
    WorkerError
        If another worker listens there, or no socket can be made there.
    """
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(path.with_name(f"{path.name}.lock").open("w"))
            _alone(lock.fileno())
            _remove_stale(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            stack.callback(path.unlink, missing_ok=True)
            listener.listen(BACKLOG)
        except OSError as error:
            raise WorkerError(f"{path}: can't be listened on ({error.strerror or error})") from None
        yield listener


def _alone(lock: int) -> None:
    """Hold the lock for as long as the file is open; a dead process holds none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(0, "another worker does") from None


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(0, "it is there already, and no socket")
    path.unlink()
