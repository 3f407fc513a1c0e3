"""Every cell of the tables in docs/flower.md: it works, or says why it doesn't."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as mods
from flwr.serverapp import strategy as flower

from strategies import REGISTRY, RunError
from strategies.engine_name import DEPLOYMENT
from strategies.testing import MemoryGrid
from tests.examples import apps

OWN: dict[str, dict[str, Any]] = {"fedbuff": {"buffer_size": 2}, "fedfix": {"fedfix_interval": 0.05}}
ROUNDS = ("fedavg", "fedprox", "spectral")
NO_DIRECTION = "no client sent a direction to place it in the graph"
NEIGHBOURS = "each client is sent an average of its neighbours' models"
NO_ROUNDS = "has no rounds: call its own start"


def strategy_of(name: str) -> Any:
    return REGISTRY[name](fraction_evaluate=0.0, **OWN.get(name, {}))


def numpy_app(*given: Any) -> ClientApp:
    """Return an app that moves the model half the way to the client's own number, with the graph's handler."""
    app = ClientApp(mods=list(given))

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        array = Array(np.array([1.0, float(context.node_config["partition-id"])]))
        return Message(RecordDict({"direction": ArrayRecord({"d": array})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy()
        w = w + 0.5 * (context.node_config["partition-id"] + 2 - w)
        arrays = ArrayRecord({"w": Array(w.astype(np.float32))})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 2})}), reply_to=message
        )

    return app


def start(strategy: Any, *given: Any, **config: Any) -> float:
    grid = MemoryGrid(numpy_app(*given), [{"partition-id": i} for i in range(3)])
    model = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    result = strategy.start(grid, model, num_rounds=2, timeout=60.0, train_config=ConfigRecord(config))
    return float(result.arrays["w"].numpy()[0])


# ---- App × strategy × engine ---------------------------------------------------------------------------------------


def initial(name: str) -> ArrayRecord:
    if name == "pytorch_fedfix":
        return ArrayRecord(apps.module(name, "task").Net().state_dict())
    if name == "sklearn_fedprox":
        return ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    return ArrayRecord([np.zeros(5)])


@pytest.mark.parametrize("devices", [False, True], ids=["simulation", "superlink"])
@pytest.mark.parametrize("strategy", REGISTRY)
@pytest.mark.parametrize("name", ["own_scheme", "pytorch_fedfix", "sklearn_fedprox", "numpy_spectral"])
def test_app_and_strategy(name: str, strategy: str, devices: bool) -> None:
    grid = apps.grid_of(name, clients=3)
    if devices:
        grid.engine = DEPLOYMENT
    model, config = initial(name), ConfigRecord({"lr": 0.1})
    made = strategy_of(strategy)
    if strategy == "spectral" and name != "numpy_spectral":
        with pytest.raises(RunError, match=NO_DIRECTION):
            made.start(grid, model, num_rounds=2, train_config=config)
        return
    result = made.start(grid, model, num_rounds=2, train_config=config)
    before, after = ([array.numpy() for array in record.values()] for record in (model, result.arrays))
    assert all(np.isfinite(array).all() for array in after)
    assert any((old != new).any() for old, new in zip(before, after, strict=True))


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


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("strategy", REGISTRY)
def test_strategy_and_wrapper(strategy: str, wrapper: str) -> None:
    wrap, given = WRAPPERS[wrapper]
    wrapped = wrap(strategy_of(strategy))
    if strategy in ("fedavg", "fedprox"):
        assert start(wrapped, *given) != 0.0
        return
    with pytest.raises(RunError, match=NEIGHBOURS if strategy == "spectral" else NO_ROUNDS):
        start(wrapped, *given)


# ---- Strategy × mod of the app -------------------------------------------------------------------------------------

MODS: dict[str, Callable[[], Any]] = {
    "LocalDpMod": lambda: mods.LocalDpMod(1.0, 0.1, 1e9, 0.1),
    "fixedclipping": lambda: mods.fixedclipping_mod,
    "adaptiveclipping": lambda: mods.adaptiveclipping_mod,
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("strategy", REGISTRY)
def test_strategy_and_mod(strategy: str, mod: str) -> None:
    if strategy == "spectral":
        with pytest.raises(RunError, match=NO_DIRECTION):
            start(strategy_of(strategy), MODS[mod](), clipping_norm=1e9)
        return
    assert start(strategy_of(strategy), MODS[mod](), clipping_norm=1e9) != 0.0


@pytest.mark.parametrize("mod", ["fixedclipping", "adaptiveclipping"])
@pytest.mark.parametrize("strategy", [name for name in REGISTRY if name != "spectral"])
def test_a_clipping_mod_that_is_told_no_norm(strategy: str, mod: str) -> None:
    said = "no client's work was accepted" if strategy in ROUNDS else "no client is left"
    with pytest.raises(RunError, match=said):
        start(strategy_of(strategy), MODS[mod]())


def test_flower_has_no_secure_aggregation_for_such_apps() -> None:
    assert not hasattr(mods, "secaggplus_mod")  # as docs/flower.md says
