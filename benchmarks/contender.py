"""The process of one contender: ``python -m benchmarks.contender KIND JOB.json LOG.json``."""

import os
import sys
import traceback
from pathlib import Path

from benchmarks.job import Job


def main(kind: str, job_path: str, log_path: str) -> None:
    """Run a job the way ``kind`` says: bare, stock, vmap, batched, jax, or an engine of this app; write its log."""
    job = Job.read(Path(job_path))
    # Imported here, by name: Ray's processes import the module as well, and each contender only its own.
    if kind == "bare":
        from benchmarks import bare_loop

        log = bare_loop.run(job)
    elif kind == "stock":
        from benchmarks import stock_flower

        log = stock_flower.run(job)
    elif kind == "vmap":
        from benchmarks import vmap_loop

        log = vmap_loop.run(job)
    elif kind == "batched":
        from benchmarks import batched_loop

        log = batched_loop.run(job)
    elif kind == "jax":
        from benchmarks import jax_loop

        log = jax_loop.run(job)
    else:
        from benchmarks import fedapp_run

        log = fedapp_run.run(job, kind)
    log.write(Path(log_path))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a simulation that failed can leave threads of Ray's that keep the process alive
