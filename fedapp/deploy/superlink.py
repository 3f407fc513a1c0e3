"""Flower's SuperLink, which also hands out the folders of runs to who may start runs (fedapp/deploy/run_files.py).

The two paths are below ``/v1/control``, so that the proxy asks for the operator's certificate as for Flower's own.
"""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedapp.deploy.run_files import LIST, READ, RunFiles, RunFilesError
from strategies.flower import internals

COMMAND = "flower-superlink"
VARIABLE = "FEDAPP_RUNS"  # environment variable with the folder below which runs' folders are


def main() -> None:
    """Be a SuperLink, with the arguments of Flower's command."""
    (command,) = entry_points(group="console_scripts", name=COMMAND)
    sys.argv[0] = COMMAND
    if root := os.environ.get(VARIABLE):
        internals.extend_superlink(lambda app: hand_out(app, RunFiles(Path(root))))
    command.load()()


def hand_out(app: Any, files: RunFiles) -> None:
    """Add the two paths to the SuperLink's app: which files a run's folder has, and what is in one of them."""
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    def answer(path: str, asked: dict[str, Any]) -> Response:
        try:
            if path == LIST:
                return JSONResponse({"files": files.listed(str(asked["run"]))})
            run, name, offset, size = (asked[key] for key in ("run", "path", "offset", "bytes"))
            pieces = files.pieces(str(run), str(name), int(offset), int(size))
        except RunFilesError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"the request can't be read ({error})"}, status_code=400)
        return StreamingResponse(pieces, media_type="application/octet-stream")

    async def asked_for(request: Request) -> Response:
        try:
            asked = dict(await request.json())
        except (ValueError, TypeError):
            return JSONResponse({"error": "the request is no JSON object"}, status_code=400)
        return await run_in_threadpool(answer, request.url.path, asked)

    for path in (LIST, READ):
        app.add_route(path, asked_for, methods=["POST"])


if __name__ == "__main__":
    main()
