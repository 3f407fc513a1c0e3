"""How long a server waits: the interval of FedFix and the buffer of FedBuff, each beside other lengths."""

from pathlib import Path

import numpy as np

from fedapp.sweeps.point import labels_along
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, geometric_mean, mean

AUTO = "auto"
SIZE = ", m = "


def intervals(results: Results, plan: Plan, folder: Path) -> Report:
    """Time to the target by scenario and interval, and how many times the best fixed one's it takes with auto."""
    report, judged = Report(), _judged(results, plan)
    for claim in plan.claims:
        scenario, target = plan.threshold(claim, "scenario"), plan.threshold(claim, "target")
        cell = judged.where(time_scenario=scenario)
        times = {
            interval: [time_to(run, target) for run in cell.where(interval=interval)]
            for interval in cell.labels("interval")
        }
        for interval, spent in times.items():
            rate = cell.where(interval=interval)[0].config.lr
            report.rows.append(Row(f"{scenario}, Δt = {interval}, γ = {rate:g}: time to {target:.0%}", spent))
        missing = results.unready(plan, claim, time_scenario=scenario)
        report.verdicts.append(not_run(claim, missing) if missing else _of_auto(claim, plan, times))
    return report


def buffers(results: Results, plan: Plan, folder: Path) -> Report:
    """Final accuracy by cell, discount and buffer, and how far one buffer's is below the best one's, in points."""
    report, judged = Report(), _judged(results, plan)
    tried = sorted(results.runs.labels("lr"))
    for claim in plan.claims:
        cell, discount = plan.threshold(claim, "cell"), plan.threshold(claim, "staleness")
        cases = [case for case in labels_along(plan.grid["case"]) if str(case).startswith(cell + SIZE)]
        own = judged.where(case=cases, staleness_discount=discount)
        of_size = {run.config.buffer_size: own.where(case=run["case"]) for run in own}
        at_end = False
        for size, runs in of_size.items():
            rate = runs[0].config.lr
            edge = ", an end of those tried" if rate in (tried[0], tried[-1]) else ""
            at_end |= bool(edge)
            name = f"{cell}, {discount}{SIZE}{size}, γ = {rate:g}{edge}: final accuracy"
            report.rows.append(Row(name, runs.values("accuracy")))
        missing = results.unready(plan, claim, case=cases, staleness_discount=discount)
        report.verdicts.append(not_run(claim, missing) if missing else _of_size(claim, plan, of_size, at_end))
    return report


def time_to(run: Run, target: float) -> float:
    """Return when the test accuracy first exceeds a target, on the line between two evaluations; else the budget."""
    accuracy, time = run.column("accuracy"), run.column("time")
    reached = np.flatnonzero(accuracy > target)
    if not reached.size:
        return float(run.config.time_budget)
    first = int(reached[0])
    if first == 0:
        return float(time[0])
    part = (target - accuracy[first - 1]) / (accuracy[first] - accuracy[first - 1])
    return float(time[first - 1] + part * (time[first] - time[first - 1]))


def _judged(results: Results, plan: Plan) -> Runs:
    tuned_on = plan.tuning.seeds if plan.tuning else ()
    return Runs(run for run in results.runs if run["seed"] not in tuned_on)


def _of_auto(claim: str, plan: Plan, times: dict[str, list[float]]) -> Verdict:
    best = min((name for name in times if name != AUTO), key=lambda name: geometric_mean(times[name]))
    ratios = [own / other for own, other in zip(times[AUTO], times[best], strict=True)]
    most, middle = plan.threshold(claim, "most"), geometric_mean(ratios)
    holds = True if middle <= most else False if min(ratios) > most else None
    evidence = f"{middle:.2f} times that of Δt = {best} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    return judge(claim, holds, evidence)


def _of_size(claim: str, plan: Plan, of_size: dict[int, Runs], at_end: bool) -> Verdict:
    accuracies = {size: runs.values("accuracy") for size, runs in of_size.items()}
    size, most = plan.threshold(claim, "buffer"), plan.threshold(claim, "most")
    best = max(accuracies, key=lambda each: mean(accuracies[each]))
    points = [100 * (high - low) for high, low in zip(accuracies[best], accuracies[size], strict=True)]
    holds = True if mean(points) <= most else False if min(points) > most else None
    each = ", ".join(f"{point:.2f}" for point in points)
    holds = None if at_end else holds
    return judge(claim, holds, f"m = {size} is {mean(points):.2f} points ({each}) below the best, m = {best}")
