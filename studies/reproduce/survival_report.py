"""FLamby's table on Fed-TCGA-BRCA: the C-index of methods that train Cox's regression in six regions."""

from itertools import pairwise
from pathlib import Path

from studies.reproduce.curves import panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, mean

METRIC, POOLED = "concordance-of-regions", "concordance"


def at_the_end(run: Run) -> float:
    """Return a run's C-index, the mean over the regions' test rows, after its last round."""
    return float(run.column(METRIC)[-1])


def tcga(results: Results, plan: Plan, folder: Path) -> Report:
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
        found = [at_the_end(run) for run in runs.where(method=method)]
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
    means = [mean([at_the_end(run) for run in results.runs.where(method=method)]) for method in order]
    return judge(
        claim,
        all(higher > lower for higher, lower in pairwise(means)),
        ", ".join(f"{method} {value:.3f}" for method, value in zip(order, means, strict=True)),
    )
