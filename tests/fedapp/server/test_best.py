"""A run that keeps its best model, or that a metric ends: its folder, and the folder of a run that is resumed."""

from pathlib import Path
from typing import Any

import pytest

import fedapp
from fedapp.config import ConfigError
from tests.runs import lines_of, summary_of

KEYS: dict[str, Any] = {"num_clients": 4, "model": "logistic", "engine": "sequential", "figures": False}
# The accuracy of this run, with steps that are too long, falls after a while; the loss does before.
LONG: dict[str, Any] = {"lr": 4.0, "batch_size": 0, "local_epochs": 3, "class_imbalance": 5.0}


def run(folder: Path, name: str, **keys: Any) -> Path:
    return fedapp.run(**{**KEYS, **LONG, "results_dir": str(folder), "run_name": name, **keys}).path


def test_the_best_model_is_kept_beside_the_last_and_nothing_else_of_the_run_changes(tmp_path):
    plain = run(tmp_path, "plain", num_server_rounds=9)
    kept = run(tmp_path, "kept", num_server_rounds=9, keep="best")
    losses = [line["loss"] for line in lines_of(plain)]
    best = losses.index(min(losses))
    assert 0 < best < 9
    until = run(tmp_path, "until", num_server_rounds=best)
    files = {path.name for path in plain.iterdir()}
    assert {path.name for path in kept.iterdir()} == files | {"model-last.safetensors"}
    assert (kept / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    assert (kept / "model-last.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert (kept / "model.safetensors").read_bytes() == (until / "model.safetensors").read_bytes()
    told, usual = summary_of(kept), summary_of(plain)
    assert (told["best-aggregation"], told["best-loss"], told["status"]) == (best, losses[best], "finished")
    assert told.keys() - usual.keys() == {"best-aggregation", "best-loss"}
    assert not [key for key in usual if key.startswith("best-")]


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_a_run_that_a_metric_ends_is_finished_and_has_a_reason(tmp_path, strategy):
    keys = {"strategy": strategy, "lr": 0.3, "num_server_rounds": 60}
    plain, ended = (
        run(tmp_path, name, **keys, **more)
        for name, more in {"a": {}, "b": {"stop_at": "accuracy>=.8"}}.items()
    )
    lines = lines_of(ended)
    assert lines == lines_of(plain)[: len(lines)]
    reached = [line["accuracy"] >= 0.8 for line in lines]
    assert reached == [*[False] * (len(lines) - 1), True]
    summary = summary_of(ended)
    assert (summary["status"], summary["complete"], summary["aggregations"]) == (
        "finished",
        True,
        len(lines) - 1,
    )
    assert summary["reason"].startswith("target reached: accuracy 0.8")
    with pytest.raises(
        ConfigError, match=r"is finished, target reached: .*; it goes on if stop-at or patience is"
    ):
        fedapp.run(resume=str(ended), num_server_rounds=70)
    longer = fedapp.run(resume=str(ended), stop_at="accuracy>=0.82").path
    assert lines_of(longer) == lines_of(plain)[: len(lines_of(longer))]
    assert len(lines_of(longer)) > len(lines)


def test_a_run_that_is_resumed_has_the_best_of_before_and_ends_where_the_whole_one_does(tmp_path):
    keys = {"keep": "best", "best_of": "accuracy", "patience": 3, "checkpoint_every": 1}
    whole = run(tmp_path, "whole", num_server_rounds=40, **keys)
    best, last = (summary_of(whole)[key] for key in ("best-aggregation", "aggregations"))
    assert last == best + 3 < 40
    assert summary_of(whole)["reason"].startswith("no progress: accuracy was no better in 3 evaluations")
    part = run(tmp_path, "part", num_server_rounds=best + 2, **keys)
    resumed = fedapp.run(resume=str(part), num_server_rounds=40).path
    for name in ("model.safetensors", "model-last.safetensors", "metrics.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert summary_of(resumed)["best-aggregation"] == best
