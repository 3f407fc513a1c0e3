"""Whatever one client of four puts into its replies, of all that Flower's records hold, no run ends by it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import REGISTRY, messages
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid

DEFAULT = ("fedavg", "fedbuff", "scaffold")
NAMES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.thorough) for name in REGISTRY]
LIAR = 2
Edit = tuple[str, str, Any]


def same(values: Any) -> Any:
    """Return lists of values of one type, as records hold them."""
    return st.lists(values, max_size=3)


keys = st.one_of(
    st.sampled_from(sorted({v for k, v in vars(messages).items() if k.isupper() and isinstance(v, str)})),
    st.text(max_size=5),
)
integers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 2**63 - 1]))
numbers = st.one_of(integers, st.floats())
texts, data, switches = st.text(max_size=5), st.binary(max_size=9), st.booleans()
metrics = st.one_of(numbers, same(integers), same(st.floats()))
fields = st.one_of(metrics, texts, data, switches, same(texts), same(data), same(switches))


@st.composite
def whole_arrays(draw: Any) -> Array:
    """Draw an array of any dtype and any values."""
    dtype = np.dtype(
        draw(st.sampled_from(["f2", "f4", ">f4", "f8", "i1", "i8", "u1", "?", "c8", "U3", "S3", "M8[s]"]))
    )
    shape = draw(st.sampled_from([(), (0,), (1,), (2,), (3,), (2, 2), (1, 2)]))
    size = int(np.prod(shape)) * dtype.itemsize
    values = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind == "U":  # not every number is a character
        values[:] = bytes(size)
    return Array(np.frombuffer(bytes(values), dtype).reshape(shape))


# Arrays that say of themselves what isn't so, with bytes that are cut, too many or none.
bytes_of_two = Array(np.zeros(2, np.float32)).data
broken_arrays = st.builds(
    Array,
    st.sampled_from(["float32", "float64", "", "object", "none"]),
    st.sampled_from([(2,), (), (0,), (-1,), (10**12,), (2**62, 2**62)]),
    st.sampled_from(["numpy.ndarray", "torch", ""]),
    st.sampled_from(
        [bytes_of_two, bytes_of_two[:-1], bytes_of_two + b"x", bytes_of_two[:64], b"\x93NUMPY", b""]
    ),
)
arrays = st.one_of(whole_arrays(), broken_arrays)
records = st.one_of(
    st.dictionaries(st.sampled_from(["w", "b", "x", ""]), arrays, max_size=3).map(ArrayRecord),
    st.dictionaries(keys, metrics, max_size=3).map(MetricRecord),
    st.dictionaries(keys, fields, max_size=3).map(ConfigRecord),
)
edits = st.one_of(
    st.tuples(st.just("record"), keys, records),
    st.tuples(st.just("no record"), keys, st.none()),
    st.tuples(st.just("metric"), keys, metrics),
    st.tuples(st.just("field"), keys, fields),
    st.tuples(st.just("array"), st.sampled_from(["w", "b", "x"]), arrays),
)


def edit(content: RecordDict, kind: str, key: str, value: Any) -> None:
    """Change the content of a reply."""
    if kind == "record":
        content[key] = value
    elif kind == "no record":
        content.pop(key, None)
    else:
        of = {
            "metric": content.metric_records,
            "field": content.config_records,
            "array": content.array_records,
        }
        for record in list(of[kind].values()):
            record[key] = value


def app_of(lies: Sequence[Edit], about: Sequence[str]) -> ClientApp:
    """Return the app of clients that train two arrays; the liar edits its replies to these types of messages."""
    app = ClientApp()

    def answer(message: Message, context: Context, **content: Any) -> Message:
        reply = RecordDict(content)
        if context.node_config["partition-id"] == LIAR and message.metadata.message_type in about:
            for lie in lies:
                edit(reply, *lie)
        return Message(reply, reply_to=message)

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        said = MetricRecord({**context.node_config, "num-partitions": 4, "num-examples": 10})  # type: ignore[dict-item]
        return answer(message, context, metrics=said, device=ConfigRecord({"task-time": 1.0}))

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        values = np.eye(4, dtype=np.float32)[int(context.node_config["partition-id"])]
        return answer(message, context, direction=ArrayRecord({"direction": Array(values)}))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"]
        moved = {name: Array(np.asarray(array.numpy() + np.float32(0.1))) for name, array in model.items()}
        asked = message.content.config_records["config"]
        applied = {messages.PATH: 1.0} if messages.PATH in asked else {}
        return answer(
            message,
            context,
            arrays=ArrayRecord(moved),
            metrics=MetricRecord({"num-examples": 10, "train-loss": 1.0}),
            **({messages.APPLIED: ConfigRecord(applied)} if applied else {}),
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, metrics=MetricRecord({"num-examples": 10, "loss": 1.0}))

    return app


@pytest.mark.parametrize("where", ["simulation", DEPLOYMENT])
@pytest.mark.parametrize("safeguards", ["on", "off"])
@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    lies=st.lists(edits, min_size=1, max_size=4),
    about=st.sampled_from(
        [
            ["train"],
            ["evaluate"],
            ["query.describe", "query.direction"],
            ["train", "evaluate", "query.describe"],
        ]
    ),
)
def test_no_run_ends_by_a_reply(name, safeguards, where, lies, about):
    grid = MemoryGrid(app_of(lies, about), [{"partition-id": i} for i in range(4)])
    grid.engine = where
    initial = ArrayRecord({"w": Array(np.zeros(2, np.float32)), "b": Array(np.zeros((), np.float32))})
    own = {"fedfix_interval": 0.02} if name == "fedfix" else {}  # seconds, real ones on devices
    result = REGISTRY[name](safeguards=safeguards, **own).start(grid, initial, num_rounds=2, timeout=5.0)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    assert 2 in result.train_metrics_clientapp  # aggregations of the honest clients' work
