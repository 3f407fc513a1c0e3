"""Runs a plain FedAvg on the sequential engine; writes which of the app's and the library's files worked in it.

Called as a process of its own, so that no cache of an earlier run hides a file: ``plain_run.py ROOT RESULTS``. It
prints JSON: the files in which a function ran, and the deepest stack of the project's frames. What runs while a
module is imported doesn't count.
"""

import inspect
import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

root, results = map(Path, sys.argv[1:])
rooms = tuple(f"{root / package}/" for package in ("fedapp", "strategies", "custom"))
files: set[str] = set()
deepest: list[str] = []

FUNCTION = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS  # neither a module nor the body of a class


def named(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(root)}: {code.co_qualname}"


def called(frame: FrameType | None, event: str, _: object) -> None:
    assert frame is not None
    if event != "call" or not frame.f_code.co_filename.startswith(rooms):
        return
    if frame.f_code.co_flags & FUNCTION != FUNCTION:
        return
    name, stack = frame.f_code.co_filename, []
    while frame is not None:
        if frame.f_code.co_filename.startswith(rooms):
            if frame.f_code.co_name == "<module>":
                return
            stack.append(frame.f_code)
        frame = frame.f_back
    files.add(str(Path(name).relative_to(root)))
    if len(stack) > len(deepest):
        deepest[:] = map(named, reversed(stack))


if __name__ == "__main__":
    sys.path.insert(0, str(root))
    from fedapp.cli import main

    sys.argv = ["fedapp", "run", "--engine", "sequential", "--federation-config", "num-supernodes=5"]
    sys.argv += ["--run-config", f'strategy="fedavg" num-server-rounds=12 results-dir="{results}"']
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    print(json.dumps({"code": code, "files": sorted(files), "frames": deepest}))
