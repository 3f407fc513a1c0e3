"""The strategies in a bare Flower app: Flower's own loop, Flower's own wrappers, and nothing of ours beside."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy

from strategies import FedAvg, FedProx

REPOSITORY = Path(__file__).resolve().parents[3]


def test_importing_the_library_imports_neither_the_app_nor_torch():
    code = "import sys, pkgutil, importlib, strategies\n"
    code += "[importlib.import_module(f'strategies.{m.name}') for m in pkgutil.iter_modules(strategies.__path__)]\n"
    code += "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "'strategies'" in done.stdout
    for name in ("fedapp", "torch", "ray", "pydantic", "matplotlib"):
        assert f"'{name}'" not in done.stdout


@pytest.mark.parametrize("strategy_class", [FedAvg, FedProx])
def test_flowers_own_loop_gives_the_same_model(federation, model, same_bytes, train_config, strategy_class):
    options: dict[str, Any] = {"participation": "uniform", "fraction_train": 0.5}
    ours = strategy_class(strategy_class.Config(**options)).start(
        federation(range(6), range(1, 7)), model(0.3), num_rounds=3, train_config=train_config(2)
    )
    flowers = Strategy.start(
        strategy_class(strategy_class.Config(**options)),
        federation(range(6), range(1, 7)),
        model(0.3),
        num_rounds=3,
        timeout=10.0,
        train_config=train_config(2),
    )
    assert same_bytes(ours.arrays, flowers.arrays)
    assert ours.train_metrics_clientapp == flowers.train_metrics_clientapp
    assert ours.evaluate_metrics_clientapp == flowers.evaluate_metrics_clientapp


def test_flowers_own_loop_leaves_bad_replies_out_too(federation, model, train_config):
    grid = federation()
    grid.spoil(1, "raise")
    result = Strategy.start(
        FedAvg(), grid, model(1.0), num_rounds=1, timeout=10.0, train_config=train_config()
    )
    assert result.arrays["w"].numpy() == pytest.approx([1 / 3], rel=1e-15)  # by hand in test_round.py


def test_wrapped_in_differential_privacy_that_neither_clips_nor_adds_noise(federation, model, train_config):
    private = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=0.0, clipping_norm=1e9, num_sampled_clients=3
    )
    result = private.start(federation(), model(1.0), num_rounds=2, timeout=10.0, train_config=train_config())
    assert result.arrays["w"].numpy() == pytest.approx([0.4375], abs=1e-6)


def test_differential_privacy_clips_each_update(federation, model, train_config):
    # Δ = 1, .5, −1, each clipped to norm .5: .5, .5, −.5; Σ p_i Δ_i = (.5 + 2 · .5 − 5 · .5) / 8 = −1/8
    private = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=0.0, clipping_norm=0.5, num_sampled_clients=3
    )
    result = private.start(federation(), model(1.0), num_rounds=1, timeout=10.0, train_config=train_config())
    assert result.arrays["w"].numpy() == pytest.approx([0.875], abs=1e-6)


def test_evaluate_without_replies_has_nothing_to_say(federation, model):
    strategy = FedAvg()
    list(strategy.configure_train(1, model(1.0), ConfigRecord(), federation()))
    assert strategy.aggregate_evaluate(1, []) is None
