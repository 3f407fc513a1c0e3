"""Fixtures of the application's tests: small npz files, messages to a ClientApp."""

from typing import Any

import numpy as np
import pytest
import torch

from fedapp import federation
from fedapp.config import RunConfig, Value


@pytest.fixture(autouse=True)
def fresh_process():
    """What a process keeps between calls doesn't leak from one test into the next."""
    threads = torch.get_num_threads()
    federation.forget()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def configure():
    """Build a config from attribute names: ``configure(num_server_rounds=3)``."""

    def build(**values: Value) -> RunConfig:
        return RunConfig.load({name.replace("_", "-"): value for name, value in values.items()})

    return build


@pytest.fixture
def save_npz(tmp_path):
    """Write an npz of 30 training rows (10 more to test on if asked) and return its path."""

    def save(
        name: str = "own.npz",
        *,
        shape: tuple[int, ...] = (8, 8),
        classes: int = 10,
        test: bool = False,
        **more: Any,
    ) -> str:
        rng = np.random.default_rng(0)
        arrays = {
            "x_train": rng.integers(0, 256, (30, *shape), np.uint8),
            "y_train": np.arange(30) % classes,
        }
        if test:
            arrays |= {"x_test": arrays["x_train"][:10], "y_test": arrays["y_train"][:10]}
        np.savez(tmp_path / name, **{**arrays, **more})
        return str(tmp_path / name)

    return save


@pytest.fixture
def broken_npz(tmp_path):
    """A file that is no npz."""
    path = tmp_path / "broken.npz"
    path.write_bytes(b"this is no zip archive")
    return str(path)
