"""FedAvg, asynchronous FedAvg and FedFix at equal time: figures 4 to 7 and table 2 of Fraboni et al. 2023."""

import itertools
import math
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogFormatter

from fedapp.config import Value
from fedapp.report.figures import new_figure, save, style_axes
from fedapp.report.method_styles import styles_of
from strategies.methods import async_fedavg, fedfix
from strategies.timing.time_scenario import TimeScenario
from studies.reproduce.curves import panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, in_all, is_lower, mean
from studies.theory.asynchronous import asynchronous_window, fedfix_window

# The metric of the federated loss, under whatever name a method logs it (`Run.column`).
LOSS = "objective"

# A panel of figure 4 is a problem, a number of clients and a time scenario; a method has its runs by learning rate.
Cell = tuple[str, int, str]
ByRate = dict[float, Runs]
Cells = dict[Cell, dict[str, ByRate]]


def figure_4(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 4: federated loss over time, each method at its best learning rate; figures 5 to 7; table 2 evaluated.

    A label on the axis ``method`` is a method's name and a learning rate, "async, γ = 0.001", because the methods
    have different rates.
    """
    report, runs = Report(), results.runs
    cells = _cells(runs)
    for problem in runs.labels("problem"):
        grid = [
            [
                (f"{scenario}, {clients} clients", _best(cells[problem, clients, scenario]), LOSS)
                for scenario in runs.labels("time-scenario")
                if (problem, clients, scenario) in cells
            ]
            for clients in runs.labels("num-clients")
        ]
        path = folder / f"figure-4-{problem.lower()}.png"
        title = f"{problem}, K = {runs[0].config.local_steps}, each method at its best learning rate"
        report.figures.append(panels(path, title, grid, y_label={LOSS: "federated loss"}, height=2.6))
        report.figures.append(_draw_rates(folder, problem, cells))
    for (problem, clients, scenario), methods in cells.items():
        for method, by_rate in methods.items():
            best = _best_rate(by_rate)
            for rate, own in by_rate.items():
                name = f"{problem}, {clients} clients, {scenario}, {method}, γ = {rate:g}"
                mark = " (best)" if rate == best else ""
                report.rows.append(Row(f"{name}{mark}: federated loss, last 5 %", own.tails(LOSS)))
    orders = [claim for claim in plan.parts("002-4") if "lower" in plan.claims[claim].thresholds]
    report.verdicts += [_order(claim, results, plan, cells) for claim in orders]
    scenarios = list(dict.fromkeys((clients, scenario) for _, clients, scenario in cells))
    if runs:
        report.extra.append(_table_2(scenarios, runs))
    return report


def _cells(runs: Runs) -> Cells:
    cells: Cells = {}
    for run in runs:
        cell = (str(run["problem"]), int(run["num-clients"]), str(run["time-scenario"]))
        of_method = cells.setdefault(cell, {}).setdefault(_method_in(run["method"]), {})
        of_method[run.config.lr] = Runs([*of_method.get(run.config.lr, ()), run])
    return cells


def _method_in(label: Value) -> str:
    """Return the method that a label "method, γ = 0.001" is of."""
    return str(label).partition(",")[0]


def _best_rate(by_rate: ByRate) -> float:
    """Return the learning rate with the lowest mean loss over seeds; a rate that diverges on a seed counts as ∞."""

    def score(rate: float) -> float:
        score = mean(by_rate[rate].tails(LOSS))
        return score if math.isfinite(score) else math.inf

    return min(sorted(by_rate), key=score)


def _best(methods: dict[str, ByRate]) -> dict[str, Runs]:
    """Return each method's runs at its best learning rate."""
    return {method: by_rate[_best_rate(by_rate)] for method, by_rate in methods.items()}


def _draw_rates(folder: Path, problem: str, cells: Cells) -> Path:
    """Draw figures 5 to 7: final loss by learning rate, with a line from the lowest to the highest seed."""
    own = {cell[1:]: methods for cell, methods in cells.items() if cell[0] == problem}
    clients, scenarios = (list(dict.fromkeys(key)) for key in zip(*own, strict=True))
    figure = new_figure(1.0 + 2.4 * len(clients), f"{problem}, by learning rate")
    panes = figure.subplots(len(clients), len(scenarios), squeeze=False, sharey=True)
    for (C, scenario), axes in zip(itertools.product(clients, scenarios), panes.flat, strict=True):
        style_axes(axes)
        # On a log axis: rates lie decades apart, and losses explode where a rate is too large.
        axes.set(xscale="log", yscale="log", xlabel="learning rate γ", ylabel="federated loss, last 5 %")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())  # within one decade 2.2 and not 2.2 × 10⁰
        axes.set_title(f"{scenario}, {C} clients", fontsize=10)
        methods = own.get((C, scenario), {})
        looks = styles_of(next(iter(by_rate.values()))[0].config.strategy for by_rate in methods.values())
        for (method, by_rate), look in zip(methods.items(), looks, strict=True):
            rates = sorted(by_rate)
            ends = [by_rate[rate].tails(LOSS) for rate in rates]
            axes.plot(
                rates,
                [mean(values) for values in ends],
                lw=1.5,
                label=method,
                **look.line(),
            )
            axes.vlines(
                rates, [min(values) for values in ends], [max(values) for values in ends], color=look.color
            )
    panes[0][0].legend(frameon=False, fontsize=9)
    return save(figure, folder / f"figures-5-7-{problem.lower()}.png")


def _order(claim: str, results: Results, plan: Plan, cells: Cells) -> Verdict:
    """Judge whether one method is ahead of another in every panel, each at its best learning rate."""
    low, high = plan.threshold(claim, "lower"), plan.threshold(claim, "higher")
    problems, scenarios = plan.threshold(claim, "problems"), plan.threshold(claim, "scenarios")
    labels = [label for label in plan.labels("method") if _method_in(label) in (low, high)]
    if missing := results.missing(problem=problems, time_scenario=scenarios, method=labels):
        return not_run(claim, missing)
    facts, evidence = [], []
    for (problem, clients, scenario), methods in cells.items():
        if problem in problems and scenario in scenarios:
            best, shown, at_end = {}, [], False
            for method in (low, high):
                rates = sorted(methods[method])
                rate = _best_rate(methods[method])
                best[method] = methods[method][rate].tails(LOSS)
                end = rate in (rates[0], rates[-1])
                at_end |= end
                shown.append(f"{mean(best[method]):.3f} (γ = {rate:g}{', an end' if end else ''})")
            facts.append(None if at_end else is_lower(best[low], best[high]))
            ahead = sum(ours < others for ours, others in zip(best[low], best[high], strict=True))
            shown.append(f"lower in {ahead} of {len(best[low])} seeds")
            evidence.append(f"{problem}, {clients}, {scenario}: {', '.join(shown)}")
    return judge(claim, in_all(facts), f"loss of {low} and of {high}, {'; '.join(evidence)}")


def _table_2(scenarios: list[tuple[int, str]], runs: Runs) -> str:
    """Table 2 with numbers: p_i = 1/C; the delay is the largest staleness seen in our runs."""
    given, budget = runs[0].config.fedfix_interval, runs[0].config.time_budget
    lines = [
        f"## Table 2, evaluated for these scenarios (T = {budget:g}, Δt = {given} for FedFix)",
        "",
        "| clients, scenario | method | d_i | N | Δt | α | β | delay τ | window W |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for clients, scenario in scenarios:
        times = TimeScenario(scenario, clients, 0).means
        own = runs.where(num_clients=clients, time_scenario=scenario)
        slowest = times.max()
        arrivals = float((budget / times).sum())
        by_arrival = async_fedavg.contribution_periods(times) / clients
        interval = fedfix.interval_of(given, times)
        periods = fedfix.contribution_periods(times, interval)
        rows = [
            ("sync", np.full(clients, 1 / clients), budget / slowest, slowest, 1, "0", 1),
            (
                "async",
                by_arrival,
                arrivals,
                budget / arrivals,
                0,
                f"{by_arrival.max():.3g}",
                asynchronous_window([float(time) for time in times]),
            ),
            (
                "FedFix-0.5",
                periods / clients,
                budget / interval,
                interval,
                1,
                "0",
                fedfix_window([int(period) for period in periods]),
            ),
        ]
        for method, d, number, step, alpha, beta, window in rows:
            stale = [run.column("staleness-max") for run in own if _method_in(run["method"]) == method]
            seen = [float(np.nanmax(column)) for column in stale if np.isfinite(column).any()]
            delay = "0" if method == "sync" else f"{max(seen):.0f}" if seen else "–"
            lines.append(
                f"| {clients}, {scenario} | {method} | {d.min():.3g} to {d.max():.3g} | {number:.0f} | {step:.3g} "
                f"| {alpha} | {beta} | {delay} | {_count(window)} |"
            )
    return "\n".join(lines)


def _count(number: int) -> str:
    return str(number) if number < 1e6 else f"{number:.1e}" if number < 1e300 else "> 1e300"
