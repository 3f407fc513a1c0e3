"""Graphs of clients over a grid of imbalances: figures 3.3 to 3.5 of Buttaci 2024."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
    return {
        "homogeneity": homogeneity,
        "median": float(np.median(mis[np.triu_indices(clients, 1)])),
        "skewness": float(normality(mis, graph.FLOOR).skewness),
        "theta": fit.theta,
        "phi": fit.phi,
        "eigenvalues": [float(f"{value:.5g}") for value in arrays["eigenvalues"]],
        "first-bin": int(filled[0]),
        "counts": panel.counts[filled[0] : filled[-1] + 1].tolist(),
        "every": panel.every,
        "heat": heat.tolist() if with_heat else [],
    }


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

    def each(self, dataset: str, phi: float, kappa: float) -> list[Cell]:
        """Return the graphs of one setting, by seed."""
        clients, seeds = self.plan.setting("num-clients"), self.plan.setting("seeds")
        return [self._numbers[_name(dataset, clients, phi, kappa, seed)] for seed in seeds]

    def means(self, dataset: str, phi: float, of: Callable[[Cell], float]) -> list[float]:
        """Return a number's mean over seeds, by class imbalance."""
        kappas = self.plan.setting("class-imbalances")
        return [mean([of(cell) for cell in self.each(dataset, phi, kappa)]) for kappa in kappas]


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
        ("003-1-grows", _grows),
        ("003-1-lognormal", _lognormal),
        ("003-2-spectrum", _spectrum),
        ("003-2-homogeneity", _homogeneity),
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
        ]
    return rows


def _mean_eigenvalue(cell: Cell) -> float:
    return mean(cell["eigenvalues"][1:])


def _judged(
    claim: str, cells: _Cells, rule: Callable[[str, float, _Cells, str], tuple[bool, str]]
) -> Verdict:
    """Judge a claim on its datasets and every data imbalance."""
    facts, evidence = [], []
    for dataset in cells.plan.threshold(claim, "datasets"):
        if dataset not in cells.datasets:
            return not_run(claim, f"{dataset} isn't there")
        for phi in cells.plan.setting("data-imbalances"):
            holds, text = rule(dataset, phi, cells, claim)
            facts.append(holds)
            evidence.append(f"{dataset}, φ² = {phi:g}: {text}")
    kappas = ", ".join(f"{kappa:g}" for kappa in cells.plan.setting("class-imbalances"))
    return judge(claim, all(facts), f"by κ⁻¹ = {kappas}, {'; '.join(evidence)}")


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


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
