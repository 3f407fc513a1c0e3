"""The spectral method against FedAvg: table 4.2 and figures 4.2 to 4.8 of Buttaci 2024."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from fedapp.config import RunConfig
from studies.reproduce.curves import Lines, panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan, folder_of_plans
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, decide, geometric_mean, in_all, mean

# Accuracy that counts as converged (table 4.1).
CONVERGED = {"femnist": 0.75, "cifar10": 0.30}

# By a figure's name: the prefix of its settings' labels, and a function from the config to the varied value.
LADDERS: dict[str, tuple[str, Callable[[RunConfig], float]]] = {
    "4-3-epochs": ("E", lambda config: config.local_epochs),
    "4-5-clipping": ("G", lambda config: config.clip_norm or math.inf),
    "4-7-step-size": ("γ", lambda config: config.lr),
}

# A reading is a label on the axis ``data``, or a pair of labels. A finding says whether a claim holds on a reading,
# and the numbers.
Reading = str | tuple[str, str]
Finding = tuple[bool | None, str]


# Table 4.2 and figure 4.2 --------------------------------------------------------------------------------------


def table_4_2(results: Results, plan: Plan, folder: Path) -> Report:
    """Table 4.2: final accuracy (%) and rounds to the threshold, for every cell; figure 4.2: the curves."""
    published = _published()
    report, runs = Report(), results.runs
    for loss in runs.labels("loss"):
        for data in runs.labels("data"):
            for beta in sorted(runs.labels("perturbation-beta"), reverse=True):
                cell = runs.where(loss=loss, data=data, perturbation_beta=beta)
                if not cell:
                    continue
                name = f"{data}, {loss}, β = {beta:g}"
                accuracy, rounds = published[_setting(data), loss, beta]
                ours = [100 * value for value in cell.values("accuracy")]
                reached = [run.rounds_to(_converged(data)) for run in cell]
                report.rows.append(Row(f"{name}: accuracy, %", ours, accuracy))
                report.rows.append(Row(f"{name}: rounds to {_converged(data):.0%}", reached, rounds))
        report.figures.append(_curves_by_beta(runs.where(loss=loss), folder / f"figure-4-2-{loss}.png", loss))
    labels = plan.labels("data")
    on_data = {claim: plan.threshold(claim, "data") for claim in ("003-3-direction", "003-3-magnitude")}
    pairs = [tuple(pair) for pair in plan.threshold("003-3-balanced", "pairs")]
    every_pair = [(data, _imbalanced(data)) for data in labels if _imbalanced(data) != data]
    report.verdicts += [
        _on_readings("003-3-direction", on_data["003-3-direction"], labels, results, plan, _faster),
        _on_readings("003-3-magnitude", on_data["003-3-magnitude"], labels, results, plan, _by_as_much),
        _on_readings("003-3-balanced", pairs, every_pair, results, plan, _hardly),
    ]
    return report


def _published() -> dict[tuple[str, str, float], tuple[float, float]]:
    """Accuracy and rounds by (data, loss, β)."""
    with (folder_of_plans() / "003-table-4-2.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (
                f"{row['dataset']} {'imbalanced' if row['imbalanced'] == 'yes' else 'balanced'}",
                "convex" if row["convex"] == "yes" else "nonconvex",
                float(row["beta"]),
            ): (float(row["accuracy"]), float(row["rounds"]))
            for row in rows
        }


def _setting(reading: Reading) -> str:
    """Return the published setting of a reading: the part of its name before a comma."""
    return (reading if isinstance(reading, str) else reading[0]).partition(",")[0]


def _imbalanced(data: str) -> str:
    """Return the same reading on imbalanced data."""
    return data.replace(" balanced", " imbalanced")


def _converged(data: str) -> float:
    return CONVERGED[data.split()[0]]


def _on_readings(
    claim: str,
    registered: Sequence[Reading],
    every: Sequence[Reading],
    results: Results,
    plan: Plan,
    find: Callable[[str, Reading, Results, Plan], Finding],
) -> Verdict:
    """Judge a claim on its registered readings; add the findings on other readings of the same settings."""

    def missing(reading: Reading) -> str:
        data = [reading] if isinstance(reading, str) else list(reading)
        betas, loss = [1.0, plan.threshold(claim, "beta")], plan.threshold(claim, "loss")
        return results.unready(plan, claim, loss=loss, data=data, perturbation_beta=betas)

    for reading in registered:
        if text := missing(reading):
            return not_run(claim, f"{_name(reading)}: {text}")
    settings = {_setting(reading) for reading in registered}
    others = [each for each in every if _setting(each) in settings and each not in registered]
    found = {reading: find(claim, reading, results, plan) for reading in registered}
    parts = [f"{_name(reading)}: {text}" for reading, (_, text) in found.items()]
    words = {True: "would hold", False: "wouldn't hold", None: "wouldn't be decided"}
    for reading in others:
        if not missing(reading):
            holds, text = find(claim, reading, results, plan)
            parts.append(f"another reading, {_name(reading)} ({words[holds]}): {text}")
    return judge(claim, in_all(holds for holds, _ in found.values()), "; ".join(parts))


def _name(reading: Reading) -> str:
    return reading if isinstance(reading, str) else reading[0]


def _speed_ups(claim: str, data: str, results: Results, plan: Plan) -> list[float]:
    """Return rounds to convergence (`Run.rounds_within`) at β = 1 over those at the claim's β, by seed."""
    own = results.runs.where(loss=plan.threshold(claim, "loss"), data=data)
    slow, fast = (
        [run.rounds_within(_converged(data)) for run in own.where(perturbation_beta=beta)]
        for beta in (1.0, plan.threshold(claim, "beta"))
    )
    return [one / other for one, other in zip(slow, fast, strict=True)]


def _interval(ratios: Sequence[float], level: float) -> tuple[float, float]:
    """Return the confidence interval of a geometric mean ratio, by Student's t on the logarithms."""
    logs = np.log(ratios)
    width = student.ppf((1 + level) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return float(np.exp(logs.mean() - width)), float(np.exp(logs.mean() + width))


def _faster(claim: str, data: Reading, results: Results, plan: Plan) -> Finding:
    level, ratios = plan.threshold(claim, "level"), _speed_ups(claim, str(data), results, plan)
    low, high = _interval(ratios, level)
    text = f"speed-up {geometric_mean(ratios):.3f}, {level:.0%} in [{low:.3f}, {high:.3f}]"
    return (True if low > 1 else False if high < 1 else None), text


def _by_as_much(claim: str, data: Reading, results: Results, plan: Plan) -> Finding:
    least, most, level = (plan.threshold(claim, name) for name in ("low", "high", "level"))
    ratios = _speed_ups(claim, str(data), results, plan)
    gain, (low, high) = geometric_mean(ratios), _interval(ratios, level)
    text = f"speed-up {gain:.3f}, {level:.0%} in [{low:.3f}, {high:.3f}]"
    if least <= gain <= most:
        return True, text
    return (None if low <= most and high >= least else False), text


def _hardly(claim: str, pair: Reading, results: Results, plan: Plan) -> Finding:
    """Tell whether the gain on balanced data is small by itself, and small beside the gain on imbalanced data."""
    band, share = plan.threshold(claim, "band"), plan.threshold(claim, "share")
    gain, other = (geometric_mean(_speed_ups(claim, data, results, plan)) for data in pair)
    text = f"speed-up {gain:.3f}, and {other:.3f} on imbalanced data"
    if other <= 1:
        return None, text
    return 1 / band <= gain <= band and abs(math.log(gain)) <= share * math.log(other), text


def _curves_by_beta(runs: Runs, path: Path, loss: str) -> Path:
    names = runs.labels("data")
    grid = [
        [(data, _by_beta(runs.where(data=data)), key) for data in names[at : at + 2]]
        for at in range(0, len(names), 2)
        for key in ("loss", "accuracy")
    ]
    title = f"testing loss and accuracy on unseen clients, {loss}"
    return panels(path, title, grid, x="aggregation", x_label="round", height=1.9)


def _by_beta(runs: Runs) -> Lines:
    betas = sorted(runs.labels("perturbation-beta"), reverse=True)
    return {f"β = {beta:g}": runs.where(perturbation_beta=beta) for beta in betas}


# Figures 4.3 to 4.8 --------------------------------------------------------------------------------------------


def figures_4(results: Results, plan: Plan, folder: Path) -> Report:
    """Figures 4.3 to 4.8: the effect of E, G and γ on the curves by β."""
    report, runs = Report(), results.runs
    for data in runs.labels("data"):
        own = runs.where(data=data)
        for name in LADDERS:
            ladder = _ladder(own, name, plan.threshold("003-4-clipping-1", "free"))
            grid = [
                [(title, _by_beta(own.where(setting=setting)), key) for title, setting in ladder.items()]
                for key in ("loss", "accuracy")
            ]
            title = f"{data}, imbalanced, convex, unseen clients"
            path = folder / f"figure-{name}-{_setting(data)}.png"
            report.figures.append(panels(path, title, grid, x="aggregation", x_label="round"))
        for setting in own.labels("setting"):
            for beta in sorted(own.labels("perturbation-beta"), reverse=True):
                cell = own.where(setting=setting, perturbation_beta=beta)
                ours = [100 * value for value in cell.values("accuracy")]
                title = setting.replace(" ", " = ")
                report.rows.append(Row(f"{data}, {title}, β = {beta:g}: accuracy, %", ours))
    for claim in plan.claims:
        find = next(find for prefix, find in _EFFECTS.items() if claim.startswith(prefix))
        report.verdicts.append(find(claim, results, plan))
    return report


def _ladder(own: Runs, name: str, usual: str) -> dict[str, str]:
    """Return a figure's settings by title, in the order of the varied value; the default setting is among them."""
    prefix, value = LADDERS[name]
    settings = {
        value(run.config): str(run["setting"])
        for run in own
        if str(run["setting"]).startswith(prefix) or run["setting"] == usual
    }
    return {f"{prefix} = {'∞' if math.isinf(at) else f'{at:g}'}": settings[at] for at in sorted(settings)}


def _area(run: Run) -> float:
    """Return the mean over rounds of the accuracy, in %; a faster method has a higher one."""
    return 100 * float(run.column("accuracy")[1:].mean())


def _falls(run: Run) -> float:
    """Sum of the falls of the accuracy from one round to the next, in points: 0 for a curve that only rises."""
    return 100 * float(np.clip(-np.diff(run.column("accuracy")), 0, None).sum())


def _by_seed(
    results: Results, data: str, setting: str, beta: float, measure: Callable[[Run], float]
) -> list[float]:
    cell = results.runs.where(data=data, setting=setting, perturbation_beta=beta)
    return [measure(run) for run in cell]


def _epochs(claim: str, results: Results, plan: Plan) -> Verdict:
    """Tell whether small β is ahead of β = 1, in every seed on every data set."""
    setting, beta = plan.threshold(claim, "setting"), plan.threshold(claim, "beta")
    if missing := results.unready(plan, claim, setting=setting, perturbation_beta=[1.0, beta]):
        return not_run(claim, missing)
    gains = {}
    for data in plan.labels("data"):
        without, with_beta = (_by_seed(results, data, setting, at, _area) for at in (1.0, beta))
        gains[data] = [two - one for one, two in zip(without, with_beta, strict=True)]
    holds = decide(gains.values(), lambda gain: gain > 0, lambda gain: gain < 0)
    return judge(claim, holds, f"points that β = {beta:g} is ahead, by seed: {_listed(gains, '+.2f')}")


def _clipping(claim: str, results: Results, plan: Plan) -> Verdict:
    """Judge the accuracy that clipping costs, at every β, in every seed, on every data set."""
    setting, free, points = (plan.threshold(claim, name) for name in ("setting", "free", "points"))
    if missing := results.unready(plan, claim, setting=[setting, free]):
        return not_run(claim, missing)
    costs = {}
    for data in plan.labels("data"):
        for beta in plan.labels("perturbation-beta"):
            clipped, unbounded = (_by_seed(results, data, each, beta, _area) for each in (setting, free))
            costs[f"{data}, β = {beta:g}"] = [b - a for a, b in zip(clipped, unbounded, strict=True)]
    if claim == "003-4-clipping-1":
        holds = decide(costs.values(), lambda cost: cost >= points, lambda cost: cost < points)
    else:
        holds = decide(costs.values(), lambda cost: abs(cost) <= points, lambda cost: abs(cost) > points)
    return judge(claim, holds, f"points lost at {setting}, by seed: {_listed(costs, '.2f')}")


def _step_size(claim: str, results: Results, plan: Plan) -> Verdict:
    """Tell whether small β falls back more than β = 1, in every seed on every data set."""
    setting, beta, least = (plan.threshold(claim, name) for name in ("setting", "beta", "ratio"))
    if missing := results.unready(plan, claim, setting=setting, perturbation_beta=[1.0, beta]):
        return not_run(claim, missing)
    ratios, shown = {}, []
    for data in plan.labels("data"):
        smooth, rough = (_by_seed(results, data, setting, at, _falls) for at in (1.0, beta))
        ratios[data] = [_ratio(two, one) for one, two in zip(smooth, rough, strict=True)]
        shown.append(f"{data}: {mean(rough):.1f} and {mean(smooth):.1f} points")
    holds = decide(ratios.values(), lambda ratio: ratio >= least, lambda ratio: ratio <= 1)
    evidence = f"falls at β = {beta:g} and 1, {'; '.join(shown)}; ratios by seed: {_listed(ratios, '.2f')}"
    return judge(claim, holds, evidence)


def _ratio(one: float, other: float) -> float:
    """Return the ratio of two numbers; 1 if both are 0."""
    return one / other if other else math.inf if one else 1.0


_EFFECTS: dict[str, Callable[[str, Results, Plan], Verdict]] = {
    "003-4-epochs": _epochs,
    "003-4-clipping": _clipping,
    "003-4-step-size": _step_size,
}


def _listed(cells: dict[str, list[float]], form: str) -> str:
    return "; ".join(
        f"{name}: {', '.join(format(v, form) for v in values)}" for name, values in cells.items()
    )
