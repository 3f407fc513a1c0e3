"""Our line in place of Flower's, in apps shaped as Flower's examples: the same model, and others learn as well."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower

from strategies import REGISTRY, FedAvg, FedBuff, FedFix
from strategies.flower.arrays import ArraysMismatchError
from strategies.testing import MemoryGrid
from tests.examples import shapes

# What each shape imports.
MODULES = {
    "jax": "jax",
    "batch_norm": "torch",
    "transformers": "transformers",
    "lightning": "pytorch_lightning",
    "sklearn": "sklearn",
    "pandas": "pandas",
}


@pytest.fixture(scope="module", params=MODULES)
def shape(request):
    pytest.importorskip(MODULES[request.param])
    made: shapes.Shape = getattr(shapes, request.param)()
    return made


@pytest.fixture(autouse=True)
def nodes_are_there_at_once(monkeypatch):
    monkeypatch.setattr("strategies.flower.exchange.NODE_POLL", 0.0)


def grid_of(app: Any) -> MemoryGrid:
    return MemoryGrid(app, [{"partition-id": i} for i in range(len(shapes.ROWS))])


def test_fedavg_is_flowers(shape):
    ours, theirs = (kind().start(grid_of(shape.app), shape.initial(), 3) for kind in (FedAvg, flower.FedAvg))
    assert list(ours.arrays) == list(theirs.arrays)
    for name, array in ours.arrays.items():
        assert array.dtype == shape.initial()[name].dtype  # Flower makes float64 of an integer
        np.testing.assert_allclose(array.numpy(), theirs.arrays[name].numpy(), rtol=1e-6, atol=1e-6)
    last = ours.evaluate_metrics_clientapp[3]["eval_loss"]
    assert last == pytest.approx(theirs.evaluate_metrics_clientapp[3]["eval_loss"], rel=1e-5, abs=1e-9)
    assert shape.loss(ours.arrays) < 0.95 * shape.loss(shape.initial())


@pytest.mark.parametrize("kind", [FedBuff, FedFix])
def test_it_learns_without_rounds(shape, kind):
    own = {"buffer_size": 2} if kind is FedBuff else {"fedfix_interval": 0.4}
    result = kind(time_scenario="F80", **own).start(grid_of(shape.app), shape.initial(), 6)
    assert shape.loss(result.arrays) < 0.95 * shape.loss(shape.initial())


def test_the_means_of_columns_are_those_of_all_rows():
    shape = shapes.pandas()
    result = FedAvg().start(grid_of(shape.app), shape.initial(), 1)
    expected = shapes.everything()[0].astype(np.float64).mean(0)
    np.testing.assert_allclose(result.arrays["means"].numpy(), expected, rtol=1e-12)


# ---- Trees ---------------------------------------------------------------------------------------------------------

NO_VECTOR = r"bytes of a serialised model, such as trees of xgboost, can't be averaged .*FedXgbBagging"


@pytest.mark.parametrize("strategy", REGISTRY)
@pytest.mark.parametrize("sent", [b"", b'{"learner":{}}'])
def test_trees_are_no_vector_which_one_line_says_before_any_message(strategy, sent):
    kind = REGISTRY[strategy]
    buffered = {"buffer_size": 2} if hasattr(kind.Config(), "buffer_size") else {}
    grid = grid_of(None)
    with pytest.raises(ArraysMismatchError, match=NO_VECTOR):
        kind(**buffered).start(grid, ArrayRecord([np.frombuffer(sent, np.uint8)]), 1)
    assert grid.sent == []


def test_flowers_bagging_runs_on_our_grid_and_grows_trees():
    xgboost = pytest.importorskip("xgboost")
    strategy = flower.FedXgbBagging(fraction_evaluate=0.0)
    empty = ArrayRecord([np.frombuffer(b"", np.uint8)])
    result = strategy.start(grid_of(shapes.xgboost()), empty, 2)
    booster = xgboost.Booster()
    booster.load_model(bytearray(result.arrays["0"].numpy().tobytes()))
    assert booster.num_boosted_rounds() > 2
    with pytest.raises(ArraysMismatchError, match=NO_VECTOR):
        FedAvg().start(grid_of(shapes.xgboost()), result.arrays, 1)


# ---- On Ray --------------------------------------------------------------------------------------------------------

ON_RAY = """
import numpy as np
from flwr.serverapp import ServerApp, strategy as flower
from strategies import FedAvg
from strategies.flower.internals import simulate
from tests.examples import shapes
shape, server = shapes.batch_norm(), ServerApp()
@server.main()
def main(grid, context):
    ours, theirs = (
        kind(min_available_nodes=3).start(grid, shape.initial(), 3).arrays for kind in (FedAvg, flower.FedAvg)
    )
    for name in ours:
        np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), rtol=1e-6, atol=1e-6)
    assert shape.loss(ours) < 0.95 * shape.loss(shape.initial())
    print("equal")
simulate(server, shape.app, num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(300)
def test_batch_norm_on_ray():
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "equal\n" in done.stdout, (done.stdout + done.stderr)[-3000:]
