"""``trained``: what a stock Flower app is sent and sends back, and that the model is that of whole messages."""

import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from strategies import (
    REGISTRY,
    FedAvg,
    FedBuff,
    RunError,
    Scaffold,
    cache_frozen_parameters,
    compress_updates,
    unpack_arrays,
)
from strategies.clock import VirtualClock
from strategies.flower import messages
from strategies.flower.frozen import SplitModel
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid
from strategies.updates.compressed_models import MODEL

CLIENTS = 4
MODS = (unpack_arrays, compress_updates, cache_frozen_parameters)
TRAVELS = ("body.norm.running_mean", "head.weight", "head.bias")
Spoil = Callable[[dict[str, np.ndarray]], None]


def model(mask: float = -np.inf, seed: int = 0, steps: type[Any] = np.int64) -> ArrayRecord:
    rng = np.random.default_rng(seed)
    values = {
        "body.weight": rng.normal(size=(40, 30)),
        "body.mask": np.full((6, 6), mask),
        "body.norm.running_mean": np.zeros(8),
        "head.weight": rng.normal(size=(8, 5)),
        "body.steps": np.arange(3),
        "head.bias": np.zeros(5),
    }
    kinds = {"body.steps": steps}
    return ArrayRecord(
        {name: Array(each.astype(kinds.get(name, np.float32))) for name, each in values.items()}
    )


def stock(
    mods: Sequence[Any] = MODS,
    spoil: Spoil = lambda arrays: None,
    describes: bool = False,
    training: Sequence[Any] = (),
) -> ClientApp:
    """Return an app whose client i moves the head to i + Σ body, and reads arrays by their places, not by names."""
    app = ClientApp(mods=list(mods))

    @app.train(mods=list(training))
    def train(message: Message, context: Context) -> Message:
        sent, i = message.content.array_records["arrays"], int(context.node_config["partition-id"])
        config = message.content.config_records["config"]
        body, _, mean, weight, _, bias = (each.copy() for each in sent.to_numpy_ndarrays())
        beside = [each for each in ("constant", "neighbours") if each in message.content]
        h = message.content["constant"].to_numpy_ndarrays()[3] if "constant" in beside else 0.0
        if "neighbours" in beside:
            assert np.array_equal(message.content["neighbours"].to_numpy_ndarrays()[0], body)
        weight -= 0.5 * (weight - i - body.mean() + h) + config.get("proximal-mu", 0.0) * 0.01
        arrays = dict(zip(sent, sent.to_numpy_ndarrays(), strict=True))
        arrays |= {"head.weight": weight.astype(np.float32), "head.bias": bias + np.float32(i + 1)}
        arrays["body.norm.running_mean"] = mean + np.float32(body.sum())
        spoil(arrays)
        metrics = MetricRecord({"num-examples": i + 1})
        content = RecordDict(
            {"arrays": ArrayRecord({name: Array(each) for name, each in arrays.items()}), "metrics": metrics}
        )
        applied = {key: config[key] for key in ("proximal-mu", "strategies.beta") if key in config}
        said = {"records": beside} if beside else {}
        content["strategies.applied"] = ConfigRecord({**applied, **said, messages.PATH: 0.5})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        body, _, _, weight, _, _ = message.content["arrays"].to_numpy_ndarrays()
        loss = float(abs(weight.mean() - body.mean()))
        return Message(
            RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": 1})}), reply_to=message
        )

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        towards = np.ones(4) + 0.1 * int(context.node_config["partition-id"])
        return Message(RecordDict({"direction": ArrayRecord([towards])}), reply_to=message)

    if describes:

        @app.query("describe")
        def describe(message: Message, context: Context) -> Message:
            i = int(context.node_config["partition-id"])
            told = MetricRecord({"partition-id": i, "num-partitions": CLIENTS, "num-examples": i + 1})
            return Message(RecordDict({"metrics": told}), reply_to=message)

    return app


def grid_of(app: ClientApp) -> MemoryGrid:
    return MemoryGrid(app, [{"partition-id": i} for i in range(CLIENTS)], range(1, CLIENTS + 1))


def run(strategy: Any, grid: MemoryGrid, initial: ArrayRecord, rounds: int = 3, **more: Any) -> Any:
    return strategy.start(grid, initial, num_rounds=rounds, timeout=30, **more)


def nbytes(arrays: ArrayRecord, names: Sequence[str]) -> int:
    return sum(len(arrays[name].data) for name in names)


def same(one: ArrayRecord, other: ArrayRecord) -> bool:
    return list(one) == list(other) and all(one[name].data == other[name].data for name in one)


def told(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.message for record in caplog.records)


def whole_requests(grid: MemoryGrid) -> list[int]:
    sent = [m for kind in (messages.TRAIN, messages.EVALUATE) for m in grid.requests(kind)]
    return [m.metadata.dst_node_id for m in sent if len(m.content["arrays"]) == len(model())]


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_makes_the_model_of_whole_messages(name):
    options = {"buffer_size": 2} if hasattr(REGISTRY[name].Config, "buffer_size") else {}
    initial = model(mask=-1.0)
    expected = run(REGISTRY[name](**options), grid_of(stock()), initial)
    grid = grid_of(stock())
    strategy = REGISTRY[name](**options, trained="head.*")
    result = run(strategy, grid, initial)
    assert list(result.arrays) == list(initial)
    for array, values in result.arrays.items():
        if array in TRAVELS:
            assert np.allclose(values.numpy(), expected.arrays[array].numpy(), rtol=1e-5, atol=1e-6), array
            assert not np.array_equal(values.numpy(), initial[array].numpy())
        else:
            assert values.data == initial[array].data
    assert strategy.session.run.layout.names == TRAVELS
    size = nbytes(initial, TRAVELS)
    first = [m for m in result.train_metrics_clientapp.values() if m.get("bytes-up")]
    assert all(m["bytes-up"] % size == 0 for m in first)
    assert set(whole_requests(grid)) == set(grid.nodes)


def test_what_is_frozen_is_sent_once_and_again_where_it_is_gone():
    initial, grid = model(), grid_of(stock())

    def observe(progress: Any) -> None:
        assert same_frozen(progress.arrays, initial)
        if progress.aggregation == 2:
            grid.nodes[2].context.state.clear()

    result = run(FedAvg(trained=["head.weight", "head.b*"], observer=observe), grid, initial, 4)
    assert same_frozen(result.arrays, initial)
    assert sorted(whole_requests(grid)) == [1, 2, 2, 3, 4]
    size, whole = nbytes(initial, TRAVELS), nbytes(initial, list(initial))
    told = [result.train_metrics_clientapp[i] for i in range(1, 5)]
    assert [each["bytes-up"] for each in told] == [CLIENTS * size] * 4
    assert [each["bytes-down"] for each in told] == [
        CLIENTS * whole,
        CLIENTS * size,
        CLIENTS * size + whole,
        CLIENTS * size,
    ]


def same_frozen(one: ArrayRecord, other: ArrayRecord) -> bool:
    frozen = [name for name in other if name not in TRAVELS]
    return list(one) == list(other) and all(one[name].data == other[name].data for name in frozen)


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
def test_an_app_without_the_mod_is_sent_whole_models_and_one_line_says_so(kind, caplog):
    initial = model()
    expected = run(kind(trained="head.*"), grid_of(stock()), initial)
    grid = grid_of(stock(mods=()))
    with caplog.at_level(logging.WARNING):
        result = run(kind(trained="head.*"), grid, initial)
    assert same(result.arrays, expected.arrays)
    assert told(caplog, "doesn't keep the arrays that aren't trained") == 1
    asked = [m for m in grid.sent if m.metadata.message_type in (messages.TRAIN, messages.EVALUATE)]
    assert len(whole_requests(grid)) == len(asked)
    up = sum(m["bytes-up"] for m in result.train_metrics_clientapp.values())
    whole = nbytes(initial, list(initial))
    if kind is FedAvg:
        assert [m["bytes-down"] for m in result.train_metrics_clientapp.values()] == [CLIENTS * whole] * 3
    assert up >= whole
    assert up % whole == 0


@pytest.mark.parametrize(
    "mods",
    [MODS, (cache_frozen_parameters, compress_updates), (compress_updates,)],
    ids=["after", "before", "alone"],
)
@pytest.mark.parametrize("compression", ["int8", "topk:0.2"])
def test_updates_are_compressed_as_those_of_a_model_of_what_travels(mods, compression):
    initial = model()
    strategies = [Scaffold(trained="head.*", compression=compression) for _ in range(2)]
    expected = run(strategies[0], grid_of(stock()), initial)
    result = run(strategies[1], grid_of(stock(mods=mods)), initial)
    assert same(result.arrays, expected.arrays)
    assert strategies[1].session.compressed is not None
    size = strategies[1].session.compressed.size(ArrayRecord({name: initial[name] for name in TRAVELS}))
    assert [m["bytes-up"] for m in result.train_metrics_clientapp.values()] == [CLIENTS * size] * 3


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, FedBuff])
def test_a_compressed_model_is_one_of_what_travels(kind):
    options = {
        "trained": "head.*",
        "compression_down": "int8",
        "clock": VirtualClock(),
        "fraction_evaluate": 0.0,
    }
    if kind is FedBuff:
        options["buffer_size"] = 2
    expected = run(kind(**options), grid_of(stock(describes=True)), model())
    for mods in (MODS, (unpack_arrays, cache_frozen_parameters), ()):
        grid = grid_of(stock(mods=mods, describes=True))
        grid.engine = DEPLOYMENT
        result = run(kind(**options), grid, model())
        assert same(result.arrays, expected.arrays)
        down = [m["bytes-down"] for m in result.train_metrics_clientapp.values()]
        least = [m["bytes-down"] for m in expected.train_metrics_clientapp.values()]
        if mods == MODS:
            assert down == least
            (last,) = grid.requests()[-1].content["arrays"].values()
            assert last.stype == MODEL
        else:
            assert sum(down) > sum(least)


@pytest.mark.parametrize("mods", [MODS, (compress_updates,), ()], ids=["kept", "compressed", "stock"])
def test_a_change_of_what_does_not_travel_is_one_line(mods, caplog):
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays["body.weight"] = arrays["body.weight"] + np.float32(1)

    initial = model()
    with caplog.at_level(logging.WARNING):
        strategy = FedAvg(trained="head.*", compression="int8")
        result = run(strategy, grid_of(stock(mods=mods, spoil=spoil)), initial)
    assert same_frozen(result.arrays, initial)
    assert told(caplog, "has another 'body.weight' than it was sent, which doesn't travel") == 1


def test_replies_with_only_what_travels_are_taken():
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        for name in [each for each in arrays if each not in TRAVELS]:
            del arrays[name]

    expected = run(FedAvg(trained="head.*"), grid_of(stock()), model())
    for mods in (MODS, ()):
        result = run(FedAvg(trained="head.*"), grid_of(stock(mods=mods, spoil=spoil)), model())
        assert same(result.arrays, expected.arrays)


@pytest.mark.parametrize("mod", [fixedclipping_mod, LocalDpMod(0.5, 0.1, 10.0, 0.1)], ids=["clips", "noise"])
def test_mods_for_training_alone_see_whole_models(mod):
    initial = model(mask=-1.0, steps=np.float32)  # these mods take floats alone
    config = ConfigRecord({"clipping_norm": 0.5})
    grid = grid_of(stock(training=[mod]))
    strategy = FedAvg(trained="head.*", untrained=())
    result = run(strategy, grid, initial, 1, train_config=config)
    moved = result.arrays["head.weight"].numpy() - initial["head.weight"].numpy()
    assert 0 < np.linalg.norm(moved) < 0.8
    assert same_frozen(ArrayRecord({**result.arrays, TRAVELS[0]: initial[TRAVELS[0]]}), initial)


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
def test_a_resumed_run_has_the_frozen_arrays_of_its_state_and_does_not_send_them_again(kind):
    options = {"trained": lambda name: name.startswith("head"), "eval_every": 1}
    expected = run(kind(**options), grid_of(stock()), model(), 4)
    grid, states = grid_of(stock()), []
    strategy = kind(**options)
    strategy.run_options.observer = lambda progress: states.append(pickle.dumps(strategy.state()))
    run(strategy, grid, model(), 4)
    sent = len(grid.sent)
    other = kind(**options)
    other.restore(pickle.loads(states[2]))
    result = run(other, grid, model(seed=1), 4)
    assert same(result.arrays, expected.arrays)
    grid.sent = grid.sent[sent:]
    assert whole_requests(grid) == []
    third = kind(trained="*")
    third.restore(pickle.loads(states[-1]))
    with pytest.raises(RunError, match=r"^trained: the state is that of a model of which .* travel, of"):
        run(third, grid, model(), 4)


def test_bytes_of_frozen_arrays_of_before_a_resumption_count():
    grid, states = grid_of(stock(mods=())), []  # without the mod, whole models go both ways
    strategy = FedBuff(trained="head*", eval_every=3)
    strategy.run_options.observer = lambda progress: states.append(pickle.dumps(strategy.state()))
    expected = run(strategy, grid, model(), 4).train_metrics_clientapp
    other = FedBuff(trained="head*", eval_every=3)
    other.restore(pickle.loads(states[2]))
    assert run(other, grid, model(), 4).train_metrics_clientapp == expected


def test_the_best_model_and_what_the_server_evaluates_are_whole():
    initial, seen = model(), []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(list(arrays))
        return MetricRecord({"loss": float(abs(number - 2))})

    strategy = FedAvg(trained="head.*", keep="best")
    result = run(strategy, grid_of(stock()), initial, evaluate_fn=evaluate)
    assert seen == [list(initial)] * 4
    assert same(result.arrays, run(FedAvg(trained="head.*"), grid_of(stock()), initial, 2).arrays)


def test_devices_take_packed_models():
    expected = run(FedAvg(trained="head.*"), grid_of(stock(describes=True)), model())
    for mods in (MODS, (unpack_arrays,)):
        grid = grid_of(stock(mods=mods, describes=True))
        grid.engine = DEPLOYMENT  # type: ignore[attr-defined]
        result = run(FedAvg(trained="head.*", safeguards="off"), grid, model())
        assert same(result.arrays, expected.arrays)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (
            "haed.*",
            r"^trained = 'haed\.\*': no array of the model is called so; its arrays are body\.weight, ",
        ),
        (["head.*", "x"], r"^trained = 'x': no array"),
        (
            lambda name: False,
            r"^trained: the function returns True for no array; the model's are body\.weight",
        ),
    ],
)
def test_what_names_nothing_is_one_line(trained, said):
    with pytest.raises(ValueError, match=said):
        run(FedAvg(trained=trained), grid_of(stock()), model())


def test_all_arrays_may_be_trained_and_wrappers_are_refused(caplog):
    initial = model(mask=-1.0)
    with caplog.at_level(logging.INFO):
        result = run(FedAvg(trained="*"), grid_of(stock()), initial)
    assert same(result.arrays, run(FedAvg(), grid_of(stock()), initial).arrays)
    assert told(caplog, "trained: names all arrays of the model") == 1
    wrapped = DifferentialPrivacyServerSideFixedClipping(FedAvg(trained="head.*"), 0.0, 1.0, CLIENTS)
    with pytest.raises(RunError, match=r"^trained: "):
        run(wrapped, grid_of(stock()), initial, 1)


def test_frozen_arrays_that_are_no_array_are_others():
    model = ArrayRecord({"w": Array(np.ones(2)), "frozen": Array(np.ones(3))})
    split = SplitModel.of(model, ["w"])
    assert split.changed(model) == ""
    empty_zip = Array("float64", (3,), "numpy.ndarray", b"PK\5\6" + bytes(18))
    assert split.changed(ArrayRecord({**model, "frozen": empty_zip})) == "frozen"
