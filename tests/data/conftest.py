"""Fixtures of the data tests: a cache of their own."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Each test prepares its datasets in a folder of its own, and nothing phones home."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDAPP_CACHE", str(folder))
    monkeypatch.setattr("flwr_datasets.common.telemetry.FLWR_TELEMETRY_ENABLED", "0")
    return folder


@pytest.fixture
def images():
    """A small npz in the shape of MNIST: 30 training and 10 test rows."""
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (30, 28, 28), np.uint8),
        "y_train": (np.arange(30) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (10, 28, 28), np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }
