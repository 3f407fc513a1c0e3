"""A table of accuracies that others published of their own benchmark, cell by cell."""

from collections.abc import Callable, Mapping
from pathlib import Path

from studies.reproduce.curves import panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, mean


def accuracies(results: Results, plan: Plan, folder: Path) -> Report:
    """Judge every claim, a cell of the table: a division of the data and a method; draw accuracy by round."""
    report, runs = Report(), results.runs
    grid = [
        [(division, {method: runs.where(division=division, method=method) for method in methods}, "accuracy")]
        for division in runs.labels("division")
        if (methods := runs.where(division=division).labels("method"))
    ]
    title = f"{plan.base['num-clients']} clients; bands: one deviation over seeds"
    labels = {"accuracy": "test accuracy"}
    report.figures.append(
        panels(folder / "accuracy.png", title, grid, x="aggregation", x_label="round", y_label=labels)
    )
    for claim in plan.claims:
        cell = {name: plan.threshold(claim, name) for name in ("division", "method")}
        of, measure = MEASURES[plan.setting("accuracy-of")]
        found = [100 * measure(run) for run in runs.where(**cell)]
        published = plan.threshold(claim, "published")
        report.rows.append(
            Row(f"{cell['division']}, {cell['method']}: accuracy of {of}, %", found, published)
        )
        report.verdicts.append(_verdict(claim, results.missing(**cell), found, plan))
    return report


MEASURES: Mapping[str, tuple[str, Callable[[Run], float]]] = {
    "best": ("the best round", lambda run: float(run.column("accuracy").max())),
    "end": ("the last 5 % of the rounds", lambda run: float(run.tail("accuracy").mean())),
}
"""What of a run's test accuracies is compared with the published one."""


def _verdict(claim: str, missing: str, best: list[float], plan: Plan) -> Verdict:
    """A cell holds where our mean is as near to the published one as its deviation, or a fixed margin, allows."""
    if missing:
        return not_run(claim, missing)
    published, deviation, points = (
        plan.threshold(claim, name) for name in ("published", "deviation", "points")
    )
    away = mean(best) - published
    by_seed = ", ".join(f"{value:.2f}" for value in best)
    return judge(
        claim,
        abs(away) <= max(2 * deviation, points),
        f"{mean(best):.2f} % ({by_seed}), {away:+.2f} points from the published",
    )
