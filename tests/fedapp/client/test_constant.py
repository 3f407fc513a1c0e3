"""A constant vector that a strategy of one's own sends beside the model: clients add it to every gradient."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from strategies import REGISTRY, FedAvg
from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import Vector
from tests.runs import arrays_of
from tests.selection import only

SHIFT = 0.25


class Shifted(FedAvg):
    """FedAvg whose clients add the same number to every entry of every gradient."""

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[dict[str, Vector]]:
        for _ in clients:
            yield {messages.CONSTANT: np.full(len(self.session.model), SHIFT)}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_it_moves_every_parameter_by_the_step_size_times_it(engine, run_app, monkeypatch):
    monkeypatch.setitem(REGISTRY, "shifted", Shifted)
    models = []
    for strategy in ("fedavg", "shifted"):
        # One full-batch step of size 0.1: the gradient itself is the same, so the models differ by 0.1 · 0.25.
        values = {
            "strategy": strategy,
            "model": "logistic",
            "batch-size": 0,
            "local-epochs": 0,
            "local-steps": 1,
            "num-server-rounds": 1,
            "lr": 0.1,
        }
        models.append(arrays_of(run_app(values, 3, engine=engine, name=strategy)))
    for name, plain in models[0].items():
        assert plain - models[1][name] == pytest.approx(0.1 * SHIFT, abs=1e-6)


@pytest.mark.parametrize("strategy", only(["scaffold", "fednova", "feddyn", "mifa"], 2))
def test_running_statistics_are_averaged_and_not_corrected_on_both_engines(strategy, run_app):
    values = {
        "strategy": strategy,
        "model": "tests.fedapp.own_parts:normalising",
        "feddyn-alpha": 0.1,
        "local-epochs": 0,
        "local-steps": 2,
        "step-heterogeneity": "list:1,2,4",
        "num-server-rounds": 4,
        "momentum": 0.5,
    }
    models = [arrays_of(run_app(values, 3, engine=each, name=each)) for each in ("sequential", "vectorized")]
    for name, array in models[0].items():
        assert array == pytest.approx(models[1][name], rel=1e-4, abs=1e-5)
    assert (models[0]["2.running_var"] > 0).all()
    assert (
        0 < int(models[0]["2.num_batches_tracked"]) <= 4 * 4
    )  # a mean, over clients of 1, 2 and 4 steps a round
