"""Runs in this process, of devices as the server sees them: named, and on a grid that is a deployment's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from strategies.flower.grids import DEPLOYMENT

NAMES = ("oslo", "bern", "lima")


class Devices(SequentialGrid):
    """Devices that hold a part each; those with an empty name have none."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(client_app.app, len(names))
        self.engine = DEPLOYMENT
        for context, name in zip(self.contexts.values(), names, strict=True):
            if name:
                context.node_config["name"] = name


@pytest.fixture
def go(tmp_path):
    """Run the app on devices, with these keys; return the run's folder."""

    def run(
        names: Sequence[str] = NAMES,
        observers: Sequence[server.Observer] = (),
        grid: Any = None,
        **values: Any,
    ) -> Path:
        given = {"model": "logistic", "num-server-rounds": 3, "results-dir": str(tmp_path), "run-name": "run"}
        given |= {name.replace("_", "-"): value for name, value in values.items()}
        experiment = server.prepare(RunConfig.load(given), len(names))
        return server.run(grid or Devices(names), experiment, observers=observers).path

    return run
