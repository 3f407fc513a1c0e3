"""FedBuff with buffers of several sizes: accuracy after the same time, by clients, data, speeds and discount."""

from pathlib import Path

from fedapp.sweeps.point import labels_along
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, mean

SIZE = ", m = "


def compare(results: Results, plan: Plan, folder: Path) -> Report:
    """Final accuracy by cell and buffer, and how far one buffer's is below the best one's, in points."""
    report = Report()
    tried = sorted(results.runs.labels("lr"))
    judged = Runs(
        run for run in results.runs if run["seed"] not in (plan.tuning.seeds if plan.tuning else ())
    )
    for claim in plan.claims:
        cell, discount = plan.threshold(claim, "cell"), plan.threshold(claim, "staleness")
        cases = [case for case in labels_along(plan.grid["case"]) if str(case).startswith(cell + SIZE)]
        own = judged.where(case=cases, staleness_discount=discount)
        buffers = {run.config.buffer_size: own.where(case=run["case"]) for run in own}
        for size, runs in buffers.items():
            rate = runs[0].config.lr
            edge = ", an end of those tried" if rate in (tried[0], tried[-1]) else ""
            name = f"{cell}, {discount}{SIZE}{size}, γ = {rate:g}{edge}: final accuracy"
            report.rows.append(Row(name, runs.values("accuracy")))
        missing = results.unready(plan, claim, case=cases, staleness_discount=discount)
        report.verdicts.append(not_run(claim, missing) if missing else _verdict(claim, plan, buffers))
    return report


def _verdict(claim: str, plan: Plan, buffers: dict[int, Runs]) -> Verdict:
    accuracies = {size: runs.values("accuracy") for size, runs in buffers.items()}
    size, most = plan.threshold(claim, "buffer"), plan.threshold(claim, "most")
    best = max(accuracies, key=lambda each: mean(accuracies[each]))
    points = [100 * (high - low) for high, low in zip(accuracies[best], accuracies[size], strict=True)]
    holds = True if mean(points) <= most else False if min(points) > most else None
    each = ", ".join(f"{point:.2f}" for point in points)
    return judge(claim, holds, f"m = {size} is {mean(points):.2f} points ({each}) below the best, m = {best}")
