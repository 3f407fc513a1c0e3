"""The files of runs' folders on the server, for whoever fetches them.

The code of runs writes these folders, and the SuperLink, which may read more than that code, hands their files out.
So no link is followed, and a file is read only if it is in the folder when it is open.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST, READ = "/v1/control/fedapp-run-files", "/v1/control/fedapp-run-file"
RESULTS = "results"  # the usual folder of runs' folders
MARKS = ("config.toml", "summary.json")  # files of each run's folder
PIECE = 1 << 20  # bytes


class RunFilesError(ValueError):
    """There is no such run or file; the message is one line."""


class RunFiles:
    """The folders of runs below a folder.

    Parameters
    ----------
    root : Path
        The folder; what isn't below it isn't handed out.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, run: str) -> Path:
        """Return a run's folder, by its path or by its name among the results.

        Raises
        ------
        RunFilesError
            If there is no run's folder below the root.
        """
        root = self._root.resolve()
        folder = (root / run if "/" in run else root / RESULTS / run).resolve()
        if not folder.is_relative_to(root) or not all((folder / mark).is_file() for mark in MARKS):
            raise RunFilesError(f"run {run!r}: isn't the folder of a run below {root} on the server")
        return folder

    def listed(self, run: str) -> list[dict[str, Any]]:
        """Return path, number of bytes and SHA-256 of each file of a run's folder.

        Raises
        ------
        RunFilesError
            If there is no such folder, or a file can't be read.
        """
        folder, found = self.folder(run), []
        for at, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = Path(at, name)
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                relative, digest, size = str(path.relative_to(folder)), hashlib.sha256(), 0
                for piece in self.pieces(run, relative, 0, 1 << 62):
                    digest.update(piece)
                    size += len(piece)
                found.append({"path": relative, "bytes": size, "sha256": digest.hexdigest()})
        return found

    def pieces(self, run: str, path: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield at most ``size`` bytes of a file from ``offset`` on.

        Raises
        ------
        RunFilesError
            If there is no such file in the run's folder, now and not when the first piece is asked for.
        """
        folder = self.folder(run)
        try:
            descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise RunFilesError(f"run {run!r}: {path!r} can't be read ({said})") from None
        opened = Path(f"/proc/self/fd/{descriptor}")  # where what is open is, whatever its path leads to now
        within = opened.resolve().is_relative_to(folder) if opened.exists() else True
        if not within or ".." in Path(path).parts or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RunFilesError(f"run {run!r}: {path!r} is no file of its folder")
        return _read(descriptor, offset, size)


def _read(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(offset)
        while piece := file.read(min(PIECE, size)):
            size -= len(piece)
            yield piece
