"""A metric that isn't defined on some clients' rows: their number is told, and the others' mean counts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fedapp
from fedapp.training.evaluation import evaluate, metrics_of
from tests.runs import lines_of, summary_of

rng = np.random.default_rng(1)

KEYS: dict[str, Any] = {
    "model": "logistic",
    "metrics": "auroc,accuracy",
    "num_server_rounds": 3,
    "engine": "sequential",
    "figures": False,
    "quiet": True,
}


def rows(number: int, classes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    y = np.resize(np.array(classes), number)
    return (rng.normal(size=(number, 2)) + y[:, None]).astype(np.float32), y


# Of four clients two have one class.
CLIENTS = [rows(24, (0, 1)), rows(20, (1,)), rows(28, (0, 1)), rows(16, (0,))]


def run(folder: Path, **keys: Any) -> Path:
    return fedapp.run(**{"dataset": CLIENTS, **KEYS, "results_dir": str(folder), **keys}).path


@pytest.mark.parametrize(
    "keys", [{}, {"test_on": "own"}, {"client_evaluation": True}], ids=lambda keys: str(keys)
)
def test_the_mean_is_over_the_clients_where_it_is_defined(keys, tmp_path):
    path = run(tmp_path, **keys, keep="best", best_of="client-auroc-mean")
    last, table = lines_of(path)[-1], pq.read_table(path / "clients.parquet").to_pandas()
    own = table[table["aggregation"] == last["aggregation"]].set_index("client")["auroc"]
    assert own.isna().tolist() == [False, True, False, True]
    assert last["client-auroc-mean"] == pytest.approx(own.mean())
    assert last["client-auroc-worst-tenth"] == pytest.approx(own.min())
    assert last["client-auroc-clients"] == 2
    assert "client-accuracy-clients" not in last
    assert math.isfinite(summary_of(path)["best-client-auroc-mean"])
    if "client_evaluation" in keys:  # weighted by rows, of the clients that have it
        weights = np.array([len(CLIENTS[client][1]) for client in (0, 2)])
        assert last["client-auroc"] == pytest.approx(np.average(own.dropna(), weights=weights), rel=0.02)


def test_a_loss_that_is_not_finite_is_not_taken_for_an_undefined_metric():
    x, y = torch.zeros(4, 1), torch.tensor([0, 1, 0, 1])

    class Broken(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.full((len(inputs), 2), math.nan)

    score = evaluate(Broken(), {}, x, y, metrics=metrics_of("auroc"))
    offsets = np.array([0, 2, 4])
    assert score.undefined("auroc", score.by_client(offsets), offsets) == []


def test_a_metric_that_never_has_a_value_is_warned_of_and_the_last_model_is_kept(tmp_path):
    x, y = rows(40, (0, 1))
    tests = rng.normal(size=(8, 2)).astype(np.float32), np.ones(8, np.int64)
    path = run(tmp_path, dataset=(x, y, *tests), num_clients=2, keep="best", best_of="auroc")
    assert all(line["auroc"] is None for line in lines_of(path))
    log = (path / "log.txt").read_text("utf-8")
    assert (
        log.count(
            "best_of = 'auroc': no evaluation had a finite value, so none is the best, and the last model"
        )
        == 1
    )
    assert (path / "model.safetensors").read_bytes() == (path / "model-last.safetensors").read_bytes()
    assert "no evaluation had" not in (run(tmp_path, keep="best", best_of="accuracy") / "log.txt").read_text(
        "utf-8"
    )


@pytest.mark.parametrize(("test_on", "expected"), [("held-out", "train"), ("own", "test")])
def test_clients_parquet_names_the_rows_that_clients_are_measured_on(test_on, expected, tmp_path):
    path = run(tmp_path, test_on=test_on)
    assert set(pq.read_table(path / "clients.parquet")["rows"].to_pylist()) == {expected}
