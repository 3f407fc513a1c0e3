"""A process that has imported the app, and forks for each command: what `fedapp` does, less its imports' seconds.

`python -m tests.docs.command_server SOCKET`; whoever connects sends arguments, folder and environment as JSON, with
standard output and error, and is told the exit code.
"""

import json
import os
import socket
import sys
import traceback

import fedapp.api.command
import fedapp.api.interface  # noqa: F401
from fedapp import cli


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        while True:
            connection, _ = server.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
                child = os.fork()
                if child == 0:
                    work(json.loads(message), files)
                for file in files:
                    os.close(file)
                _, status = os.waitpid(child, 0)
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def work(command: dict, files: list[int]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    # The streams of before remember whether what they wrote to could seek.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    code = 1
    try:
        os.chdir(command["folder"])
        os.environ.update(command["environment"])
        sys.argv = ["fedapp", *command["arguments"]]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
