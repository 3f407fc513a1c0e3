"""A metric of each client, sorted from the worst to the best, of one run or several.

Clients are sorted from the lowest value where it isn't known which values are better.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fedapp.report.client_tables import last_clients, names_of_clients
from fedapp.report.figures import STEPS, new_figure, save, shortened, style_axes
from fedapp.report.files import LOSS, data_of, rows_in_words, without_digest
from fedapp.report.method_styles import MethodStyle, styles_of
from fedapp.report.overlay import MOST
from fedapp.report.recorded import RecordedRun, directions_of, metrics_of
from fedapp.report.style import current_style
from strategies.flower.higher_is_better import PERSONAL, higher_is_better

FIGURE = "clients.png"

_DOTS = 40  # up to this number of clients, each is a dot
_NAMED = 15  # up to this number of clients, their names are below the dots
_LONGEST = 40  # characters of a line's name


def scores_of(run_dir: Path, metric: str) -> dict[str, NDArray[np.float64]]:
    """Return clients' values of a metric at a run's end: "" of the global model, "personal-" of clients' own models.

    Values that aren't finite are left out.
    """
    told = last_clients(run_dir)
    found = {whose: np.array(told.get(f"{whose}{metric}", []), np.float64) for whose in ("", PERSONAL)}
    finite = {whose: values[np.isfinite(values)] for whose, values in found.items()}
    return {whose: values for whose, values in finite.items() if values.size}


def metric_by_client(runs: Sequence[RecordedRun]) -> str:
    """Return the metric by which clients are drawn: the runs' first metric, the loss if they have no other."""
    own = [name for name in metrics_of(runs) if name != LOSS and not name.startswith(PERSONAL)]
    return next(iter(own), LOSS)


def draw_by_client(run_dir: Path) -> Path | None:
    """Draw a run's clients into ``clients.png``, 1200 pixels wide; None if no client's values are on record."""
    run = RecordedRun(run_dir)
    strategy, model = (without_digest(str(run.config.get(key, "?"))) for key in ("strategy", "model"))
    of = f"{strategy}, {data_of(run.config)}, {model}"
    return next(iter(draw_clients_of_runs(run_dir / FIGURE, {"": run}, of)), None)


def draw_clients_of_runs(path: Path, runs: Mapping[str, RecordedRun], of: str = "") -> list[Path]:
    """Draw the clients of runs, by name, over each other; return the paths, [] if no client's values are on record.

    Solid: the global model. Dashed: clients' own models. Of more than eight runs, the first. ``of`` is the second
    line of the title.
    """
    metric = metric_by_client(list(runs.values()))
    known = {name: scores_of(run.path, metric) for name, run in runs.items()}
    known = {name: found for name, found in known.items() if found}
    if not known:
        return []
    notes = [of] * bool(of) + [f"{MOST} of {len(known)} settings: the first"] * (len(known) > MOST)
    what = f"{metric} on each client's {rows_in_words(run.rows for run in runs.values())}"
    title = f"{what[0].upper()}{what[1:]}"
    style = current_style()
    figure = new_figure(3.4 if style.width else 4.2, "\n".join([title, *notes]))
    axes = figure.subplots()
    style_axes(axes)
    higher = higher_is_better(metric, directions_of(list(runs.values())))
    looks = styles_of(str(runs[name].config.get("strategy", "")) for name in known)
    for (name, found), look in list(zip(known.items(), looks, strict=True))[:MOST]:
        for whose, values in found.items():
            total = len(last_clients(runs[name].path)[f"{whose}{metric}"])
            lacking = f"\n{total - len(values)} of {total} clients: no {metric}" * (total > len(values))
            label = _label(name, whose) + lacking
            _draw_sorted(axes, values, look, label, own=bool(whose), higher=higher)
    order = "from the lowest to the highest" if higher is None else "from the worst to the best"
    axes.set(xlim=(0, 1))
    axes.set_xlabel(f"clients, {order}", fontsize=10)
    axes.set_ylabel(metric, fontsize=10)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    if len(runs) == 1:
        _name_places(axes, next(iter(runs.values())).path, metric, higher=higher)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    axes.legend(frameon=False, fontsize=8, **(below if style.width else beside))
    return style.paths(save(figure, path))


def _draw_sorted(
    axes: Axes, values: NDArray[np.float64], look: MethodStyle, label: str, *, own: bool, higher: bool | None
) -> None:
    """Draw sorted values over the share of clients, each in the middle of its part of it."""
    ordered = np.sort(values)[::-1] if higher is False else np.sort(values)
    tenth = ordered[: -(-len(ordered) // 10)].mean()
    places = (np.arange(len(ordered)) + 0.5) / len(ordered)
    label = f"{label}\nmean {ordered.mean():.3g}, {'lowest' if higher is None else 'worst'} tenth {tenth:.3g}"
    style = {**look.line(values), "lw": 1.4, "label": label}
    if len(ordered) <= _DOTS:
        style["markevery"] = None
    if own:
        style |= {"ls": "--", "mfc": "white", "mew": 1}
    axes.plot(places, ordered, **style)


def _name_places(axes: Axes, run_dir: Path, metric: str, *, higher: bool | None) -> None:
    """Name the clients of one run below their dots, if only the global model is drawn and there are few clients."""
    values, names = np.array(last_clients(run_dir).get(metric, []), np.float64), names_of_clients(run_dir)
    there = np.flatnonzero(np.isfinite(values))
    lines = axes.get_lines()
    if not names or len(lines) != 1 or not 0 < len(there) <= _NAMED:
        return
    ordered = there[np.argsort((-1 if higher is False else 1) * values[there], kind="stable")].tolist()
    named = [shortened(names.get(client, str(client))) for client in ordered]
    axes.set_xticks(np.asarray(lines[0].get_xdata()), named, rotation=30, ha="right")


def _label(name: str, whose: str) -> str:
    model = "own models" if whose else "global model"
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    return f"{short}, {model}" if short else model
