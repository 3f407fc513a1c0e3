"""Asynchronous FedAvg and FedFix: figures 2 to 4 and table 2 of Fraboni et al. 2023."""

import itertools
from pathlib import Path

import numpy as np

from fedapp.data import DataError
from fedapp.report.figures import new_figure, save, style_axes
from fedapp.report.overlay import COLORS
from fedapp.sweeps.point import PlannedRun
from research.reproduce import surrogate_optima
from research.reproduce.curves import Lines, finite, panels
from research.reproduce.experiment import ABSENT, Numbers, Results, data_key
from research.reproduce.plan import Plan
from research.reproduce.report import Report, Row, Verdict, judge, not_run
from research.reproduce.runs import Runs, in_all, is_lower, mean
from research.theory.asynchronous import asynchronous_window, fedfix_window
from research.theory.constants import AssumptionError
from strategies import async_fedavg, fedfix
from strategies.time_scenario import TimeScenario

# The surrogate problem of both schemes is that of identical weights: how often a client answers (eq. 10).
FEDERATED, SURROGATE = "federated-loss", "hardware-loss"
# The federated loss of figure 4, whose methods call it by different names.
LOSS = "objective"
LABELS = {
    FEDERATED: "federated loss",
    f"{FEDERATED}-std": "std. over clients",
    SURROGATE: "surrogate loss",
    f"{SURROGATE}-std": "std. over clients",
}
SCHEMES = ("identical", "time-based")

# A panel of the figure: problem, clients, time scenario; and in it, each method's runs at its best learning rate.
Cell = tuple[str, int, str]
Cells = dict[Cell, dict[str, Runs]]
Ends = set[tuple[Cell, str]]


def measure_figure_2(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Work out the optima of both schemes, by problem and seed, for the problems whose optima 002-2 speaks of.

    They take minutes each: a quick run, which has no verdicts, does without.
    """
    numbers: Numbers = {}
    for name, planned in _with_optima(plan, runs).items():
        try:
            numbers[name] = known.get(name) or surrogate_optima.optima(planned.config, planned.num_clients)
        except (DataError, AssumptionError) as error:
            numbers.setdefault(ABSENT, {})[name] = str(error)
    return numbers


def sources_figure_2(plan: Plan, runs: Runs) -> dict[str, str]:
    """Optima are those of the data and of what else ``surrogate_optima`` reads."""
    return {name: data_key(each, *surrogate_optima.READ) for name, each in _with_optima(plan, runs).items()}


def _with_optima(plan: Plan, runs: Runs) -> dict[str, PlannedRun]:
    """Return a run of each problem and seed whose optima are wanted, by their name."""
    problems = () if plan.is_quick else plan.threshold("002-2-suboptimum", "problems")
    return {
        _optima_name(problem, seed): runs.where(problem=problem, seed=seed)[0].planned
        for problem in problems
        for seed in runs.where(problem=problem, seed=plan.labels("seed")).labels("seed")
    }


def _optima_name(problem: str, seed: int) -> str:
    return f"optima: {problem}, seed {seed}"


def figure_2(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 2: losses and their spread over time."""
    report, judged = Report(), results.runs.where(seed=plan.labels("seed"))
    tuned = {problem: judged.where(problem=problem) for problem in judged.labels("problem")}
    columns: list[tuple[str, Lines]] = [
        (f"{problem}, γ = {own[0]['lr']:g}", {s: own.where(aggregation_weights=s) for s in SCHEMES})
        for problem, own in tuned.items()
    ]
    grid = [[(title, lines, key) for title, lines in columns] for key in LABELS]
    title = "asynchronous FedAvg, F80, 10 clients, K = 1"
    if columns:
        report.figures.append(panels(folder / "figure-2.png", title, grid, y_label=LABELS, height=1.9))
    for problem, own in tuned.items():
        for key, name in LABELS.items():
            name = f"std. of {LABELS[key.removesuffix('-std')]}" if key.endswith("-std") else name
            for scheme in SCHEMES:
                values = own.where(aggregation_weights=scheme).tails(key)
                report.rows.append(Row(f"{problem}, {scheme}: {name}, last 5 %", values))
    report.rows += _optima_rows(results)
    for claim in plan.parts("002-1"):
        report.verdicts.append(_comparison(claim, results, plan, tuned))
    report.verdicts += [_suboptimum(results, plan), _ratio(results, plan)]
    report.extra += _by_rate(results.runs, plan)
    return report


def _by_rate(runs: Runs, plan: Plan) -> list[str]:
    """The federated loss by learning rate: what the tuning chose from."""
    if not plan.tuning:
        return []
    tries = plan.tuning.tries(runs)
    lines = ["## Federated loss by learning rate, last 5 %", "", "| problem | γ | loss | seeds |",
             "|---|--:|--:|--:|"]  # fmt: skip
    for problem in tries.labels("problem"):
        for rate in tries.where(problem=problem).labels("lr"):
            losses = tries.where(problem=problem, lr=rate).tails(FEDERATED)
            lines.append(f"| {problem} | {rate:g} | {mean(losses):.4f} | {len(losses)} |")
    return ["\n".join(lines)]


def _comparison(claim: str, results: Results, plan: Plan, tuned: dict[str, Runs]) -> Verdict:
    """Judge one problem: the metrics of which time-based weights have the lower value, and the higher."""
    problem = plan.threshold(claim, "problem")
    if missing := results.missing(problem=problem):
        return not_run(claim, missing)
    facts, evidence = [], []
    for direction in ("lower", "higher"):
        for key in plan.threshold(claim, direction):
            identical, time_based = (
                tuned[problem].where(aggregation_weights=scheme).tails(key) for scheme in SCHEMES
            )
            pair = (time_based, identical) if direction == "lower" else (identical, time_based)
            facts.append(is_lower(*pair))
            name = f"std. of {LABELS[key.removesuffix('-std')]}" if key.endswith("-std") else LABELS[key]
            count = sum(one < other for one, other in zip(*pair, strict=True))
            evidence.append(
                f"{name} {mean(identical):.4f} → {mean(time_based):.4f} ({direction} in {count} of {len(identical)} "
                "seeds)"
            )
    return judge(claim, in_all(facts), f"identical → time-based: {', '.join(evidence)}")


def _optima_rows(results: Results) -> list[Row]:
    """The two optima, and how far apart they are."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, optima in results.numbers.items():
        found.setdefault(name.removeprefix("optima: ").partition(",")[0], []).append(optima)
    rows = []
    for problem, optima in found.items():
        keys = [key for key in optima[0] if not key.endswith("decrement")]
        rows += [Row(f"{problem}: optimum, {key}", [each[key] for each in optima]) for key in keys]
        rows.append(Row(f"{problem}: identical − federated optimum", [_gap(each) for each in optima]))
    return rows


def _gap(optima: dict[str, float]) -> float:
    """How far above the least federated loss identical weights end."""
    return optima["identical"] - optima["federated-least"]


def _gaps(results: Results, plan: Plan, problem: str) -> list[float]:
    """Return the gaps by seed; empty unless all seeds of the plan have one."""
    names = [_optima_name(problem, seed) for seed in plan.labels("seed")]
    return [_gap(results.numbers[name]) for name in names] if set(names) <= results.numbers.keys() else []


def _suboptimum(results: Results, plan: Plan) -> Verdict:
    """002-2: identical weights have their optimum elsewhere."""
    claim = "002-2-suboptimum"
    least, facts, evidence = plan.threshold(claim, "least"), [], []
    for problem in plan.threshold(claim, "problems"):
        gaps = _gaps(results, plan, problem)
        if not gaps:
            return not_run(claim, f"the optima on {problem} aren't there for every seed")
        optima = [
            results.numbers[_optima_name(problem, seed)]["federated-least"] for seed in plan.labels("seed")
        ]
        shares = [gap / optimum for gap, optimum in zip(gaps, optima, strict=True)]
        facts += [share > least for share in shares]
        evidence.append(f"{problem}: {mean(gaps):.2e}, {mean(shares):.2%} of the optimum")
    holds = all(facts) if len(set(facts)) == 1 else None
    return judge(
        claim, holds, f"federated loss of the identical optimum above the least: {'; '.join(evidence)}"
    )


def _ratio(results: Results, plan: Plan) -> Verdict:
    """002-2: the gap on MNIST-shard against that on MNIST."""
    claim = "002-2-ratio"
    published, close = plan.threshold(claim, "published"), plan.threshold(claim, "close")
    plain, shard = (_gaps(results, plan, problem) for problem in plan.threshold(claim, "problems"))
    if not plain or not shard:
        return not_run(claim, "the optima aren't there for every seed of both problems")
    ratio = mean(shard) / mean(plain)
    by_seed = ", ".join(f"{b / a:.2f}" for a, b in zip(plain, shard, strict=True))
    evidence = f"gaps of {mean(plain):.2e} and {mean(shard):.2e}: ratio {ratio:.2f}; by seed {by_seed}"
    return judge(claim, abs(ratio / published - 1) <= close, evidence)


# Of a problem in figure 3: mean and standard deviation by K, of each scheme.
ByK = dict[str, tuple[list[float], list[float]]]


def figure_3(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 3: mean and standard deviation of the federated loss over the last 5 % of evaluations, by K."""
    report, runs = Report(), results.runs
    steps, problems = sorted(runs.labels("local-steps")), runs.labels("problem")
    title = (
        f"asynchronous FedAvg, F80, 10 clients, γ = {runs[0].config.lr:g}, T = {runs[0].config.time_budget:g}"
    )
    figure = new_figure(1.0 + 2.6 * len(problems), title)
    panes = figure.subplots(len(problems), 2, squeeze=False)
    found: dict[str, ByK] = {}
    for problem, (left, right) in zip(problems, panes, strict=True):
        own = found[problem] = {}
        for scheme, color in zip(SCHEMES, COLORS, strict=False):
            cells = [runs.where(problem=problem, local_steps=K, aggregation_weights=scheme) for K in steps]
            means = [cell.tails(FEDERATED) for cell in cells]
            spreads = [[float(run.tail(FEDERATED).std()) for run in cell] for cell in cells]
            own[scheme] = [mean(v) for v in means], [mean(v) for v in spreads]
            for axes, values in zip((left, right), own[scheme], strict=True):
                axes.plot(steps, values, "o-", color=color, lw=1.5, ms=4, label=scheme)
            for K, level, spread in zip(steps, means, spreads, strict=True):
                name = f"{problem}, K = {K}, {scheme}"
                report.rows.append(Row(f"{name}: mean federated loss, last 5 %", level))
                report.rows.append(Row(f"{name}: its standard deviation", spread))
        for axes, label in ((left, "mean federated loss, last 5 %"), (right, "its standard deviation")):
            style_axes(axes)
            axes.set(xlabel="local steps K", ylabel=label, title=problem)
    panes[0][0].legend(frameon=False, fontsize=9)
    report.figures.append(save(figure, folder / "figure-3.png"))
    for claim in plan.parts("002-3"):
        wanted = plan.threshold(claim, "problems")
        curves = {problem: own for problem, own in found.items() if problem in wanted}
        numbers = [v for own in curves.values() for pair in own.values() for values in pair for v in values]
        if missing := results.missing(problem=wanted):
            report.verdicts.append(not_run(claim, missing))
        elif not finite(*numbers):
            report.verdicts.append(judge(claim, None, "a loss isn't finite"))
        else:
            report.verdicts.append(_LOCAL_WORK[claim](claim, steps, curves, plan))
    return report


def _turns(claim: str, steps: list[int], curves: dict[str, ByK], plan: Plan) -> Verdict:
    """002-3: the mean falls and rises again."""
    rise, turns, shown = plan.threshold(claim, "rise"), [], []
    for problem, own in curves.items():
        for scheme, (level, _) in own.items():
            best = int(np.argmin(level))
            turns.append(min(level[0], level[-1]) >= (1 + rise) * level[best])
            shown.append(
                f"{problem}, {scheme}: {level[0]:.4f} at K = {steps[0]}, lowest {level[best]:.4f} at "
                f"K = {steps[best]}, {level[-1]:.4f} at K = {steps[-1]}"
            )
    return judge(claim, all(turns), "; ".join(shown))


def _grows(claim: str, steps: list[int], curves: dict[str, ByK], plan: Plan) -> Verdict:
    """002-3: the variance only grows."""
    slack, grows, shown = plan.threshold(claim, "slack"), [], []
    for problem, own in curves.items():
        for scheme, (_, spread) in own.items():
            grows.append(bool(np.all(np.array(spread[1:]) >= (1 - slack) * np.array(spread[:-1]))))
            shown.append(f"{problem}, {scheme}: {', '.join(f'{value:.4f}' for value in spread)}")
    return judge(claim, all(grows), f"standard deviation by K, {'; '.join(shown)}")


def _is_sensitive(claim: str, steps: list[int], curves: dict[str, ByK], plan: Plan) -> Verdict:
    """002-3: time-based weights have more of it, with much local work."""
    many, facts, shown = [plan.threshold(claim, "first") <= K for K in steps], [], []
    for problem, own in curves.items():
        identical, time_based = (np.array(own[scheme][1])[many] for scheme in SCHEMES)
        facts.append(bool(np.all(time_based > identical)))
        pairs = zip(identical, time_based, strict=True)
        shown.append(f"{problem}: {', '.join(f'{one:.4f} → {other:.4f}' for one, other in pairs)}")
    return judge(claim, all(facts), f"standard deviation, identical → time-based, {'; '.join(shown)}")


_LOCAL_WORK = {"002-3-mean": _turns, "002-3-variance": _grows, "002-3-sensitive": _is_sensitive}


def figure_4(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 4: federated loss over time of every method at its best learning rate; table 2 evaluated."""
    report, runs = Report(), results.runs.where(seed=plan.labels("seed"))
    tries = plan.tuning.tries(results.runs) if plan.tuning else runs
    cells = _cells(runs)
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
        report.figures.append(_draw_rates(folder, problem, tries.where(problem=problem)))
    for (problem, clients, scenario), best in cells.items():
        for method, cell in best.items():
            name = f"{problem}, {clients} clients, {scenario}, {method} (γ = {cell[0]['lr']:g})"
            report.rows.append(Row(f"{name}: federated loss, last 5 %", cell.tails(LOSS)))
    ends = _at_ends(cells, tries)
    report.verdicts += [_order(claim, results, plan, cells, ends) for claim in plan.parts("002-4")]
    scenarios = list(dict.fromkeys((clients, scenario) for _, clients, scenario in cells))
    if runs:
        report.extra.append(_table_2(scenarios, runs))
    return report


def _draw_rates(folder: Path, problem: str, runs: Runs) -> Path:
    """Draw figures 5 to 7: where each method ends, by learning rate; lines from the lowest to the highest seed."""
    clients, scenarios = runs.labels("num-clients"), runs.labels("time-scenario")
    figure = new_figure(1.0 + 2.4 * len(clients), f"{problem}, K = 10, by learning rate")
    panes = figure.subplots(len(clients), len(scenarios), squeeze=False, sharey=True)
    for (C, scenario), axes in zip(itertools.product(clients, scenarios), panes.flat, strict=True):
        own = runs.where(num_clients=C, time_scenario=scenario)
        for method, color in zip(own.labels("method"), COLORS, strict=False):
            rates = sorted(own.where(method=method).labels("lr"))
            ends = [own.where(method=method, lr=rate).tails(LOSS) for rate in rates]
            axes.plot(rates, [mean(values) for values in ends], "o-", color=color, lw=1.5, ms=4, label=method)
            axes.vlines(
                rates, [min(values) for values in ends], [max(values) for values in ends], color=color
            )
        style_axes(axes)
        axes.set(xscale="log", xlabel="learning rate γ", ylabel="federated loss, last 5 %")
        axes.set_title(f"{scenario}, {C} clients", fontsize=10)
    panes[0][0].legend(frameon=False, fontsize=9)
    return save(figure, folder / f"figures-5-7-{problem.lower()}.png")


def _cells(runs: Runs) -> Cells:
    cells: Cells = {}
    axes = ("problem", "num-clients", "time-scenario")
    for cell in itertools.product(*(runs.labels(axis) for axis in axes)):
        own = runs.where(**dict(zip(axes, cell, strict=True)))
        if own:
            cells[cell] = {method: own.where(method=method) for method in own.labels("method")}
    return cells


def _at_ends(cells: Cells, tries: Runs) -> Ends:
    """Return which methods are best at the first or last learning rate that was tried, by panel."""
    rates = sorted(tries.labels("lr"))
    return {
        (cell, method) for cell, best in cells.items() for method, runs in best.items()
        if runs[0]["lr"] in (rates[0], rates[-1])
    }  # fmt: skip


def _order(claim: str, results: Results, plan: Plan, cells: Cells, ends: Ends) -> Verdict:
    """Judge whether one method is ahead of another in every panel."""
    low, high = plan.threshold(claim, "lower"), plan.threshold(claim, "higher")
    problems, scenarios = plan.threshold(claim, "problems"), plan.threshold(claim, "scenarios")
    if missing := results.missing(problem=problems, time_scenario=scenarios, method=[low, high]):
        return not_run(claim, missing)
    facts, evidence = [], []
    for (problem, clients, scenario), best in cells.items():
        if problem in problems and scenario in scenarios:
            losses = best[low].tails(LOSS), best[high].tails(LOSS)
            at_end = [method for method in (low, high) if ((problem, clients, scenario), method) in ends]
            facts.append(None if at_end else is_lower(*losses))
            remark = f" ({' and '.join(at_end)} at an end of the learning rates)" if at_end else ""
            evidence.append(
                f"{problem}, {clients}, {scenario}: {mean(losses[0]):.3f}, {mean(losses[1]):.3f}{remark}"
            )
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
