"""FedProx among stragglers and unlike devices: figures 1 and 2 of T. Li et al. 2020, on their synthetic data."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.reproduce.curves import Lines, panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, decide, mean

LOSS, ACCURACY = "objective", "accuracy"
LABELS = {LOSS: "training loss", ACCURACY: "test accuracy"}
DROPPED, IN_PART = "dropped", "in part"


def unsteadiness(run: Run) -> float:
    """Mean absolute change of the training loss from one evaluation to the next, over the last half."""
    losses = run.column(LOSS)
    return float(np.abs(np.diff(losses[len(losses) // 2 :])).mean())


def synthetic(results: Results, plan: Plan, folder: Path) -> Report:
    """Figures 1 and 2: loss and accuracy over rounds, by data, stragglers, treatment of their work, and μ."""
    report, runs = Report(), results.runs
    cases = runs.labels("case")
    for name, chosen in {
        "figure-1": [case for case in cases if DROPPED in case or IN_PART in case],
        "figure-2": [case for case in cases if DROPPED not in case and IN_PART not in case],
    }.items():
        if chosen:
            report.figures.append(_draw(folder / f"{name}.png", runs, chosen))
    for case in cases:
        for mu in runs.labels("proximal-mu"):
            cell = runs.where(case=case, proximal_mu=mu)
            report.rows += [
                Row(f"{case}, μ = {mu:g}: {label}, last 5 %", cell.tails(key))
                for key, label in LABELS.items()
            ]
            report.rows.append(Row(f"{case}, μ = {mu:g}: unsteadiness", [unsteadiness(run) for run in cell]))
    report.verdicts = [
        _lower_loss("fedprox-1-partial", 0.0, results, plan),
        _lower_loss("fedprox-1-proximal", 1.0, results, plan),
        _steadier("fedprox-1-steadier", _among_stragglers(plan, "fedprox-1-steadier", IN_PART), results),
        _more_accurate(results, plan),
        _ordered(results, plan),
        _steadier("fedprox-2-proximal", plan.threshold("fedprox-2-proximal", "data"), results),
        _slower(results, plan),
    ]
    return report


def _draw(path: Path, runs: Runs, cases: list[str]) -> Path:
    """Draw a column for each data set, or share of stragglers; a line for each μ and treatment."""
    columns: dict[str, Lines] = {}
    for case in cases:
        data, treatment = _treated(case)
        for mu in runs.labels("proximal-mu"):
            name = f"μ = {mu:g}" + (f", {treatment}" if treatment else "")
            columns[data] = {**columns.get(data, {}), name: runs.where(case=case, proximal_mu=mu)}
    grid = [[(data, lines, key) for data, lines in columns.items()] for key in LABELS]
    title = "FedProx, E = 20, ten of 30 devices a round; bands: one deviation over seeds"
    return panels(path, title, grid, x="aggregation", x_label="round", y_label=LABELS)


def _treated(case: str) -> tuple[str, str]:
    """Return a case's data and share of stragglers, and the treatment of their work."""
    for treatment in (DROPPED, IN_PART):
        if case.endswith(f" {treatment}"):
            return case.removesuffix(f" {treatment}"), treatment
    return case, ""


def _among_stragglers(plan: Plan, claim: str, treatment: str) -> list[str]:
    data = plan.threshold(claim, "data")
    return [f"{data}, {share} {treatment}" for share in plan.threshold(claim, "stragglers")]


def _lower_loss(claim: str, mu: float, results: Results, plan: Plan) -> Verdict:
    """Judge whether partial work with μ ends lower than FedAvg, which drops it."""
    pairs = list(zip(*(_among_stragglers(plan, claim, way) for way in (IN_PART, DROPPED)), strict=True))
    gains, evidence = [], []
    for part, dropped in pairs:
        missing = results.missing(case=part, proximal_mu=mu) or results.missing(case=dropped, proximal_mu=0.0)
        if missing:
            return not_run(claim, missing)
        ours = _or_worst(results.runs.where(case=part, proximal_mu=mu).tails(LOSS))
        theirs = _or_worst(results.runs.where(case=dropped, proximal_mu=0.0).tails(LOSS))
        gains.append([theirs - own for own, theirs in zip(ours, theirs, strict=True)])
        share = _treated(part)[0].rpartition(", ")[2]
        count = sum(gain > 0 for gain in gains[-1])
        evidence.append(
            f"{share}: {mean(ours):.4f} against {mean(theirs):.4f}, lower in {count} of {len(ours)} seeds"
        )
    holds = decide(gains, lambda gain: gain > 0, lambda gain: gain < 0)
    return judge(claim, holds, "; ".join(evidence))


def _steadier(claim: str, cases: list[str], results: Results) -> Verdict:
    """Judge whether μ = 1 is steadier than μ = 0."""
    ratios, evidence = [], []
    for case in cases:
        if missing := results.missing(case=case, proximal_mu=[0.0, 1.0]):
            return not_run(claim, missing)
        plain, pulled = (
            _or_worst([unsteadiness(run) for run in results.runs.where(case=case, proximal_mu=mu)])
            for mu in (0.0, 1.0)
        )
        ratios.append([b / a for a, b in zip(plain, pulled, strict=True)])
        evidence.append(
            f"{case}: {mean(plain):.4f} → {mean(pulled):.4f}, below in {sum(r < 1 for r in ratios[-1])} "
            f"of {len(plain)} seeds"
        )
    holds = decide(ratios, lambda ratio: ratio < 1, lambda ratio: ratio > 1)
    return judge(claim, holds, f"μ = 0 → μ = 1, {'; '.join(evidence)}")


def _more_accurate(results: Results, plan: Plan) -> Verdict:
    """fedprox-1-accuracy: the gain in test accuracy."""
    claim = "fedprox-1-accuracy"
    low, high = plan.threshold(claim, "low"), plan.threshold(claim, "high")
    (part,), (dropped,) = (_among_stragglers(plan, claim, way) for way in (IN_PART, DROPPED))
    missing = results.missing(case=part, proximal_mu=1.0) or results.missing(case=dropped, proximal_mu=0.0)
    if missing:
        return not_run(claim, missing)
    ours = results.runs.where(case=part, proximal_mu=1.0).tails(ACCURACY)
    theirs = results.runs.where(case=dropped, proximal_mu=0.0).tails(ACCURACY)
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not math.isfinite(mean(gains)):  # a run that exploded has no accuracy
        holds: bool | None = None
    elif low <= mean(gains) <= high:
        holds = True
    else:
        holds = None if any(low <= gain <= high for gain in gains) else False
    by_seed = ", ".join(f"{gain:+.3f}" for gain in gains)
    return judge(
        claim, holds, f"{mean(theirs):.3f} → {mean(ours):.3f}: {mean(gains):+.3f}; by seed {by_seed}"
    )


def _ordered(results: Results, plan: Plan) -> Verdict:
    """fedprox-2-heterogeneity: the loss is least unsteady on the first data set, and most unsteady on the last."""
    claim = "fedprox-2-heterogeneity"
    data = plan.threshold(claim, "data")
    if missing := results.missing(case=data, proximal_mu=0.0):
        return not_run(claim, missing)
    table = np.array(
        [
            _or_worst([unsteadiness(run) for run in results.runs.where(case=case, proximal_mu=0.0)])
            for case in data
        ]
    )
    facts = [_first_least_last_most(column.tolist()) for column in table.T]
    holds = facts[0] if len(set(facts)) == 1 else None
    shown = "; ".join(f"{case}: {mean(row):.4f}" for case, row in zip(data, table.tolist(), strict=True))
    return judge(claim, holds, f"{shown}; so in {sum(map(bool, facts))} of {len(facts)} seeds")


def _slower(results: Results, plan: Plan) -> Verdict:
    """fedprox-2-iid: mean loss over all rounds with μ = 1, minus that with μ = 0."""
    claim = "fedprox-2-iid"
    case = plan.threshold(claim, "data")
    if missing := results.missing(case=case, proximal_mu=[0.0, 1.0]):
        return not_run(claim, missing)
    plain, pulled = (
        # Before the first round there is no training loss.
        _or_worst(
            [float(run.column(LOSS)[1:].mean()) for run in results.runs.where(case=case, proximal_mu=mu)]
        )
        for mu in (0.0, 1.0)
    )
    gaps = [b - a for a, b in zip(plain, pulled, strict=True)]
    holds = decide([gaps], lambda gap: gap > 0, lambda gap: gap < 0)
    return judge(claim, holds, f"mean over all rounds, μ = 0 → μ = 1: {mean(plain):.4f} → {mean(pulled):.4f}")


def _or_worst(values: Sequence[float]) -> list[float]:
    """Return losses, or unsteadiness, with ∞ for a run that exploded: it is worse than every other run."""
    return [value if math.isfinite(value) else math.inf for value in values]


def _first_least_last_most(values: Sequence[float]) -> bool | None:
    """Tell whether the first value is below and the last above all others; None if only a tie speaks against it."""
    first, *others, last = values
    if (first > min(values)) or (last < max(values)):
        return False
    return True if first < min(*others, last) and last > max(first, *others) else None
