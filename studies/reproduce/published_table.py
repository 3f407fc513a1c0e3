"""Tables that others published of their own benchmarks, cell by cell: accuracies, and FLamby's C-indices."""

from collections.abc import Callable, Mapping
from itertools import pairwise
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


# ---- FLamby's Fed-TCGA-BRCA ---------------------------------------------------------------------------------------

METRIC, POOLED = "concordance-of-regions", "concordance"


def _c_index(run: Run) -> float:
    """Return a run's C-index, the mean over the regions' test rows, after its last round."""
    return float(run.column(METRIC)[-1])


def c_indices(results: Results, plan: Plan, folder: Path) -> Report:
    """Judge every method's C-index beside the published one; draw it by round."""
    report, runs = Report(), results.runs
    methods = {method: runs.where(method=method) for method in runs.labels("method")}
    grid = [[(name, methods, column)] for name, column in {"six regions": METRIC, "pooled": POOLED}.items()]
    title = "C-index of test rows; bands: one deviation over seeds"
    labels = {METRIC: "mean over regions", POOLED: "all test rows"}
    report.figures.append(
        panels(folder / "c-index.png", title, grid, x="aggregation", x_label="round", y_label=labels)
    )
    for claim in plan.parts("flamby-c"):
        method, published = plan.threshold(claim, "method"), plan.threshold(claim, "published")
        found = [_c_index(run) for run in runs.where(method=method)]
        report.rows.append(Row(f"{method}: C-index, mean over regions", found, published))
        report.rows.append(
            Row(
                f"{method}: C-index of all test rows",
                [float(run.column(POOLED)[-1]) for run in runs.where(method=method)],
            )
        )
        report.verdicts.append(_near(claim, results.missing(method=method), found, plan))
    report.verdicts.append(_ordered("flamby-order", results, plan))
    return report


def _near(claim: str, missing: str, found: list[float], plan: Plan) -> Verdict:
    if missing:
        return not_run(claim, missing)
    away = mean(found) - plan.threshold(claim, "published")
    by_seed = ", ".join(f"{value:.3f}" for value in found)
    return judge(
        claim,
        abs(away) <= plan.threshold(claim, "margin"),
        f"{mean(found):.3f} ({by_seed}), {away:+.3f} from the published",
    )


def _ordered(claim: str, results: Results, plan: Plan) -> Verdict:
    """The methods' means are in the published order."""
    order = plan.threshold(claim, "order")
    for method in order:
        if missing := results.missing(method=method):
            return not_run(claim, missing)
    means = [mean([_c_index(run) for run in results.runs.where(method=method)]) for method in order]
    return judge(
        claim,
        all(higher > lower for higher, lower in pairwise(means)),
        ", ".join(f"{method} {value:.3f}" for method, value in zip(order, means, strict=True)),
    )
