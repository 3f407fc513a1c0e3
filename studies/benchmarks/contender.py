"""The process of one contender: ``python -m studies.benchmarks.contender KIND JOB.json LOG.json``."""

import importlib
import os
import sys
import traceback
from pathlib import Path

from studies.benchmarks.job import Job

# The module, and function, of each kind of contender; any other kind is an engine of this app, or ``WORKERS``.
MODULES = {
    "bare": "bare_loop",
    "stock": "stock_flower",
    "simulate": "stock_flower:run_in_processes",
    "vmap": "vmap_loop",
    "batched": "batched_loop",
    "jax": "jax_loop",
    "appfl": "appfl_driver",
    "flgo": "flgo_server",
    "pfl": "pfl_backend",
}


# The vectorized engine in two processes on Ray.
WORKERS = "workers"


def main(kind: str, job_path: str, log_path: str) -> None:
    """Run a job as a kind of contender (``MODULES``, an engine, or ``WORKERS``); write its log."""
    job = Job.read(Path(job_path))
    # Imported here, by name: Ray's processes import the module as well, and each contender only its own.
    if kind in MODULES:
        module, _, function = MODULES[kind].partition(":")
        log = getattr(importlib.import_module(f"studies.benchmarks.{module}"), function or "run")(job)
    else:
        from studies.benchmarks import fedapp_run

        log = fedapp_run.run(job, *(("vectorized", 2) if kind == WORKERS else (kind,)))
    log.write(Path(log_path))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a simulation that failed can leave threads of Ray's that keep the process alive
