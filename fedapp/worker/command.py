"""``fedapp-worker``: work for this device's SuperNode, on the socket that FEDAPP_WORKER names."""

import argparse
import os
from pathlib import Path

from fedapp.worker.asking import VARIABLE
from fedapp.worker.protocol import WorkerError
from fedapp.worker.serving import Worker


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="fedapp-worker", description=__doc__)
    parser.add_argument("--socket", default=os.environ.get(VARIABLE, ""), help=f"default: ${VARIABLE}")
    socket = parser.parse_args(arguments).socket
    if not socket:
        raise SystemExit(f"error: {VARIABLE}, --socket: one of them has to name the worker's socket")
    try:
        Worker(Path(socket).absolute()).serve()
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
