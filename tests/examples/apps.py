"""The runnable apps of examples/, as tests load them."""

import importlib
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from strategies import REGISTRY
from strategies.testing import MemoryGrid

EXAMPLES = Path(__file__).parents[2] / "examples"

# What the accuracy on the clients has to be after the rounds that an app has by itself.
LEAST = {
    "pytorch_fedfix": 0.85,
    "sklearn_fedprox": 0.7,
    "numpy_spectral": 0.9,
    "pytorch_spectral": 0.8,
    "own_scheme": 0.9,
    "jax_fedbuff": 0.85,
}
# What a strategy is made with in the place of an app's own.
OWN = {
    "fedbuff": "buffer_size=2",
    "ca2fl": "buffer_size=2",
    "fadas": "buffer_size=2",
    "rennala": "buffer_size=2",
    "fedfix": "fedfix_interval=0.5",
}
ASYNCHRONOUS = ("pytorch_fedfix", "own_scheme", "jax_fedbuff")


def needs(name: str) -> None:
    """Skip a test of an app whose framework isn't installed."""
    if name == "jax_fedbuff":
        pytest.importorskip("jax", reason="JAX isn't installed")


def settings(name: str) -> dict[str, Any]:
    """Return what an app's pyproject.toml says of it."""
    text = (EXAMPLES / name / "pyproject.toml").read_text(encoding="utf-8")
    app: dict[str, Any] = tomllib.loads(text)["tool"]["flwr"]["app"]
    return app


def module(name: str, which: str) -> Any:
    """Return a module of an app."""
    folder = str(EXAMPLES / name)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"{name}.{which}")


def component(name: str, which: str) -> Any:
    """Return an app's ``serverapp`` or ``clientapp``, as its pyproject.toml names it."""
    path, attribute = settings(name)["components"][which].split(":")
    return getattr(module(name, path.removeprefix(f"{name}.")), attribute)


def grid_of(name: str, clients: int = 4, **changes: Any) -> MemoryGrid:
    """Return an app's real clients in this process."""
    config = settings(name)["config"] | changes
    grid = MemoryGrid(
        component(name, "clientapp"),
        [{"partition-id": i, "num-partitions": clients} for i in range(clients)],
    )
    for node in grid.nodes.values():
        node.context.run_config = dict(config)
    return grid


def run(name: str, clients: int = 4, **changes: Any) -> MemoryGrid:
    """Run an app's real server and clients in this process."""
    grid, config = grid_of(name, clients, **changes), settings(name)["config"] | changes
    component(name, "serverapp")(grid, Context(1, 1, {}, RecordDict(), dict(config)))
    return grid


def with_strategy(name: str, strategy: str, folder: Path) -> Path:
    """Copy an app into a folder, with another strategy in the line that makes one; return the copy."""
    copied = folder / name
    shutil.copytree(EXAMPLES / name, copied, ignore=shutil.ignore_patterns("__pycache__"))
    path, kind = copied / name / "server_app.py", REGISTRY[strategy].__name__
    call = f"strategy = {kind}({OWN.get(strategy, '')})"
    code, changed = re.subn(
        r"^(\s+)strategy = \w+\(.*$", rf"\1{call}", path.read_text("utf-8"), flags=re.MULTILINE
    )
    assert changed == 1, code
    path.write_text(
        f"{code.rstrip()}\n".replace(
            "app = ServerApp()", f"from strategies import {kind}\n\napp = ServerApp()"
        )
    )
    return copied


def with_frozen_body(folder: Path, mods: str) -> Path:
    """Copy own_scheme into a folder, with a second array of 1,000 values that isn't trained; return the copy.

    ``mods`` are its clients'. It prints the bytes of each round.
    """
    copied = with_strategy("own_scheme", "fedavg", folder)
    changes = {
        "server_app.py": {
            "FedAvg()": "FedAvg(trained='1')",
            "[np.zeros(FEATURES)]": "[np.ones(1000), np.zeros(FEATURES)]",
            "    last = ": "    told = result.train_metrics_clientapp\n"
            "    print('Bytes', [[m['bytes-down'], m['bytes-up']] for m in told.values()])\n    last = ",
        },
        "client_app.py": {
            "app = ClientApp()": f"from strategies import cache_frozen_parameters, compresses, unpack_arrays\n\n"
            f"app = ClientApp(mods=[{mods}])",
            "    x, y, _, _ = ": "    assert body.sum() == 1000\n    x, y, _, _ = ",
            "[w]": "[body, w]",
            "(w,) = ": "body, w = ",
        },
    }
    for name, pairs in changes.items():
        path = copied / "own_scheme" / name
        code = path.read_text("utf-8")
        for old, new in pairs.items():
            assert old in code, old
            code = code.replace(old, new)
        path.write_text(code)
    return copied


def accuracy_in(output: str) -> float:
    """Return the last accuracy that an app has printed."""
    found = re.findall(r"Accuracy on the clients: ([\d.]+)", output)
    assert found, output
    return float(found[-1])
