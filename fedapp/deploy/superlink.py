"""Flower's SuperLink, which also hands out, to who may start runs, runs' folders and the logs that devices share.

The paths for that are below ``/v1/control``, so that the proxy asks for the operator's certificate as for Flower's
own (fedapp/deploy/run_files.py, fedapp/deploy/shared_logs.py).
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedapp.deploy.proxy import ABOUT, CONTROL
from fedapp.deploy.run_files import LIST, READ, RunFiles, RunFilesError
from fedapp.deploy.shared_logs import SEND, TELL, SharedLogError, SharedLogs
from strategies.flower import internals

COMMAND = "flower-superlink"
# SQLite's settings for the messages of large models. Debian's SQLite overwrites what it deletes, which for a model of
# 400 MB locks the database for longer than the 5 s that Flower lets other requests wait: they fail, and so does the
# run. They now wait nearly as long as their clients do (30 s).
DATABASE = {"secure_delete": "OFF", "busy_timeout": "25000"}
VARIABLE = "FEDAPP_RUNS"  # environment variable with the folder below which runs' folders are


def main() -> None:
    """Be a SuperLink, with the arguments of Flower's command."""
    (command,) = entry_points(group="console_scripts", name=COMMAND)
    sys.argv[0] = COMMAND
    internals.database_settings(DATABASE)
    if root := os.environ.get(VARIABLE):
        internals.extend_superlink(lambda app: hand_out(app, RunFiles(Path(root))))
    internals.extend_superlink(lambda app: internals.add_control_header(app, ABOUT, subject_of))
    command.load()()


def subject_of(path: str, request: Any, answer: Any) -> str:
    """Return which run or node a request to the Control API was about, for the proxy's log; "" for other requests."""
    method = path.removeprefix(CONTROL)
    if method in ("start-run", "stop-run"):
        return f"run {(answer if method == 'start-run' else request).run_id}"
    if method in ("register-node", "unregister-node"):
        return f"node {(answer if method == 'register-node' else request).node_id}"
    return ""


def hand_out(app: Any, files: RunFiles) -> None:
    """Add the paths to the SuperLink's app."""
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    logs = SharedLogs()

    def answer(path: str, asked: dict[str, Any]) -> Response:
        if path == LIST:
            return JSONResponse({"files": files.listed(str(asked["run"]))})
        if path == TELL:
            return JSONResponse(logs.told(str(asked["node"])))
        run, name, offset, size = (asked[key] for key in ("run", "path", "offset", "bytes"))
        pieces = files.pieces(str(run), str(name), int(offset), int(size))
        return StreamingResponse(pieces, media_type="application/octet-stream")

    def take(headers: Mapping[str, str], body: bytes) -> Response:
        logs.take(internals.node_of_key(app), headers, body)
        return JSONResponse({})

    async def asked_for(request: Request) -> Response:
        body = await request.body()
        try:
            if request.url.path == SEND:
                return await run_in_threadpool(take, request.headers, body)
            return await run_in_threadpool(answer, request.url.path, dict(json.loads(body)))
        except RunFilesError as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except SharedLogError as error:
            return JSONResponse({"error": str(error)}, status_code=403)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"the request can't be read ({error})"}, status_code=400)

    for path in (LIST, READ, TELL, SEND):
        app.add_route(path, asked_for, methods=["POST"])


if __name__ == "__main__":
    main()
