"""Rounds to a target accuracy by similarity of the clients: table 3 of Karimireddy et al. 2020 (SCAFFOLD)."""

from pathlib import Path

from fedapp.config import Value
from studies.reproduce.curves import Lines, panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, decide, geometric_mean

METHODS = ("SGD", "FedAvg", "FedProx", "SCAFFOLD")


def rounds(results: Results, plan: Plan, folder: Path) -> Report:
    """Table 3: rounds to the target, by similarity, epochs and method; the curves behind them."""
    report, runs = Report(), results.runs
    target = plan.threshold("scaffold-1-fastest", "target")
    grid = [
        [
            (f"{similarity} alike, {_epochs(epochs)}", _lines(runs, similarity, epochs), "accuracy")
            for epochs in runs.labels("local-epochs")
        ]
        for similarity in runs.labels("similarity")
    ]
    title = "logistic regression on MNIST, 20 of 100 clients a round; bands: one deviation over seeds"
    labels = {"accuracy": "test accuracy"}
    report.figures.append(
        panels(folder / "table-3.png", title, grid, x="aggregation", x_label="round", y_label=labels)
    )
    for similarity in runs.labels("similarity"):
        for epochs in runs.labels("local-epochs"):
            for method, cell in _lines(runs, similarity, epochs).items():
                if method != "SGD" or epochs == runs.labels("local-epochs")[0]:
                    shown = method if method == "SGD" else f"{method}, {_epochs(epochs)}"
                    reached = [run.rounds_to(target) for run in cell]
                    report.rows.append(Row(f"{similarity} alike, {shown}: rounds to {target:.0%}", reached))
    report.verdicts = [
        _compared("scaffold-1-fastest", "SCAFFOLD", ["FedAvg", "FedProx"], results, plan),
        _faster("scaffold-1-sgd", _against_sgd(results, plan), "SCAFFOLD over SGD"),
        _slowed(results, plan),
        _faster("scaffold-1-epochs", _by_epochs("scaffold-1-epochs", "SCAFFOLD", results, plan), "SCAFFOLD"),
        _compared("scaffold-1-fedprox", "FedAvg", ["FedProx"], results, plan),
    ]
    return report


Cells = dict[str, list[float]]


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def _lines(runs: Runs, similarity: str, epochs: int) -> Lines:
    cell = runs.where(similarity=similarity, local_epochs=epochs)
    return {method: own for method in METHODS if len(own := cell.where(method=method))}


def _ratios(runs: Runs, target: float, axis: str, pair: tuple[Value, Value]) -> list[float]:
    """Return the rounds to the target with the first label of a pair over those with the second, by seed."""
    ours, theirs = ([run.rounds_within(target) for run in runs.where(**{axis: label})] for label in pair)
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _by_cell(results: Results, plan: Plan, target: float, ours: str, theirs: str) -> Cells:
    """Return rounds of one method over those of another, in every cell of similarity and epochs."""
    return {
        f"{similarity}, {_epochs(epochs)}": _ratios(
            results.runs.where(similarity=similarity, local_epochs=epochs), target, "method", (ours, theirs)
        )
        for similarity in plan.labels("similarity")
        for epochs in plan.labels("local-epochs")
    }


def _compared(claim: str, ours: str, theirs: list[str], results: Results, plan: Plan) -> Verdict:
    """Judge whether one method takes no more rounds than others, in every cell."""
    if missing := results.missing(method=[ours, *theirs]):
        return not_run(claim, missing)
    target, slack = plan.threshold(claim, "target"), plan.threshold(claim, "slack")
    pairs = {other: _by_cell(results, plan, target, ours, other) for other in theirs}
    cells = {f"{cell}, {other}": pairs[other][cell] for cell in pairs[theirs[0]] for other in theirs}
    refuted = any(all(ratio > 1 for ratio in cell) for cell in cells.values())
    holds = all(geometric_mean(cell) <= slack for cell in cells.values()) or (False if refuted else None)
    return judge(claim, holds, _shown(cells))


def _shown(cells: Cells) -> str:
    return "; ".join(f"{name}: {geometric_mean(cell):.2f}" for name, cell in cells.items())


def _faster(claim: str, cells: Cells | str, whose: str) -> Verdict:
    """Judge whether every ratio is below 1; a text in place of cells is the reason why there are none."""
    if isinstance(cells, str):
        return not_run(claim, cells)
    holds = decide(cells.values(), lambda ratio: ratio < 1, lambda ratio: ratio >= 1)
    return judge(claim, holds, f"{whose}, {_shown(cells)}")


def _against_sgd(results: Results, plan: Plan) -> Cells | str:
    claim = "scaffold-1-sgd"
    target = plan.threshold(claim, "target")
    if missing := results.missing(method=["SGD", "SCAFFOLD"]):
        return missing
    return _by_cell(results, plan, target, "SCAFFOLD", "SGD")


def _by_epochs(claim: str, method: str, results: Results, plan: Plan) -> Cells | str:
    """Return rounds with many epochs over those with few, by similarity."""
    target, wanted = plan.threshold(claim, "target"), plan.threshold(claim, "similarity")
    many, few = plan.threshold(claim, "many"), plan.threshold(claim, "few")
    if missing := results.missing(method=method, similarity=wanted, local_epochs=[many, few]):
        return missing
    return {
        similarity: _ratios(
            results.runs.where(similarity=similarity, method=method), target, "local_epochs", (many, few)
        )
        for similarity in wanted
    }


def _slowed(results: Results, plan: Plan) -> Verdict:
    """scaffold-1-drift: FedAvg's rounds with many epochs over those with few."""
    claim = "scaffold-1-drift"
    cells = _by_epochs(claim, "FedAvg", results, plan)
    if isinstance(cells, str):
        return not_run(claim, cells)
    holds = decide(cells.values(), lambda ratio: ratio > 1, lambda ratio: ratio <= 1)
    return judge(claim, holds, f"FedAvg, {_shown(cells)}")
