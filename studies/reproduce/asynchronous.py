"""Asynchronous FedAvg, its weights and its local work: figures 2 and 3 of Fraboni et al. 2023."""

from pathlib import Path

import numpy as np

from fedapp.data import DataError
from fedapp.report.figures import new_figure, save, style_axes
from fedapp.report.method_styles import COLORS
from fedapp.sweeps.point import PlannedRun
from studies.reproduce import surrogate_optima
from studies.reproduce.curves import Lines, finite, panels
from studies.reproduce.experiment import ABSENT, Numbers, Results, data_key
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, in_all, is_lower, mean
from studies.theory.constants import AssumptionError

# The surrogate problem of both schemes is that of identical weights: how often a client answers (eq. 10).
FEDERATED, SURROGATE = "federated-loss", "hardware-loss"
LABELS = {
    FEDERATED: "federated loss",
    f"{FEDERATED}-std": "std. over clients",
    SURROGATE: "surrogate loss",
    f"{SURROGATE}-std": "std. over clients",
}
SCHEMES = ("identical", "time-based")


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
    at_end = _tuned_to_an_end(results.runs, plan, tuned)
    for claim in plan.parts("002-1"):
        report.verdicts.append(_comparison(claim, results, plan, tuned, at_end))
    report.verdicts += [_suboptimum(results, plan), _ratio(results, plan, tuned)]
    report.extra += _by_rate(results.runs, plan)
    return report


def _by_rate(runs: Runs, plan: Plan) -> list[str]:
    """The federated loss by learning rate: what the tuning chose from."""
    if not plan.tuning:
        return []
    tries = plan.tuning.tries(runs)
    lines = [
        "## Federated loss by learning rate, last 5 %",
        "",
        "| problem | γ | loss | seeds |",
        "|---|--:|--:|--:|",
    ]
    for problem in tries.labels("problem"):
        for rate in tries.where(problem=problem).labels("lr"):
            losses = tries.where(problem=problem, lr=rate).tails(FEDERATED)
            lines.append(f"| {problem} | {rate:g} | {mean(losses):.4f} | {len(losses)} |")
    return ["\n".join(lines)]


def _tuned_to_an_end(runs: Runs, plan: Plan, tuned: dict[str, Runs]) -> set[str]:
    """Return the problems whose learning rate is the first or the last that was tried."""
    if not plan.tuning:
        return set()
    tries = plan.tuning.tries(runs)
    found = set()
    for problem, own in tuned.items():
        rates = tries.where(problem=problem).labels("lr")
        if own[0]["lr"] in (min(rates), max(rates)):
            found.add(problem)
    return found


def _comparison(
    claim: str, results: Results, plan: Plan, tuned: dict[str, Runs], at_end: set[str]
) -> Verdict:
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
    remark = f"; γ = {tuned[problem][0]['lr']:g} is an end of those tried" if problem in at_end else ""
    holds = None if problem in at_end else in_all(facts)
    return judge(claim, holds, f"identical → time-based: {', '.join(evidence)}{remark}")


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


def _ratio(results: Results, plan: Plan, tuned: dict[str, Runs]) -> Verdict:
    """002-2: how far the learnt models are apart on MNIST-shard, against MNIST; beside it the two optima."""
    claim = "002-2-ratio"
    published, close = plan.threshold(claim, "published"), plan.threshold(claim, "close")
    problems = plan.threshold(claim, "problems")
    if missing := results.missing(problem=problems):
        return not_run(claim, missing)
    plain, shard = (_learnt_gaps(tuned[problem]) for problem in problems)
    evidence = f"learnt models: {_ratio_of(plain, shard)}"
    of_optima = [_gaps(results, plan, problem) for problem in problems]
    if all(of_optima):
        evidence += f". Optima: {_ratio_of(*of_optima)}"
    return judge(claim, abs(mean(shard) / mean(plain) / published - 1) <= close, evidence)


def _learnt_gaps(runs: Runs) -> list[float]:
    """Return by how much the federated loss is higher with identical weights, over the last 5 %, by seed."""
    identical, time_based = (runs.where(aggregation_weights=scheme).tails(FEDERATED) for scheme in SCHEMES)
    return [one - other for one, other in zip(identical, time_based, strict=True)]


def _ratio_of(plain: list[float], shard: list[float]) -> str:
    by_seed = ", ".join(f"{b / a:.2f}" for a, b in zip(plain, shard, strict=True))
    ratio = mean(shard) / mean(plain)
    return f"gaps of {mean(plain):.2e} and {mean(shard):.2e}, ratio {ratio:.2f}; by seed {by_seed}"


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
