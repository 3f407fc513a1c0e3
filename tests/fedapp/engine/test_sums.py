"""Rounds that ask the vectorized engine for sums, against the same rounds by messages: bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedapp import server
from fedapp.engine import summing
from fedapp.engine.models import ModelsOnGPU
from strategies import FedAvg, FedProx
from strategies.clients.roster import Client
from strategies.flower.arrays import Vector
from strategies.updates.aggregation import WeightedSum, block_size
from strategies.updates.sums import BlockSum, SumRequest, blocks
from tests.fedapp.engine.conftest import Counting
from tests.runs import same_files
from tests.selection import methods, only

CLIENTS = 20


@pytest.fixture
def both(run_both):
    """Run a config with sums, and then by messages, which a hook that looks at every model asks for."""
    given: dict[str, Any] = {
        "strategy": "fedavg",
        "model": "logistic",
        "num_server_rounds": 2,
        "batch_size": 16,
        "min_samples": 1,
    }
    return lambda clients=CLIENTS, **values: run_both("on_local_model", clients, **{**given, **values})


CASES: dict[str, dict[str, Any]] = {
    "logistic": {},
    "fedprox": {"strategy": "fedprox", "proximal_mu": 0.3},
    "mlp": {"model": "mlp", "l2": 1e-3},
    "cnn": {"model": "cnn", "clients": 10, "num_server_rounds": 2, "batch_size": 32},
    "uneven": {"data_imbalance": 1.0, "partitioner": "label-quantity-skew", "class_imbalance": 1.0},
    "drawn": {"participation": "uniform", "fraction_train": 0.5, "client_weights": "uniform"},
    "bounded": {"update_norm_bound": 0.05, "participation": "uniform", "fraction_train": 0.2},
    "bounded, of few": {
        "update_norm_bound": 0.02,
        "participation": "uniform",
        "fraction_train": 0.3,
        "task_failure": 0.4,
        "client_weights": "samples",
        "data_imbalance": 1.0,
        "partitioner": "label-quantity-skew",
        "num_server_rounds": 4,
    },
    "fedexp": {"server_optimizer": "fedexp"},
    "yogi": {"server_optimizer": "yogi", "server_lr": 0.1},
    "stragglers": {"stragglers": 0.5, "local_epochs": 4},
    "dropped": {"stragglers": 0.5, "drop_stragglers": True},
    "lost": {"task_failure": 0.3, "num_server_rounds": 4},
    "momentum": {"momentum": 0.9, "clip_norm": 1.0, "normalize_steps": True},
    "all rows": {"batch_size": 0, "local_epochs": 5},
}


@pytest.mark.parametrize("case", only(list(CASES), 8))
def test_sums_equal_messages_bit_for_bit(case, both):
    path, other = both(**CASES[case])
    assert same_files(path, other)


def test_many_clients_are_summed_block_by_block(both):
    path, other = both(clients=150, num_server_rounds=2)
    assert same_files(path, other)


def test_sums_on_a_gpu_differ_by_rounding_at_most(both, monkeypatch):
    asked = []
    monkeypatch.setattr(summing, "models_of", lambda *of: asked.append(ModelsOnGPU(*of)) or asked[-1])
    monkeypatch.setattr(summing.SharedTerms, "on_gpu", True)
    monkeypatch.setattr(summing, "FEWEST_ON_GPU", 4)
    path, other = both(model="mlp", data_imbalance=1.0, partitioner="label-quantity-skew")
    assert len(asked) == 2 * summing.BLOCKS_ON_GPU
    ours, theirs = load_file(path / "model.safetensors"), load_file(other / "model.safetensors")
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("number", "size", "sizes"),
    [
        (0, 10, []),
        (1, 10, [1]),
        (31, 10, [31]),
        (32, 10, [16, 16]),
        (100, 10, [25, 25, 25, 25]),
        (1000, 10, [250, 250, 250, 250]),
        # 2^30 bytes hold 161 models of 1,663,370 values, and 1 of 2^28 or more.
        (100, 1_663_370, [25, 25, 25, 25]),
        (700, 1_663_370, [140, 140, 140, 140, 140]),
        (3, 1 << 28, [1, 1, 1]),
        (2, 1 << 40, [1, 1]),
    ],
)
def test_a_gpu_has_few_large_blocks(number, size, sizes):
    found = summing.blocks_on_gpu(number, size)
    assert [len(block) for block in found] == sizes
    assert [place for block in found for place in block] == list(range(number))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_threads_changes_nothing(workers, configure, tmp_path):
    found = []
    for number in (2, workers):
        config = configure(
            num_server_rounds=2, results_dir=str(tmp_path), run_name=f"run-{number}", model="mlp"
        )
        path = server.run(Counting(workers=number), server.prepare(config, CLIENTS)).path
        found.append((path / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_a_model_that_is_not_finite_counts_for_nothing_and_is_named(both, too_large, caplog):
    path, other = both(**too_large, num_server_rounds=2)
    assert same_files(path, other)
    said = [record.message for record in caplog.records if "left out client" in record.message]
    assert len(said) == 4
    assert said[:2] == said[2:]
    assert "client 0" in said[0]


def test_a_round_that_is_cut_off_leaves_no_trace(configure, tmp_path):
    stopped = False

    class Stopping(Counting):
        def sums(self, request: SumRequest) -> Iterator[BlockSum]:
            nonlocal stopped
            for number, block in enumerate(super().sums(request)):
                stopped = self.rounds_of_sums == 2 and number == 3
                yield block

    config = configure(num_server_rounds=5, results_dir=str(tmp_path), run_name="cut")
    path = server.run(Stopping(), server.prepare(config, CLIENTS), lambda: stopped).path
    whole = configure(num_server_rounds=1, results_dir=str(tmp_path), run_name="whole")
    other = server.run(Counting(), server.prepare(whole, CLIENTS)).path
    assert (path / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


# Who may be summed ---------------------------------------------------------------------------------------------


def test_methods_that_look_at_updates_get_messages():
    summed = methods("has_rounds", sees_single_updates=False)
    assert {"fedavg", "fedprox"} <= set(summed)
    assert not set(summed) & {*methods("aggregates"), *methods("writes_requests")}


@pytest.mark.parametrize(
    "values",
    [
        {"aggregation_rule": "median", "client_weights": "uniform"},
        {"compression": "fp16"},
        {"dp": "central", "client_weights": "uniform", "dp_clipping_norm": 1.0, "dp_noise_multiplier": 1.0},
        {"dp": "local", "client_weights": "uniform", "dp_clipping_norm": 1e-3, "dp_noise_multiplier": 0.1},
        {"safeguards": "on", "norm_ratio_bound": 3.0},
        {"over_select": 0.5, "participation": "uniform", "fraction_train": 0.5, "time_scenario": "F80"},
        {"record_divergence": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_what_needs_single_updates_gets_them(values, configure, tmp_path):
    config = configure(num_server_rounds=1, results_dir=str(tmp_path), run_name="run", **values)
    grid = Counting(5)
    server.run(grid, server.prepare(config, 5))
    assert (grid.rounds_of_sums, grid.models > 0) == (0, True)


def test_a_subclass_of_ones_own_that_hooks_in_gets_messages():
    class Watching(FedAvg):
        def on_local_model(self, client: Client, local_model: Vector) -> None:
            """Look at it."""

    class Renamed(FedProx):
        """Nothing of its own."""

    assert Watching.capabilities.sees_single_updates
    assert not Renamed.capabilities.sees_single_updates


# Blocks ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 10**8))
def test_blocks_have_every_task_once_and_are_of_one_size(number, size):
    found = blocks(number, size)
    assert [place for block in found for place in block] == list(range(number))
    step = block_size(number, size)
    assert 1 <= step <= 64
    assert step == 1 or step * size <= 8 << 20
    assert all(len(block) == step for block in found[:-1])
    assert len(found) >= min(number, 5)


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.floats(0.001, 1), st.integers(-1000, 1000))),
        min_size=1,
        max_size=300,
    )
)
def test_a_sum_of_blocks_is_the_sum_of_its_parts(given):
    whole = WeightedSum(3, block_size(len(given), 3), squares=True)
    parts = WeightedSum(3)
    for block in blocks(len(given), 3):
        total, squares, kept = np.zeros(3), 0.0, []
        for one in given[block.start : block.stop]:
            if one is None:
                whole.skip()
                continue
            weight, value = one
            update = np.array([value, 0.1 * value, 1.0])
            whole.add(weight, update)
            total += weight * update
            squares += weight * float(update @ update)
            kept.append(weight)
        parts.add_block(total, squares, kept)
    weights = [1.0 if one is None else one[0] for one in given]
    found, expected = whole.result(weights), parts.result(weights)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.tobytes() == expected.tobytes()
        assert whole.mean_square(weights) == pytest.approx(parts.mean_square(weights), rel=1e-12)
