"""Makes the missing runs, in worker processes that stay: starting one costs seconds, a run often less.

A run that finished or diverged is never repeated. One that was cut off or failed goes on from its last checkpoint, or
begins anew without one. One that another process makes is left to it.
"""

import contextlib
import fcntl
import fnmatch
import gc
import io
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import torch
from rich.console import Console

from fedapp.config import ConfigError, RunConfig, in_keys
from fedapp.config.options import SimulationConfig
from fedapp.engine.run import chosen_engine, run_on, torch_as_it_was
from fedapp.logs import shown_from
from fedapp.meant import clients_as
from fedapp.names import RAY
from fedapp.own import PARTS, changed_since, in_process_names
from fedapp.report.differences import DATA_PATH
from fedapp.report.files import read_summary
from fedapp.report.live_bar import LiveBar
from fedapp.server import USER_ERRORS, RunDirectory, StillGoingOnError
from fedapp.sweeps.point import (
    DIVERGED,
    FINISHED,
    INTERRUPTED,
    NUM_CLIENTS,
    PlannedRun,
    folder_of,
    is_finished,
)
from strategies import RunError

log = logging.getLogger("flwr.fedapp")


def run_missing(
    planned: Sequence[PlannedRun],
    folder: Path,
    *,
    engine: str,
    jobs: int,
    have: Container[str] = (),
    minutes: float = math.inf,
    only: str = "*",
    console: Console | None = None,
    workers: ProcessPoolExecutor | None = None,
    shared: bool = False,
) -> dict[str, str]:
    """Make the planned runs that aren't finished yet, with a progress bar and the time left.

    Parameters
    ----------
    planned : sequence of PlannedRun
        Runs with equal keys are made once.
    folder : Path
        Holds a folder for each run, by `PlannedRun.name`.
    engine : str
        One of `fedapp.names.ENGINES`, or ``auto``; empty: the key ``engine`` of each run.
    jobs : int
        Worker processes, each with one thread; 0: this process makes the runs, one after the other.
    have : container of str
        Keys of the runs that are in curves.parquet: they need no folder.
    minutes : float
        No run is started after that.
    only : str
        Shell pattern; no run with another name is started.
    workers : ProcessPoolExecutor, optional
        Workers from `worker_pool`, which stay afterwards; by default workers are started and ended here.
    shared : bool
        Other processes make other runs in the folder, which isn't locked.

    Returns
    -------
    dict of str to str
        Why each run that failed or diverged did so, by its name.

    Raises
    ------
    ConfigError
        If another process runs here, no run has a name like ``only``, or several at a time aren't possible.
    RunError
        If a worker process was killed.
    KeyboardInterrupt
        If a run was interrupted.
    """
    _check_jobs(planned, engine, jobs)
    wanted = {each.key: each for each in planned if fnmatch.fnmatch(each.name, only)}
    if not wanted:
        raise ConfigError(f"--only {only}: no run has such a name; they are called like {planned[0].name}")
    folder.mkdir(parents=True, exist_ok=True)
    missing, failures = _missing(wanted, folder, have)
    alone = contextlib.nullcontext() if shared else only_one(folder)
    with alone, _sigterm_as_interrupt(), _bar(console or Console(), len(wanted)) as advance:
        advance(len(wanted) - len(missing), "")
        end = time.monotonic() + 60 * minutes
        here = _made_here(missing, folder, engine, end)
        outcomes = _outcomes(missing, folder, engine, jobs, end, workers) if jobs else here
        for name, reason in outcomes if minutes else ():
            if reason.startswith(
                f"{INTERRUPTED}:"
            ):  # this process's own signal may have been lost on its way
                raise KeyboardInterrupt
            failures |= {name: reason} if reason else {}
            advance(1, f"{missing[name].title}: {reason}" if reason else "")
    return failures


def _check_jobs(planned: Sequence[PlannedRun], engine: str, jobs: int) -> None:
    """Refuse runs in processes that can't make them."""
    # A sweep reads no shares of a GPU, so that clients have none.
    engines = {
        chosen_engine(engine or each.config.engine, SimulationConfig(), secure_sums=each.config.secure_sums)[
            0
        ]
        for each in planned
    }
    if RAY in engines and jobs > 1:
        raise ConfigError(
            f"jobs = {jobs}: Ray spreads one run over all cores; allowed with engine {RAY} is 1"
        )
    known_here = [item for each in planned for item in in_process_names(each.config.flat()).items()]
    if known_here and jobs:
        key, name = known_here[0]
        raise ConfigError(
            f"{key} = {name!r}: is known in this process alone; jobs = {jobs} needs it in a module"
        )
    # Of the same parts once: a sweep has many runs.
    parts = {
        tuple(values.get(key, "") for key in PARTS): values for values in (p.config.flat() for p in planned)
    }
    if jobs and (changed := next(filter(None, map(changed_since, parts.values())), "")):
        raise ConfigError(changed)


def _missing(
    wanted: Mapping[str, PlannedRun], folder: Path, have: Container[str]
) -> tuple[dict[str, PlannedRun], dict[str, str]]:
    """Return the runs to be made, by name, and why others would only diverge again."""
    missing: dict[str, PlannedRun] = {}
    diverged: dict[str, str] = {}
    for key, each in wanted.items():
        path = folder_of(each, folder)
        if reason := _diverged(path):
            diverged[each.name] = reason
        elif key not in have and not is_finished(path):
            missing[each.name] = each
    return missing, diverged


EVERY = 60.0  # seconds between two lines of progress where there is no bar

# Set in a worker when Ctrl-C is pressed, or it is told to end.
_INTERRUPTED = threading.Event()


def perform(planned: PlannedRun, folder: Path, engine: str) -> str:
    """Make one run, or the rest of it; return why it failed, or nothing."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            path = folder_of(planned, folder)
            directory = _cut_off(path, planned.config.data_path)
            config = (
                directory.config
                if directory
                else planned.config.model_copy(update={"results_dir": str(folder), "run_name": path.name})
            )
            simulation = SimulationConfig.read({NUM_CLIENTS: planned.num_clients})
            run_on(
                engine or config.engine,
                config,
                simulation,
                directory=directory,
                workers=1,
                should_stop=_INTERRUPTED.is_set,
            )
        except Exception as error:  # one run that can't be made doesn't keep the others from it
            text = in_keys(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"
            return _diverged(folder_of(planned, folder)) or clients_as(text, NUM_CLIENTS)
        finally:
            # A strategy and its parts refer to each other. Python looks for such objects only after many more have
            # been made than a run makes, so that the models of dozens of runs would stay in memory.
            gc.collect()
    return _unfinished(folder_of(planned, folder))


def _diverged(path: Path) -> str:
    """Say why the run in a folder diverged; nothing if it didn't."""
    summary = read_summary(path)
    return f"diverged: {summary.get('reason', '')}" if summary.get("status") == DIVERGED else ""


def _unfinished(path: Path) -> str:
    """Say how a run ended that raised no error and isn't finished."""
    summary = read_summary(path)
    status = summary.get("status", "no summary.json")
    return "" if status == FINISHED else f"{status}: {summary.get('reason', '')}"


def _cut_off(path: Path, data_path: str) -> RunDirectory | None:
    """Open the folder of a run that was cut off after a checkpoint; remove one that has none.

    The run goes on with the data at ``data_path``, wherever they were when it began.

    Raises
    ------
    StillGoingOnError
        If another process makes the run.
    """
    try:
        return RunDirectory(RunConfig.load({"resume": str(path), DATA_PATH: data_path}))
    except StillGoingOnError:
        raise
    except ConfigError:
        shutil.rmtree(path, ignore_errors=True)
        return None


def _made_here(
    missing: Mapping[str, PlannedRun], folder: Path, engine: str, end: float
) -> Iterator[tuple[str, str]]:
    """Make runs in this process, on one thread as in a worker's, and yield as `_outcomes` does."""
    for name, planned in missing.items():
        if time.monotonic() >= end:
            return
        with silent(logging.ERROR), torch_as_it_was():
            torch.set_num_threads(1)
            reason = perform(planned, folder, engine)
        yield name, reason


@contextlib.contextmanager
def silent(level: int) -> Iterator[None]:
    """Let a run in this process print nothing, show nothing in a notebook, and no line of its log below a level."""
    with shown_from(level), contextlib.redirect_stdout(io.StringIO()), _nothing_displayed():
        yield


def _nothing_displayed() -> contextlib.AbstractContextManager[object]:
    """Return what keeps rich's tables from a notebook, which they reach beside the standard output."""
    if "IPython" not in sys.modules:
        return contextlib.nullcontext()
    from IPython.utils.capture import capture_output

    captured: contextlib.AbstractContextManager[object] = capture_output(
        stdout=False, stderr=False, display=True
    )
    return captured


def _outcomes(
    missing: Mapping[str, PlannedRun],
    folder: Path,
    engine: str,
    jobs: int,
    end: float,
    staying: ProcessPoolExecutor | None,
) -> Iterator[tuple[str, str]]:
    """Yield the name of each run that is done, and why it failed."""
    waiting = iter(missing.items())
    with worker_pool(jobs) if staying is None else contextlib.nullcontext(staying) as workers:
        under_way: dict[Future[str], str] = {}
        while True:
            # Handed out one by one: what a pool has taken it can't give back when the time is over.
            while len(under_way) < jobs and time.monotonic() < end and (item := next(waiting, None)):
                under_way[workers.submit(perform, item[1], folder, engine)] = item[0]
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                name = under_way.pop(future)
                try:
                    yield name, future.result()
                except BrokenProcessPool:
                    raise RunError(
                        "a worker process was killed, perhaps for want of memory; the same command goes on from "
                        "here, with fewer --jobs if need be"
                    ) from None


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """Return worker processes of one thread each, for several calls of `run_missing`."""
    main = sys.modules["__main__"]
    if not Path(getattr(main, "__file__", None) or __file__).exists():
        del main.__file__  # "<stdin>": each process would look for that file, and die
    return ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker)


_WORKER = contextlib.ExitStack()  # contexts that last as long as the worker process


def _begin_worker() -> None:
    torch.set_num_threads(1)
    _WORKER.enter_context(shown_from(logging.ERROR))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _interrupt(number: int, frame: object) -> None:
    """End the worker's run in good order, which goes on next time; the same signal again ends the worker at once."""
    _INTERRUPTED.set()
    signal.signal(number, signal.SIG_DFL)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, which reaches this process alone, do what Ctrl-C in a terminal does to it and its workers."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, previous)  # a second one isn't waited for
        for worker in active_children():
            if worker.pid is not None:
                os.kill(worker.pid, signal.SIGINT)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep a second process from the folder: it would take the first one's runs for cut off."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process makes its runs") from None
        except OSError as error:  # a file system without locks
            log.warning("%s can't be locked: %s", folder, error)
        yield


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar, or else a line a minute at most; yield what takes the number of runs done and a remark."""
    bar = LiveBar(console, total, "runs")
    began = told = time.monotonic()
    done: int | None = None
    failed = 0

    def advance(number: int, remark: str) -> None:
        nonlocal done, failed, told
        if (
            done is None
        ):  # the first call has the runs that were there: they say nothing of how long the rest takes
            bar.begin_at(number, total)
        done = (done or 0) + number
        bar.advance(done, "runs")
        if remark:
            failed += 1
            console.print(remark, style="yellow", markup=False)
        now = time.monotonic()
        if number and not bar.shown and (done == total or now - told >= EVERY):
            told = now
            ends = f" ({failed} failed or diverged, see above)" if failed else ""
            console.print(f"{done} of {total} runs{ends}, {(now - began) / 60:.1f} minutes")

    bar.start()
    try:
        yield advance
    finally:
        bar.stop()
