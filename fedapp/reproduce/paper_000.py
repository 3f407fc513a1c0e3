"""FedAvg on FEMNIST: figure 4 of papers/000_eaef941d18240f45.txt."""

from pathlib import Path

import numpy as np

from fedapp.reproduce.curves import finite, panels
from fedapp.reproduce.experiment import Numbers, Results
from fedapp.reproduce.plan import Plan
from fedapp.reproduce.report import Report, Row, Verdict, judge, not_run
from fedapp.reproduce.runs import Runs, is_lower, mean

NAMES = {"iid": "IID", "natural": "by writer"}


def measure_femnist(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Count, by run, the clients, the training and the test rows; and those that both divisions of a seed share."""
    rows: dict[str, dict[str, np.ndarray]] = {}
    numbers: Numbers = {}
    for run in runs:
        name = f"{run['partitioner']}, seed {run['seed']}"
        path = run.folder / "partition.npz" if run.folder else None
        if path is None or not path.exists():
            numbers |= {name: known[name]} if name in known else {}
            continue
        with np.load(path) as stored:
            rows[name] = {"training": stored["client_indices"], "test": stored["test_indices"]}
            clients = len(stored["client_offsets"]) - 1
        numbers[name] = {"clients": clients, **{part: len(own) for part, own in rows[name].items()}}
    for seed in runs.labels("seed"):
        shared = f"shared, seed {seed}"
        iid, natural = (rows.get(f"{partitioner}, seed {seed}") for partitioner in NAMES)
        if iid and natural:
            numbers[shared] = {part: len(np.intersect1d(iid[part], natural[part])) for part in iid}
        elif shared in known:
            numbers[shared] = known[shared]
    return numbers


def femnist(results: Results, plan: Plan, folder: Path) -> Report:
    """Figure 4: test accuracy by round, rounds to the target, and which rows each side had."""
    report = Report()
    lines = {name: results.runs.where(partitioner=key) for key, name in NAMES.items()}
    grid = [[("test accuracy", lines, "accuracy"), ("test loss", lines, "loss")]]
    title = "FedAvg on FEMNIST, 20 clients a round"
    report.figures.append(
        panels(folder / "figure-4.png", title, grid, x="aggregation", x_label="round", height=3.4)
    )
    target = plan.threshold("000-5-rounds", "target")
    published = plan.threshold("000-5-rounds", "published")
    for name, cell in lines.items():
        report.rows.append(Row(f"{name}: rounds to {target:.0%}", _rounds(cell, target)))
        report.rows.append(Row(f"{name}: accuracy, last 5 %", cell.tails("accuracy")))
    ratios = _ratios(lines, target)
    report.rows.append(Row(f"rounds to {target:.0%}: by writer over IID", ratios, published))
    report.rows += _division(results)
    if lacking := results.lacking():
        missing = f"{lacking} of {len(results.planned)} runs aren't there"
        report.verdicts += [not_run(claim, missing) for claim in plan.parts("000-5")]
    else:
        report.verdicts += [_rounds_verdict(lines, plan), _accuracy_verdict(lines)]
    return report


def _rounds(cell: Runs, target: float) -> list[float]:
    return [run.rounds_to(target) for run in cell]


def _ratios(lines: dict[str, Runs], target: float) -> list[float]:
    """Rounds to the target by writer over those IID, by seed."""
    return [
        run.rounds_to(target) / other.rounds_to(target)
        for run in lines["by writer"]
        for other in lines["IID"].where(seed=run["seed"])
    ]


def _rounds_verdict(lines: dict[str, Runs], plan: Plan) -> Verdict:
    claim = "000-5-rounds"
    target, published, close = (plan.threshold(claim, name) for name in ("target", "published", "close"))
    iid, writer = (_rounds(lines[name], target) for name in NAMES.values())
    ratio = mean(_ratios(lines, target))
    if not finite(ratio):
        reached = f"{np.isfinite(iid).sum()} of {len(iid)} IID runs, {np.isfinite(writer).sum()} by writer"
        return judge(claim, None, f"{target:.0%} is reached in {reached}")
    evidence = f"{mean(iid):.1f} rounds IID, {mean(writer):.1f} by writer: {ratio:.2f} times as many"
    return judge(claim, abs(ratio / published - 1) <= close, evidence)


def _accuracy_verdict(lines: dict[str, Runs]) -> Verdict:
    iid, writer = (lines[name].tails("accuracy") for name in NAMES.values())
    evidence = f"accuracy over the last 5 % of rounds: {mean(iid):.4f} IID, {mean(writer):.4f} by writer"
    return judge("000-5-accuracy", is_lower(writer, iid), evidence)


def _division(results: Results) -> list[Row]:
    """How many clients and rows each side had, and how many rows both had."""
    rows = []
    for kind, name in {**NAMES, "shared": "both sides"}.items():
        counts = [numbers for key, numbers in results.numbers.items() if key.startswith(f"{kind},")]
        for part in counts[0] if counts else ():
            quantity = f"{name}: {part}" + (" rows" if part != "clients" else "")
            rows.append(Row(quantity, [float(count[part]) for count in counts]))
    return rows
