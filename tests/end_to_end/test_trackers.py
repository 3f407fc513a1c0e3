"""Trackers write what metrics.jsonl holds; they are extras, so each test needs its package."""

import json

import pytest

from fedapp import client_app, server
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.server.trackers import find_spec


def run(tmp_path, tracker):
    config = {"num-server-rounds": 2, "results-dir": str(tmp_path), "run-name": "run", "tracker": tracker}
    return server.run(SequentialGrid(client_app.app, 3), server.prepare(RunConfig.load(config), 3)).path


def test_tensorboard_events_equal_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = run(tmp_path, "tensorboard")
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([m["loss"] for m in metrics])
    assert [e.step for e in events.Scalars("loss")] == [0, 1, 2]


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = run(tmp_path, "wandb")
    assert list((path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_missing_tracker_is_named_before_the_run(tmp_path, tracker):
    if find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(ConfigError, match=f"tracker = '{tracker}': it isn't installed"):
        run(tmp_path, tracker)
