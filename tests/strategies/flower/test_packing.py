"""Models as one array: the same bits, fewer objects, and a packed reply is trusted no more than another."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import REGISTRY, FedAvg
from strategies.clock import VirtualClock
from strategies.flower import messages, packing
from strategies.flower.arrays import ArraysMismatchError, Layout
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.packing import (
    PACKED,
    READS_PACKED,
    is_packed,
    pack_record,
    unpack_arrays,
    unpack_record,
)
from strategies.testing import MemoryGrid
from tests.strategies.methods.test_registry import content, initial_model, small_config

Make = Callable[..., Any]

DTYPES = ["?", "i1", "u1", "<i2", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
KEPT = [">f4", "<U3", "<M8[s]"]  # of other byte orders and kinds: these are sent as they are


@st.composite
def records(draw: st.DrawFn, dtypes: list[str] = DTYPES) -> ArrayRecord:
    """Draw records of any names, types, shapes (empty ones, too) and bits."""
    record = ArrayRecord()
    for name in draw(st.lists(st.text(max_size=8), unique=True, max_size=5)):
        dtype = np.dtype(draw(st.sampled_from(dtypes)))
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        size = int(np.prod(shape)) * dtype.itemsize
        if dtype.kind in "bU":
            values = draw(hnp.arrays(dtype, shape))
        else:
            values = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
        record[name] = Array(values)
    return record


# Records ---------------------------------------------------------------------------------------------------------


@given(records())
def test_what_is_packed_comes_back_to_the_last_byte(record):
    packed = pack_record(record)
    assert is_packed(packed) == (len(record) > 1)
    if is_packed(packed):
        assert content(unpack_record(packed)) == content(record)
    else:
        assert packed is record


@given(records(KEPT), records())
def test_what_would_not_come_back_is_not_packed(strange, others):
    both = ArrayRecord({**others, **strange})
    assert pack_record(both) is both or not strange
    transposed = Array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    record = ArrayRecord({"a": transposed, "b": transposed})
    assert pack_record(record) is record


def packed_bytes(head: Any, body: bytes, length: int | None = None) -> ArrayRecord:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    data = (len(text) if length is None else length).to_bytes(8, "big") + text + body
    return ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})


@given(st.binary(max_size=200))
@example(b"")
@example(b"\0" * 8)
@example((2**63).to_bytes(8, "big"))
def test_no_bytes_do_more_than_be_refused(data):
    with pytest.raises(ArraysMismatchError, match=r"^its packed arrays ") as caught:
        unpack_record(ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)}))
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["float32", "O"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.tuples(JSON, JSON, JSON) | JSON, min_size=1, max_size=3), st.binary(max_size=16))
def test_no_head_does_more_than_be_refused_or_say_what_is_there(head, body):
    with suppress(ArraysMismatchError):
        record = unpack_record(packed_bytes(head, body))
        assert sum(array.numpy().nbytes for array in record.values()) == len(body)


HEADS = {
    "a name twice": ([["w", "float32", [1]], ["w", "float32", [1]]], b"\0" * 8, "a name is there twice"),
    "an object": ([["w", "object", [1]]], b"\0" * 8, "an array's type is 'object'"),
    "a structure": ([["w", "i4,i4", [1]]], b"\0" * 8, "an array's type is 'i4,i4'"),
    "a terminal's code": ([["w", "\x1b[2J", [1]]], b"\0" * 8, "an array's type is '�[2J'"),
    "a negative size": ([["w", "float32", [-2, -1]]], b"\0" * 8, "a shape is a list of at most 32 whole"),
    "true as a size": ([["w", "float32", [True]]], b"\0" * 4, "a shape is a list of at most 32 whole"),
    "a size with no end": ([["w", "float32", [10**4000]]], b"", "a shape is a list of at most 32 whole"),
    "too many digits": (b'[["w","float32",[' + b"9" * 5000 + b"]]]", b"", "a head that can't be read"),
    "a deep nest": (b"[" * 200_000, b"", "a head that can't be read"),
    "no text": (b"\xff\xfe", b"", "a head that can't be read"),
    "no list": (17, b"", "a head that can't be read"),
    "too few values": ([["w", "float32", [3]]], b"\0" * 8, "take 8 bytes, by their head 12"),
    "too many values": ([["w", "float32", [1]]], b"\0" * 8, "take 8 bytes, by their head 4"),
    "an exabyte": ([["w", "float64", [2**60]]], b"\0" * 8, f"take 8 bytes, by their head {2**63}"),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_lies_is_refused(case):
    head, body, reason = HEADS[case]
    with pytest.raises(ArraysMismatchError) as caught:
        unpack_record(packed_bytes(head, body))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (
            packing.MOST_HEAD + 1,
            f"have a head of {packing.MOST_HEAD + 1} bytes; allowed are {packing.MOST_HEAD}",
        ),
        (2**64 - 1, f"take {packing.MOST_HEAD + 12} bytes, too few for their head"),
    ],
)
def test_a_head_longer_than_any_model_s_is_not_even_parsed(length, reason):
    body = b" " * (packing.MOST_HEAD + 2)
    with pytest.raises(ArraysMismatchError, match=reason):
        unpack_record(packed_bytes(b"[]", body, length))


def test_a_model_of_sixty_arrays_is_six_objects_instead_of_124():
    rng = np.random.default_rng(0)
    model = ArrayRecord({f"layer{i}.weight": Array(rng.normal(size=(3, i + 1))) for i in range(60)})
    counts = []
    for record in (model, pack_record(model)):
        request = messages.request(messages.TRAIN, 7, ConfigRecord({"lr": 0.1}), ttl=60.0, arrays=record)
        objects = get_all_nested_objects(request)
        sent = {name: value.deflate() for name, value in objects.items()}
        received = inflate_object_from_contents(request.object_id, sent)
        assert isinstance(received, Message)
        assert content(received.content.array_records["arrays"]) == content(record)
        counts.append(len(objects))
    # Message, content, config, record of arrays; and two for each array.
    assert counts == [4 + 2 * 60, 4 + 2]


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def devices(federation):
    """Make a grid whose nodes are devices, by default such as read packed models."""

    def make(centres: Any = (0.0, 1.0, -2.0), mods: Any = (unpack_arrays,), **options: Any) -> Any:
        sizes = range(1, len(centres) + 1)
        grid = federation(centres, sizes, num_partitions=len(centres), mods=mods, **options)
        grid.engine = DEPLOYMENT
        return grid

    return make


def records_of(requests: list[Message]) -> list[ArrayRecord]:
    return [record for request in requests for record in request.content.array_records.values()]


def model_of_many_types() -> ArrayRecord:
    values = [
        np.full((2, 3), 0.1, np.float32),
        np.array([1.0, -1.0]),
        np.array(3, np.int64),
        np.float16([[0.5]]),
    ]
    return ArrayRecord({f"array-{i}": Array(np.asarray(value)) for i, value in enumerate(values)})


@pytest.mark.parametrize("model", [initial_model, model_of_many_types])
@pytest.mark.parametrize("name", REGISTRY)
def test_packing_changes_no_bit_of_any_strategy(name, model, devices, train_config):
    results, grids = [], []
    for mods in ((), (unpack_arrays,)):
        directions = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        grids.append(devices(mods=mods, directions=directions))
        strategy = REGISTRY[name](small_config(name, client_evaluation=True), clock=VirtualClock())
        results.append(
            strategy.start(grids[-1], model(), num_rounds=4, timeout=10.0, train_config=train_config(2, 0.1))
        )
    plain, packed = results
    assert content(packed.arrays) == content(plain.arrays)
    assert packed.train_metrics_clientapp == plain.train_metrics_clientapp
    assert packed.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    for kind in (messages.TRAIN, messages.EVALUATE):
        assert all(is_packed(record) for record in records_of(grids[1].requests(kind)))
        assert not any(is_packed(record) for record in records_of(grids[0].requests(kind)))
    records = records_of(grids[1].requests())
    assert len(records) > len(grids[1].requests()) or name != "spectral"  # the neighbours' average, too


def test_a_simulation_is_not_even_asked(federation):
    grid = federation(mods=(unpack_arrays,))
    FedAvg().start(grid, initial_model(), num_rounds=1, timeout=10.0)
    assert not any(is_packed(record) for record in records_of(grid.requests()))
    for request in grid.requests(messages.DESCRIBE):
        assert READS_PACKED not in request.content.config_records[messages.CONFIG]


def test_each_node_is_sent_what_it_knows(devices, federation):
    grid, stock = devices(), federation().app
    reader = grid.app
    grid.app = lambda message, context: (stock if context.node_config["partition-id"] == 1 else reader)(
        message, context
    )
    result = FedAvg(describe=True).start(grid, initial_model(), num_rounds=2, timeout=10.0)
    packed = {
        partition: is_packed(record)
        for partition, record in zip(grid.asked(), records_of(grid.requests()), strict=True)
    }
    assert packed == {0: True, 1: False, 2: True}
    expected = FedAvg(describe=True).start(devices(mods=()), initial_model(), num_rounds=2, timeout=10.0)
    assert content(result.arrays) == content(expected.arrays)


def test_nobody_can_claim_it_for_another_node(devices):
    grid = devices(node_ids=[10, 20, 30], mods=())

    def claims_to_be_20(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.DESCRIBE and context.node_id == 10:
            messages.metrics_of(reply)[READS_PACKED] = 1
            reply.metadata.__dict__["_src_node_id"] = 20
        return reply

    plain = grid.app
    grid.app = lambda message, context: claims_to_be_20(message, context, plain)
    FedAvg(describe=True).start(grid, initial_model(), num_rounds=1, timeout=10.0)
    sent = {request.metadata.dst_node_id: request for request in grid.requests()}
    assert not is_packed(sent[20].content[messages.ARRAYS])


# Replies that lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["nan", "inf", "shape", "dtype", "bytes", "npz", "stype", "name", "no-arrays"]
)
def test_a_bad_model_is_left_out_for_the_reason_it_has_without_packing(fault, devices, caplog):
    lines, models = [], []
    for mods in ((), (unpack_arrays,)):
        grid = devices(mods=mods, node_ids=[10, 20, 30])
        grid.spoil(1, fault)
        with caplog.at_level(logging.WARNING, "flwr.strategies"):
            models.append(FedAvg().start(grid, initial_model(), num_rounds=1, timeout=10.0).arrays)
        lines.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    assert lines[0] == lines[1]
    left_out, at_the_end = lines[0]
    assert left_out.startswith("round 1: left out client 1 (node 20): ")
    assert at_the_end == "client 1 (node 20) never counted in this run: 1 task, 1 refused"
    assert content(models[0]) == content(models[1])


def answering(change: Callable[[bytes], bytes]) -> Any:
    """Make a mod that changes the packed bytes of what client 1 answers."""

    def mod(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 1:
            data = change(reply.content[messages.ARRAYS][PACKED].data)
            reply.content[messages.ARRAYS] = ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})
        return reply

    return mod


# The model has 2 × 3 numbers of float32 and 2 of float64: 40 bytes of values.
LIES = {
    "torn": (lambda data: data[:-1], "its packed arrays take 39 bytes, by their head 40"),
    "too long": (lambda data: data + b"\0", "its packed arrays take 41 bytes, by their head 40"),
    "empty": (lambda data: b"", "its packed arrays take 0 bytes, too few for their head"),
    "another type": (lambda data: data.replace(b"float64", b"int64  "), "an array's type is 'int64  '"),
    "as wide a type": (
        lambda data: (len(data[8:-40]) + 2).to_bytes(8, "big") + data[8:].replace(b"float64", b"complex64"),
        "array 'layer.bias' is complex64[2], the model's is float64[2]",
    ),
    "another shape": (
        lambda data: data.replace(b"[2, 3]", b"[3, 2]"),
        "array 'layer.weight' is float32[3, 2], the model's is float32[2, 3]",
    ),
    "another name": (
        lambda data: data.replace(b"layer.bias", b"layer.blas"),
        "its arrays are ['layer.weight', 'layer.blas'], the model's are ['layer.weight', 'layer.bias']",
    ),
    "not finite": (lambda data: data[:-40] + b"\xff" * 40, "its arrays hold values that aren't finite"),
}


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
@pytest.mark.parametrize("lie", LIES)
def test_a_packed_reply_that_lies_is_left_out_in_one_line(lie, name, devices, caplog):
    change, reason = LIES[lie]
    grid = devices(mods=(answering(change), unpack_arrays), node_ids=[10, 20, 30])
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        result = REGISTRY[name](small_config(name)).start(grid, initial_model(), num_rounds=1, timeout=10.0)
    *lines, last = [line for line in caplog.messages if "client 1 (node 20)" in line]
    assert lines
    assert all(reason in line and "\n" not in line for line in lines)
    assert last.startswith("client 1 (node 20) never counted in this run: ")
    assert content(result.arrays) != content(initial_model())  # the others' work counts


def test_a_packed_reply_larger_than_the_model_is_refused_before_it_is_unpacked(devices, caplog, monkeypatch):
    unpacked: list[int] = []

    def watched(record: ArrayRecord) -> ArrayRecord:
        unpacked.append(messages.num_bytes(record))
        return unpack_record(record)

    monkeypatch.setattr(packing, "unpack_record", watched)
    huge = packing.MOST_HEAD + 100_000
    lie = packed_bytes([["layer.weight", "uint8", [huge]]], b"\0" * huge)[PACKED].data
    grid = devices(mods=(answering(lambda data: lie), unpack_arrays), node_ids=[10, 20, 30])
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        FedAvg().start(grid, initial_model(), num_rounds=1, timeout=10.0)
    size, most = len(lie), Layout.of(initial_model()).most_bytes + (1 << 20)
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    said = re.fullmatch(rf".*client 1 \(node 20\): its reply takes (\d+) bytes; allowed are {most}", line)
    assert said is not None
    assert size < int(said[1]) < size + 100  # with its metrics
    assert len(unpacked) >= 3 + 2  # three requests, two replies
    assert max(unpacked) < packing.MOST_HEAD


def test_a_mod_leaves_alone_what_it_was_not_asked_for():
    app = ClientApp(mods=[unpack_arrays])

    @app.query("describe")
    def describe(message: Message, context: Any) -> Message:
        return Message(RecordDict({}), reply_to=message)

    grid = MemoryGrid(app, [{"partition-id": 0}], [7])
    for content_of in (RecordDict(), RecordDict({messages.CONFIG: ConfigRecord({READS_PACKED: True})})):
        [message_id] = grid.push_messages(
            [Message(content_of, dst_node_id=7, message_type=messages.DESCRIBE, ttl=9.0)]
        )
        [reply] = grid.pull_messages([message_id])
        assert reply.has_content()
        assert not reply.content


def test_what_comes_back_beside_the_model_may_be_larger_than_it(devices):
    """A strategy of one's own gets it as the client made it."""
    large = ArrayRecord({f"fisher-{i}": Array(np.full((300, 300), i, np.float64)) for i in range(2)})

    def adds(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.TRAIN:
            reply.content["fisher"] = large
        return reply

    seen = []

    class Listening(FedAvg):
        extra_reply_bytes = messages.num_bytes(large)

        def transform_update(self, contribution: Any) -> Any:
            seen.append(contribution.arrays["fisher"])
            return super().transform_update(contribution)

    Listening().start(devices(mods=(unpack_arrays, adds)), initial_model(), num_rounds=1, timeout=10.0)
    assert [content(record) for record in seen] == [content(large)] * 3
    assert messages.num_bytes(pack_record(large)) > packing.MOST_HEAD
