"""Graphs of clients over a grid of imbalances: figures 3.3 to 3.5 of papers/003_4ba4febf91704f25.txt."""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedapp.cli import graph_arrays
from fedapp.config import ConfigError, RunConfig
from fedapp.data import DataError
from fedapp.report.graph_figures import GraphPanel, draw_graph
from fedapp.reproduce.plan import read_plan
from fedapp.reproduce.report import Report, Row, Verdict, judge, write_report
from fedapp.reproduce.runs import mean
from strategies import graph

NAME = "003-graph"
CLASS_IMBALANCES = (0.0, 1.0, 10.0, 100.0)
DATA_IMBALANCES = (0.0, 1.0)
DATASETS = ("femnist-digits", "mnist", "cifar10")  # the thesis has CIFAR-100 in place of MNIST


@dataclass(frozen=True)
class Size:
    """How large the study is."""

    datasets: tuple[str, ...]
    num_clients: int
    seeds: tuple[int, ...]


FULL, QUICK = Size(DATASETS, 100, (0, 1, 41)), Size(DATASETS[:2], 40, (0,))


def run(out: Path, *, quick: bool, data_path: str, engine: str, jobs: int = 1) -> None:
    """Build the graphs of every dataset that is there, and report; nothing is trained, so ``engine`` isn't needed."""
    size = QUICK if quick else FULL
    report, began = Report(), time.monotonic()
    panels: dict[str, list[GraphPanel]] = {}
    for dataset in size.datasets:
        try:
            panels[dataset] = _panels(dataset, data_path, size)
        except (ConfigError, DataError) as error:
            report.notes.append(f"Not there: {dataset}: {error}")
            continue
        folder = out / dataset
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{dataset}, {size.num_clients} clients"
        report.figures += [
            path.rename(out / f"{dataset}-{path.name}") for path in draw_graph(folder, panels[dataset], title)
        ]
        folder.rmdir()
        report.rows += _rows(dataset, panels[dataset])
    report.verdicts += [_misalignment(panels), _homogeneity(panels)]
    report.notes.append(
        "The principal directions of images have no negative entries, so misalignments are at most ½: where classes "
        "are nearly apart (κ⁻¹ = 100) they gather below that limit, and ln mis has a long tail to the left that a "
        "lognormal hasn't."
    )
    plan = read_plan(NAME)
    write_report(
        out, report, title=plan.title, source=plan.source, claims=plan.claims,
        setting=[
            f"**Quick**: {plan.quick.note}" if quick else "Full settings.",
            f"{size.num_clients} clients, {len(size.seeds)} seeds; {(time.monotonic() - began) / 60:.1f} minutes",
        ],
    )  # fmt: skip


def _panels(dataset: str, data_path: str, size: Size) -> list[GraphPanel]:
    panels = []
    for phi, kappa, seed in itertools.product(DATA_IMBALANCES, CLASS_IMBALANCES, size.seeds):
        config = RunConfig.load(
            {
                "dataset": dataset, "data-path": data_path, "class-imbalance": kappa, "data-imbalance": phi,
                "seed": seed, "partitioner": "label-quantity-skew",
            }
        )  # fmt: skip
        arrays = graph_arrays(config, size.num_clients)
        fit = graph.fit_lognormal(arrays["misalignment"], config.message_floor)
        homogeneity = graph.homogeneity(arrays["adjacency"])
        panels.append(
            GraphPanel(
                kappa, phi, arrays["misalignment"], arrays["eigenvalues"], homogeneity, fit.theta, fit.phi
            )
        )
    return panels


def _cells(panels: list[GraphPanel], phi: float) -> dict[float, list[GraphPanel]]:
    return {
        kappa: [p for p in panels if (p.class_imbalance, p.data_imbalance) == (kappa, phi)]
        for kappa in CLASS_IMBALANCES
    }


def _rows(dataset: str, panels: list[GraphPanel]) -> list[Row]:
    rows = []
    for phi in DATA_IMBALANCES:
        for kappa, cell in _cells(panels, phi).items():
            name = f"{dataset}, κ⁻¹ = {kappa:g}, φ² = {phi:g}"
            rows += [
                Row(f"{name}: homogeneity", [p.homogeneity for p in cell]),
                Row(f"{name}: median misalignment", [_median(p) for p in cell]),
                Row(f"{name}: skewness of ln mis (0 for a lognormal)", [_skewness(p) for p in cell]),
            ]
    return rows


def _pairs(panel: GraphPanel) -> np.ndarray:
    return panel.misalignment[np.triu_indices(len(panel.misalignment), 1)]


def _median(panel: GraphPanel) -> float:
    return float(np.median(_pairs(panel)))


def _skewness(panel: GraphPanel) -> float:
    return float(graph.normality(panel.misalignment, graph.FLOOR).skewness)


# |skewness| of ln mis up to here counts as close to lognormal: that of an exponential is 2.
CLOSE = 1.0


def _misalignment(datasets: dict[str, list[GraphPanel]]) -> Verdict:
    facts, evidence = [], []
    for dataset, panels in datasets.items():
        for phi in DATA_IMBALANCES:
            cells = _cells(panels, phi).values()
            medians = [mean([_median(p) for p in cell]) for cell in cells]
            skews = [mean([_skewness(p) for p in cell]) for cell in cells]
            facts += [bool(np.all(np.diff(medians) > 0)), max(map(abs, skews)) < CLOSE]
            evidence.append(
                f"{dataset}, φ² = {phi:g}: median misalignment {_listed(medians)}, "
                f"skewness of ln mis {_listed(skews)}"
            )
    return judge(
        "003-1", all(facts) if facts else None, f"κ⁻¹ = {_listed(CLASS_IMBALANCES)}. " + "; ".join(evidence)
    )


def _homogeneity(datasets: dict[str, list[GraphPanel]]) -> Verdict:
    facts, evidence = [], []
    for dataset, panels in datasets.items():
        for phi in DATA_IMBALANCES:
            cells = _cells(panels, phi).values()
            homs = [mean([p.homogeneity for p in cell]) for cell in cells]
            spectra = [mean([float(p.eigenvalues[1:].mean()) for p in cell]) for cell in cells]
            facts += [bool(np.all(np.diff(spectra) < 0)), _settles(homs)]
            evidence.append(
                f"{dataset}, φ² = {phi:g}: homogeneity {_listed(homs)}, mean eigenvalue {_listed(spectra)}"
            )
    return judge(
        "003-2", all(facts) if facts else None, f"κ⁻¹ = {_listed(CLASS_IMBALANCES)}. " + "; ".join(evidence)
    )


def _settles(homogeneities: list[float]) -> bool:
    """Tell whether it falls more than twice as much up to κ⁻¹ = 10 as from there on."""
    start, middle, end = (homogeneities[CLASS_IMBALANCES.index(kappa)] for kappa in (0.0, 10.0, 100.0))
    return start - middle > 2 * (middle - end)


def _listed(values: "list[float] | tuple[float, ...]") -> str:
    return ", ".join(f"{value:.3g}" for value in values)
