"""``fedapp report``: the page as a file, or served while runs go on; and its curves as figures."""

import signal
from collections.abc import Sequence
from pathlib import Path

from fedapp.config import ConfigError
from fedapp.report.comparison import Comparison
from fedapp.report.page.content import page_content
from fedapp.report.page.html import NoPlotlyError, make_page
from fedapp.report.page.live import LivePage, TuningOf
from fedapp.report.recorded import RecordedRun
from fedapp.report.runs import runs_in
from fedapp.report.style import current_style


def report(
    folders: Sequence[Path],
    out: Path | None,
    *,
    live: bool,
    port: int,
    tuning_of: TuningOf,
) -> None:
    """Write the page of the runs in ``folders`` to ``out``, or serve it ``live`` until Ctrl-C.

    With another style than that of a screen the curves are also figures beside the page.
    """
    if live and out is not None:
        raise SystemExit(f"error: -o {out}: --live serves the page and writes no file; give one of the two")
    if live and (given := current_style().given):
        raise SystemExit(f"error: {given}: --live writes no figures; give one of the two")
    if port and not live:
        raise SystemExit(f"error: --port {port}: goes with --live")
    found: dict[Path, Path] = {}
    for folder in folders:
        if not (in_folder := runs_in(folder)):
            raise SystemExit(f"error: {folder}: holds no run, a folder with a config.toml")
        found.update({path.resolve(): path for path in in_folder})
    runs = list(found.values())
    path = out or Path("report.html")
    try:
        if live:
            _serve(LivePage(runs, port, tuning_of))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_page(page_content(runs, tuning_of(runs))), "utf-8")
        paths = [path, *_figures(runs, path, tuning_of)]
    except NoPlotlyError as error:
        raise SystemExit(f"error: fedapp report {error}") from None
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        where = f"--port {port}: can't be listened on" if live else f"-o {path}: can't be written"
        raise SystemExit(f"error: {where} ({error})") from None
    for each in paths:
        print(each.absolute())


def _figures(runs: Sequence[Path], page: Path, tuning_of: TuningOf) -> list[Path]:
    """Draw the curves of the page's settings beside the page, if a style is given; return the paths."""
    if not current_style().given:
        return []
    from fedapp.report.overlay import draw_overlay  # matplotlib is slow to import

    comparison = Comparison([RecordedRun(run) for run in runs], tuning_of(runs))
    if not comparison.axes or not comparison.metrics:
        raise ConfigError("--format: no run has curves yet")
    figure = page.with_suffix(".png")
    return draw_overlay(figure, comparison.cells, comparison.metrics[:2], comparison.axes)


def _serve(page: LivePage) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        page.serve()
    except KeyboardInterrupt:
        print()
