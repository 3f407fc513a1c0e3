"""FLamby's Fed-TCGA-BRCA: survival of patients in six regions, by Cox's partial likelihood."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from custom.survival import concordance
from fedapp.data.errors import DataError
from strategies import FedAvg, SynchronousConfig
from strategies.updates.server_optimizer import Adam, ServerOptimizer
from studies.reproduce.curves import panels
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Run, mean

FILE = "tcga_brca.csv"
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


# ---- What the runs are made of -------------------------------------------------------------------------------------


def patients(data_path: str) -> dict[str, np.ndarray]:
    """Return 39 features of each patient, (event, time, number of the region), and the region as natural id."""
    path = Path(data_path, FILE)
    if not path.is_file():
        raise DataError(f"data-path = {data_path!r}: has no {FILE}")
    table = pd.read_csv(path)
    table["place"] = table["region"].map(REGIONS.index)
    found = {}
    for fold in ("train", "test"):
        rows = table[table["fold"] == fold]
        x = rows.drop(columns=["event", "time", "region", "fold", "place"])
        found[f"x_{fold}"] = x.to_numpy(np.float32)
        found[f"y_{fold}"] = rows[["event", "time", "place"]].to_numpy(np.float32)
        found[f"group_{fold}"] = rows["region"].to_numpy(str)
    return found


def concordance_of_regions(outputs: Tensor, targets: Tensor) -> float:
    """Return Harrell's C of each region's rows, the mean over the regions."""
    places = targets[:, 2]
    return mean([concordance(outputs[places == each], targets[places == each]) for each in places.unique()])


@dataclass(frozen=True)
class FLambysConfig(SynchronousConfig):
    """FedAvg's parameters; the server's step is FLamby's Adam: β₂ = .999, τ = 1e-8, from v₀ = 0."""

    def new_optimizer(self) -> ServerOptimizer:
        """Return Adam without correction of its bias."""
        return Adam(0.1, 0.9, 0.999, 1e-8, initial=0.0, usual_lr=0.1)


class FLambysFedAdam(FedAvg):
    """FedAdam (Reddi et al. 2021, algorithm 2) with the constants of FLamby's benchmark."""

    Config = FLambysConfig


# ---- Their report --------------------------------------------------------------------------------------------------

METRIC, POOLED = "concordance-of-regions", "concordance"


def at_the_end(run: Run) -> float:
    """Return a run's C-index, the mean over the regions' test rows, after its last round."""
    return float(run.column(METRIC)[-1])


def tcga(results: Results, plan: Plan, folder: Path) -> Report:
    """Judge every method's C-index beside the published one; draw it by round."""
    report, runs = Report(), results.runs
    methods = {method: runs.where(method=method) for method in runs.labels("method")}
    grid = [[(name, methods, column)] for name, column in {"six regions": METRIC, "pooled": POOLED}.items()]
    title = "C-index of test rows; bands: one deviation over seeds"
    labels = {METRIC: "mean over regions", POOLED: "all test rows"}
    report.figures.append(
        panels(folder / "c-index.png", title, grid, x="aggregation", x_label="round", y_label=labels)
    )
    for claim in plan.parts("flamby-c"):
        method, published = plan.threshold(claim, "method"), plan.threshold(claim, "published")
        found = [at_the_end(run) for run in runs.where(method=method)]
        report.rows.append(Row(f"{method}: C-index, mean over regions", found, published))
        report.rows.append(
            Row(
                f"{method}: C-index of all test rows",
                [float(run.column(POOLED)[-1]) for run in runs.where(method=method)],
            )
        )
        report.verdicts.append(_near(claim, results.missing(method=method), found, plan))
    report.verdicts.append(_ordered("flamby-order", results, plan))
    return report


def _near(claim: str, missing: str, found: list[float], plan: Plan) -> Verdict:
    if missing:
        return not_run(claim, missing)
    away = mean(found) - plan.threshold(claim, "published")
    by_seed = ", ".join(f"{value:.3f}" for value in found)
    return judge(
        claim,
        abs(away) <= plan.threshold(claim, "margin"),
        f"{mean(found):.3f} ({by_seed}), {away:+.3f} from the published",
    )


def _ordered(claim: str, results: Results, plan: Plan) -> Verdict:
    """The methods' means are in the published order."""
    order = plan.threshold(claim, "order")
    for method in order:
        if missing := results.missing(method=method):
            return not_run(claim, missing)
    means = [mean([at_the_end(run) for run in results.runs.where(method=method)]) for method in order]
    return judge(
        claim,
        all(higher > lower for higher, lower in pairwise(means)),
        ", ".join(f"{method} {value:.3f}" for method, value in zip(order, means, strict=True)),
    )
