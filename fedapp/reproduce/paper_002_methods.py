"""Sync, async, FedFix and FedBuff at equal time: figure 4 and table 2 of papers/002_840aee1ee8a82ff9.txt."""

import itertools
import math
from pathlib import Path

import numpy as np

from fedapp.reproduce.curves import panels
from fedapp.reproduce.experiment import Results
from fedapp.reproduce.plan import Plan
from fedapp.reproduce.report import Report, Row, Verdict, judge, not_run
from fedapp.reproduce.runs import Runs, in_all, is_lower, mean
from fedapp.theory.asynchronous import asynchronous_window, fedfix_window
from strategies import async_fedavg, fedfix
from strategies.time_scenario import TimeScenario

LOSS = "objective"

# A panel of the figure: problem, clients, time scenario; and in it, each method's runs at its best learning rate.
Cell = tuple[str, int, str]
Cells = dict[Cell, dict[str, Runs]]


def figure_4(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 4: federated loss over time of every method at its best learning rate; table 2 evaluated."""
    report, runs = Report(), results.runs
    cells = _best(runs)
    for problem in runs.labels("problem"):
        grid = [
            [
                (f"{scenario}, {clients} clients", cells[problem, clients, scenario], LOSS)
                for scenario in runs.labels("time-scenario")
                if (problem, clients, scenario) in cells
            ]
            for clients in runs.labels("num-clients")
        ]
        path = folder / f"figure-4-{problem.lower()}.png"
        title = f"{problem}, K = 10, each method at its best learning rate"
        report.figures.append(panels(path, title, grid, y_label={LOSS: "federated loss"}, height=2.6))
    for (problem, clients, scenario), best in cells.items():
        for method, cell in best.items():
            name = f"{problem}, {clients} clients, {scenario}, {method} (γ = {cell[0]['lr']:g})"
            report.rows.append(Row(f"{name}: federated loss, last 5 %", cell.tails(LOSS)))
    report.verdicts += [_order(claim, results, plan, cells) for claim in plan.parts("002-4")]
    scenarios = list(dict.fromkeys((clients, scenario) for _, clients, scenario in cells))
    report.extra.append(_table_2(scenarios, runs))
    return report


def _best(runs: Runs) -> Cells:
    cells: Cells = {}
    axes = ("problem", "num-clients", "time-scenario")
    for cell in itertools.product(*(runs.labels(axis) for axis in axes)):
        own = runs.where(**dict(zip(axes, cell, strict=True)))
        if own:
            cells[cell] = {method: _best_rate(own.where(method=method)) for method in own.labels("method")}
    return cells


def _best_rate(runs: Runs) -> Runs:
    def loss(rate: float) -> float:
        value = mean(runs.where(lr=rate).tails(LOSS))
        return value if math.isfinite(value) else math.inf

    return runs.where(lr=min(runs.labels("lr"), key=loss))


def _order(claim: str, results: Results, plan: Plan, cells: Cells) -> Verdict:
    """Judge whether one method is ahead of another in every panel."""
    low, high = plan.threshold(claim, "lower"), plan.threshold(claim, "higher")
    problems, scenarios = plan.threshold(claim, "problems"), plan.threshold(claim, "scenarios")
    if lacking := results.lacking(problem=problems, time_scenario=scenarios, method=[low, high]):
        return not_run(claim, f"{lacking} runs of {low} and {high} aren't there")
    facts, evidence = [], []
    for (problem, clients, scenario), best in cells.items():
        if problem in problems and scenario in scenarios:
            losses = best[low].tails(LOSS), best[high].tails(LOSS)
            facts.append(is_lower(*losses))
            evidence.append(f"{problem}, {clients}, {scenario}: {mean(losses[0]):.3f}, {mean(losses[1]):.3f}")
    return judge(claim, in_all(facts), f"loss of {low} and of {high}, {'; '.join(evidence)}")


def _table_2(scenarios: list[tuple[int, str]], runs: Runs) -> str:
    """Table 2 with numbers: p_i = 1/C; the delay is the largest staleness seen in our runs."""
    interval, budget = runs[0].config.fedfix_interval, runs[0].config.time_budget
    lines = [
        f"## Table 2, evaluated for these scenarios (T = {budget:g}, Δt = {interval:g} for FedFix)",
        "",
        "| clients, scenario | method | d_i | N | Δt | α | β | delay τ | window W |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for clients, scenario in scenarios:
        times = TimeScenario(scenario, clients, 0).means
        own = runs.where(num_clients=clients, time_scenario=scenario)
        slowest = times.max()
        arrivals = float((budget / times).sum())
        by_arrival = async_fedavg.periods(times) / clients
        periods = fedfix.periods(times, interval)
        rows = [
            ("sync", np.full(clients, 1 / clients), budget / slowest, slowest, 1, "0", 1),
            ("async", by_arrival, arrivals, budget / arrivals, 0, f"{by_arrival.max():.3g}",
             asynchronous_window([float(time) for time in times])),
            ("FedFix-0.5", periods / clients, budget / interval, interval, 1, "0",
             fedfix_window([int(period) for period in periods])),
        ]  # fmt: skip
        for method, d, number, step, alpha, beta, window in rows:
            stale = [run.column("staleness-max") for run in own.where(method=method)]
            seen = [float(np.nanmax(column)) for column in stale if np.isfinite(column).any()]
            delay = "0" if method == "sync" else f"{max(seen):.0f}" if seen else "–"
            lines.append(
                f"| {clients}, {scenario} | {method} | {d.min():.3g} to {d.max():.3g} | {number:.0f} | {step:.3g} "
                f"| {alpha} | {beta} | {delay} | {_count(window)} |"
            )
    return "\n".join(lines)


def _count(number: int) -> str:
    return str(number) if number < 1e6 else f"{number:.1e}" if number < 1e300 else "> 1e300"
