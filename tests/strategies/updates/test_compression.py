"""Compressed updates in runs: bytes that are counted as they are, error feedback, and clients that lie or can't."""

import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from strategies import REGISTRY, FedAvg, RunError
from strategies.clients.roster import Client
from strategies.clock import VirtualClock
from strategies.flower import messages
from strategies.flower.arrays import Layout, npy_header
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.internals import message_to_bytes
from strategies.flower.packing import is_packed, unpack_arrays
from strategies.updates.client_compression import compress_updates, compressed
from strategies.updates.compression import COMPRESSED, compressing, is_compressed, size_of
from strategies.updates.compression_residual import RESIDUALS, RESIDUALS_OF
from strategies.updates.pipeline import Check
from tests.strategies.methods.test_registry import content, initial_model, small_config

Make = Callable[..., Any]

NAMES = ["fp16", "int8", "topk:0.3", "topk:0.01", "qsgd:1", "qsgd:4"]
BIASED = [name for name in NAMES if not name.startswith("qsgd")]
RUN = 5  # of every request that is made here


def model_of(**values: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def request_for(arrays: ArrayRecord, name: str, task: int = 1, run: int = RUN, **more: Any) -> Message:
    fields = {
        messages.CLIENT: 3,
        messages.TASK: task,
        messages.SEED: 7,
        messages.RUN: run,
        messages.COMPRESSION: name,
        messages.UNTRAINED: [],
        **more,
    }
    return messages.request(messages.TRAIN, 1, ConfigRecord(fields), ttl=60.0, arrays=arrays)


def reply_to(request: Message, arrays: ArrayRecord) -> Message:
    return Message(RecordDict({"arrays": arrays}), reply_to=request)


def a_context() -> Context:
    return Context(1, 2, {"partition-id": 3}, RecordDict(), {})


def sent(base: ArrayRecord, trained: ArrayRecord, name: str, context: Context, **more: Any) -> ArrayRecord:
    """Return what a client sends of its trained model."""
    request = request_for(base, name, **more)
    found = messages.arrays_of(compressed(request, reply_to(request, trained), context))
    assert found is not None
    return found


def read(base: ArrayRecord, record: ArrayRecord, name: str, untrained: tuple[str, ...] = ()) -> Any:
    """Return the model (D,) that the server makes of it."""
    layout = Layout.of(base)
    compression = compressing(name, layout, untrained)
    assert compression is not None
    return compression.read(record, layout.to_vector(base))


@pytest.mark.parametrize("name", ["int8", "fp16"])
def test_a_client_holds_few_vectors_of_a_large_model_at_once(name):
    size = 1_000_000
    rng = np.random.default_rng(0)
    base, trained = (model_of(w=rng.normal(size=size).astype(np.float32)) for _ in range(2))
    context = a_context()
    sent(base, trained, name, context)  # so that there is a residual
    tracemalloc.start()
    sent(base, trained, name, context, task=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        peak <= 33 * size
    )  # beside both models: the update and one more vector in float64, and what a code takes


# What is sent ----------------------------------------------------------------------------------------------------


def test_an_update_by_hand():
    # Δ = (1, −2, 0.5): a share of 0.3 is one value of three, −2; the next Δ = (0.5, 0, 0.25) adds to (1, 0, 0.5).
    base, context = model_of(w=np.float64([10.0, 10.0]), v=np.float64(5.0)), a_context()
    record = sent(base, model_of(w=np.float64([11.0, 8.0]), v=np.float64(5.5)), "topk:0.3", context)
    assert is_compressed(record)
    (array,) = record.values()
    assert array.data == b"\x02" + np.float64(-2).tobytes()
    assert read(base, record, "topk:0.3").tolist() == [10.0, 8.0, 5.0]
    record = sent(base, model_of(w=np.float64([10.5, 10.0]), v=np.float64(5.25)), "topk:0.3", context, task=2)
    assert read(base, record, "topk:0.3").tolist() == [11.5, 10.0, 5.0]
    assert context.state[RESIDUALS]["since"].numpy().tolist() == [0.0, 0.0, 0.75]  # type: ignore[index]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_trained_goes_as_it_is(name):
    base = model_of(
        a=np.zeros((2, 2), np.float32), n=np.int64(7), mean=np.float32([0.5, -1]), flag=np.array([True])
    )
    trained = model_of(
        a=np.ones((2, 2), np.float32),
        n=np.int64(1 << 40),
        mean=np.float32([1e-3, 77]),
        flag=np.array([False]),
    )
    record = sent(base, trained, name, a_context(), **{messages.UNTRAINED: ["me*"]})
    (array,) = record.values()
    assert array.data.endswith(np.int64(1 << 40).tobytes() + np.float32([1e-3, 77]).tobytes() + b"\0")
    model = read(base, record, name, ("me*",))
    assert model[4:].tolist() == [float(1 << 40), *np.float32([1e-3, 77]).tolist(), 0.0]


@given(
    st.sampled_from(["none", *NAMES]),
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from("fdeiq?")), max_size=4),
    st.booleans(),
)
def test_the_size_that_is_foretold_is_that_of_the_message(name, arrays, apart):
    base = model_of(**{f"a{i}": np.zeros(shape, kind) for i, (shape, kind) in enumerate(arrays)})
    untrained = ("a1",) if apart else ()
    request = request_for(base, name, **{messages.UNTRAINED: list(untrained)})
    reply = compressed(request, reply_to(request, base), a_context())
    assert messages.total_bytes(reply) == size_of(Layout.of(base), name, untrained)
    # What else there is of the message is the same for all codes, but for names and headers.
    whole = len(message_to_bytes(reply))
    without = len(message_to_bytes(Message(RecordDict({"arrays": ArrayRecord()}), reply_to=request)))
    assert 0 <= whole - without - messages.total_bytes(reply) <= 120 * max(len(base), 1)


def test_the_size_of_a_model_that_is_sent_whole():
    base = model_of(w=np.zeros((3, 2), np.float32), b=np.zeros(2))
    headers = len(npy_header(np.dtype("f4"), (3, 2))[1]) + len(npy_header(np.dtype("f8"), (2,))[1])
    assert size_of(Layout.of(base)) == 6 * 4 + 2 * 8 + headers == messages.num_bytes(base)
    with pytest.raises(ValueError, match="compression = 'zip': allowed are"):
        size_of(Layout.of(base), "zip")


# Error feedback --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(BIASED),
    st.lists(st.lists(st.floats(-9, 9, width=32), min_size=5, max_size=5), min_size=1, max_size=6),
    st.sampled_from([np.float32, np.float64]),
)
def test_what_was_meant_and_what_is_left_out_is_all_that_was_trained(name, updates, kind):
    context, base = a_context(), model_of(w=np.zeros(3, kind), v=np.zeros(2, kind))
    meant, true = np.zeros(5), np.zeros(5)
    for task, values in enumerate(updates, 1):
        update = np.array(values, kind)
        record = sent(base, model_of(w=update[:3], v=update[3:]), name, context, task=task)
        meant += read(base, record, name)
        true += update
    left_out = context.state[RESIDUALS]["since"].numpy()  # type: ignore[index]
    assert left_out.dtype == kind
    tolerance = 1e-12 if kind is np.float64 else 1e-5
    assert meant + left_out == pytest.approx(true, abs=tolerance * (1 + np.abs(updates).sum()))


@pytest.mark.parametrize("name", BIASED)
def test_a_task_that_is_handed_out_again_is_done_again_and_another_run_begins_anew(name):
    rng = np.random.Generator(np.random.PCG64(0))
    base, context = model_of(w=np.zeros(50, np.float32)), a_context()
    models = [model_of(w=rng.normal(size=50).astype(np.float32)) for _ in range(3)]
    first = sent(base, models[0], name, context, task=4)
    second = sent(base, models[1], name, context, task=6)
    kept = context.state[RESIDUALS]["since"].data  # type: ignore[index]
    assert content(sent(base, models[1], name, context, task=6)) == content(second)
    assert context.state[RESIDUALS]["since"].data == kept  # type: ignore[index]
    fresh = a_context()
    assert content(sent(base, models[1], name, fresh, task=6)) != content(second)
    other = sent(base, models[0], name, context, task=7, run=RUN + 1)
    assert content(other) == content(first)
    assert dict(context.state[RESIDUALS_OF]) == {messages.RUN: RUN + 1, messages.TASK: 7}  # type: ignore[arg-type]


def test_a_code_that_is_right_in_the_mean_leaves_nothing_and_draws_by_client_and_task():
    base, context = model_of(w=np.zeros(50, np.float32)), a_context()
    trained = model_of(w=np.linspace(-1, 1, 50, dtype=np.float32))
    one, same, other = (content(sent(base, trained, "qsgd:2", context, task=task)) for task in (1, 1, 2))
    assert one == same != other
    assert content(sent(base, trained, "qsgd:2", context, **{messages.CLIENT: 4})) != one
    assert content(sent(base, trained, "qsgd:2", context, **{messages.SEED: 8})) != one
    assert not context.state


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(federation, train_config):
    """Run a strategy on six clients that can compress."""

    def start(
        name: str, *, mods: Any = (compress_updates,), arrays: Any = None, grid: Any = None, **options: Any
    ) -> Any:
        grid = grid or federation([0.0, 1.0, -2.0, 3.0, 0.5, 2.0], [1, 2, 3, 4, 5, 6], mods=mods)
        strategy = REGISTRY[name](small_config(name, **options))
        result = strategy.start(
            grid, arrays or initial_model(), num_rounds=3, timeout=10.0, train_config=train_config(2, 0.1)
        )
        return result, grid

    return start


@pytest.mark.parametrize("name", REGISTRY)
def test_a_code_that_leaves_nothing_out_changes_no_strategy(name, run):
    arrays = model_of(w=np.full((2, 3), 0.1), b=np.array([1.0, -1.0]))
    plain, exact = (run(name, compression=kind, arrays=arrays)[0] for kind in ("none", "topk:1"))
    for key, array in plain.arrays.items():
        assert exact.arrays[key].numpy() == pytest.approx(array.numpy(), rel=1e-12, abs=1e-14)
    assert plain.arrays["w"].numpy() != pytest.approx(arrays["w"].numpy())


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbuff", "async-fedavg"])
@pytest.mark.parametrize("compression", NAMES)
def test_what_is_counted_is_what_the_replies_hold(name, compression, run, monkeypatch):
    seen: dict[str, int] = {}
    plain = Check.read

    def counting(check: Check, client: Client, reply: Message | None, base: Any) -> Any:
        assert reply is not None
        (record,) = reply.content.array_records.values()
        assert is_compressed(record)
        seen[reply.metadata.reply_to_message_id] = sum(len(array.data) for array in record.values())
        return plain(check, client, reply, base)

    monkeypatch.setattr(Check, "read", counting)
    result, _ = run(name, compression=compression)
    told = [metrics[messages.BYTES_UP] for metrics in result.train_metrics_clientapp.values()]
    assert sum(told) == sum(seen.values())
    assert set(seen.values()) == {size_of(Layout.of(initial_model()), compression)}


@pytest.mark.parametrize("compression", NAMES)
def test_packed_models_and_compressed_updates_go_together(compression, federation):
    results = []
    for mods in ((compress_updates,), (unpack_arrays, compress_updates)):
        grid = federation([0.0, 1.0, -2.0], [1, 2, 3], num_partitions=3, mods=mods)
        grid.engine = DEPLOYMENT
        strategy = FedAvg(compression=compression, clock=VirtualClock(), fraction_evaluate=0.0)
        results.append(strategy.start(grid, initial_model(), num_rounds=3, timeout=10.0))
        packed = [is_packed(messages.arrays_of(request) or ArrayRecord()) for request in grid.requests()]
        assert packed == [unpack_arrays in mods] * len(packed)
    one, other = results
    assert content(one.arrays) == content(other.arrays)
    assert one.train_metrics_clientapp == other.train_metrics_clientapp


def test_what_comes_after_sees_models_like_any_others(federation):
    # Rules and bounds look at what the codes mean: one client is far off, and the median doesn't follow it.
    seen: list[Any] = []
    options: dict[str, Any] = {"aggregation_rule": "median", "client_weights": "uniform", "faulty_clients": 1}
    grid = federation([1.0, 1.0, 1e6], [1, 1, 1], mods=(compress_updates,))
    strategy = FedAvg(
        compression="int8", on_client_model=lambda _, model: seen.append(model.copy()), **options
    )
    result = strategy.start(grid, model_of(w=np.zeros(3)), num_rounds=1, timeout=10.0)
    assert [model.shape for model in seen] == [(3,)] * 3
    assert result.arrays["w"].numpy() == pytest.approx([0.5] * 3, rel=1e-2)


@pytest.mark.parametrize("compression", [*NAMES, "none"])
def test_central_privacy_bounds_what_the_codes_mean(compression, federation):
    # Coarse codes make updates longer; the server's clipping is what its noise rests on.
    grid = federation([3.0, 2.0, -1.0], [1, 1, 1], mods=(compress_updates,))
    lengths: list[float] = []

    def measure(_: int, model: Any) -> None:
        lengths.append(float(np.linalg.norm(model - strategy.session.model)))

    private = {"dp": "central", "dp_clipping_norm": 0.25, "dp_noise_multiplier": 1e-6}
    strategy = FedAvg(compression=compression, client_weights="uniform", on_client_model=measure, **private)
    strategy.start(grid, model_of(w=np.linspace(0, 1, 9)), num_rounds=3, timeout=10.0)
    assert len(lengths) == 9
    assert max(lengths) == pytest.approx(0.25, abs=1e-9)


def test_the_record_of_arrays_may_have_any_name(federation):
    grid = federation(mods=(compress_updates,))
    plain = grid.app

    def renamed(message: Message, context: Context) -> Message:
        if message.metadata.message_type != messages.TRAIN:
            return plain(message, context)

        def app(inner: Message, state: Context) -> Message:
            inner.content["arrays"] = inner.content.pop("weights")
            inner.content["config"] = inner.content.pop("settings")
            reply = bare(inner, state)
            reply.content["weights"] = reply.content.pop("arrays")
            return reply

        return compress_updates(message, context, app)

    bare = federation().app
    grid.app = renamed
    strategy = FedAvg(
        compression="int8", arrayrecord_key="weights", configrecord_key="settings", fraction_evaluate=0.0
    )
    result = strategy.start(grid, model_of(w=np.ones(2)), num_rounds=1, timeout=10.0)
    # Δ = (1, 0.5, −1) for p = (1, 2, 5)/8, as far as int8 has it: all values of an array are alike.
    assert result.arrays["w"].numpy() == pytest.approx([1 - 3 / 8] * 2, abs=1e-6)
    assert result.train_metrics_clientapp[1][messages.BYTES_UP] == 3 * (4 + 2)


def test_flowers_clipping_comes_before_it(federation, train_config):
    from flwr.clientapp.mod import fixedclipping_mod

    lengths: list[float] = []

    def measure(_: int, model: Any) -> None:
        lengths.append(float(np.linalg.norm(model - strategy.session.model)))

    grid = federation(mods=(compress_updates, fixedclipping_mod))
    strategy = FedAvg(compression="fp16", on_client_model=measure, fraction_evaluate=0.0)
    config = ConfigRecord({**train_config(), "clipping_norm": 0.125})
    strategy.start(grid, model_of(w=np.linspace(0, 1, 9)), num_rounds=1, train_config=config)
    assert lengths == pytest.approx([0.125] * 3, rel=1e-3)


# Clients that can't, or lie --------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_an_app_without_the_mod_sends_whole_models_and_the_log_says_so_once(name, run, caplog):
    plain, _ = run(name)
    caplog.clear()
    whole, _ = run(name, mods=(), compression="int8")
    assert content(whole.arrays) == content(plain.arrays)
    lines = [line for line in warnings_of(caplog) if "compression" in line]
    assert lines == [
        "compression = 'int8': clients send their models whole; a ClientApp compresses its updates by the mod "
        "strategies.compress_updates"
    ]


def answering(change: Callable[[Array], Any], name: str | None = None) -> Any:
    """Make a mod that changes what client 1 sends of its update."""

    def mod(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 1:
            ((own, array),) = reply.content[messages.ARRAYS].items()
            data = change(array)
            lie = data if isinstance(data, Array) else Array("uint8", (len(data),), COMPRESSED, data)
            reply.content[messages.ARRAYS] = ArrayRecord({name or own: lie})
        return reply

    return mod


# The model has 2 × 3 numbers of float32 and 2 of float64: two scales and eight bytes.
LIES: dict[str, tuple[Any, str]] = {
    "torn": (
        lambda array: array.data[:-1],
        "its compressed update takes 15 bytes; one of this model takes 16",
    ),
    "too long": (
        lambda array: array.data + b"\0",
        "its compressed update takes 17 bytes; one of this model takes 16",
    ),
    "empty": (lambda array: b"", "its compressed update takes 0 bytes; one of this model takes 16"),
    "huge": (
        lambda array: bytes(10**6),
        "its compressed update takes 1000000 bytes; one of this model takes 16",
    ),
    "a scale that is none": (
        lambda array: np.float32(np.nan).tobytes() + array.data[4:],
        "its compressed update has a scale that isn't a finite number of 0 or more",
    ),
    "a scale that is too large": (
        lambda array: np.float32(3e38).tobytes() + b"\x7f" * 12,
        "its arrays' norm is",
    ),
    "no bytes of ours": (
        lambda array: Array("float32", (2,), "numpy.ndarray", array.data),
        "its arrays are ['int8'], the model's are ['layer.weight', 'layer.bias']",
    ),
}


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
@pytest.mark.parametrize("lie", LIES)
def test_an_update_that_lies_is_left_out_in_one_line(lie, name, federation, run, caplog):
    change, reason = LIES[lie]
    grid = federation(mods=(answering(change), compress_updates), node_ids=[10, 20, 30])
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        result, _ = run(name, grid=grid, compression="int8")
    lines = [line for line in warnings_of(caplog) if "client 1 (node 20)" in line]
    assert lines
    assert all(reason in line for line in lines)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    assert content(result.arrays) != content(initial_model())


def test_another_code_than_asked_for_is_left_out(federation, run, caplog):
    grid = federation(mods=(answering(lambda array: array.data, "fp16\x1b[2J"), compress_updates))
    run("fedavg", grid=grid, compression="int8")
    lines = [line for line in warnings_of(caplog) if "left out client 1" in line]
    assert len(lines) == 3
    assert all(
        "its update is compressed by 'fp16\N{REPLACEMENT CHARACTER}[2J', asked was 'int8'" in x for x in lines
    )


def test_a_compressed_update_that_nobody_asked_for_is_left_out(federation, run, caplog):
    def eager(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 1:
            reply.content["arrays"] = ArrayRecord({"int8": Array("uint8", (16,), COMPRESSED, bytes(16))})
        return reply

    run("fedavg", grid=federation(mods=(eager,)))
    lines = [line for line in warnings_of(caplog) if "left out client 1" in line]
    assert len(lines) == 3
    assert all(line.endswith("its update is compressed, which it wasn't asked for") for line in lines)


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan", "aren't finite"), ("shape", "the model's is"), ("name", "other")]
)
def test_a_bad_model_is_left_out_for_the_reason_that_it_has_without(fault, reason, federation, run, caplog):
    said = []
    for options in ({"compression": "int8"}, {}):
        grid = federation(mods=(compress_updates,), node_ids=[10, 20, 30])
        grid.spoil(1, fault)
        run("fedavg", grid=grid, **options)
        said.append([line for line in warnings_of(caplog) if "left out" in line])
        caplog.clear()
        assert (RESIDUALS in grid.node(1).context.state) is False
    assert said[0] == said[1]
    assert len(said[0]) == 3
    assert reason in said[0][0]


def test_a_code_that_a_client_does_not_know_is_said_in_its_reply(federation, run, caplog):
    def of_tomorrow(message: Message, context: Any, call_next: Any) -> Message:
        if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 1:
            message.content["config"][messages.COMPRESSION] = "sketch:7"
        return call_next(message, context)

    run("fedavg", grid=federation(mods=(of_tomorrow, compress_updates)), compression="int8")
    lines = [line for line in warnings_of(caplog) if "left out client 1" in line]
    assert len(lines) == 3
    assert all("compression = 'sketch:7': allowed are none, fp16, int8" in line for line in lines)


# What can't be ---------------------------------------------------------------------------------------------------


def test_a_name_that_is_none_is_refused_when_a_strategy_is_made():
    for name in REGISTRY:
        with pytest.raises(ValueError, match="compression = 'topk:2': allowed are none, fp16, int8, topk:F"):
            REGISTRY[name](compression="topk:2")


def test_a_loop_around_the_strategy_is_refused(federation, train_config):
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    wrapper = DifferentialPrivacyServerSideFixedClipping(FedAvg(compression="int8"), 0.1, 1.0, 3)
    with pytest.raises(
        RunError, match=r"compression = 'int8': a wrapper around the strategy.* can't read compressed"
    ):
        wrapper.start(
            federation(mods=(compress_updates,)), initial_model(), num_rounds=1, train_config=train_config()
        )


def test_clients_of_ray_do_not_evaluate_while_they_keep_what_is_left_out(federation):
    # Flower's simulation keeps the state that a client's last message returned, and evaluates beside the training.
    grid = federation(mods=(compress_updates,))
    grid.engine = "ray"
    with pytest.raises(
        RunError, match=r"compression = 'int8': a client on Ray that evaluates while it trains loses"
    ):
        REGISTRY["fedbuff"](compression="int8").start(grid, initial_model(), num_rounds=1)
    assert grid.requests() == []
    for options in ({"compression": "qsgd:4"}, {"compression": "int8", "fraction_evaluate": 0.0}):
        grid = federation(mods=(compress_updates,))
        grid.engine = "ray"
        result = REGISTRY["fedbuff"](buffer_size=2, **options).start(grid, initial_model(), num_rounds=1)
        assert content(result.arrays) != content(initial_model())
