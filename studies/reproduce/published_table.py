"""A table of accuracies that others published of their own benchmark, cell by cell."""

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
        best = [best_accuracy(run) for run in runs.where(**cell)]
        published = plan.threshold(claim, "published")
        report.rows.append(
            Row(f"{cell['division']}, {cell['method']}: accuracy of the best round, %", best, published)
        )
        report.verdicts.append(_verdict(claim, results.missing(**cell), best, plan))
    return report


def best_accuracy(run: Run) -> float:
    """Return the test accuracy after a run's best round, in percent."""
    return 100 * float(run.column("accuracy").max())


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
