"""FedAvg on FEMNIST: figure 4 of Dhasade, Kremer & Renard."""

from pathlib import Path

import numpy as np

from studies.reproduce.curves import finite, panels
from studies.reproduce.experiment import Numbers, Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, decide, geometric_mean, mean

# Rounds that the paper takes more by writer than IID.
MORE_ROUNDS = 78

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
    report = Report(digits=5)  # rows are counted in tens of thousands
    lines = {name: results.runs.where(partitioner=key) for key, name in NAMES.items()}
    grid = [[("test accuracy", lines, "accuracy"), ("test loss", lines, "loss")]]
    planned = results.runs[0].planned
    title = f"FedAvg on FEMNIST, {planned.config.fraction_train * planned.num_clients:.0f} clients a round"
    report.figures.append(
        panels(folder / "figure-4.png", title, grid, x="aggregation", x_label="round", height=3.4)
    )
    target, tail = plan.threshold("000-5-slower", "target"), plan.threshold("000-5-final", "tail")
    for name, cell in lines.items():
        report.rows.append(Row(f"{name}: rounds to {target:.0%}", _rounds(cell, target)))
        report.rows.append(Row(f"{name}: accuracy, last {tail:.0%}", _ends(cell, tail)))
    iid, writer = (_rounds(cell, target) for cell in lines.values())
    differences = [more - less for less, more in zip(iid, writer, strict=False)]
    report.rows.append(Row(f"rounds to {target:.0%}: by writer minus IID", differences, MORE_ROUNDS))
    report.rows += _division(results)
    rules = (("000-5-slower", _slower), ("000-5-ratio", _ratio), ("000-5-final", _final))
    for claim, rule in rules:
        missing = results.unready(plan, claim)
        report.verdicts.append(not_run(claim, missing) if missing else rule(claim, lines, plan))
    return report


def _rounds(cell: Runs, target: float) -> list[float]:
    return [run.rounds_to(target) for run in cell]


def _ends(cell: Runs, tail: float) -> list[float]:
    return [float(run.tail("accuracy", tail).mean()) for run in cell]


def _slower(claim: str, lines: dict[str, Runs], plan: Plan) -> Verdict:
    target = plan.threshold(claim, "target")
    iid, writer = ([run.rounds_within(target) for run in cell] for cell in lines.values())
    more = [two - one for one, two in zip(iid, writer, strict=True)]
    holds = decide([more], lambda value: value > 0, lambda value: value <= 0)
    return judge(claim, holds, f"by writer minus IID: {', '.join(f'{value:+.0f}' for value in more)} rounds")


def _ratio(claim: str, lines: dict[str, Runs], plan: Plan) -> Verdict:
    target, low, high = (plan.threshold(claim, name) for name in ("target", "low", "high"))
    iid, writer = (_rounds(cell, target) for cell in lines.values())
    if not finite(*iid, *writer):
        reached = f"{np.isfinite(iid).sum()} of {len(iid)} IID runs, {np.isfinite(writer).sum()} by writer"
        return judge(claim, None, f"{target:.0%} is reached in {reached}")
    ratio = geometric_mean(np.divide(writer, iid).tolist())
    evidence = f"{mean(iid):.1f} rounds IID, {mean(writer):.1f} by writer: {ratio:.2f} times as many"
    return judge(claim, low <= ratio <= high, evidence)


def _final(claim: str, lines: dict[str, Runs], plan: Plan) -> Verdict:
    iid, writer = (_ends(cell, plan.threshold(claim, "tail")) for cell in lines.values())
    less = [one - two for one, two in zip(iid, writer, strict=True)]
    holds = decide([less], lambda value: value > 0, lambda value: value < 0)
    shown = ", ".join(f"{100 * value:+.2f}" for value in less)
    return judge(
        claim,
        holds,
        f"{mean(iid):.4f} IID, {mean(writer):.4f} by writer; IID minus by writer, points: {shown}",
    )


def _division(results: Results) -> list[Row]:
    """How many clients and rows each side had, and how many rows both had."""
    rows = []
    for kind, name in {**NAMES, "shared": "both sides"}.items():
        counts = [numbers for key, numbers in results.numbers.items() if key.startswith(f"{kind},")]
        for part in counts[0] if counts else ():
            quantity = f"{name}: {part}" + (" rows" if part != "clients" else "")
            rows.append(Row(quantity, [float(count[part]) for count in counts]))
    return rows
