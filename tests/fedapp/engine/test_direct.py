"""Asynchronous runs on the vectorized engine, which need no messages, against the same by messages: bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedapp import client_app, server
from fedapp.engine.direct import TOGETHER, TOGETHER_VALUES, together
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.training import trainer
from strategies import REGISTRY, AsynchronousStrategy, FedBuff
from strategies.clock import VirtualClock, WallClock
from strategies.flower import messages
from strategies.flower.grids import WorkingGrid
from tests.fedapp.engine.conftest import Counting
from tests.runs import same_files
from tests.selection import methods, only

CLIENTS = 12
# The clients of a method that writes something into its requests, such as vectors or a task's steps, get messages.
ASYNCHRONOUS = methods(has_rounds=False, writes_requests=False)


@pytest.fixture
def both(run_both):
    """Run a config without messages, and then with them, which a hook that could write into them asks for."""
    given: dict[str, Any] = {
        "strategy": "async-fedavg",
        "model": "logistic",
        "num_server_rounds": 20,
        "eval_every": 10,
        "batch_size": 16,
        "min_samples": 1,
        "time_scenario": "F80",
    }
    return lambda clients=CLIENTS, **values: run_both("extra_records", clients, **{**given, **values})


def assert_same(path: Path, other: Path) -> None:
    """Compare models, metrics and, but for real seconds, what became of every task."""
    assert same_files(path, other)
    tasks, others = (pq.read_table(each / "tasks.parquet") for each in (path, other))
    virtual = [name for name in tasks.column_names if not name.startswith("wall")]
    assert tasks.num_rows
    assert tasks.select(virtual).equals(others.select(virtual))


@pytest.mark.parametrize("strategy", only(ASYNCHRONOUS, 4))
def test_every_method_has_the_bits_that_messages_give(strategy, both):
    assert_same(*both(strategy=strategy, num_server_rounds=8 if strategy == "fedfix" else 20))


CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "l2": 1e-3, "momentum": 0.9},
    "cnn": {"model": "cnn", "clients": 6, "num_server_rounds": 8},
    "uneven": {"data_imbalance": 1.0, "partitioner": "label-quantity-skew", "class_imbalance": 1.0},
    "bounded": {"update_norm_bound": 0.05, "lr_schedule": "cosine"},
    "places": {"concurrency": 3},
    "lost": {"task_failure": 0.3, "availability": "diurnal:0.5,20", "num_server_rounds": 12},
    "evaluated by clients": {"client_evaluation": True, "eval_every": 5},
    "buffered": {"strategy": "fedbuff", "buffer_size": 5, "server_optimizer": "yogi", "server_lr": 0.1},
    "guarded": {"strategy": "fedbuff", "buffer_size": 5, "safeguards": "on"},
}


@pytest.mark.parametrize("case", only(list(CASES), 5))
def test_every_kind_of_run_has_them(case, both):
    assert_same(*both(**CASES[case]))


def test_batches_of_one_have_them(both):
    # The last bits of a stack's products depend on how many clients it has, where each has one example.
    assert_same(
        *both(strategy="fedbuff", buffer_size=3, model="mlp", batch_size=1, local_steps=4, local_epochs=0)
    )


def test_tasks_that_wait_are_trained_together_whatever_they_were_dispatched_with(both, monkeypatch):
    sizes: list[int] = []
    trained = trainer.train_dense

    def counted(stack: Any) -> Any:
        sizes.append(len(stack))
        return trained(stack)

    monkeypatch.setattr(trainer, "train_dense", counted)
    both(strategy="fedbuff", buffer_size=2, model="mlp", time_scenario="F0")
    number = len(sizes) // 2  # without messages, and with them
    assert sorted(sizes[:number]) == sorted(sizes[number:])
    assert max(sizes) == TOGETHER


@given(st.integers(0, 500), st.integers(1, 10**8))
def test_together_are_all_tasks_once_in_their_order(number, size):
    found = together(number, size)
    assert [place for part in found for place in part] == list(range(number))
    assert all(len(part) == len(found[0]) for part in found[:-1])
    longest = max(map(len, found), default=1)
    assert 1 <= longest <= TOGETHER
    assert longest == 1 or longest * size <= TOGETHER_VALUES
    assert number < TOGETHER or longest == TOGETHER or (longest + 1) * size > TOGETHER_VALUES


def test_a_local_rule_that_changes_is_followed(both, monkeypatch):
    class Pulled(REGISTRY["async-fedavg"]):  # type: ignore[misc]
        def local_rule(self) -> dict[str, float]:
            return {messages.ALPHA: 0.5 * (self.session.aggregations % 3)}

    plain = both(strategy="async-fedavg", local_epochs=2)[0]
    monkeypatch.setitem(REGISTRY, "async-fedavg", Pulled)
    path, other = both(strategy="async-fedavg", local_epochs=2)
    assert_same(path, other)
    assert (path / "model.safetensors").read_bytes() != (plain / "model.safetensors").read_bytes()


def test_so_is_one_that_changes_while_the_model_does_not(both, monkeypatch):
    class Pulled(REGISTRY["rennala"]):  # type: ignore[misc]
        def local_rule(self) -> dict[str, float]:
            return {messages.ALPHA: 2.0 * (self.session.task_table.dispatched % 2)}

    monkeypatch.setitem(REGISTRY, "rennala", Pulled)
    # Each client works about twice on every model.
    assert_same(
        *both(strategy="rennala", local_epochs=2, buffer_size=2 * CLIENTS, num_server_rounds=6, eval_every=1)
    )


def test_a_resumed_run_hands_out_again_what_was_under_way(configure, tmp_path):
    given: dict[str, Any] = {
        "strategy": "fedbuff",
        "buffer_size": 4,
        "num_server_rounds": 12,
        "time_scenario": "F80",
        "model": "mlp",
        "results_dir": str(tmp_path),
        "checkpoint_every": 1,
    }
    whole = server.run(Counting(CLIENTS), server.prepare(configure(**given, run_name="whole"), CLIENTS)).path
    seen = itertools.count()
    config = configure(**given, run_name="cut-off")
    path = server.run(
        Counting(CLIENTS), server.prepare(config, CLIENTS), should_stop=lambda: next(seen) > 120
    ).path
    assert len((path / "metrics.jsonl").read_text().splitlines()) < 13
    grid = Counting(CLIENTS)
    server.run(grid, server.prepare(configure(resume=str(path)), CLIENTS))
    assert grid.tasks
    assert not grid.models
    ours, theirs = load_file(path / "model.safetensors"), load_file(whole / "model.safetensors")
    for name, value in theirs.items():  # what is stacked with what decides the last bits
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7)


def test_clients_that_cant_take_part_are_named_and_missed(both, too_large, caplog):
    path, other = both(**too_large, clients=20, num_server_rounds=60)
    assert_same(path, other)
    texts = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith("client 0 (node 1), task 1: its arrays") for text in texts) == 2
    assert any("is dropped after 3 misses" in text for text in texts)


def test_a_task_that_raises_is_a_failure_with_its_reason(configure, tmp_path, monkeypatch, caplog):
    grid = Counting(CLIENTS)
    monkeypatch.setitem(grid.contexts[3].node_config, "partition-id", 99)
    config = configure(strategy="fedbuff", buffer_size=3, num_server_rounds=4, results_dir=str(tmp_path))
    server.run(grid, server.prepare(config, CLIENTS))
    assert grid.tasks
    assert any("partition-id = 99: must be 0 to 11" in record.getMessage() for record in caplog.records)


def test_who_writes_into_requests_or_waits_for_real_time_gets_messages():
    class Own(FedBuff):
        def extra_records(self, client: Any) -> dict[str, Any]:
            return {}

    assert Own.capabilities.writes_requests
    assert not any(REGISTRY[name].capabilities.writes_requests for name in ASYNCHRONOUS)
    assert REGISTRY["fedcompass"].capabilities.writes_requests
    assert isinstance(VectorizedGrid(client_app.app, 2), WorkingGrid)
    assert not isinstance(SequentialGrid(client_app.app, 2), WorkingGrid)
    assert issubclass(Own, AsynchronousStrategy)
    assert (
        FedBuff(clock=VirtualClock()).session.scheduler.real_time,
        FedBuff(clock=WallClock()).session.scheduler.real_time,
    ) == (
        False,
        True,
    )


def test_compressed_updates_travel_as_messages(configure, tmp_path):
    grid = Counting(CLIENTS)
    config = configure(
        strategy="fedbuff",
        buffer_size=3,
        num_server_rounds=2,
        compression="qsgd:8",
        results_dir=str(tmp_path),
    )
    server.run(grid, server.prepare(config, CLIENTS))
    assert (grid.tasks, grid.models > 0) == (0, True)
