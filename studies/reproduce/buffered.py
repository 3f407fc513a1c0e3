"""FedBuff against rounds, to the same accuracy with as many clients at work: Nguyen et al. 2022.

``speed_up`` has rounds without momentum, and one server step size. ``tuned_speed_up`` has FedAsync and rounds with
server momentum too, and tunes each method's server step size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedapp.report.figures import new_figure, save, style_axes
from fedapp.report.method_styles import styles_of
from strategies import REGISTRY, AsynchronousStrategy
from strategies.rounds.participation import Participation
from studies.reproduce.curves import panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, decide, geometric_mean

BUFFERED = "FedBuff"

METHODS = ("FedAvg", "FedProx", BUFFERED)

Cost = Callable[[Run], np.ndarray]


def updates(run: Run) -> np.ndarray:
    """Return the client updates that went into the model, by evaluation."""
    return run.column("aggregation") * _each(run)


def _each(run: Run) -> int:
    """Return how many client updates make a new model."""
    config = run.config
    if issubclass(REGISTRY[config.strategy], AsynchronousStrategy):
        return config.buffer_size if config.strategy == "fedbuff" else 1
    scheme = Participation.parse(config.participation, config.fraction_train)
    return scheme.sample_size(run.planned.num_clients)


def seconds(run: Run) -> np.ndarray:
    """Return virtual time, by evaluation."""
    return run.column("time")


def cost_to(run: Run, target: float, cost: Cost) -> float:
    """Return what a run had spent when its accuracy first exceeded the target; NaN if it never did."""
    return run.at_accuracy(target, cost(run))


def case_of(concurrency: str, method: str) -> str:
    """Return the label of a case: how many clients are at work, and the method."""
    return f"{concurrency} at work, {method}"


def speed_up(results: Results, plan: Plan, folder: Path) -> Report:
    """Client updates and time to the target by method and concurrency, and how many times fewer FedBuff takes."""
    report = Report()
    target = plan.threshold("fedbuff-1-updates", "target")
    rates = _rates(results.runs, plan)
    judged = {case: _judged(results.runs, plan, case, rate) for case, rate in rates.items()}
    if any(judged.values()):
        report.figures.append(_draw(folder / "speed-up.png", judged))
    for case, cell in judged.items():
        for name, cost in (("client updates", updates), ("virtual time", seconds)):
            spent = [cost_to(run, target, cost) for run in cell]
            report.rows.append(Row(f"{case}, γ = {rates[case]:g}: {name} to {target:.0%}", spent))
    found = _Found(results, plan, rates, judged)
    report.verdicts = [
        _cheaper("fedbuff-1-updates", updates, found),
        _magnitude(found),
        _grows(found),
        _cheaper("fedbuff-1-time", seconds, found),
    ]
    report.extra.append(_tuning(results.runs, plan))
    return report


@dataclass(frozen=True)
class _Found:
    """The step size of each case, and the case's runs with this step size on the seeds that are judged."""

    results: Results
    plan: Plan
    rates: dict[str, float]
    judged: dict[str, Runs]

    def missing(self, cases: list[str]) -> str:
        """Say which runs of some cases are missing; empty if none are."""
        for case in cases:
            tuned = self.results.missing(case=case, seed=self.plan.setting("tuning-seed"))
            if missing := tuned or self.results.missing(case=case, lr=self.rates[case]):
                return f"{case}: {missing}"
        return ""

    def at_end(self, case: str) -> bool:
        """Tell whether a case's step size is the first or the last that was tried."""
        tried = self.results.runs.where(seed=self.plan.setting("tuning-seed"), case=case).labels("lr")
        return self.rates[case] in (min(tried), max(tried))

    def judge(self, claim: str, holds: bool | None, evidence: str, cases: list[str]) -> Verdict:
        """Judge a claim: not decided if a case might have done better beyond the step sizes that were tried."""
        return judge(claim, None if any(map(self.at_end, cases)) else holds, evidence)


def _score(run: Run) -> float:
    """Return the mean test accuracy over a run's evaluations; −∞ if it isn't finite."""
    score = float(run.column("accuracy").mean())
    return score if math.isfinite(score) else -math.inf


def _rates(runs: Runs, plan: Plan) -> dict[str, float]:
    """Return the step size that each case did best with on the seed that isn't judged."""
    tuned = runs.where(seed=plan.setting("tuning-seed"))
    return {case: max(tuned.where(case=case), key=_score).config.lr for case in tuned.labels("case")}


def _judged(runs: Runs, plan: Plan, case: str, rate: float) -> Runs:
    own = runs.where(case=case, lr=rate)
    return Runs(run for run in own if run["seed"] != plan.setting("tuning-seed"))


def _tuning(runs: Runs, plan: Plan) -> str:
    """Write the scores by which the step sizes were chosen."""
    tuned = runs.where(seed=plan.setting("tuning-seed"))
    rates = sorted(tuned.labels("lr"))
    lines = [
        "## Test accuracy by step size, mean over the evaluations of the seed that isn't judged",
        "",
        f"| | {' | '.join(f'γ = {rate:g}' for rate in rates)} |",
        "|---|" + "--:|" * len(rates),
    ]
    for case in tuned.labels("case"):
        scores = [[_score(run) for run in tuned.where(case=case, lr=rate)] for rate in rates]
        lines.append(f"| {case} | {' | '.join(f'{score[0]:.4f}' if score else '–' for score in scores)} |")
    return "\n".join(lines)


def _draw(path: Path, judged: dict[str, Runs]) -> Path:
    """Draw accuracy against client updates, and against time, a column for each concurrency."""
    figure = new_figure(5.4, "MNIST, 1000 clients unlike in data, half-normal task times")
    columns = list(dict.fromkeys(case.partition(" ")[0] for case in judged))
    grid = figure.subplots(2, len(columns), squeeze=False)
    for row, (label, cost) in zip(
        grid, (("client updates", updates), ("virtual time", seconds)), strict=True
    ):
        for axes, concurrency in zip(row, columns, strict=True):
            style_axes(axes)
            for method, look in zip(METHODS, styles_of(map(str.lower, METHODS)), strict=True):
                for number, run in enumerate(judged.get(case_of(concurrency, method), Runs([]))):
                    name = "_" if number else method
                    values = run.column("accuracy")
                    axes.plot(cost(run), values, lw=1, alpha=0.8, label=name, **look.line(values))
            axes.set(xlabel=label, ylabel="test accuracy", ylim=(0, 1), title=f"{concurrency} at work")
            axes.title.set_fontsize(9)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(names) or 1, frameon=False, fontsize=9
    )
    return save(figure, path)


@dataclass(frozen=True)
class _Ratios:
    """Ratios of another method's cost to FedBuff's, by seed.

    ``at_least``: on some seed the other method doesn't reach the target, and counts with its whole cost. NaN where
    FedBuff doesn't reach it.
    """

    values: list[float]
    at_least: bool = False
    remark: str = ""

    def __str__(self) -> str:
        by_seed = ", ".join(f"{ratio:.2f}" for ratio in self.values)
        return f"{'≥ ' if self.at_least else ''}{geometric_mean(self.values):.2f} ({by_seed}){self.remark}"


def _ratios(claim: str, concurrency: str, cost: Cost, other: str, found: _Found) -> _Ratios:
    """Return the ratios of the other method's cost to the target to FedBuff's."""
    target = found.plan.threshold(claim, "target")
    ours, theirs = (found.judged[case_of(concurrency, method)] for method in (BUFFERED, other))
    spent = [(cost_to(run, target, cost), _whole(run, cost)) for run in theirs]
    least = [reached if math.isfinite(reached) else total for reached, total in spent]
    case = case_of(concurrency, other)
    return _Ratios(
        [a / cost_to(run, target, cost) for a, run in zip(least, ours, strict=True)],
        not all(math.isfinite(reached) for reached, _ in spent),
        f" [γ = {found.rates[case]:g}, an end of those tried]" if found.at_end(case) else "",
    )


def _whole(run: Run, cost: Cost) -> float:
    """Return a run's whole cost; of a run that exploded, which ended early, the planned cost."""
    if not run.exploded:
        return float(cost(run)[-1])
    return float(_each(run) * run.config.num_server_rounds) if cost is updates else math.inf


def _cases(concurrency: list[str], others: list[str]) -> list[str]:
    return [case_of(at, method) for at in concurrency for method in (*others, BUFFERED)]


def _shown(cells: dict[str, _Ratios]) -> str:
    return "; ".join(f"{name}: {cell}" for name, cell in cells.items())


def _cheaper(claim: str, cost: Cost, found: _Found) -> Verdict:
    """Judge whether FedBuff spends less than each other method, at each concurrency."""
    concurrency, others = (found.plan.threshold(claim, name) for name in ("concurrency", "methods"))
    if missing := found.missing(cases := _cases(concurrency, others)):
        return not_run(claim, missing)
    cells = {
        f"{at}, {other}": _ratios(claim, at, cost, other, found) for at in concurrency for other in others
    }
    by_seed = [cell.values for cell in cells.values()]
    holds = decide(by_seed, lambda ratio: ratio > 1, lambda ratio: not ratio >= 1)
    return found.judge(
        claim, holds, f"the other's over FedBuff's, by seed in brackets, {_shown(cells)}", cases
    )


def _magnitude(found: _Found) -> Verdict:
    """fedbuff-1-magnitude: how many times fewer updates than FedAvg."""
    claim = "fedbuff-1-magnitude"
    (at,), (other,) = (found.plan.threshold(claim, name) for name in ("concurrency", "methods"))
    low, high = found.plan.threshold(claim, "low"), found.plan.threshold(claim, "high")
    if missing := found.missing(cases := _cases([at], [other])):
        return not_run(claim, missing)
    ratios = _ratios(claim, at, updates, other, found)
    if low <= geometric_mean(ratios.values) <= high:
        holds: bool | None = True
    else:
        holds = None if any(low <= ratio <= high for ratio in ratios.values) else False
    return found.judge(claim, holds, _shown({f"{at}, {other}": ratios}), cases)


def _grows(found: _Found) -> Verdict:
    """fedbuff-1-scales: the speed-up with many at work over that with few."""
    claim = "fedbuff-1-scales"
    few, many = found.plan.threshold(claim, "concurrency")
    (other,) = found.plan.threshold(claim, "methods")
    if missing := found.missing(cases := _cases([few, many], [other])):
        return not_run(claim, missing)
    least, most = (_ratios(claim, at, updates, other, found) for at in (few, many))
    growth = [b / a for a, b in zip(least.values, most.values, strict=True)]
    holds = decide([growth], lambda ratio: ratio > 1, lambda ratio: ratio < 1)
    return found.judge(claim, holds, _shown({few: least, many: most, "growth": _Ratios(growth)}), cases)


COSTS: Mapping[str, Cost] = {"client updates": updates, "virtual time": seconds}


@dataclass(frozen=True)
class Arm:
    """A method with a number of clients at work, at the step sizes that did best on the tuning seeds.

    Attributes
    ----------
    case : str
        The label of its case: clients at work, method, server step size.
    judged : Runs
        Its runs with the best server and local step sizes, on the seeds that are judged.
    at_end : bool
        Whether one of the two step sizes is the smallest or largest that was tried, and no bound of its key.
    """

    case: str
    rate: float
    judged: Runs
    at_end: bool

    def spent(self, target: float, cost: Cost) -> list[float]:
        """Return each run's cost to the target, or its whole cost if it doesn't reach the target."""
        reached = [cost_to(run, target, cost) for run in self.judged]
        return [
            value if math.isfinite(value) else _whole(run, cost)
            for value, run in zip(reached, self.judged, strict=True)
        ]


def tuned_speed_up(results: Results, plan: Plan, folder: Path) -> Report:
    """Client updates and time to the target by arm, and how many times FedBuff's the best rival's are."""
    report = Report()
    arms = {place: arm for place in _places(plan) if (arm := _arm(results.runs, plan, place))}
    target = plan.setting("target")
    for arm in arms.values():
        for name, cost in COSTS.items():
            spent = [cost_to(run, target, cost) for run in arm.judged]
            report.rows.append(Row(f"{arm.case}, γ = {arm.rate:g}: {name} to {target:.0%}", spent))
    grid = [
        [
            (
                f"{at} at work",
                {method: arm.judged for (own, method), arm in arms.items() if own == at},
                "accuracy",
            )
        ]
        for at in dict.fromkeys(at for at, _ in arms)
    ]
    if any(arm.judged for arm in arms.values()):
        title = "MNIST, 1000 clients unlike in data, half-normal task times"
        report.figures.append(panels(folder / "accuracy.png", title, grid))
    report.verdicts = [_verdict(claim, results, plan, arms) for claim in plan.claims]
    report.extra.append(_first_there(results.runs, plan, arms))
    return report


def _first_there(runs: Runs, plan: Plan, arms: Mapping["Place", Arm]) -> str:
    """Write what the arms spend on the tuning seeds, and what other step sizes do, which are there first."""
    assert plan.tuning is not None
    target = plan.setting("target")
    lines = [
        f"## Client updates to {target:.0%} on the tuning seeds, by step sizes",
        "",
        "Step sizes were chosen by mean accuracy, which isn't what is judged. Beside them are those that reach the "
        "target with the fewest client updates on the tuning seeds (geometric means, and their ratios to FedBuff's).",
        "",
        "| | chosen | updates | over FedBuff | first there | updates | over FedBuff |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    spent: dict[Place, dict[tuple[str, float], float]] = {}
    for place in arms:
        tries = plan.tuning.tries(Runs(run for run in runs if _place(str(run["case"])) == place))
        points = sorted({(str(run["case"]), float(run["lr"])) for run in tries})
        costs = {
            point: [cost_to(run, target, updates) for run in tries.where(case=point[0], lr=point[1])]
            for point in points
        }
        spent[place] = {
            point: geometric_mean(each) for point, each in costs.items() if np.isfinite(each).all()
        }
    for place, arm in arms.items():
        ours, own = spent.get((place[0], BUFFERED), {}), spent[place]
        buffered = arms.get((place[0], BUFFERED))
        if not own or not ours or buffered is None:
            continue
        first = min(own, key=lambda point: own[point])
        chosen = own.get((arm.case, arm.rate), math.nan)
        over = chosen / ours.get((buffered.case, buffered.rate), math.nan), own[first] / min(ours.values())
        lines.append(
            f"| {place[0]} at work, {place[1]} | {_step(arm.case, arm.rate)} | {chosen:.0f} | {over[0]:.2f} "
            f"| {_step(*first)} | {own[first]:.0f} | {over[1]:.2f} |"
        )
    return "\n".join(lines)


def _step(case: str, rate: float) -> str:
    return ", ".join([*case.split(", ")[2:], f"γ = {rate:g}"])


Place = tuple[str, str]  # clients at work, method


def _places(plan: Plan) -> list[Place]:
    return list(dict.fromkeys(_place(str(label)) for label in plan.labels("case")))


def _place(case: str) -> Place:
    at, method, *_ = case.split(", ")
    return at.split(" ")[0], method


def _arm(runs: Runs, plan: Plan, place: Place) -> Arm | None:
    """Return a method's arm; None while a tuning run isn't there."""
    assert plan.tuning is not None
    own = Runs(run for run in runs if _place(str(run["case"])) == place)
    tries = plan.tuning.tries(own)
    points = {(run["case"], run["lr"]) for run in tries}
    if not points:
        return None
    scores = {
        (case, rate): float(np.mean([_score(run) for run in tries.where(case=case, lr=rate)]))
        for case, rate in points
    }
    case, rate = max(sorted(scores), key=lambda point: scores[point])
    rates = sorted({rate for _, rate in points})
    cases = [label for label in plan.labels("case") if _place(str(label)) == place]
    is_bound = tries.where(case=case)[0].config.mixing_alpha == 1.0 and place[1] == "FedAsync"
    judged = Runs(run for run in own.where(case=case, lr=rate) if run["seed"] not in plan.tuning.seeds)
    at_end = rate in (rates[0], rates[-1]) or (case in (cases[0], cases[-1]) and not is_bound)
    return Arm(str(case), float(rate), judged, at_end)


def _verdict(claim: str, results: Results, plan: Plan, arms: Mapping[Place, Arm]) -> Verdict:
    concurrency, rivals = (plan.threshold(claim, name) for name in ("concurrency", "methods"))
    wanted = [(at, method) for at in concurrency for method in (*rivals, BUFFERED)]
    for place in wanted:
        cases = [label for label in plan.labels("case") if _place(str(label)) == place]
        if missing := "isn't planned" if not cases else results.missing(case=cases):
            return not_run(claim, f"{', '.join(place)}: {missing}")
    cost, target = COSTS[plan.threshold(claim, "cost")], plan.setting("target")
    cells, texts, ends = [], [], [arms[place].case for place in wanted if arms[place].at_end]
    for at in concurrency:
        ours = [cost_to(run, target, cost) for run in arms[at, BUFFERED].judged]
        ratios = {
            method: [a / b for a, b in zip(arms[at, method].spent(target, cost), ours, strict=True)]
            for method in rivals
        }
        method = min(ratios, key=lambda name: geometric_mean(ratios[name]))
        cells.append(ratios[method])
        by_seed = ", ".join(f"{ratio:.2f}" for ratio in ratios[method])
        texts.append(f"{arms[at, method].case}: {geometric_mean(ratios[method]):.2f} ({by_seed})")
    if ends:
        texts.append(f"at an end of what was tried: {'; '.join(ends)}")
    return judge(claim, None if ends else _holds(plan, claim, cells), "; ".join(texts))


def _holds(plan: Plan, claim: str, cells: list[list[float]]) -> bool | None:
    """Judge ratios by a claim's interval for their geometric mean, or by whether they are above 1."""
    bounds = plan.claims[claim].thresholds
    if "low" not in bounds:
        return decide(cells, lambda ratio: ratio > 1, lambda ratio: not ratio >= 1)
    low, high = bounds["low"], bounds["high"]
    if all(low <= geometric_mean(cell) <= high for cell in cells):
        return True
    return None if any(low <= ratio <= high for cell in cells for ratio in cell) else False
