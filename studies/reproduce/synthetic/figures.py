"""Figures 2, 3 and 5 of Dhasade, Kremer & Renard."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator

from fedapp.models import PERCEPTRON_SLOPE
from fedapp.report.figures import INK, STEPS, TEST, TRAIN, new_figure, save, style_axes
from fedapp.report.method_styles import COLORS
from studies.reproduce.synthetic.measures import Measured


def draw_drift(path: Path, measured: Measured) -> Path:
    """Draw the separators, the test loss and the divergence, by τ: figure 2."""
    figure = new_figure(3.8, "FedAvg on the synthetic problem, by local steps τ")
    separators, losses, divergences = figure.subplots(1, 3, width_ratios=[1, 1.3, 1.3])
    plan = measured.plan
    *cases, iid = plan.setting("figure-2")
    _classes(separators, measured)
    rounds = measured.curve(iid, "aggregation")
    for case, color in zip(cases, COLORS, strict=False):
        _separator(separators, measured.biases(case)[0], color)
        losses.plot(rounds, measured.curve(case, "loss"), color=color, lw=1.5, label=case)
        divergences.plot(rounds[1:], measured.curve(case, "divergence")[1:], color=color, lw=1.5)
    losses.plot(rounds, measured.curve(iid, "loss"), color=INK, lw=1.2, ls="--", label=iid)
    divergences.plot(rounds[1:], measured.curve(iid, "divergence")[1:], color=INK, lw=1.2, ls="--")
    losses.axhline(measured.optimum(), color=INK, lw=0.8, ls=":", label="least possible")
    zeta = plan.threshold("000-1-zeta", "published")
    divergences.axhline(zeta, color=INK, lw=0.8, ls="-.", label="ζ as published")
    style_axes(separators)
    separators.set(xlim=(-1, 5), ylim=(-1, 5), xlabel="x₁", ylabel="x₂", aspect="equal")
    separators.set_title("classes and separators", fontsize=10)
    _finish(losses, "test loss", rounds[-1])
    # Before the first round every curve is at the same, high loss.
    after = [measured.curve(case, "loss")[1:] for case in (*cases, iid)]
    _fit(losses, [*after, np.array([measured.optimum()])])
    _finish(divergences, "divergence", rounds[-1])
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8, columnspacing=1)
    return save(figure, path)


def draw_fedprox(path: Path, measured: Measured) -> Path:
    """Draw the test loss of FedAvg and FedProx: figure 3."""
    average, prox = measured.plan.setting("figure-3")
    figure = new_figure(3.4, "FedAvg and FedProx with many local steps")
    axes = figure.subplots()
    for case, color in ((average, TRAIN), (prox, TEST)):
        rounds, loss = measured.curve(case, "aggregation"), measured.curve(case, "loss")
        axes.plot(rounds, loss, "o-", color=color, ms=3, lw=1.5, label=case)
    axes.axhline(measured.optimum(), color=INK, lw=0.8, ls=":", label="least possible")
    _finish(axes, "test loss", measured.curve(prox, "aggregation")[-1])
    axes.set_title("")
    axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def draw_bound(path: Path, measured: Measured) -> Path:
    """Draw bound and measured gap, by τ after the last round and round by round: figure 5."""
    cases = measured.plan.setting("figure-5")
    steps = [measured.each(case)[0].config.local_steps for case in cases]
    figure = new_figure(3.8, "Theorem 2.1 and what was measured")
    at_end, by_round = figure.subplots(1, 2)
    bounds, gaps = zip(*(measured.end(case) for case in cases), strict=True)
    at_end.loglog(steps, bounds, "s--", color=INK, label="bound")
    at_end.loglog(steps, gaps, "o-", color=TEST, label="measured mean gap F − F*")
    for at, bound, gap in zip(steps, bounds, gaps, strict=True):
        times = f"×{float(f'{bound / gap:.2g}'):,.0f}"
        at_end.annotate(times, (at, math.sqrt(bound * gap)), ha="center", fontsize=8, color=INK)
    at_end.set_xticks(steps, [str(at) for at in steps])
    at_end.minorticks_off()
    at_end.set(xlabel="local steps τ", ylabel="F − F*", title="after the last round")
    at_end.margins(x=0.12)
    rounds = np.arange(1, len(measured.gap_curve(cases[0])) + 1)
    for case, color in zip(cases, COLORS, strict=False):
        by_round.semilogy(rounds, measured.bound(case, rounds), color=color, ls="--", lw=1.2)
        by_round.semilogy(rounds, measured.gap_curve(case), color=color, lw=1.5, label=case)
    by_round.set(xlabel="server round", ylabel="F − F*", title="by round: bound dashed", xlim=(0, rounds[-1]))
    for axes in (at_end, by_round):
        style_axes(axes)
        axes.title.set_fontsize(10)
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8, columnspacing=1)
    return save(figure, path)


def _finish(axes: Axes, name: str, last_round: float) -> None:
    style_axes(axes)
    axes.set(title=name, xlabel="server round", ylabel=name, xlim=(0, last_round))
    axes.title.set_fontsize(10)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=STEPS))


def _fit(axes: Axes, curves: Sequence[np.ndarray]) -> None:
    low, high = min(curve.min() for curve in curves), max(curve.max() for curve in curves)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _classes(axes: Axes, measured: Measured) -> None:
    """Draw mean ± 2 standard deviations of each class: of the usual clients filled, of the outlier as an outline."""
    for group in measured.problems[measured.seeds[0]]["classes"]:
        gray = "#999999" if group["label"] else "#444444"
        width, height = (4 * deviation for deviation in group["deviation"])
        style = {"fc": "none", "ec": gray, "ls": "--"} if group["outlier"] else {"fc": gray, "alpha": 0.4}
        axes.add_patch(Ellipse(group["mean"], width, height, **style))


def _separator(axes: Axes, bias: float, color: str) -> None:
    """The line v·x + b = 0."""
    x = np.array([-1.0, 5.0])
    axes.plot(x, -(bias + PERCEPTRON_SLOPE[0] * x) / PERCEPTRON_SLOPE[1], color=color, lw=1.5)
