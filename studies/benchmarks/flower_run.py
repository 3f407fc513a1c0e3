"""The whole command ``flwr run``: this app by its own engine and on Ray, beside Flower's quickstart.

    python -m studies.benchmarks.flower_run --data-path mnist.npz

Each contender runs twice in a new FLWR_HOME: cold, where the command starts the local SuperLink first, and warm, on
the SuperLink of the cold run. Contenders take turns. Wall seconds are those of the command. CPU seconds are those of
all processes that descend from it, the SuperLink's and Ray's included, from the command's start to its end. Every run
must succeed, and accuracies of one workload must agree within a point. Linux only.

``--contenders quickstart,swapped`` compares Flower's FedAvg with this library's in the same app of Flower's, which
``--libraries`` writes on PyTorch, numpy and scikit-learn.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import tomli_w

from studies.benchmarks.fedapp_run import run_config
from studies.benchmarks.job import Job
from studies.benchmarks.measure import ROOT, ContenderError, descendants
from studies.benchmarks.results import TOLERANCE, JsonObject, report
from studies.benchmarks.sentences import fill_pages
from studies.benchmarks.workloads import WORKLOADS, Data

QUICKSTART = Path(__file__).with_name("quickstart")
MEASURED = Path(__file__).with_name("flower_run.json")  # behind the figures of docs/scale.md
CONTENDERS = ("auto", "ray", "quickstart")  # this app by the key `engine`; Flower's app
SWAPPED = "swapped"  # Flower's app with this library's FedAvg in place of Flower's
FLOWERS = ("quickstart", SWAPPED)
PYTORCH = "pytorch"
LIBRARIES = (
    PYTORCH,
    "numpy",
    "sklearn",
)  # of Flower's app; those beside PyTorch have logistic regression alone
STARTS = ("cold", "warm")
MARKS = "flwr-run "  # prefix of marks in docs/scale.md: flwr-run seconds: W1-cold auto
MEASURED_SWAPPED = Path(__file__).with_name("swapped.json")  # the same of ``swapped``
MARKS_SWAPPED = "swapped "
LINES = 25  # last lines of a failed command's output that are shown
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run the command line."""
    arguments = options()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("error: needs Linux, to count the CPU of processes whose parent has ended")
    names, libraries = arguments.contenders.split(","), arguments.libraries.split(",")
    if libraries != [PYTORCH] and not set(names) <= set(FLOWERS):
        sys.exit(f"error: --libraries {arguments.libraries} is of --contenders {','.join(FLOWERS)} alone")
    chosen = [
        (workload.with_rounds(arguments.rounds) if arguments.rounds else workload, library)
        for library in libraries
        for workload in map(WORKLOADS.__getitem__, arguments.workloads.split(","))
        if library == PYTORCH or workload.model == "logistic"
    ]
    rows, problems = [], []
    with TemporaryDirectory(prefix="fedapp-flwr-run-") as temporary:
        os.environ["FEDAPP_CACHE"] = str(Path(temporary, "cache"))
        data = Data(Path(temporary), arguments.data_path)
        for workload, library in chosen:
            job = workload.job("stock", data.path(workload.data))
            job = replace(job, evaluate_every=job.rounds)
            named = workload.name if library == PYTORCH else f"{workload.name}-{library}"
            runs: dict[tuple[str, str], list[JsonObject]] = {}
            for repeat in range(arguments.repeats):
                # In turn forwards and backwards: none always runs after the same other.
                for name in names[:: -1 if repeat % 2 else 1]:
                    for start, found in cold_and_warm(
                        name, job, library, Path(temporary, f"{named}-{repeat}-{name}")
                    ):
                        runs.setdefault((start, name), []).append(found)
                        print(f"{named} {start} {name}: {said(found)}", flush=True)
            of_workload = [row_of(f"{named}-{start}", name, runs[start, name]) for start, name in runs]
            found_accuracies = [row["accuracy"] for row in of_workload]
            if max(found_accuracies) - min(found_accuracies) > TOLERANCE:
                problems.append(f"{named}: accuracies differ by over a point: {found_accuracies}")
            rows += of_workload
    whole = report(
        rows, [], problems, arguments.data_path.name if arguments.data_path else "generated images"
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
    for row in rows:
        print(f"{row['workload']:8} {row['contender']:10} {said(row)}")
    if problems:
        sys.exit("error: " + "\n".join(problems))
    if arguments.write_results:
        marks, measured = (MARKS_SWAPPED, MEASURED_SWAPPED) if SWAPPED in names else (MARKS, MEASURED)
        fill_pages(whole, marks)
        shutil.copy(arguments.out, measured)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="W1,W2", help="of W1, W2, comma-separated")
    every = ", ".join((*CONTENDERS, SWAPPED))
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {every}, comma-separated")
    parser.add_argument("--libraries", default=PYTORCH, help=f"of {', '.join(LIBRARIES)}, comma-separated")
    parser.add_argument("--rounds", type=int, default=0, help="default: each workload's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-path", type=Path, help="MNIST as .npz, in place of generated images")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/flower-run.json")
    parser.add_argument(
        "--write-results",
        action="store_true",
        help="put the figures into docs/scale.md, and the JSON beside this file",
    )
    return parser.parse_args()


def said(row: JsonObject) -> str:
    """Return a row in words."""
    return f"{row['seconds']:6.1f} s, {row['cpu']:6.1f} CPU s, accuracy {row['accuracy']:.4f}"


def row_of(workload: str, contender: str, runs: list[JsonObject]) -> JsonObject:
    """Return the medians over runs, and each run's wall and CPU seconds."""
    medians = {key: median(run[key] for run in runs) for key in ("seconds", "cpu", "accuracy")}
    seconds = [run["seconds"] for run in runs]
    cpu = [run["cpu"] for run in runs]
    return {
        "workload": workload,
        "contender": contender,
        "seconds-of-runs": seconds,
        "cpu-of-runs": cpu,
        **medians,
    }


def cold_and_warm(name: str, job: Job, library: str, folder: Path) -> Iterator[tuple[str, JsonObject]]:
    """Run a contender twice in a new FLWR_HOME: without a SuperLink, and on the one that the first run left."""
    with flower_home(folder) as environment:
        for start in STARTS:
            yield start, timed(name, job, library, folder / start, environment)


@contextmanager
def flower_home(folder: Path) -> Iterator[dict[str, str]]:
    """Make a FLWR_HOME and choose a free port for its SuperLink; end all processes that were started below it."""
    before = set(descendants(os.getpid()))
    (folder / "flower").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Compiled modules may be kept, as at a user's: else each run compiles what it imports, a library of ours too.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        yield {
            **inherited,
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}",
        }
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            for pid in set(descendants(os.getpid())) - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
                reap()
                time.sleep(0.1)


def timed(name: str, job: Job, library: str, folder: Path, environment: dict[str, str]) -> JsonObject:
    """Run one command; return its wall and CPU seconds and the accuracy of its model.

    Raises
    ------
    ContenderError
        If the run leaves no accuracy, or ran on another engine than it should.
    """
    folder.mkdir()
    is_quickstart = name in FLOWERS
    if is_quickstart:
        config = {
            SWAPPED: name == SWAPPED,
            "num-server-rounds": job.rounds,
            "library": library,
            "model": job.model,
            "data": job.data,
            "batch-size": job.batch_size,
            "lr": job.lr,
            "accuracy-file": str(folder / "accuracy"),
        }
    else:
        config = {**run_config(job), "engine": name, "results-dir": str(folder), "run-name": "run"}
    given = folder / "run.toml"
    given.write_text(tomli_w.dumps(config), "utf-8")
    federation = f"num-supernodes={job.num_clients} client-resources-num-cpus=1"
    command = ["flwr", "run", str(QUICKSTART if is_quickstart else ROOT), "--stream"]
    command += ["--run-config", str(given), "--federation-config", federation]
    began, used = time.monotonic(), cpu_seconds()
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found = {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - used}
    try:
        return {**found, "accuracy": accuracy_of(name, folder)}
    except (OSError, KeyError) as error:
        last = "\n".join(done.stdout.splitlines()[-LINES:])
        raise ContenderError(f"{name}: {error}; the command ended with {done.returncode}:\n{last}") from None


def accuracy_of(name: str, folder: Path) -> float:
    """Return the accuracy that a run reached."""
    if name in FLOWERS:
        return float((folder / "accuracy").read_text("utf-8"))
    summary = json.loads((folder / "run" / "summary.json").read_text("utf-8"))
    if (summary["engine"] == "ray") != (name == "ray"):
        raise ContenderError(f"{name}: ran on {summary['engine']}")
    return float(summary["accuracy"])


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that descend from this one, ended ones included.

    A process whose parent has ended becomes a child of this one, so that none is lost.
    """
    reap()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for pid in set(descendants(os.getpid())) - {os.getpid()}:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
            # Of the process, and of its children that it has waited for.
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def reap() -> None:
    """Wait for children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    try:
        main()
    except ContenderError as error:
        sys.exit(f"error: {error}")
