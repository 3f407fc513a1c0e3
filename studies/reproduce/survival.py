"""What runs on FLamby's Fed-TCGA-BRCA are made of: patients of six regions, a metric, and FLamby's FedAdam."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from custom.survival import concordance
from fedapp.data.errors import DataError
from strategies import FedAvg, SynchronousConfig
from strategies.updates.server_optimizer import Adam, ServerOptimizer

FILE = "tcga_brca.csv"
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


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
    regions = [places == each for each in range(len(REGIONS)) if bool((places == each).any())]
    return float(np.mean([concordance(outputs[rows], targets[rows]) for rows in regions]))


@dataclass(frozen=True)
class FLambysConfig(SynchronousConfig):
    """FedAvg's parameters; the server's step is FLamby's Adam: β₂ = .999, τ = 1e-8, from v₀ = 0."""

    def new_optimizer(self) -> ServerOptimizer:
        """Return Adam without correction of its bias."""
        return Adam(0.1, 0.9, 0.999, 1e-8, initial=0.0, usual_lr=0.1)


class FLambysFedAdam(FedAvg):
    """FedAdam (Reddi et al. 2021, algorithm 2) with the constants of FLamby's benchmark."""

    Config = FLambysConfig
