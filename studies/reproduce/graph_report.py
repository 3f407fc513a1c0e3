"""Graphs of clients over a grid of imbalances: figures 3.3 to 3.5 of Buttaci 2024."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kurtosis, skew

from fedapp.config import ConfigError, RunConfig
from fedapp.data import DataError
from fedapp.federation.graph import graph_arrays
from fedapp.report.style import current_style
from strategies.clients import graph
from studies.graphs.figures import GraphPanel, draw_graph
from studies.graphs.lognormal import fit_lognormal, normality
from studies.reproduce.experiment import ABSENT, Numbers, Results
from studies.reproduce.plan import STORED, Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, mean

PARTICIPANTS = "003-2-participants"
# The most clients of a stored heat map: more would only make the file larger.
HEAT_CLIENTS = 50

# The numbers of one graph of the study, by name.
Cell = dict[str, Any]


def measure(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Build the graphs of every dataset that is there; nothing is trained."""
    numbers: Numbers = {}
    clients, seeds = plan.setting("num-clients"), plan.setting("seeds")
    for dataset in plan.setting("datasets"):
        try:
            for phi, kappa, seed in itertools.product(*_imbalances(plan), seeds):
                name = _name(dataset, clients, phi, kappa, seed)
                config = _config(dataset, data_path, phi, kappa, seed)
                numbers[name] = known.get(name) or _cell(config, clients, with_heat=seed == seeds[0])
                if dataset not in plan.threshold(PARTICIPANTS, "datasets"):
                    continue
                for number in plan.setting("other-numbers-of-clients"):
                    name = _name(dataset, number, phi, kappa, seed)
                    numbers[name] = known.get(name) or {"homogeneity": _homogeneity_of(config, number)}
        except (ConfigError, DataError) as error:
            numbers.setdefault(ABSENT, {})[dataset] = str(error)
    return numbers


def _imbalances(plan: Plan) -> tuple[list[float], list[float]]:
    return plan.setting("data-imbalances"), plan.setting("class-imbalances")


def _name(dataset: str, clients: int, phi: float, kappa: float, seed: int) -> str:
    return f"{dataset}, {clients} clients, φ² = {phi:g}, κ⁻¹ = {kappa:g}, seed {seed}"


def _config(dataset: str, data_path: str, phi: float, kappa: float, seed: int) -> RunConfig:
    return RunConfig.load(
        {
            "dataset": dataset,
            "data-path": data_path if dataset in STORED else "",
            "class-imbalance": kappa,
            "data-imbalance": phi,
            "seed": seed,
            "partitioner": "label-quantity-skew",
        }
    )


def _cell(config: RunConfig, clients: int, *, with_heat: bool) -> Cell:
    """Return a graph's numbers; the heat map as 100 log10 mis above its diagonal, row by row."""
    arrays = graph_arrays(config, clients)
    mis = arrays["misalignment"]
    fit = fit_lognormal(mis, config.message_floor)
    homogeneity = graph.homogeneity(arrays["adjacency"])
    panel = GraphPanel.of(0, 0, mis, arrays["eigenvalues"], homogeneity, fit.theta, fit.phi, HEAT_CLIENTS)
    filled = np.flatnonzero(panel.counts)
    heat = np.round(100 * np.log10(panel.heat[np.triu_indices(len(panel.heat), 1)])).astype(int)
    pairs, logs = mis[np.triu_indices(clients, 1)], normality(mis, graph.FLOOR)
    return {
        "homogeneity": homogeneity,
        "median": float(np.median(pairs)),
        "skewness": float(logs.skewness),
        "kurtosis": float(logs.excess_kurtosis),
        "mis-skewness": float(skew(pairs)),
        "mis-kurtosis": float(kurtosis(pairs)),
        "theta": fit.theta,
        "phi": fit.phi,
        "eigenvalues": [float(f"{value:.5g}") for value in arrays["eigenvalues"]],
        "first-bin": int(filled[0]),
        "counts": panel.counts[filled[0] : filled[-1] + 1].tolist(),
        "every": panel.every,
        "heat": heat.tolist() if with_heat else [],
    }


def _homogeneity_of(config: RunConfig, clients: int) -> float:
    return graph.homogeneity(graph_arrays(config, clients)["adjacency"])


def _panel(cell: Cell, phi: float, kappa: float) -> GraphPanel:
    counts = np.zeros_like(GraphPanel.of(0, 0, np.zeros((1, 1)), np.zeros(1), 0, 0, 0).counts)
    counts[cell["first-bin"] : cell["first-bin"] + len(cell["counts"])] = cell["counts"]
    number = round((1 + (1 + 8 * len(cell["heat"])) ** 0.5) / 2)
    heat = np.zeros((number, number))
    heat[np.triu_indices(number, 1)] = 10 ** (np.array(cell["heat"]) / 100)
    return GraphPanel(
        kappa,
        phi,
        heat + heat.T,
        cell["every"],
        counts,
        np.array(cell["eigenvalues"]),
        cell["homogeneity"],
        cell["theta"],
        cell["phi"],
    )


class _Cells:
    """The graphs of a study, and their numbers by imbalance."""

    def __init__(self, results: Results, plan: Plan) -> None:
        self.plan, self._numbers = plan, results.numbers
        self.datasets = [name for name in plan.setting("datasets") if name not in results.absent]

    def each(self, dataset: str, phi: float, kappa: float, clients: int = 0) -> list[Cell]:
        """Return the graphs of one setting, by seed; without ``clients`` those that are drawn."""
        number, seeds = clients or self.plan.setting("num-clients"), self.plan.setting("seeds")
        return [self._numbers[_name(dataset, number, phi, kappa, seed)] for seed in seeds]

    def means(self, dataset: str, phi: float, of: Callable[[Cell], float], clients: int = 0) -> list[float]:
        """Return a number's mean over seeds, by class imbalance."""
        kappas = self.plan.setting("class-imbalances")
        return [mean([of(cell) for cell in self.each(dataset, phi, kappa, clients)]) for kappa in kappas]


def report(results: Results, plan: Plan, folder: Path) -> Report:
    """Figures 3.3 to 3.5 of each dataset that is there, and their numbers."""
    made = Report()
    cells = _Cells(results, plan)
    for dataset in cells.datasets:
        panels = [
            _panel(cell, phi, kappa)
            for phi, kappa in itertools.product(*_imbalances(plan))
            for cell in cells.each(dataset, phi, kappa)
        ]
        title = f"{dataset}, {plan.setting('num-clients')} clients"
        for path in draw_graph(folder, panels, title):
            own, *_ = [each.rename(folder / f"{dataset}-{each.name}") for each in current_style().paths(path)]
            made.figures.append(own)
        made.rows += _rows(dataset, cells)
    rules = (
        ("003-1-grows", _by_imbalance(_grows)),
        ("003-1-lognormal", _by_imbalance(_lognormal)),
        ("003-1-tails", _tails),
        ("003-2-spectrum", _by_imbalance(_spectrum)),
        ("003-2-altered", _altered),
        ("003-2-homogeneity", _by_imbalance(_homogeneity)),
        (PARTICIPANTS, _by_imbalance(_participants)),
    )
    made.verdicts += [_judged(claim, cells, rule) for claim, rule in rules]
    made.notes.append(
        "The principal directions of images have no negative entries, so misalignments are at most ½: where classes "
        "are nearly apart (κ⁻¹ = 100) they gather below that limit, and ln mis has a long tail to the left that a "
        "lognormal hasn't."
    )
    made.notes.append(
        "Published homogeneities are an earlier check of the division (one seed, half of CIFAR-10): the thesis has "
        "them in figures only."
    )
    return made


def _rows(dataset: str, cells: _Cells) -> list[Row]:
    rows = []
    checked = {(name, phi, kappa): value for name, phi, kappa, value in cells.plan.setting("checked")}
    for phi, kappa in itertools.product(*_imbalances(cells.plan)):
        known = checked.get((dataset, phi, kappa), math.nan)
        name = f"{dataset}, κ⁻¹ = {kappa:g}, φ² = {phi:g}"
        own = cells.each(dataset, phi, kappa)
        rows += [
            Row(f"{name}: homogeneity", [cell["homogeneity"] for cell in own], known),
            Row(f"{name}: mean eigenvalue", [_mean_eigenvalue(cell) for cell in own]),
            Row(f"{name}: median misalignment", [cell["median"] for cell in own]),
            Row(f"{name}: skewness of ln mis (0 for a lognormal)", [cell["skewness"] for cell in own]),
            Row(f"{name}: excess kurtosis of ln mis (0 for a lognormal)", [cell["kurtosis"] for cell in own]),
        ]
    return rows


def _mean_eigenvalue(cell: Cell) -> float:
    return mean(cell["eigenvalues"][1:])


# What a rule finds of a dataset: whether each part of it holds, and the evidence.
Found = list[tuple[bool, str]]


def _judged(claim: str, cells: _Cells, rule: Callable[[str, _Cells, str], Found]) -> Verdict:
    """Judge a claim on its datasets."""
    found: Found = []
    for dataset in cells.plan.threshold(claim, "datasets"):
        if dataset not in cells.datasets:
            return not_run(claim, f"{dataset} isn't there")
        found += [(holds, f"{dataset}, {text}") for holds, text in rule(dataset, cells, claim)]
    kappas = ", ".join(f"{kappa:g}" for kappa in cells.plan.setting("class-imbalances"))
    evidence = "; ".join(text for _, text in found)
    return judge(claim, all(holds for holds, _ in found), f"by κ⁻¹ = {kappas}, {evidence}")


def _by_imbalance(
    rule: Callable[[str, float, _Cells, str], tuple[bool, str]],
) -> Callable[[str, _Cells, str], Found]:
    """Return the rule that holds if another one does with every data imbalance."""

    def both(dataset: str, cells: _Cells, claim: str) -> Found:
        found = [(phi, *rule(dataset, phi, cells, claim)) for phi in cells.plan.setting("data-imbalances")]
        return [(holds, f"φ² = {phi:g}: {text}") for phi, holds, text in found]

    return both


def _grows(dataset: str, phi: float, cells: _Cells, claim: str) -> tuple[bool, str]:
    medians = cells.means(dataset, phi, lambda cell: cell["median"])
    return bool(np.all(np.diff(medians) > 0)), _listed(medians)


def _lognormal(dataset: str, phi: float, cells: _Cells, claim: str) -> tuple[bool, str]:
    skews = cells.means(dataset, phi, lambda cell: cell["skewness"])
    # Not by the largest: `max` overlooks a NaN, which equal misalignments have.
    most = cells.plan.threshold(claim, "skewness")
    return all(abs(skew) <= most for skew in skews), _listed(skews)


def _spectrum(dataset: str, phi: float, cells: _Cells, claim: str) -> tuple[bool, str]:
    spectra = cells.means(dataset, phi, _mean_eigenvalue)
    return bool(np.all(np.diff(spectra) < 0)), _listed(spectra)


def _homogeneity(dataset: str, phi: float, cells: _Cells, claim: str) -> tuple[bool, str]:
    """Tell whether it falls much more up to the bend than from there on."""
    values = cells.means(dataset, phi, lambda cell: cell["homogeneity"])
    bend = cells.plan.setting("class-imbalances").index(cells.plan.threshold(claim, "bend"))
    steep, flat = values[0] - values[bend], values[bend] - values[-1]
    return 0 < steep >= cells.plan.threshold(claim, "factor") * flat, _listed(values)


def _tails(dataset: str, cells: _Cells, claim: str) -> Found:
    """Tell whether data imbalance makes the distribution of misalignments less like a normal one."""
    even, *_, uneven = cells.plan.setting("data-imbalances")
    found = []
    for moment in ("skewness", "kurtosis"):
        before, after = (
            cells.means(dataset, phi, lambda cell: cell[f"mis-{moment}"])  # noqa: B023
            for phi in (even, uneven)
        )
        more = all(second > first for first, second in zip(before, after, strict=True))
        found.append((more, f"{moment} {_listed(before)} and, φ² = {uneven:g}, {_listed(after)}"))
    return found


def _altered(dataset: str, cells: _Cells, claim: str) -> Found:
    """Tell whether data imbalance moves the spectrum most where there is no class imbalance."""
    even, *_, uneven = cells.plan.setting("data-imbalances")
    moves = []
    for kappa in cells.plan.setting("class-imbalances"):
        pairs = zip(cells.each(dataset, even, kappa), cells.each(dataset, uneven, kappa), strict=True)
        spectra = [np.subtract(a["eigenvalues"], b["eigenvalues"])[1:] for a, b in pairs]
        moves.append(mean([float(np.mean(change**2)) for change in spectra]))
    return [(all(moves[0] > move for move in moves[1:]), f"deviation {_listed(moves)}")]


def _participants(dataset: str, phi: float, cells: _Cells, claim: str) -> tuple[bool, str]:
    """Tell whether homogeneity is the same with other numbers of clients."""
    usual = cells.means(dataset, phi, lambda cell: cell["homogeneity"])
    facts, texts = [], []
    for clients in cells.plan.setting("other-numbers-of-clients"):
        values = cells.means(dataset, phi, lambda cell: cell["homogeneity"], clients)
        ratios = [value / own for value, own in zip(values, usual, strict=True)]
        facts += [abs(ratio - 1) <= cells.plan.threshold(claim, "part") for ratio in ratios]
        texts.append(f"C = {clients}: {_listed(ratios)} of that with {cells.plan.setting('num-clients')}")
    return all(facts), ", ".join(texts)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
