"""A run's folder: made under a name that is free, locked while the run goes on, and resumed after an interruption."""

import fcntl
import glob
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedapp.config import ConfigError, RunConfig
from fedapp.config.key import path_of
from fedapp.report.differences import differing
from fedapp.report.files import FAILED, RUNNING, read_config, read_summary, without_digest

log = logging.getLogger("flwr.fedapp")

LOCK_TRIES, LOCK_PAUSE = 5, 0.1  # how often, and every how many seconds, a folder's lock is tried again

# The statuses of a run that was cut off, and that of one that came to its end.
_CUT_OFF, FINISHED = ("interrupted", "stopped", FAILED), "finished"


class StillGoingOnError(ConfigError):
    """A run can't be resumed, as another process makes it."""


def make_folder(config: RunConfig) -> Path:
    """Make the folder of a new run, ``RESULTS-DIR/RUN-NAME`` or ``STRATEGY-DATASET-MODEL-NNN``.

    Raises
    ------
    ConfigError
        If the run's name is taken, or the folder can't be made.
    """
    results = path_of("results-dir", config.results_dir)
    try:
        results.mkdir(parents=True, exist_ok=True)
        if not config.run_name:
            names = map(without_digest, (config.strategy, config.dataset, config.model))
            stem = "-".join(re.sub(r"[^\w.-]+", "-", name)[-60:].lstrip(".-") for name in names)
            return _first_free(lambda number: results / f"{stem}-{number:03d}")
    except OSError as error:
        raise ConfigError(
            f"results-dir = {config.results_dir!r}: must be a folder that can be written to ({error})"
        ) from None
    path = results / config.run_name
    try:
        path.mkdir()
    except FileExistsError:
        taken = f"run-name = {config.run_name!r}: {path} is there already, and its results are kept; "
        raise ConfigError(f"{taken}{how_it_goes_on(path)}choose another name") from None
    except OSError as error:
        raise ConfigError(f"run-name = {config.run_name!r}: can't be made a folder ({error})") from None
    return path


def goes_on_from(path: Path) -> str:
    """Return how a run that was cut off is resumed, and from where: ``resume=PATH goes on from aggregation 5``.

    "" if it can't be: it was made with ``checkpoint-every = 0``, or isn't readable.
    """
    config = read_config(path)
    if not config.get("checkpoint-every"):
        return ""
    try:
        states = path.glob("checkpoint/[0-9]*/state.json")
        newest = max(states, key=lambda state: int(state.parent.name), default=None)
        if newest is None:
            return f"resume={path} begins it anew, as it has no checkpoint yet"
        done = json.loads(newest.read_bytes())["strategy"]["aggregations"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"resume={path} goes on from aggregation {done}"


def how_it_goes_on(path: Path) -> str:
    """Return how the run in a folder ended, if it was cut off, and how it goes on; it ends in "or "."""
    summary = read_summary(path)
    if summary.get("status") == RUNNING:
        return "that run is still going on; "
    if summary.get("status") not in _CUT_OFF or not (how := goes_on_from(path)):
        return ""
    return f"that run {_end_of(summary)}, and {how}; or "


def said_of_the_same(path: Path) -> str:
    """Return how the last earlier run with the config of a new run, which has no name, ended and how it is resumed.

    One line, "" if no run has that config.
    """
    config, stem = _without_versions(path), path.name.rpartition("-")[0]
    others = [
        each for each in path.parent.glob(f"{glob.escape(stem)}-*") if each.name[len(stem) + 1 :].isdigit()
    ]
    for earlier in sorted(others, key=lambda each: int(each.name.rpartition("-")[2]), reverse=True):
        if earlier == path or not (former := _without_versions(earlier)) or differing([config, former]):
            continue
        summary = read_summary(earlier)
        finished = summary.get("status") == FINISHED
        how = goes_on_from(earlier) if finished or summary.get("status") in _CUT_OFF else ""
        if how and finished:
            how += " with a larger num-server-rounds or time-budget"
        said = f"a new run begins; {earlier.name} has the same config and {_end_of(summary)}"
        return f"{said}: {how}" if how else said
    return ""


def _without_versions(path: Path) -> dict[str, Any]:
    return {key: value for key, value in read_config(path).items() if key != "versions"}


def _end_of(summary: Mapping[str, Any]) -> str:
    """Return how a run ended, in words."""
    status = summary.get("status", "")
    if status in (RUNNING, ""):
        return "is still going on" if status else "has no summary"
    ended = status if status in (FINISHED, FAILED, "diverged") else f"was {status}"
    return f"{ended} after aggregation {summary.get('aggregations', 0)}"


def lock(path: Path) -> int:
    """Return a descriptor that holds the lock of a run's folder.

    Raises
    ------
    StillGoingOnError
        If another process makes the run.
    """
    descriptor = os.open(path, os.O_RDONLY)
    for last in (*[False] * LOCK_TRIES, True):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if last:
                os.close(descriptor)
                raise StillGoingOnError(f"resume = {str(path)!r}: that run is still going on") from None
            time.sleep(LOCK_PAUSE)  # whoever reads its summary may hold it for a moment
        except OSError as error:  # a file system without locks
            log.warning("%s can't be locked: %s", path, error)
            break
    return descriptor


def _first_free(path_of: Callable[[int], Path]) -> Path:
    for number in itertools.count(1):
        try:
            path_of(number).mkdir()
        except FileExistsError:
            continue
        return path_of(number)
    raise AssertionError
