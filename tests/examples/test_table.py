"""Each strategy with each app and wrapper in docs/flower.md: it works, or says why it doesn't."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as mods
from flwr.serverapp import strategy as flower

from strategies import REGISTRY, RunError
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid
from tests.examples import apps
from tests.selection import covering, methods

OWN: dict[str, dict[str, Any]] = {"fedfix": {"fedfix_interval": 0.05}}
ROUNDS = methods("has_rounds")
NO_DIRECTION = "no client sent a direction to place it in the graph"
NEIGHBOURS = "each client is sent a mean of its neighbours' models"
CORRECTED = [name for name, kind in REGISTRY.items() if kind.capabilities.side_channel]
PAST_THE_SUM = "which a wrapper around the strategy, such as one for privacy, knows nothing of"
NO_ROUNDS = "has no rounds: call its own start"


def strategy_of(name: str, fraction_evaluate: float = 0.0) -> Any:
    kind = REGISTRY[name]
    buffered = {"buffer_size": 2} if hasattr(kind.Config(), "buffer_size") else {}  # there are three clients
    return kind(fraction_evaluate=fraction_evaluate, **buffered, **OWN.get(name, {}))


def numpy_app(*given: Any, train_mods: Any = None) -> ClientApp:
    """Return an app that moves the model half the way to the client's own number, with the graph's handler.

    An update is clipped by hand to the norm ``by-hand`` of the config, if there is one.
    """
    app = ClientApp(mods=list(given))

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        array = Array(np.array([1.0, float(context.node_config["partition-id"])]))
        return Message(RecordDict({"direction": ArrayRecord({"d": array})}), reply_to=message)

    @app.train(mods=train_mods)
    def train(message: Message, context: Context) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy()
        step = 0.5 * (context.node_config["partition-id"] + 2 - w)
        step *= min(1.0, message.content["config"].get("by-hand", np.inf) / np.linalg.norm(step))
        arrays = ArrayRecord({"w": Array((w + step).astype(np.float32))})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 2})}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        w = float(message.content.array_records["arrays"]["w"].numpy()[0])
        metrics = MetricRecord(
            {"num-examples": 2, "loss": (context.node_config["partition-id"] + 2 - w) ** 2}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def start(strategy: Any, *given: Any, **config: Any) -> float:
    return run(strategy, MemoryGrid(numpy_app(*given), [{"partition-id": i} for i in range(3)]), **config)


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def run(strategy: Any, grid: MemoryGrid, num_rounds: int = 2, **config: Any) -> float:
    result = strategy.start(
        grid, model(), num_rounds=num_rounds, timeout=60.0, train_config=ConfigRecord(config)
    )
    return float(result.arrays["w"].numpy()[0])


# ---- App × strategy × engine ---------------------------------------------------------------------------------------


def initial(name: str) -> ArrayRecord:
    if name.startswith("pytorch"):
        return ArrayRecord(apps.module(name, "task").Net().state_dict())
    if name == "sklearn_fedprox":
        return ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    return ArrayRecord([np.zeros(5)])


@pytest.mark.parametrize(
    ("name", "strategy", "devices"),
    covering(
        ["own_scheme", "pytorch_fedfix", "sklearn_fedprox", "pytorch_spectral", "numpy_spectral"],
        REGISTRY,
        [False, True],
        together=1,
    ),
)
def test_app_and_strategy(name, strategy, devices):
    grid = apps.grid_of(name, clients=3)
    if devices:
        grid.engine = DEPLOYMENT
    before, config = initial(name), ConfigRecord({"lr": 0.1})
    made = strategy_of(strategy)
    if strategy.endswith("spectral") and not name.endswith("spectral"):
        with pytest.raises(RunError, match=NO_DIRECTION):
            made.start(grid, before, num_rounds=2, train_config=config)
        return
    result = made.start(grid, before, num_rounds=2, train_config=config)
    old, new = ([array.numpy() for array in record.values()] for record in (before, result.arrays))
    assert all(np.isfinite(array).all() for array in new)
    assert any((a != b).any() for a, b in zip(old, new, strict=True))


# ---- Strategy × wrapper --------------------------------------------------------------------------------------------

WRAPPERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "server-fixed": (lambda s: flower.DifferentialPrivacyServerSideFixedClipping(s, 0.1, 1.0, 3), ()),
    "server-adaptive": (lambda s: flower.DifferentialPrivacyServerSideAdaptiveClipping(s, 0.1, 3), ()),
    "client-fixed": (
        lambda s: flower.DifferentialPrivacyClientSideFixedClipping(s, 0.1, 1.0, 3),
        (mods.fixedclipping_mod,),
    ),
    "client-adaptive": (
        lambda s: flower.DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, 3),
        (mods.adaptiveclipping_mod,),
    ),
}


@pytest.mark.parametrize(("strategy", "wrapper"), covering(REGISTRY, WRAPPERS, together=1))
def test_strategy_and_wrapper(strategy, wrapper):
    wrap, given = WRAPPERS[wrapper]
    wrapped = wrap(strategy_of(strategy))
    if strategy in ROUNDS and strategy != "spectral" and strategy not in CORRECTED:
        assert start(wrapped, *given) != 0.0
        return
    why = NEIGHBOURS if strategy == "spectral" else PAST_THE_SUM if strategy in CORRECTED else NO_ROUNDS
    with pytest.raises(RunError, match=why):
        start(wrapped, *given)
