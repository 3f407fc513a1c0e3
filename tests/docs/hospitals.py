"""What the commands of docs/start.md leave behind: AUC of each hospital by name, predictions for new patients."""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from examples.hospitals import patients

IN_ORDER = ["Basel", "Genève", "Hospital 2", "Hospital 10", "Zürich"]


def check_hospitals(folder: Path) -> None:
    """Check the config, the run and the predictions in the folder where the commands ran."""
    assert (folder / "hospitals.toml").is_file()
    assert (folder / "hospitals.png").is_file()
    run = folder / "results" / "hospitals"
    clients = pd.read_parquet(run / "clients.parquet")
    last = clients[clients["aggregation"] == clients["aggregation"].max()]
    assert last["name"].tolist() == IN_ORDER
    assert last["auroc"].between(0.7, 1).all()
    with np.load(run / "partition.npz") as stored:
        assert stored["client_names"].tolist() == IN_ORDER
    found, known = pd.read_csv(folder / "predictions.csv"), patients(40, seed=2)
    assert found["patient"].tolist() == known["patient"].tolist()
    assert set(found["class"]) == {"yes", "no"}
    assert np.allclose(found["probability"], found[["probability yes", "probability no"]].max(axis=1))
    assert roc_auc_score(known["died"] == "yes", found["probability yes"]) > 0.75
