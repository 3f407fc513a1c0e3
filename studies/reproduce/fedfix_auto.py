"""FedFix with the interval that it chooses by itself, beside fixed ones: time to an accuracy, by time scenario."""

from pathlib import Path

import numpy as np

from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, geometric_mean

AUTO = "auto"


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


def compare(results: Results, plan: Plan, folder: Path) -> Report:
    """Time to the target by scenario and interval, and how many times the best fixed one's it takes with auto."""
    report = Report()
    judged = Runs(
        run for run in results.runs if run["seed"] not in (plan.tuning.seeds if plan.tuning else ())
    )
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
        report.verdicts.append(_verdict(claim, results, plan, times))
    return report


def _verdict(claim: str, results: Results, plan: Plan, times: dict[str, list[float]]) -> Verdict:
    if missing := results.unready(plan, claim, time_scenario=plan.threshold(claim, "scenario")):
        return not_run(claim, missing)
    best = min((name for name in times if name != AUTO), key=lambda name: geometric_mean(times[name]))
    ratios = [own / other for own, other in zip(times[AUTO], times[best], strict=True)]
    most, middle = plan.threshold(claim, "most"), geometric_mean(ratios)
    holds = True if middle <= most else False if min(ratios) > most else None
    evidence = f"{middle:.2f} times that of Δt = {best} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    return judge(claim, holds, evidence)
