"""The synthetic problem of Dhasade et al.: client drift where one client is an outlier and one parameter is trained.

Dhasade, Kremer & Renard, sections 3.1 and 4. A perceptron with frozen slope v of which only the bias b is
trained, full batches, the outlier (the last client) and one other in each round. With one parameter the constants of
the theory follow from the data: minima, L, D, ζ.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from fedapp.data import DataError
from fedapp.models import PERCEPTRON_SLOPE
from fedapp.sweeps.point import PlannedRun
from studies.reproduce.experiment import ABSENT, Numbers, Results, data_key, digest
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, mean
from studies.reproduce.synthetic import figures
from studies.reproduce.synthetic.measures import Measured, problem_name
from studies.reproduce.synthetic.problem import SyntheticProblem


def measure_synthetic(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Work out each seed's problem from its data, and read each run's final bias."""
    numbers: Numbers = {}
    for run in runs:
        name, key = problem_name(run.config.seed), run.planned.key
        if name not in numbers and run.config.partitioner == "natural":
            try:
                numbers[name] = known.get(name) or _problem(run.planned, plan)
            except DataError as error:
                numbers.setdefault(ABSENT, {})[name] = str(error)
        path = run.folder / "model.safetensors" if run.folder else None
        if key not in known and path is not None and path.exists():
            numbers[key] = float(load_file(path)["bias"][0])
        elif key in known:
            numbers[key] = known[key]
    return numbers


def sources_synthetic(plan: Plan, runs: Runs) -> dict[str, str]:
    """A seed's problem is worked out from its data and the other slope; each bias has its run's key."""
    return {
        problem_name(run.config.seed): digest(data_key(run.planned), plan.setting("diagonal"))
        for run in runs
        if run.config.partitioner == "natural"
    }


def _problem(planned: PlannedRun, plan: Plan) -> Numbers:
    problem = SyntheticProblem.of(planned.config, planned.num_clients)
    diagonal = SyntheticProblem(problem.clients, problem.test, tuple(plan.setting("diagonal")))
    test, objective = problem.points(problem.test), problem.objective
    return {
        "smoothness": problem.smoothness,
        "local-smoothness": problem.local_smoothness,
        "distance": problem.distance,
        "limit-divergence": problem.limit_divergence,
        "largest-divergence": problem.largest_divergence,
        "diagonal-smoothness": diagonal.smoothness,
        "diagonal-limit-divergence": diagonal.limit_divergence,
        "diagonal-distance": diagonal.distance,
        "least-loss": float(objective.loss(objective.minimiser)),
        "least-test-loss": float(test.loss(test.minimiser)),
        "paired-test-loss": float(test.loss(problem.paired_minimiser)),
        "classes": problem.classes(),
    }


def synthetic(results: Results, plan: Plan, folder: Path) -> Report:
    """Figures 2, 3 and 5, the constants, and a table of the cases' results."""
    measured = Measured(results, plan)
    report = Report(digits=3)
    report.rows = _rows(measured, plan)
    report.extra = [_table(measured)]
    for claim in plan.claims:
        report.verdicts.append(_judged(claim, results, measured, plan))
    report.figures = [
        draw(folder / name, measured)
        for name, draw in (
            ("figure-2.png", figures.draw_drift),
            ("figure-3.png", figures.draw_fedprox),
            ("figure-5.png", figures.draw_bound),
        )
        if measured.has(*plan.setting(name.removesuffix(".png")))
    ]
    report.notes = [
        "Divergence after a round is the largest |∂f_i(b_i) − ∂F(b_i)| of the participants, each at its own local "
        "model; ζ is its largest value at the largest τ of figure 2, as in section 4.1.",
        f"The paper freezes the slope at v = {PERCEPTRON_SLOPE}. Its ζ and L fit the direction between the usual "
        f"class means, {tuple(plan.setting('diagonal'))}, instead, which its D doesn't fit: all are in the table.",
        "The outlier takes part in every round with weight ½, so that FedAvg aims at ½ f_C + ½ mean f_i rather than "
        "F: even with small τ its test loss stays above the optimum. Theorem 2.1 supposes that all take part.",
        "Ellipses in figure 2 are a class's mean ± 2 standard deviations: the usual clients' filled, the outlier's "
        "dashed.",
        "The gap is F(b) − F(b*) on the training points; the bound is 000's eq. 1 with σ = 0, the measured ζ, the "
        "largest L of the f_i, and D.",
    ]
    return report


def _rows(measured: Measured, plan: Plan) -> list[Row]:
    """The constants: of every seed's data, with the frozen slope and with the diagonal one."""
    if not measured.problems:
        return []
    zeta, smooth, distance = (
        plan.threshold(claim, "published") for claim in ("000-1-zeta", "000-3-smoothness", "000-3-distance")
    )
    slope = tuple(plan.setting("diagonal"))
    quantities = [
        ("L of F, by numerical differentiation", "smoothness", smooth),
        ("D, from b = 0 to the minimiser of F", "distance", distance),
        ("divergence as τ → ∞", "limit-divergence", zeta),
        ("sup of |∂f_i − ∂F| over all b", "largest-divergence", np.nan),
        ("largest L of the f_i", "local-smoothness", np.nan),
        (f"slope {slope}: divergence as τ → ∞", "diagonal-limit-divergence", zeta),
        (f"slope {slope}: L of F", "diagonal-smoothness", smooth),
        (f"slope {slope}: D", "diagonal-distance", distance),
        ("least test loss of any b", "least-test-loss", np.nan),
        ("test loss at the minimiser of ½ f_C + ½ mean f_i", "paired-test-loss", np.nan),
    ]
    return [Row(name, measured.constants(key), published) for name, key, published in quantities]


def _table(measured: Measured) -> str:
    """Return the results of each case as a table in Markdown."""
    columns: dict[str, Callable[[str], list[float]]] = {
        "plateau of the test loss": measured.plateaus,
        "plateau reached in round": measured.reached,
        "largest divergence": measured.divergences,
        "final b": measured.biases,
        "F − F* at the end": measured.gaps,
    }
    lines = ["| case |" + "".join(f" {name} |" for name in columns), "|---|" + "--:|" * len(columns)]
    for case in measured.cases:
        cells = [Row("", measure(case)).text(4) for measure in columns.values()]
        lines.append(f"| {case} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(["## Runs", "", *lines])


def _judged(claim: str, results: Results, measured: Measured, plan: Plan) -> Verdict:
    """Judge a claim, if the cases that it names and the data are there."""
    cases = plan.threshold(claim, "cases")
    if missing := results.missing(case=cases):
        return not_run(claim, missing)
    if len(measured.problems) < len(plan.labels("seed")):
        return not_run(claim, "the data aren't there")
    holds, evidence = _RULES[claim](measured, plan, claim, cases)
    return judge(claim, holds, evidence)


def _plateau(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    plateaus = [mean(measured.plateaus(case)) for case in cases]
    return _rises(plateaus), _listed(cases, plateaus)


def _speed(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool | None, str]:
    reached = [mean(measured.reached(case)) for case in cases]
    slack = plan.threshold(claim, "slack")
    quicker = bool(np.all(np.diff(reached) <= slack)) and reached[-1] < reached[0]
    # A plateau that no round comes near isn't reached in any.
    return quicker if np.isfinite(
        reached
    ).all() else None, f"plateau reached in round, {_listed(cases, reached)}"


def _divergence(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    largest = [mean(measured.divergences(case)) for case in cases]
    return _rises(largest), _listed(cases, largest)


def _zeta(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    zeta = mean(measured.divergences(cases[0]))
    diagonal = mean(measured.constants("diagonal-limit-divergence"))
    return _is_close(zeta, plan, claim), (
        f"{zeta:.3f} at {cases[0]}; as τ → ∞ {mean(measured.constants('limit-divergence')):.3f}, and {diagonal:.3f} "
        f"with slope {tuple(plan.setting('diagonal'))}"
    )


def _iid(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    iid, drifted = (mean(measured.plateaus(case)) for case in cases)
    optimum = mean(measured.constants("least-test-loss"))
    share = (iid - optimum) / (drifted - optimum)
    return share <= plan.threshold(claim, "share"), (
        f"IID ends at {iid:.4f}, least possible {optimum:.4f}, by client {drifted:.4f}: {share:.2%} of that gap"
    )


def _bound(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    ratios = [bound / gap for bound, gap in (measured.end(case) for case in cases)]
    return min(ratios) >= plan.threshold(claim, "factor"), f"bound over gap, {_listed(cases, ratios)}"


def _smoothness(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    smooth, diagonal = (mean(measured.constants(key)) for key in ("smoothness", "diagonal-smoothness"))
    return _is_close(smooth, plan, claim), (
        f"{smooth:.3f} with the frozen slope {PERCEPTRON_SLOPE}; {diagonal:.3f} with slope "
        f"{tuple(plan.setting('diagonal'))}"
    )


def _distance(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool, str]:
    distance = mean(measured.constants("distance"))
    return _is_close(distance, plan, claim), f"{distance:.3f}"


def _fedprox(measured: Measured, plan: Plan, claim: str, cases: list[str]) -> tuple[bool | None, str]:
    (average, prox), (quick, slow) = (
        [mean(measure(case)) for case in cases] for measure in (measured.plateaus, measured.reached)
    )
    optimum = mean(measured.constants("least-test-loss"))
    share = (prox - optimum) / (average - optimum)
    holds = share <= plan.threshold(claim, "share") and slow > quick
    return holds if math.isfinite(share + slow + quick) else None, (
        f"FedProx ends at {prox:.4f}, FedAvg at {average:.4f}, least {optimum:.4f}: {share:.1%} of that gap; "
        f"plateau reached in round {slow:.3g} and {quick:.3g}"
    )


_RULES: dict[str, Callable[[Measured, Plan, str, list[str]], tuple[bool | None, str]]] = {
    "000-1-plateau": _plateau,
    "000-1-speed": _speed,
    "000-1-divergence": _divergence,
    "000-1-zeta": _zeta,
    "000-2": _iid,
    "000-3-bound": _bound,
    "000-3-smoothness": _smoothness,
    "000-3-distance": _distance,
    "000-4": _fedprox,
}


def _is_close(value: float, plan: Plan, claim: str) -> bool:
    published, close = plan.threshold(claim, "published"), plan.threshold(claim, "close")
    return bool(abs(value / published - 1) <= close)


def _rises(values: Sequence[float]) -> bool:
    return bool(np.all(np.diff(values) > 0))


def _listed(cases: Sequence[str], values: Sequence[float]) -> str:
    return "; ".join(f"{case}: {value:.4g}" for case, value in zip(cases, values, strict=True))
