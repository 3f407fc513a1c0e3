"""This app: ``run_simulation.py`` with an engine, as a user starts it, and when each aggregation was done."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

import run_simulation
from fedapp.report import read_metrics
from fedapp.server import Entry, Observer
from studies.benchmarks.job import Job, Log


def run(job: Job, engine: str, workers: int = 0) -> Log:
    """Run a job on an engine of ``run_simulation.py``; ``workers``: number of workers on Ray, 0: in this process."""
    log = Log()

    class Times(Observer):
        """Told of every aggregation, evaluated or not, when all that belongs to it is done."""

        def record(self, entry: Entry) -> None:
            log.mark()

    with TemporaryDirectory() as folder:
        config = Path(folder, "run.toml")
        config.write_text(
            tomli_w.dumps({**run_config(job), "results-dir": folder, "run-name": "run"}), "utf-8"
        )
        federation = f"num-supernodes={job.num_clients} client-resources-num-cpus=1"
        federation += f" workers={workers}" * bool(workers)
        code = run_simulation.main(
            ["--engine", engine, "--run-config", str(config), "--federation-config", federation], [Times()]
        )
        if code:
            sys.exit(code)
        for record in read_metrics(Path(folder, "run")):
            if record["aggregation"] > 0:
                log.accuracy[record["aggregation"]] = record["accuracy"]
    return log


def run_config(job: Job) -> dict[str, str | int | float]:
    """Return the job in the words of this app."""
    partial = job.participants < job.num_clients and not job.server_lr
    return {
        "strategy": "async-fedavg" if job.server_lr else "fedavg",
        "num-server-rounds": job.rounds,
        "eval-every": job.evaluate_every,
        "participation": "uniform" if partial else "full",
        "fraction-train": job.participants / job.num_clients if partial else 1.0,
        "server-lr": job.server_lr or 1.0,
        "dataset": "npz",
        "data-path": job.data,
        "partitioner": "natural" if job.server_lr else "iid",  # the digits' file says which row is whose
        "min-samples": 1,
        "model": job.model,
        "batch-size": job.batch_size,
        "lr": job.lr,
        "seed": job.seed,
    }
