"""The graph of clients by their last updates beside the graph by their data: homogeneity, similar pairs, accuracy."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr, t

from strategies.clients import graph
from studies.reproduce.experiment import Numbers, Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, Runs, decide

DATA, UPDATES = "data", "updates"


def compare(results: Results, plan: Plan, folder: Path) -> Report:
    """Accuracy and homogeneity by source of the graph and class imbalance, and a verdict on each claim."""
    report, runs = Report(), results.runs
    judged = Runs(run for run in runs if run["seed"] not in (plan.tuning.seeds if plan.tuning else ()))
    for imbalance in judged.labels("class-imbalance"):
        cell = judged.where(class_imbalance=imbalance)
        for source in cell.labels("source"):
            own = cell.where(source=source)
            name = f"κ⁻¹ = {imbalance:g}, {source}, γ = {own[0].config.lr:g}"
            report.rows.append(Row(f"{name}: test accuracy", own.values("accuracy")))
            if source in (DATA, UPDATES):
                found = _numbers(results, own, "homogeneity")
                report.rows.append(Row(f"{name}: homogeneity", found))
    for claim in plan.claims:
        report.verdicts.append(_verdict(claim, results, plan, judged))
    return report


def measure_compare(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Return each graph's homogeneity, and the rank correlation of A_ij by updates with A_ij by data."""
    numbers = dict(known)
    for run in runs.where(source=[DATA, UPDATES]):
        if f"homogeneity {run.planned.key}" not in numbers and (A := _adjacency(run)) is not None:
            numbers[f"homogeneity {run.planned.key}"] = graph.homogeneity(A)
    for run in runs.where(source=UPDATES):
        name = f"correlation {run.planned.key}"
        same = runs.where(source=DATA, seed=run["seed"], class_imbalance=run["class-imbalance"])
        if name in numbers or not same:
            continue
        # The graph by data is the same for every step size.
        ours, theirs = _adjacency(run), _adjacency(same[0])
        if ours is not None and theirs is not None:
            pairs = np.triu_indices(len(ours), 1)
            numbers[name] = float(spearmanr(ours[pairs], theirs[pairs]).statistic)
    return numbers


def _adjacency(run: Run) -> np.ndarray | None:
    """Return A (C, C) of a run's last graph; None if its folder is gone."""
    path = run.folder and run.folder / "graph.npz"
    if not path or not path.is_file():
        return None
    with np.load(path) as arrays:
        return np.asarray(arrays["adjacency"])


def _numbers(results: Results, runs: Runs, name: str) -> list[float]:
    return [results.numbers.get(f"{name} {run.planned.key}", np.nan) for run in runs]


def _verdict(claim: str, results: Results, plan: Plan, judged: Runs) -> Verdict:
    imbalances: Sequence[float] = plan.threshold(claim, "imbalances")
    for source in (DATA, UPDATES):
        if missing := results.unready(plan, claim, source=source, class_imbalance=imbalances):
            return not_run(claim, f"{source}: {missing}")
    updates = [judged.where(source=UPDATES, class_imbalance=imbalance) for imbalance in imbalances]
    if "homogeneity" in claim:
        levels = [_numbers(results, own, "homogeneity") for own in updates]
        steps = [np.subtract(a, b).tolist() for a, b in itertools.pairwise(levels)]
        means = ", ".join(f"{np.mean(level):.3f}" for level in levels)
        evidence = f"by updates {means} at κ⁻¹ = {', '.join(f'{each:g}' for each in imbalances)}"
        return judge(claim, decide(steps, lambda fall: fall > 0, lambda fall: fall < 0), evidence)
    if "pairs" in claim:
        least = plan.threshold(claim, "least")
        found = [_numbers(results, own, "correlation") for own in updates]
        spread = [f"{min(each):.2f} to {max(each):.2f}" for each in found]
        evidence = "; ".join(f"κ⁻¹ = {k:g}: {text}" for k, text in zip(imbalances, spread, strict=True))
        return judge(claim, decide(found, lambda rho: rho >= least, lambda rho: rho < least), evidence)
    return _accuracy(claim, plan, judged.where(class_imbalance=imbalances))


def _accuracy(claim: str, plan: Plan, cell: Runs) -> Verdict:
    """Judge the paired difference of accuracies by its confidence interval."""
    margin, level = plan.threshold(claim, "margin"), plan.threshold(claim, "level")
    by_seed = {
        source: {run["seed"]: run.final("accuracy") for run in cell.where(source=source)}
        for source in (DATA, UPDATES)
    }
    gains = [by_seed[UPDATES][seed] - accuracy for seed, accuracy in by_seed[DATA].items()]
    middle, error = float(np.mean(gains)), float(np.std(gains, ddof=1)) / len(gains) ** 0.5
    half = float(t.ppf((1 + level) / 2, len(gains) - 1)) * error
    holds = True if middle - half > -margin else False if middle + half < -margin else None
    evidence = f"updates minus data, points: {100 * middle:+.2f} ± {100 * half:.2f}"
    return judge(claim, holds, evidence)
