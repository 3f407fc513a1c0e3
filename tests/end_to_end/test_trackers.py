"""Trackers write what metrics.jsonl holds; they are extras, so each test needs its package."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fedapp.config import ConfigError
from tests.runs import lines_of, summary_of
from tests.selection import only


@pytest.fixture
def tracked(run_app):
    """Run the app for two rounds with a tracker."""
    return lambda tracker, **more: run_app(
        {"num-server-rounds": 2, "model": "logistic", "tracker": tracker, **more}, 3
    )


def test_tensorboard_events_equal_metrics(tracked):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tracked("tensorboard")
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([m["loss"] for m in lines_of(path)])
    assert [e.step for e in events.Scalars("loss")] == [0, 1, 2]


def test_wandb_writes_an_offline_run(tracked, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = tracked("wandb")
    assert list((path / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_has_what_metrics_jsonl_has(tracked, monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = tracked("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{path.parent}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("fedapp").experiment_id])
    assert (run.info.run_name, run.info.status) == (path.name, "FINISHED")
    assert run.data.params["model"] == "logistic"
    history = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda each: each.step)
    assert [each.value for each in history] == [line["loss"] for line in lines_of(path)]
    assert [each.step for each in history] == [0, 1, 2]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(ConfigError, match=r"tracker = 'mlflow': .*nonsense"):
        tracked("mlflow", **{"run-name": "other"})


@pytest.fixture
def stand_in(monkeypatch):
    """Have a module stand in for a tracker's."""

    def put(name, **content):
        monkeypatch.setattr("fedapp.server.trackers.find_spec", lambda _: ModuleType)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))

    return put


@pytest.fixture
def scalars(stand_in):
    """Stand in for TensorBoard: what it shows of a folder, by tag and step, each as often as it is there."""
    shown = []

    class Writer:
        def __init__(self, folder, purge_step=None):
            if purge_step is not None:
                shown[:] = [scalar for scalar in shown if scalar[1] < purge_step]

        def add_scalar(self, tag, value, step):
            shown.append((tag, step))

        def close(self):
            pass

    stand_in("torch.utils.tensorboard")
    stand_in("torch.utils.tensorboard.writer", SummaryWriter=Writer)
    return shown


@pytest.mark.parametrize("before", only([{"checkpoint-every": 1}, {"checkpoint-every": 100}], 1))
def test_a_resumed_run_shows_each_step_once(run_app, tracked, scalars, before):
    path = tracked("tensorboard", **before)
    assert [step for tag, step in scalars if tag == "loss"] == [0, 1, 2]
    # from aggregation 2, which is told again, or from the beginning
    run_app({"resume": str(path), "num-server-rounds": 4}, 3)
    assert [step for tag, step in scalars if tag == "loss"] == [0, 1, 2, 3, 4]


@pytest.mark.thorough
def test_wandb_that_does_not_begin_is_one_line_and_a_failed_run(tracked, tmp_path, stand_in):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty).\nCall wandb.login")

    stand_in("wandb", init=init)
    with pytest.raises(ConfigError) as caught:
        tracked("wandb", availability="bernoulli:0.5")
    line = (
        "tracker = 'wandb': RuntimeError: api_key not configured (no-tty). (WANDB_MODE=offline needs no login, and "
        "keeps the run on this machine)"
    )
    assert str(caught.value) == line
    told = summary_of(tmp_path / "run")
    assert (told["status"], told["reason"]) == ("failed", line)
