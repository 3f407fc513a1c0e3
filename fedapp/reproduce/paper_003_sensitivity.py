"""Local epochs, clipping and step size: figures 4.3 to 4.8 of papers/003_4ba4febf91704f25.txt."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedapp.config import RunConfig
from fedapp.reproduce.curves import panels
from fedapp.reproduce.experiment import Results
from fedapp.reproduce.paper_003 import by_beta
from fedapp.reproduce.plan import Plan
from fedapp.reproduce.report import Report, Row, Verdict, judge, not_run
from fedapp.reproduce.runs import Run, Runs, in_all, is_lower, mean

# The figures: name, what the labels of its settings begin with, and what the config has there.
LADDERS: dict[str, tuple[str, Callable[[RunConfig], float]]] = {
    "4-3-epochs": ("E", lambda config: config.local_epochs),
    "4-5-clipping": ("G", lambda config: config.clip_norm or math.inf),
    "4-7-step-size": ("γ", lambda config: config.lr),
}

KEYS = ("loss", "accuracy")


def figures_4(results: Results, plan: Plan, folder: Path) -> Report:
    """Figures 4.3 to 4.8: the effect of E, G and γ on the curves by β."""
    report, runs = Report(), results.runs
    for data in runs.labels("data"):
        own = runs.where(data=data)
        short = data.partition(",")[0]
        for name in LADDERS:
            ladder = _ladder(own, name, plan)
            grid = [
                [(title, by_beta(own.where(setting=setting)), key) for title, setting in ladder.items()]
                for key in KEYS
            ]
            title = f"{data}, imbalanced, convex, unseen clients"
            path = folder / f"figure-{name}-{short}.png"
            report.figures.append(panels(path, title, grid, x="aggregation", x_label="round"))
        for setting in own.labels("setting"):
            for beta in sorted(own.labels("perturbation-beta"), reverse=True):
                cell = own.where(setting=setting, perturbation_beta=beta)
                ours = [100 * value for value in cell.values("accuracy")]
                report.rows.append(Row(f"{data}, {_title(setting)}, β = {beta:g}: accuracy, %", ours))
    report.verdicts += [
        _judged("003-4-epochs", results, plan, _epochs),
        _judged("003-4-clipping", results, plan, _clipping),
        _judged("003-4-step-size", results, plan, _step_size),
    ]
    return report


def _ladder(own: Runs, name: str, plan: Plan) -> dict[str, str]:
    """Return a figure's settings by title, in the order of what they vary; the usual one is among them."""
    prefix, value = LADDERS[name]
    settings = {
        value(run.config): str(run["setting"])
        for run in own
        if str(run["setting"]).startswith(prefix) or run["setting"] == plan.setting("usual")
    }
    return {f"{prefix} = {'∞' if math.isinf(at) else f'{at:g}'}": settings[at] for at in sorted(settings)}


def _title(setting: str) -> str:
    return setting.replace(" ", " = ")


def _judged(
    claim: str, results: Results, plan: Plan, find: Callable[[Runs, Plan, str], tuple[bool | None, str]]
) -> Verdict:
    """Judge a claim on each of its data."""
    facts, evidence = [], []
    for data in plan.threshold(claim, "data"):
        settings, betas = plan.threshold(claim, "settings"), [1.0, plan.threshold(claim, "beta")]
        if lacking := results.lacking(data=data, setting=settings, perturbation_beta=betas):
            return not_run(claim, f"{lacking} of its runs on {data} aren't there")
        holds, text = find(results.runs.where(data=data), plan, claim)
        facts.append(holds)
        evidence.append(f"{data}: {text}")
    return judge(claim, in_all(facts), "; ".join(evidence))


def _area(run: Run) -> float:
    """Mean accuracy over the rounds, in %: higher is faster."""
    return 100 * float(run.column("accuracy").mean())


def _roughness(run: Run) -> float:
    """Sum of the falls of the accuracy from one round to the next, in points: 0 for a curve that only rises."""
    return 100 * float(np.clip(-np.diff(run.column("accuracy")), 0, None).sum())


def _by_seed(own: Runs, setting: str, beta: float, measure: Callable[[Run], float]) -> list[float]:
    return [measure(run) for run in own.where(setting=setting, perturbation_beta=beta)]


def _epochs(own: Runs, plan: Plan, claim: str) -> tuple[bool | None, str]:
    """Tell whether small β is ahead of β = 1 for every E, in every seed."""
    beta, facts, gains = plan.threshold(claim, "beta"), [], []
    for setting in plan.threshold(claim, "settings"):
        with_beta, without = (_by_seed(own, setting, at, _area) for at in (beta, 1.0))
        facts.append(is_lower(without, with_beta))
        gains.append(f"{mean(with_beta) - mean(without):+.2f} at {_title(setting)}")
    return in_all(facts), f"accuracy averaged over the rounds, β = {beta:g} against 1, points: {', '.join(gains)}"


def _clipping(own: Runs, plan: Plan, claim: str) -> tuple[bool | None, str]:
    """Tell whether the tight bound costs much and the loose one hardly anything, at each β."""
    tight, loose, free = plan.threshold(claim, "settings")
    slower, same = plan.threshold(claim, "slower"), plan.threshold(claim, "same")
    facts, parts = [], []
    for beta in (1.0, plan.threshold(claim, "beta")):
        low, middle, high = (mean(_by_seed(own, setting, beta, _area)) for setting in (tight, loose, free))
        facts += [high - low >= slower, abs(high - middle) <= same]
        parts.append(f"{low:.1f}, {middle:.1f}, {high:.1f} % at β = {beta:g}")
    return all(facts), f"accuracy averaged over the rounds with {tight}, {loose}, none: {'; '.join(parts)}"


def _step_size(own: Runs, plan: Plan, claim: str) -> tuple[bool | None, str]:
    """Tell whether small β falls back more than β = 1 at the large step, in every seed."""
    beta, facts, parts = plan.threshold(claim, "beta"), [], []
    for setting in plan.threshold(claim, "settings"):
        rough, smooth = (_by_seed(own, setting, at, _roughness) for at in (beta, 1.0))
        facts.append(is_lower(smooth, rough))
        parts.append(
            f"at {_title(setting)} falls of accuracy add up to {mean(rough):.1f} points with β = {beta:g} and "
            f"{mean(smooth):.1f} with β = 1"
        )
    return in_all(facts), ", ".join(parts)
