"""A process that calls ``run_simulation.main`` for every line it reads: what it imports, it imports once."""

import json
import os
import sys
import traceback

import run_simulation
from fedapp import federation


def serve() -> None:
    """Read a line with the arguments, where the output goes and which Ray to use; answer with the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        arguments, log, os.environ["RAY_ADDRESS"] = json.loads(line)
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        federation.forget()
        try:
            code = run_simulation.main(arguments)
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    serve()
