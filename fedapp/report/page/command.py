"""``fedapp report``: the page as a file, or served while runs go on."""

import signal
from collections.abc import Sequence
from pathlib import Path

from fedapp.report.page.content import page_content
from fedapp.report.page.html import NoPlotlyError, make_page
from fedapp.report.page.live import LivePage
from fedapp.report.runs import runs_in


def report(folders: Sequence[Path], out: Path | None, *, live: bool, port: int) -> None:
    """Write the page of the runs in ``folders`` to ``out``, or serve it ``live`` until Ctrl-C."""
    if live and out is not None:
        raise SystemExit(f"error: -o {out}: --live serves the page and writes no file; give one of the two")
    if port and not live:
        raise SystemExit(f"error: --port {port}: goes with --live")
    runs: dict[Path, Path] = {}
    for folder in folders:
        if not (found := runs_in(folder)):
            raise SystemExit(f"error: {folder}: holds no run, a folder with a config.toml")
        runs.update({path.resolve(): path for path in found})
    try:
        if live:
            _serve(LivePage(list(runs.values()), port))
            return
        path = out or Path("report.html")
        path.write_text(make_page(page_content(list(runs.values()))), "utf-8")
    except NoPlotlyError as error:
        raise SystemExit(f"error: fedapp report {error}") from None
    except OSError as error:
        where = (
            f"--port {port}: can't be listened on" if live else f"-o {out or 'report.html'}: can't be written"
        )
        raise SystemExit(f"error: {where} ({error})") from None
    print(path.absolute())


def _serve(page: LivePage) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        page.serve()
    except KeyboardInterrupt:
        print()
