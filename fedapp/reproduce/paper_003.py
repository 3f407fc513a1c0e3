"""The spectral method against FedAvg: table 4.2 and figure 4.2 of papers/003_4ba4febf91704f25.txt."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

from fedapp.reproduce.curves import Lines, panels
from fedapp.reproduce.experiment import Results
from fedapp.reproduce.plan import Plan, folder_of_plans
from fedapp.reproduce.report import Report, Row, Verdict, judge, not_run
from fedapp.reproduce.runs import Runs, in_all, is_lower, mean

# What one reading of the data says of a claim: whether it holds, and the numbers.
Finding = tuple[bool | None, str]


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
                accuracy, rounds = published[_published_data(data), loss, beta]
                ours = [100 * value for value in cell.values("accuracy")]
                converged = _converged(plan, data)
                report.rows.append(Row(f"{name}: accuracy, %", ours, accuracy))
                report.rows.append(Row(f"{name}: rounds to {converged:.0%}", _rounds(cell, converged), rounds))
        report.figures.append(_curves_by_beta(runs.where(loss=loss), folder / f"figure-4-2-{loss}.png", loss))
    report.verdicts += [
        _on_readings("003-3-direction", results, plan, _faster),
        _on_readings("003-3-magnitude", results, plan, _by_as_much),
        _on_readings("003-3-balanced", results, plan, _hardly),
    ]
    report.notes.append(
        "Section 4.5.5 of the thesis: on balanced FEMNIST, with its own step size, the loss is stable for β = 0.7 and "
        "0.9 and comparatively unstable for β = 0.5. Where β = 0.5 falls behind on balanced data, it is that."
    )
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


def _published_data(data: str) -> str:
    """Return the published setting that a label on the axis ``data`` is a reading of: what stands before a comma."""
    return data.partition(",")[0]


def _converged(plan: Plan, data: str) -> float:
    """Return the accuracy that counts as converged (table 4.1)."""
    return float(plan.setting("converged")[data.split()[0]])


def _rounds(cell: Runs, accuracy: float) -> list[float]:
    return [run.rounds_to(accuracy) for run in cell]


def _on_readings(
    claim: str, results: Results, plan: Plan, find: Callable[[str, str, Results, Plan], Finding]
) -> Verdict:
    """Judge a claim on the registered reading of each setting, the first one in ``data``; show all the others."""
    loss, beta = plan.threshold(claim, "loss"), plan.threshold(claim, "beta")
    registered: dict[str, str] = {}
    for data in plan.threshold(claim, "data"):
        registered.setdefault(_published_data(data), data)
    readings = [data for data in plan.labels("data") if _published_data(data) in registered]

    def lacking(data: str) -> int:
        both = [data, _imbalanced(data)]
        return results.lacking(loss=loss, data=both, perturbation_beta=[1.0, beta])

    if missing := sum(map(lacking, registered.values())):
        return not_run(claim, f"{missing} runs of its readings aren't there")
    found = {data: find(claim, data, results, plan) for data in readings if not lacking(data)}
    words = {True: "would hold", False: "wouldn't hold", None: "would not be decided"}
    parts = [f"{data}: {found[data][1]}" for data in registered.values()]
    others = [
        f"{data} ({words[holds]}): {text}"
        for data, (holds, text) in found.items()
        if data not in registered.values()
    ]
    if others:
        parts.append("other readings: " + "; ".join(others))
    return judge(claim, in_all(found[data][0] for data in registered.values()), "; ".join(parts))


def _imbalanced(data: str) -> str:
    """Return the same reading on imbalanced data."""
    return data.replace(" balanced", " imbalanced")


def _both(claim: str, data: str, results: Results, plan: Plan) -> tuple[list[float], list[float]]:
    """Rounds to convergence by seed at β = 1 and at the claim's β."""
    own = results.runs.where(loss=plan.threshold(claim, "loss"), data=data)
    slow, fast = (
        _rounds(own.where(perturbation_beta=beta), _converged(plan, data))
        for beta in (1.0, plan.threshold(claim, "beta"))
    )
    return slow, fast


def _gain(slow: list[float], fast: list[float]) -> float:
    """Rounds at β = 1 over rounds at β, mean over seeds; NaN if one isn't reached."""
    return mean([one / other for one, other in zip(slow, fast, strict=True)])


def _listed(rounds: list[float]) -> str:
    return ", ".join(f"{value:.0f}" if math.isfinite(value) else "never" for value in rounds)


def _faster(claim: str, data: str, results: Results, plan: Plan) -> Finding:
    slow, fast = _both(claim, data, results, plan)
    return is_lower(fast, slow), f"{_listed(slow)} rounds at β = 1, {_listed(fast)} at β = {_beta(claim, plan)}"


def _by_as_much(claim: str, data: str, results: Results, plan: Plan) -> Finding:
    gain = _gain(*_both(claim, data, results, plan))
    published, close = plan.threshold(claim, "published"), plan.threshold(claim, "close")
    return (abs(gain / published - 1) <= close if math.isfinite(gain) else None), _times(gain, claim, plan)


def _hardly(claim: str, data: str, results: Results, plan: Plan) -> Finding:
    """Tell whether the gain is within the band, into which the gain on imbalanced data mustn't fit."""
    gain, other = (_gain(*_both(claim, each, results, plan)) for each in (data, _imbalanced(data)))
    band = plan.threshold(claim, "band")
    text = f"{_times(gain, claim, plan)}, {_times(other, claim, plan)} on imbalanced data"
    if not math.isfinite(gain):
        return None, text
    if abs(gain - 1) > band:
        return False, text
    return (True if other - 1 > band else None), text


def _beta(claim: str, plan: Plan) -> str:
    return f"{plan.threshold(claim, 'beta'):g}"


def _times(gain: float, claim: str, plan: Plan) -> str:
    if not math.isfinite(gain):
        return "a run doesn't converge"
    return f"β = {_beta(claim, plan)} is {gain:.2f} times as fast"


def _curves_by_beta(runs: Runs, path: Path, loss: str) -> Path:
    names = runs.labels("data")
    grid = [
        [(data, by_beta(runs.where(data=data)), key) for data in names[at : at + 2]]
        for at in range(0, len(names), 2)
        for key in ("loss", "accuracy")
    ]
    title = f"testing loss and accuracy on unseen clients, {loss}"
    return panels(path, title, grid, x="aggregation", x_label="round", height=1.9)


def by_beta(runs: Runs) -> Lines:
    """Return the runs by β, from FedAvg on."""
    betas = sorted(runs.labels("perturbation-beta"), reverse=True)
    return {f"β = {beta:g}": runs.where(perturbation_beta=beta) for beta in betas}
