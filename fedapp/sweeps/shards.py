"""Shards of a sweep: parts that processes make apart, such as the tasks of a job array, all in one folder.

No lock keeps the processes apart, as a network file system may have none. Every run belongs to one shard, and a shard
writes only its runs' folders and a record of its own, ``shards/3-of-16.json``, which is replaced whole. The record is
touched while the shard is at work, so that others can tell a shard that is at work from one that was killed.
"""

import contextlib
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fedapp.config import ConfigError
from fedapp.report.files import replacing, this_process
from fedapp.sweeps.point import PlannedRun

RECORDS = "shards"  # folder of the records, in the sweep's

BEAT = 10.0  # seconds between two touches of the record of a shard that is at work
WATCH = 45.0  # seconds after which a shard whose record wasn't touched counts as killed
LOOK = 0.5  # seconds between two looks at such a record

_AT_WORK, _ENDED = "at work", "ended"
_TEXT = re.compile(r"(\d{1,9})/(\d{1,9})")
_RECORD = re.compile(r"(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``, both from 1 on."""

    number: int
    count: int

    @classmethod
    def read(cls, text: str) -> "Shard":
        """Read a shard from a text such as ``3/16``.

        Raises
        ------
        ConfigError
            If the text isn't of that form, or there is no such shard.
        """
        match = _TEXT.fullmatch(text)
        shard = cls(int(match[1]), int(match[2])) if match else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise ConfigError(
                f"--shard {text}: must be NUMBER/COUNT, such as 3/16, with a number from 1 to the count"
            )
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part_of(self, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Return this shard's runs: every ``count``-th of a plan's runs, whether they are finished or not.

        Runs with equal keys are one run, which belongs to one shard.
        """
        return list({each.key: each for each in planned}.values())[self.number - 1 :: self.count]

    def record_in(self, folder: Path) -> Path:
        """Return the path of this shard's record in a sweep's folder."""
        return folder / RECORDS / f"{self.number}-of-{self.count}.json"


@dataclass
class Record:
    """What a shard leaves for the merge beside its runs.

    Attributes
    ----------
    failures : dict of str to str
        Why runs failed or diverged, by `PlannedRun.name`: a run that couldn't begin has no folder that says so.
    """

    failures: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def shard_record(shard: Shard, folder: Path, console: Console) -> Iterator[Record]:
    """Make a sweep's folder and keep a shard's record in it while the shard makes its runs.

    Raises
    ------
    ConfigError
        If another process makes the same shard, the whole sweep, or shards of another count.
    """
    path = shard.record_in(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_beside_whole(folder)
    refuse_beside_shards(folder, console, beside=shard)
    record, ended = Record(), threading.Event()
    _write(path, _AT_WORK, record)
    beating = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    beating.start()
    try:
        yield record
    finally:
        ended.set()
        beating.join()
        _write(path, _ENDED, record)


def refuse_beside_shards(folder: Path, console: Console, beside: Shard | None = None) -> None:
    """Refuse to make a folder's runs while other processes make shards of them.

    Parameters
    ----------
    beside : Shard, optional
        The shard that is to be made: other shards of the same count have other runs.

    Raises
    ------
    ConfigError
    """
    doubtful = {
        path: touched
        for path, shard in _records(folder)
        if (beside is None or shard.count != beside.count or shard == beside) and (touched := _touched(path))
    }
    if not doubtful:
        return
    names = ", ".join(str(_shard_of(path)) for path in doubtful)
    console.print(
        f"shard {names} may be at work: waiting up to {WATCH:g} seconds for a sign of life", markup=False
    )
    end = time.monotonic() + WATCH
    while doubtful and time.monotonic() < end:
        time.sleep(LOOK)
        for path, before in list(doubtful.items()):
            now = _touched(path)
            if now and now != before:
                host = _read(path).get("process", {}).get("host", "?")
                raise ConfigError(
                    f"{folder}: another process makes its runs, shard {_shard_of(path)} on {host}"
                )
            if not now:  # the shard has ended
                del doubtful[path]


def failures_in(folder: Path) -> dict[str, str]:
    """Return why runs failed or diverged, by name, from the records of all shards, the newest last."""
    paths = sorted((path for path, _ in _records(folder)), key=lambda path: path.stat().st_mtime_ns)
    return {
        str(name): str(reason) for path in paths for name, reason in _read(path).get("failures", {}).items()
    }


def shards_of(missing: Sequence[PlannedRun], planned: Sequence[PlannedRun], folder: Path) -> str:
    """Return which shards some of a plan's runs belong to, ``2, 7 of 16``; "" if the folder's shards don't say it."""
    counts = {shard.count for _, shard in _records(folder)}
    if len(counts) != 1:
        return ""
    keys, count = list(dict.fromkeys(each.key for each in planned)), counts.pop()
    numbers = sorted({keys.index(each.key) % count + 1 for each in missing})
    return f"{', '.join(map(str, numbers))} of {count}"


def _refuse_beside_whole(folder: Path) -> None:
    """Refuse a shard while one process makes the whole sweep, where its lock can be seen."""
    with contextlib.suppress(FileNotFoundError), (folder / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process makes its runs") from None
        except OSError:  # a file system without locks
            return


def _beat(path: Path, ended: threading.Event) -> None:
    """Touch a record now and then, by the clock of the file's server."""
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):  # the next one tells
            os.utime(path)


def _touched(path: Path) -> int:
    """Return when the record of a shard that is at work was last touched, nanoseconds; 0 if the shard has ended."""
    try:
        with path.open("rb") as file:  # opened: a network file system then asks its server
            content = json.load(file)
            return os.fstat(file.fileno()).st_mtime_ns if content["status"] == _AT_WORK else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _records(folder: Path) -> list[tuple[Path, Shard]]:
    """Return the records in a sweep's folder, and whose each is."""
    paths = sorted((folder / RECORDS).glob("*-of-*.json"))
    return [(path, _shard_of(path)) for path in paths if _RECORD.fullmatch(path.name)]


def _shard_of(path: Path) -> Shard:
    match = _RECORD.fullmatch(path.name)
    assert match is not None
    return Shard(int(match[1]), int(match[2]))


def _read(path: Path) -> Mapping[str, Any]:
    """Return the content of a record; {} where it can't be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def _write(path: Path, status: str, record: Record) -> None:
    content = {"status": status, "process": this_process(), "failures": record.failures}
    with replacing(path) as new:
        new.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
