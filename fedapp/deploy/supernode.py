"""Flower's SuperNode, in a process that ends when the SuperNode does: so that its unit knows, and starts it again.

After an answer that it doesn't expect (500, say, from a SuperLink whose disk is full) Flower 1.41's SuperNode leaves
its loop, and the process stays: its own API answers that it is healthy, and the device takes part in nothing.
"""

import os
import sys
from importlib.metadata import entry_points

COMMAND = "flower-supernode"


def main() -> None:
    """Be a SuperNode, with the arguments of Flower's command, and end with it, whatever else still runs."""
    (command,) = entry_points(group="console_scripts", name=COMMAND)
    sys.argv[0] = COMMAND
    code: object = 1
    try:
        command.load()()
        print("the SuperNode has left its loop, for the reason above", file=sys.stderr)
    except SystemExit as end:
        code = end.code
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
