"""A real Flower Grid that runs a real ClientApp in this process, with clients that can be made to misbehave.

The clients are bare numpy: client i minimises f_i(w) = a_i/2 ‖w − c_i‖² by gradient descent, so that every number a
test expects can be worked out by hand. Nothing here imports fedapp or torch.
"""

from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies.flower import messages
from strategies.flower.grids import Work, WorkRequest
from strategies.flower.internals import TaskIdentity
from strategies.testing import MemoryGrid, Node, be_the_server

# ---- The clients ------------------------------------------------------------------------------------------------


def client_app(*, describes: bool = True, mods: Iterable[Any] = ()) -> ClientApp:
    """Return the bare ClientApp; its ``node_config`` holds a (curvature), c (centre), n and the fault to show."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config = context.node_config, message.content["config"]
        received = message.content["arrays"]
        alpha, lr, steps = _steps(client, config)
        trained: dict[str, np.ndarray] = {}
        starts = {name: _values(array.data) for name, array in received.items()}
        for name, start in starts.items():
            u = 0.0
            if config.get(messages.BETA, 1.0) < 1:
                u = message.content.array_records["neighbours"][name].numpy().astype(np.float64)
            constant = messages.arrays_of(message, messages.CONSTANT)
            h = 0.0 if constant is None else constant[name].numpy().astype(np.float64)
            trained[name] = _descend(client, config, start, u, h)
        loss = _loss(client, starts.values())
        metrics = MetricRecord({"num-examples": client["num-examples"], "train-loss": loss})
        arrays = ArrayRecord({name: Array(values) for name, values in trained.items()})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        applied = {
            key: config[key] for key in (messages.ALPHA, messages.BETA, messages.STEPS) if key in config
        }
        if beside := [key for key in ("neighbours", messages.CONSTANT) if key in message.content]:
            applied[messages.RECORDS] = beside
        if messages.PATH in config:  # Σ_k γ (1 − α × what is gone by then)
            applied[messages.PATH] = (1 - (1 - lr * alpha) ** steps) / alpha if alpha else lr * steps
        if applied:
            content[messages.APPLIED] = ConfigRecord(applied)
        return Message(_misbehave(client.get("fault-train"), content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = context.node_config
        arrays = message.content["arrays"].values()
        loss = _loss(client, (_values(array.data) for array in arrays))
        metrics = MetricRecord({"num-examples": client["num-examples"], "loss": loss})
        return Message(
            _misbehave(client.get("fault-evaluate"), RecordDict({"metrics": metrics})), reply_to=message
        )

    @app.query("direction")
    def graph_direction(message: Message, context: Context) -> Message:
        client = context.node_config
        direction = np.array(client.get("direction", [1.0, client["centre"]]))
        content = _spoilt_direction(client.get("fault-direction"), direction / np.linalg.norm(direction))
        return Message(content, reply_to=message)

    if describes:

        @app.query("describe")
        def describe(message: Message, context: Context) -> Message:
            client = context.node_config
            if client.get("fault-query") == "refuse":
                return Message(Error(100, "out of memory"), reply_to=message)
            keys = [k for k in ("partition-id", "num-partitions", "num-examples") if k in client]
            metrics = MetricRecord({key: client[key] for key in keys})
            content = _misbehave(client.get("fault-query"), RecordDict({"metrics": metrics}))
            if "name" in client:
                content["device"] = ConfigRecord({"name": client["name"]})
            return Message(content, reply_to=message)

    return app


def _steps(client: Any, config: Any) -> tuple[float, float, int]:
    """Return α, the step size and the number of steps of a client's task."""
    # What the server asks for comes first, and then a client's own E_k.
    steps = config.get(messages.STEPS) or client.get("local-steps", config.get("local-steps", 1))
    lr = config.get("lr", 0.5)
    return config.get(messages.ALPHA, 0.0), lr / steps if config.get("normalize-steps") else lr, steps


def _descend(client: Any, config: Any, start: np.ndarray, u: Any = 0.0, h: Any = 0.0) -> np.ndarray:
    """Return what a client makes of an array by its steps."""
    alpha, lr, steps = _steps(client, config)
    beta, w = config.get(messages.BETA, 1.0), start.astype(np.float64)
    for _ in range(steps):
        at = beta * w + (1 - beta) * u
        w = w - lr * (client["curvature"] * (at - client["centre"]) + alpha * (w - start) + h)
    return np.asarray(w, dtype=start.dtype)  # a 0-d array becomes a scalar in sums


@lru_cache(maxsize=64)
def _values(data: bytes) -> np.ndarray:
    """Return the values of an array's bytes; many clients read the same model."""
    values: np.ndarray = np.load(BytesIO(data), allow_pickle=False)
    values.flags.writeable = False
    return values


def _loss(client: Any, arrays: Iterable[np.ndarray]) -> float:
    offsets = [(array - client["centre"]).ravel() for array in arrays]
    return float(client["curvature"] / 2 * np.sum(np.concatenate(offsets) ** 2))


def _npz_bytes() -> bytes:
    buffer = BytesIO()
    np.savez(buffer, w=np.zeros(2))
    return buffer.getvalue()


def _misbehave(fault: str | None, content: RecordDict) -> RecordDict:
    """Spoil a reply in the way that ``fault`` names: what a broken ClientApp might send."""
    if fault is None:
        return content
    if fault == "raise":
        raise RuntimeError("out of memory")
    if fault.startswith("metric:"):  # "metric:num-examples=nan"
        key, value = fault.removeprefix("metric:").split("=")
        bad: dict[str, Any] = {"list": [1, 2], "nan": float("nan"), "inf": float("inf"), "negative": -3}
        content["metrics"] = MetricRecord({**content.metric_records["metrics"], key: bad[value]})
        return content
    if fault == "no-arrays":
        del content["arrays"]
        return content
    arrays = content.array_records["arrays"]
    name, array = next(iter(arrays.items()))
    values = array.numpy()
    if fault == "name":
        content["arrays"] = ArrayRecord({"other": array})
        return content
    spoilt = {
        "nan": lambda: Array(np.full_like(values, np.nan)),
        "inf": lambda: Array(np.full_like(values, np.inf)),
        "shape": lambda: Array(np.append(values, values[:1])),
        "dtype": lambda: Array(values.astype(np.complex64)),
        "bytes": lambda: Array(array.dtype, array.shape, array.stype, b"\x93NUMPY torn"),
        "npz": lambda: Array(array.dtype, array.shape, array.stype, _npz_bytes()),
        "stype": lambda: Array(array.dtype, array.shape, "pickle", array.data),
    }
    arrays[name] = spoilt[fault]()
    return content


def _spoilt_direction(fault: str | None, direction: np.ndarray) -> RecordDict:
    """Return the reply with a client's direction, spoilt in the way that ``fault`` names."""
    good, bad = (
        Array(direction),
        {
            "shape": np.ones(len(direction) + 1),
            "matrix": direction[None],
            "scalar": np.array(1.0),
            "empty": np.empty(0),
            "zeros": 0 * direction,
            "nan": np.append(direction[1:], np.nan),
            "inf": np.append(direction[1:], -np.inf),
            "text": np.array(["left", "right"]),
            "long": 8 * direction,
            "tiny": np.linspace(1, 3, len(direction)) * 1e-161,  # its squares have lost their digits
        },
    )
    if fault == "raise":
        raise RuntimeError("no data")
    if fault == "no-record":
        return RecordDict()
    records = {
        "no-array": ArrayRecord(),
        "two-arrays": ArrayRecord({"m": good, "n": good}),
        "bytes": ArrayRecord({"m": Array(good.dtype, good.shape, good.stype, b"\x93NUMPY torn")}),
        "npz": ArrayRecord({"m": Array(good.dtype, good.shape, good.stype, _npz_bytes())}),
        "stype": ArrayRecord({"m": Array(good.dtype, good.shape, "pickle", good.data)}),
    }
    if fault in records:
        return RecordDict({"direction": records[fault]})
    return RecordDict({"direction": ArrayRecord({"m": Array(bad[fault]) if fault else good})})


# ---- The grid ---------------------------------------------------------------------------------------------------


class InProcessGrid(MemoryGrid):
    """The library's grid, with clients that can be made to misbehave."""

    def spoil(self, partition: int, fault: str | None, category: str = "train") -> None:
        """Make the ClientApp of a node raise, or send a bad reply; None makes it well again."""
        config = self.node(partition).context.node_config
        config.pop(f"fault-{category}", None)
        if fault is not None:
            config[f"fault-{category}"] = fault


class WorkingClients(InProcessGrid):
    """The bare clients as an engine has them: asynchronous strategies are answered without messages.

    For long runs, of which a test looks at times, weights and models alone.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.done: dict[str, Work] = {}
        self.count = 0

    def can_work(self, request: WorkRequest) -> bool:
        return True

    def hand_out(self, request: WorkRequest) -> list[str]:
        ids = []
        for task in request.tasks:
            client = self.nodes[task.node_id].context.node_config
            self.count += 1
            ids.append(f"task/{self.count}")
            self.done[ids[-1]] = self._work_of(client, request)
        return ids

    def work(self, task_id: str) -> Work | None:
        return self.done.pop(task_id, None)

    def _work_of(self, client: Any, request: WorkRequest) -> Work:
        if "fault-train" in client:
            return Work(np.empty(0), MetricRecord(), reason="out of memory")
        model = _descend(client, {**request.config, **request.rule}, request.base).astype(np.float64)
        metrics = {"num-examples": client["num-examples"], "train-loss": _loss(client, [request.base])}
        return Work(model, MetricRecord(metrics), request.layout.num_bytes)


# ---- Fixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def task_identity():
    """Be the ServerApp's process: the Message constructor asks who is sending."""
    before = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    be_the_server()
    yield
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """Look for nodes every millisecond instead of every tenth of a second."""
    monkeypatch.setattr("strategies.flower.exchange.NODE_POLL", 0.001)


@pytest.fixture
def federation():
    """Make an in-process grid of clients with curvatures a, centres c and sizes n.

    The defaults are the three clients that most hand calculations use: p = (1/8, 2/8, 5/8). From w = 1, one step of
    lr 0.5 gives Δ_i = −0.5 (1 − c_i) = (1, 0.5, −1). Without ``messages`` the clients of asynchronous strategies work
    as those of an engine do.
    """

    def make(
        centres: Iterable[float] = (3.0, 2.0, -1.0),
        sizes: Iterable[int] = (1, 2, 5),
        curvatures: Iterable[float] | None = None,
        *,
        node_ids: Iterable[int] | None = None,
        seed: int = 0,
        describes: bool = True,
        num_partitions: int | None = None,
        directions: Iterable[Iterable[float]] | None = None,
        mods: Iterable[Any] = (),
        messages: bool = True,
    ) -> InProcessGrid:
        centres, sizes = list(centres), list(sizes)
        directions = None if directions is None else list(directions)
        curvatures = [1.0] * len(centres) if curvatures is None else list(curvatures)
        nodes = []
        for i, (a, c, n) in enumerate(zip(curvatures, centres, sizes, strict=True)):
            config: dict[str, Any] = {"partition-id": i, "curvature": a, "centre": c, "num-examples": n}
            if num_partitions is not None:
                config["num-partitions"] = num_partitions
            if directions is not None:
                config["direction"] = list(directions[i])
            nodes.append(config)
        kind = InProcessGrid if messages else WorkingClients
        return kind(client_app(describes=describes, mods=mods), nodes, node_ids, seed)

    return make


@pytest.fixture
def tied():
    """Directions of three clients, whose graph has whole numbers.

    Their products are 0, 1/2, 3/4, so mis = 1/2, 1/4, 1/8 and A = ln 2 · (1, 2, 3) for the pairs 01, 02, 12. The
    degrees are ln 2 · (3, 4, 5), hence p = (3, 4, 5) / 12, and p_ij / p_i has the rows (0, 1/3, 2/3), (1/4, 0, 3/4)
    and (2/5, 3/5, 0).
    """
    return [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.75, 3**0.5 / 4]]


@pytest.fixture
def there(tmp_path):
    """Make options by which clients come and go as rows ``client,start,end[,period]`` say; every task takes 1 s."""

    def options(rows: str) -> dict[str, str]:
        (tmp_path / "there.csv").write_text(rows)
        return {"time_scenario": "F0", "availability": f"trace:{tmp_path / 'there.csv'}"}

    return options


@pytest.fixture
def add_node():
    """Connect one more node to a grid: like that of another partition, under a new id and partition."""

    def add(grid: InProcessGrid, like: int, partition: int, node_id: int, **more: Any) -> Node:
        return grid.add(node_id, {**grid.node(like).context.node_config, "partition-id": partition, **more})

    return add


@pytest.fixture
def model():
    """Make a model of one array, ``w``."""

    def make(*values: float, dtype: str = "float64") -> ArrayRecord:
        return ArrayRecord({"w": Array(np.array(values or (1.0,), dtype=dtype))})

    return make


@pytest.fixture
def values_of():
    """Read a model of one array back."""
    return lambda record: record["w"].numpy().tolist()


@pytest.fixture
def same_bytes():
    """Tell whether two models are equal bit for bit."""
    return lambda one, other: [(k, a.data) for k, a in one.items()] == [(k, a.data) for k, a in other.items()]


@pytest.fixture
def train_config():
    """Make the config that the bare clients read."""

    def make(local_steps: int = 1, lr: float = 0.5, **more: Any) -> ConfigRecord:
        return ConfigRecord({"local-steps": local_steps, "lr": lr, **more})

    return make
