"""Asynchronous FedAvg, FedFix and FedBuff: figures 2 to 4 and table 2 of papers/002_840aee1ee8a82ff9.txt."""

import math
from pathlib import Path

import numpy as np

from fedapp.report.figures import new_figure, save, style_axes
from fedapp.reproduce.curves import COLORS, Lines, finite, panels
from fedapp.reproduce.report import Report, Row, Verdict, judge
from fedapp.reproduce.runs import Runs, mean
from fedapp.theory.asynchronous import asynchronous_window, fedfix_window
from strategies import async_fedavg, fedfix
from strategies.time_scenario import TimeScenario

# The surrogate problem of both schemes is that of identical weights: how often a client answers (eq. 10).
FEDERATED, SURROGATE = "federated-loss", "hardware-loss"
LABELS = {
    FEDERATED: "federated loss",
    f"{FEDERATED}-std": "its std. over clients",
    SURROGATE: "surrogate loss",
    f"{SURROGATE}-std": "its std. over clients",
}
SCHEMES = ("identical", "time-based")

# Problems for which the paper sees identical weights ahead on the surrogate loss.
SURROGATE_PROBLEMS = ("MNIST", "MNIST-shard", "CIFAR-10")

# With fewer seeds than this, values that differ by less than that, relatively, decide nothing.
MANY_SEEDS = 3
AS_GOOD_AS_EQUAL = 0.01


def figure_2(runs: Runs, folder: Path) -> Report:
    """Figure 2: losses and their spread over time, with the learning rate that suits identical weights best."""
    report = Report()
    tuned = {problem: _tuned(runs.where(problem=problem)) for problem in runs.labels("problem")}
    columns: list[tuple[str, Lines]] = [
        (f"{problem}, γ = {own[0]['lr']:g}", {s: own.where(aggregation_weights=s) for s in SCHEMES})
        for problem, own in tuned.items()
    ]
    grid = [[(title, lines, key) for title, lines in columns] for key in LABELS]
    title = "asynchronous FedAvg, F80, 10 clients, K = 1"
    report.figures.append(panels(folder / "figure-2.png", title, grid, y_label=LABELS, height=1.9))
    for problem, own in tuned.items():
        for key, name in LABELS.items():
            name = f"std. of {LABELS[key.removesuffix('-std')]}" if key.endswith("-std") else name
            for scheme in SCHEMES:
                values = own.where(aggregation_weights=scheme).tails(key)
                report.rows.append(Row(f"{problem}, {scheme}: {name}, last 5 %", values))
    report.verdicts += [_time_based_is_better(tuned), _suboptimum(tuned)]
    for problem in tuned:
        identical = runs.where(problem=problem, aggregation_weights="identical")
        listed = ", ".join(
            f"{rate:g}: {mean(identical.where(lr=rate).tails(FEDERATED)):.4f}" for rate in runs.labels("lr")
        )
        report.notes.append(f"{problem}: federated loss with identical weights by learning rate: {listed}.")
    return report


def _tuned(runs: Runs) -> Runs:
    """Keep the learning rate with the lowest federated loss under identical weights, as the paper does."""

    def loss(rate: float) -> float:
        value = mean(runs.where(lr=rate, aggregation_weights="identical").tails(FEDERATED))
        return value if math.isfinite(value) else math.inf

    return runs.where(lr=min(runs.labels("lr"), key=loss))


def _ends(own: Runs, key: str) -> tuple[list[float], list[float]]:
    identical, time_based = (own.where(aggregation_weights=s).tails(key) for s in SCHEMES)
    return identical, time_based


def _time_based_is_better(tuned: dict[str, Runs]) -> Verdict:
    facts: list[bool | None] = []
    evidence = []
    for problem, own in tuned.items():
        loss, spread, surrogate = (_ends(own, key) for key in (FEDERATED, f"{FEDERATED}-std", SURROGATE))
        if not finite(*map(mean, (*loss, *spread, *surrogate))):
            continue
        facts += [_is_lower(loss[1], loss[0]), _is_lower(spread[1], spread[0])]
        if problem in SURROGATE_PROBLEMS:
            facts.append(_is_lower(surrogate[0], surrogate[1]))
        evidence.append(
            f"{problem}, identical → time-based: federated loss {_arrow(loss)}, its std. {_arrow(spread)}, "
            f"surrogate loss {_arrow(surrogate)}"
        )
    return judge("002-1", _all(facts), "; ".join(evidence))


def _arrow(ends: tuple[list[float], list[float]]) -> str:
    return " → ".join(f"{mean(end):.4f}" for end in ends)


def _suboptimum(tuned: dict[str, Runs]) -> Verdict:
    if not {"MNIST", "MNIST-shard"} <= set(tuned):
        return judge("002-2", None, "needs MNIST and MNIST-shard")
    gaps, there = {}, []
    for problem in ("MNIST", "MNIST-shard"):
        identical, time_based = _ends(tuned[problem], FEDERATED)
        gaps[problem] = mean(identical) - mean(time_based)
        there.append(_is_lower(time_based, identical))
    plain, shard = gaps["MNIST"], gaps["MNIST-shard"]
    if not finite(plain, shard):
        return judge("002-2", None, "runs are missing")
    evidence = f"identical − time-based: {plain:.4f} on MNIST, {shard:.4f} on MNIST-shard"
    if plain > 0:
        evidence += f" ({shard / plain:.1f}×)"
    if all(there):
        there.append(1.5 < shard / plain < 3)
    return judge("002-2", _all(there), evidence)


def figure_3(runs: Runs, folder: Path) -> Report:
    """Figure 3: mean and standard deviation of the federated loss over the last 5 % of aggregations, by K."""
    report = Report()
    steps = runs.labels("local-steps")
    figure = new_figure(
        3.6, f"asynchronous FedAvg on CIFAR-10, F80, 10 clients, γ = {runs[0].config['lr']:g}"
    )
    left, right = figure.subplots(1, 2)
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for scheme, color in zip(SCHEMES, COLORS, strict=False):
        cells = [runs.where(local_steps=K, aggregation_weights=scheme) for K in steps]
        means = [cell.tails(FEDERATED) for cell in cells]
        spreads = [[float(run.tail(FEDERATED).std()) for run in cell] for cell in cells]
        curves[scheme] = [mean(v) for v in means], [mean(v) for v in spreads]
        for axes, values in zip((left, right), curves[scheme], strict=True):
            axes.plot(steps, values, "o-", color=color, lw=1.5, ms=4, label=scheme)
        for K, level, spread in zip(steps, means, spreads, strict=True):
            report.rows.append(Row(f"K = {K}, {scheme}: mean federated loss, last 5 %", level))
            report.rows.append(Row(f"K = {K}, {scheme}: its standard deviation", spread))
    for axes, label in ((left, "mean federated loss, last 5 %"), (right, "its standard deviation")):
        style_axes(axes)
        axes.set(xlabel="local steps K", ylabel=label)
    left.legend(frameon=False, fontsize=9)
    report.figures.append(save(figure, folder / "figure-3.png"))
    report.verdicts.append(_local_work(steps, curves))
    return report


def _local_work(steps: list[int], curves: dict[str, tuple[list[float], list[float]]]) -> Verdict:
    facts, evidence = [], []
    for scheme, (level, spread) in curves.items():
        if not finite(*level, *spread):
            return judge("002-3", None, f"{scheme}: the loss isn't finite for every K")
        best = int(np.argmin(level))
        facts += [0 < best < len(steps) - 1, bool(np.all(np.diff(spread) > 0))]
        evidence.append(
            f"{scheme}: loss {level[0]:.3f} at K = {steps[0]}, lowest {level[best]:.3f} at K = {steps[best]}, "
            f"{level[-1]:.3f} at K = {steps[-1]}; std. {', '.join(f'{value:.3f}' for value in spread)}"
        )
    identical, time_based = (np.array(curves[scheme][1]) for scheme in SCHEMES)
    facts.append(bool(time_based[-1] > identical[-1]))
    return judge("002-3", all(facts), "; ".join(evidence))


def figure_4(runs: Runs, folder: Path) -> Report:
    """Figure 4: federated loss over time of every method at its best learning rate; table 2 evaluated."""
    report = Report()
    facts: list[bool | None] = []
    evidence: list[str] = []
    scenarios: list[tuple[int, str]] = []
    for problem in runs.labels("problem"):
        grid = []
        for clients in runs.labels("num-clients"):
            row = []
            for scenario in runs.labels("time-scenario"):
                own = runs.where(problem=problem, num_clients=clients, time_scenario=scenario)
                if not own:
                    continue
                best = {method: _best_rate(own.where(method=method)) for method in own.labels("method")}
                lines = {f"{method}": cell for method, cell in best.items()}
                row.append((f"{scenario}, {clients} clients", lines, "objective"))
                losses = {method: _objective_tails(cell) for method, cell in best.items()}
                for method, cell in best.items():
                    name = f"{problem}, {clients} clients, {scenario}, {method} (γ = {cell[0]['lr']:g})"
                    report.rows.append(Row(f"{name}: federated loss, last 5 %", _objective_tails(cell)))
                facts += _order(losses, scenario)
                listed = ", ".join(f"{method} {mean(loss):.3f}" for method, loss in losses.items())
                evidence.append(f"{problem}, {clients} clients, {scenario}: {listed}")
                scenarios.append((clients, scenario))
            grid.append(row)
        path = folder / f"figure-4-{problem.lower()}.png"
        title = f"{problem}, K = 10, each method at its best learning rate"
        report.figures.append(panels(path, title, grid, y_label={"objective": "federated loss"}, height=2.6))
    report.verdicts.append(judge("002-4", _all(facts), "; ".join(evidence)))
    interval = float(runs[0].config["fedfix-interval"])
    budget = float(runs[0].config["time-budget"])
    report.extra.append(_table_2(list(dict.fromkeys(scenarios)), interval, budget, runs))
    return report


def _all(facts: list[bool | None]) -> bool | None:
    """False if one fact is; True if all are; None if nothing is known, or something isn't."""
    return False if False in facts else None if None in facts or not facts else True


def _is_lower(low: list[float], high: list[float]) -> bool | None:
    """Tell whether a value is the lower one, seed by seed; None where seeds disagree, or too few say too little."""
    lower = {one < other for one, other in zip(low, high, strict=False)}
    few = min(len(low), len(high)) < MANY_SEEDS
    if len(lower) != 1 or (few and abs(mean(low) / mean(high) - 1) < AS_GOOD_AS_EQUAL):
        return None
    return lower.pop()


def _objective_tails(cell: Runs) -> list[float]:
    return cell.tails("objective")


def _best_rate(runs: Runs) -> Runs:
    def loss(rate: float) -> float:
        value = mean(_objective_tails(runs.where(lr=rate)))
        return value if math.isfinite(value) else math.inf

    return runs.where(lr=min(runs.labels("lr"), key=loss))


def _order(losses: dict[str, list[float]], scenario: str) -> list[bool | None]:
    """Tell whether each loss that should be the lower one is."""
    if not {"sync", "async", "FedFix-0.5"} <= set(losses):
        return []
    pairs = [("FedFix-0.5", "sync"), ("FedFix-0.5", "async")]
    if scenario == "F0":
        pairs.append(("sync", "async"))
    return [_is_lower(losses[low], losses[high]) for low, high in pairs]


def _table_2(scenarios: list[tuple[int, str]], interval: float, budget: float, runs: Runs) -> str:
    """Table 2 with numbers: p_i = 1/C; the delay is the largest staleness seen in our runs."""
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
