"""The vectorized engine against the sequential one: same events, same replies, same model up to rounding."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import ConfigRecord, Message

from fedapp import client_app, federation, server
from fedapp.client.handlers import CANNOT_TAKE_PART
from fedapp.client.training import own_tensors
from fedapp.config import RunConfig
from fedapp.engine import vectorized
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.report.client_tables import by_evaluation
from fedapp.training.trainer import Trainer
from strategies import REGISTRY, AsynchronousStrategy
from strategies.flower import messages
from strategies.flower.grids import WorkRequest
from strategies.flower.internals import APP_RAISED
from strategies.updates.sums import BlockSum, SumRequest
from tests.runs import ROUNDED, lines_of, same_files, summary_of, vector_of
from tests.selection import covering, only, spread

CLIENTS, ROUNDS = 5, 2  # what a method keeps of the first round is used in the second
Configure = Callable[..., RunConfig]


def is_rounded(key: str) -> bool:
    return key in ROUNDED or key.startswith(("client-", "personal-"))


@pytest.fixture
def small(configure, tmp_path):
    """Configure a short run: 2 rounds, or as many aggregations for each client, a few steps each."""
    numbers = itertools.count()

    def build(**values: Any) -> RunConfig:
        asynchronous = issubclass(REGISTRY[values.get("strategy", "fedavg")], AsynchronousStrategy)
        return configure(
            **{
                "num_server_rounds": ROUNDS * CLIENTS if asynchronous else ROUNDS,
                "eval_every": 5 if asynchronous else 1,
                "checkpoint_every": 0,
                "server_lr": 0.5,
                "batch_size": 32,
                "buffer_size": 2,
                "l2": 1e-3,
                "results_dir": str(tmp_path),
                "run_name": f"run-{next(numbers)}",
                **values,
            }
        )

    return build


def run(grid: SequentialGrid, config: RunConfig, should_stop: Callable[[], bool] | None = None) -> Path:
    """Run the app on a grid; return the run directory."""
    experiment = server.prepare(config, len(grid.contexts))
    return server.run(grid, experiment, *([should_stop] if should_stop else [])).path


def vectorized_grid(clients: int = CLIENTS, way: Any = None, workers: int = 2) -> VectorizedGrid:
    return VectorizedGrid(client_app.app, clients, Trainer(way, workers))


def sequential_grid(clients: int = CLIENTS) -> SequentialGrid:
    return SequentialGrid(client_app.app, clients)


def events(path: Path) -> list[dict[str, Any]]:
    lines = lines_of(path)
    known = by_evaluation(path)
    for line in lines:
        line["clients"] = known.get(line["aggregation"], {})  # none with client-records = "never"
        for name, renamed in (("loss", "client-losses"), ("accuracy", "client-accuracies")):
            if name in line["clients"]:  # rounded, unlike the rest about clients
                line[renamed] = line["clients"].pop(name)
        for name in [name for name in line["clients"] if name.startswith("personal-")]:
            line[f"{name}-by-client"] = line["clients"].pop(name)
    return lines


def assert_equal_runs(path: Path, reference: Path) -> None:
    """Same events bit for bit; the model within 1e-5 of its norm."""
    log, expected = events(path), events(reference)
    assert len(log) == len(expected) > 1
    for line, other in zip(log, expected, strict=True):
        assert list(line) == list(other)
        rounded = [key for key in line if is_rounded(key)]
        assert rounded
        exact = {key: value for key, value in line.items() if not is_rounded(key)}
        assert exact == {key: other[key] for key in exact}
        for key in rounded:
            # a test row on the boundary between two classes may fall on either side
            close = 5e-3 if "accuracy" in key else 1e-6
            assert line[key] == pytest.approx(other[key], rel=1e-3, abs=close, nan_ok=True)
    ours, theirs = vector_of(path), vector_of(reference)
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    summary, other = (summary_of(folder) for folder in (path, reference))
    assert (summary["engine"], other["engine"]) == ("vectorized", "sequential")
    for key in ("status", "aggregations", "failures", "bytes-up", "bytes-down"):
        assert summary[key] == other[key]


DIVISIONS = {"equal": {"partitioner": "iid"}, "ragged": {"data_imbalance": 1.0}}


@pytest.mark.parametrize(
    ("strategy", "model", "division"),
    spread(list(product(REGISTRY, ["logistic", "mlp", "cnn"], DIVISIONS)), 10),
)
def test_every_strategy_equals_the_sequential_engine(strategy, model, division, small):
    work: dict[str, Any] = {"local_epochs": 0, "local_steps": 2} if model == "cnn" else {"batch_size": 32}
    # Half a unit in every coordinate, however small its gradient, would enlarge its rounding.
    if strategy == "fadas":
        work["server_lr"] = 0.01

    def config() -> RunConfig:
        return small(strategy=strategy, model=model, **work, **DIVISIONS[division])

    path, reference = run(vectorized_grid(), config()), run(sequential_grid(), config())
    assert_equal_runs(path, reference)
    sizes = np.diff(np.load(path / "partition.npz")["client_offsets"])
    assert (np.ptp(sizes) <= 1) == (division == "equal")
    if strategy == "spectral":
        graph, other = np.load(path / "graph.npz"), np.load(reference / "graph.npz")
        assert list(graph) == list(other)
        assert all(np.array_equal(graph[name], other[name]) for name in graph)


@pytest.mark.parametrize("strategy", ["spectral", "async-spectral"])
def test_a_graph_of_updates_is_that_of_the_sequential_engine(strategy, small):
    config, same = (
        small(strategy=strategy, model="logistic", graph_source="updates", buffer_size=2) for _ in range(2)
    )
    path, reference = run(vectorized_grid(), config), run(sequential_grid(), same)
    ours, theirs = vector_of(path), vector_of(reference)
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    graph, other = np.load(path / "graph.npz"), np.load(reference / "graph.npz")
    assert list(graph) == ["clients", "misalignment", "adjacency", "eigenvalues"]
    for name in graph:
        np.testing.assert_allclose(graph[name], other[name], rtol=1e-3, atol=1e-4)
    assert np.ptp(graph["adjacency"][np.triu_indices(CLIENTS, 1)]) > 0.01


@pytest.mark.parametrize("strategy", ["fedbuff", "async-fedavg"])
def test_a_robust_rule_without_rounds_equals_the_sequential_engine(strategy, small):
    robust: dict[str, Any] = {
        "strategy": strategy,
        "model": "logistic",
        "aggregation_rule": "trimmed-mean",
        "faulty_clients": 1,
        "client_weights": "uniform",
        "aggregation_weights": "identical",
        "buffer_size": 4,
    }
    assert_equal_runs(*(run(grid, small(**robust)) for grid in (vectorized_grid(), sequential_grid())))


WORKS: dict[str, dict[str, Any]] = {
    "cnn": {"local_epochs": 0, "local_steps": 2},
    "mlp": {"batch_size": 64},
    "logistic": {},
}


# feddyn: α and a constant; ditto: a pull to another model than its first
@pytest.mark.parametrize(
    ("way", "model", "strategy"),
    covering(
        ["dual", "vmapped", "single"],
        WORKS,
        ["fedavg", "spectral", "feddyn", "ditto", "async-fedavg"],
        together=1,
    ),
)
def test_every_way_of_training_equals_the_sequential_engine(way, model, strategy, small):
    config, same = (
        small(strategy=strategy, model=model, **WORKS[model], **DIVISIONS["ragged"], lr=0.05)
        for _ in range(2)
    )
    assert_equal_runs(run(vectorized_grid(way=way), config), run(sequential_grid(), same))


@pytest.mark.parametrize(
    ("way", "strategy"), covering([None, "vmapped"], ["fedavg", "scaffold", "fedbuff"], together=1)
)
def test_a_parameter_may_be_one_number(strategy, way, small):
    own = {"strategy": strategy, "model": "tests.fedapp.own_parts:Scaled"}
    if strategy != "fedbuff":
        own |= {"client_evaluation": True, "fine_tune_epochs": 1, "test_on": "own"}
    path, reference = (run(grid, small(**own)) for grid in (vectorized_grid(way=way), sequential_grid()))
    assert_equal_runs(path, reference)
    assert safetensors.numpy.load_file(path / "model.safetensors")["scale"].shape == ()


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "fedbuff"])
def test_a_buffer_may_have_no_values(strategy, small):
    own = {"strategy": strategy, "model": "tests.fedapp.own_parts:Empty", "batch_size": 16}
    path, reference = (run(grid, small(**own)) for grid in (vectorized_grid(), sequential_grid()))
    assert_equal_runs(path, reference)
    assert events(path)[-1]["loss"] < 0.9 * events(path)[0]["loss"]


@pytest.mark.parametrize("way", only(["vmapped", "stacked", "dual", "single"], 2))
def test_images_are_changed_alike_by_every_way_of_training(way, small):
    values = {
        "model": "cnn",
        "local_epochs": 0,
        "local_steps": 2,
        "augment": "flip+crop",
        **DIVISIONS["ragged"],
    }
    path, reference = (run(grid, small(**values)) for grid in (vectorized_grid(way=way), sequential_grid()))
    assert_equal_runs(path, reference)
    plain = run(sequential_grid(), small(**{**values, "augment": "none"}))
    assert np.linalg.norm(vector_of(path) - vector_of(plain)) > 1e-3 * np.linalg.norm(vector_of(path))


@pytest.mark.parametrize(
    "values",
    [
        {"momentum": 0.9, "lr": 0.02, "clip_norm": 1.0},
        {"step_heterogeneity": "range:1-3", "normalize_steps": True},
        {"batch_size": 0, "lr_schedule": "inverse-sqrt", "lr": 0.5},
        {"participation": "md", "fraction_train": 0.6},  # a client may be drawn more than once
        {"round_deadline": 0.5},
        {"over_select": 0.5, "participation": "md", "fraction_train": 0.6, "round_deadline": 0.7},
        {"dataset": "synthetic", "partitioner": "natural", "model": "perceptron", "batch_size": 0},
        {"test_on": "unseen-clients", "record_divergence": True},
        {"normalize": "standardize", "strategy": "async-fedavg", "lr": 0.02},
        {"augment": "flip+crop", "model": "mlp", "batch_size": 7},
        {"augment": "crop", "batch_size": 0},
        {"stragglers": 0.7, "local_epochs": 4},
        {"stragglers": 0.5, "drop_stragglers": True, "dataset": "synthetic:1,0.5", "partitioner": "natural"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_every_kind_of_local_work_equals_the_sequential_engine(values, small):
    values = {"model": "logistic", **values}
    path, reference = (run(grid, small(**values)) for grid in (vectorized_grid(), sequential_grid()))
    if "record_divergence" in values:
        for line, other in zip(events(path), events(reference), strict=True):
            assert line.pop("clock") == other.pop("clock")
            clients, others = (
                each.pop("clients") | {key: each.pop(key) for key in ("client-losses", "client-accuracies")}
                for each in (line, other)
            )
            assert list(clients) == list(others)
            assert all(clients[key] == pytest.approx(others[key], rel=1e-2, abs=5e-3) for key in clients)
            assert line == pytest.approx(other, rel=1e-2, abs=5e-3)
        assert np.linalg.norm(vector_of(path) - vector_of(reference)) <= 1e-5 * np.linalg.norm(
            vector_of(path)
        )
    else:
        assert_equal_runs(path, reference)


def test_clients_evaluate_on_copies_of_their_rows_and_to_the_same_bits(small, monkeypatch):
    values = {"client_evaluation": True, "dataset": "synthetic", "partitioner": "natural", "l2": 0.0}
    path = run(vectorized_grid(), small(**values, model="logistic"))

    def own(_: Any, *arguments: Any) -> Any:
        return own_tensors(*arguments)

    monkeypatch.setattr(vectorized._Known, "copied", own)
    other = run(vectorized_grid(), small(**values, model="logistic"))
    assert (path / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


def test_clients_evaluate_too(small):
    config, same = (small(client_evaluation=True, model="logistic") for _ in range(2))
    path = run(vectorized_grid(), config)
    assert {"client-loss", "client-accuracy"} <= set(events(path)[-1])
    assert_equal_runs(path, run(sequential_grid(), same))


@pytest.mark.parametrize(
    ("strategy", "model"), [("fedavg", "mlp"), ("fedbuff", "logistic"), ("fedavg", "cnn")]
)
def test_a_run_is_repeated_to_the_last_bit_on_any_number_of_threads(strategy, model, small):
    work = {"local_epochs": 0, "local_steps": 2}
    paths = [
        run(vectorized_grid(workers=workers), small(strategy=strategy, model=model, **work))
        for workers in (2, 2, 1, 3)
    ]
    assert all(same_files(path, paths[0]) for path in paths[1:])


@pytest.mark.parametrize("strategy", ["scaffold", "spectral", "async-fedavg"])
def test_little_memory_at_a_time(strategy, small, monkeypatch):
    taken: list[int] = []

    class Counting(Trainer):
        def train(self, tasks: Any, groups: Any = ()) -> Any:
            taken.append(len(tasks))
            return super().train(tasks, groups)

    def one(budget: int) -> Path:
        monkeypatch.setattr(vectorized, "PULL_BUDGET", budget)
        taken.clear()
        grid = VectorizedGrid(client_app.app, CLIENTS, Counting(workers=2))
        return run(grid, small(strategy=strategy, model="logistic", batch_size=64))

    assert_equal_runs(
        one(1), run(sequential_grid(), small(strategy=strategy, model="logistic", batch_size=64))
    )
    assert set(taken) == {1}
    one(256 << 20)
    assert max(taken) == CLIENTS


# Errors ----------------------------------------------------------------------------------------------------


class Faulty:
    """Mixed into a grid: once training begins, node 3 has no data, and node 4 an unreadable partition."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        requests = list(messages)
        if any(request.metadata.message_type == "train" for request in requests):
            self.contexts[3].node_config.clear()  # type: ignore[attr-defined]
            self.contexts[4].node_config["partition-id"] = 99  # type: ignore[attr-defined]
        return super().push_messages(requests)  # type: ignore[misc]

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        self.contexts[3].node_config.clear()  # type: ignore[attr-defined]
        self.contexts[4].node_config["partition-id"] = 99  # type: ignore[attr-defined]
        return super().hand_out(request)  # type: ignore[misc]

    def sums(self, request: SumRequest) -> Iterable[BlockSum]:
        self.contexts[3].node_config.clear()  # type: ignore[attr-defined]
        self.contexts[4].node_config["partition-id"] = 99  # type: ignore[attr-defined]
        return super().sums(request)  # type: ignore[misc]


@pytest.mark.parametrize("strategy", ["fedavg", "spectral", "async-fedavg", "fedbuff"])
def test_failing_clients_reach_the_strategy_as_in_the_sequential_engine(strategy, small):
    paths = []
    number = 3 * (1 if REGISTRY[strategy].has_rounds else CLIENTS)
    for engine in (VectorizedGrid, SequentialGrid):
        faulty = type(engine.__name__, (Faulty, engine), {})
        config = small(strategy=strategy, model="logistic", num_server_rounds=number)
        paths.append(run(faulty(client_app.app, CLIENTS), config))
    assert_equal_runs(*paths)
    summary = summary_of(paths[0])
    assert summary["failures"] >= 5
    assert summary["accuracy"] > 0.3  # three still learn


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "fedavg"},
        {"strategy": "scaffold"},
        {"strategy": "ditto", "test_on": "own"},
        {"strategy": "fedavg", "client_evaluation": True, "fine_tune_epochs": 1, "test_on": "own"},
        {"strategy": "fedbuff"},
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_clients_whose_training_raises_reach_it_too(values, small, tmp_path, caplog):
    rng = np.random.default_rng(0)
    categories = rng.choice(np.delete(np.arange(50), 30), (100, 1))
    categories[30] = 30  # of client 1, and the model doesn't know it
    owners = np.repeat(np.arange(CLIENTS), 20)
    np.savez(
        tmp_path / "data.npz",
        x_train=categories.astype(np.float32),
        y_train=rng.integers(0, 3, 100),
        x_test=categories[:30].astype(np.float32),
        y_test=rng.integers(0, 3, 30),
        group_train=owners,
        group_test=np.repeat(np.arange(CLIENTS), 6),
    )
    own = {
        "dataset": "npz",
        "data_path": str(tmp_path / "data.npz"),
        "partitioner": "natural",
        "normalize": False,
        "model": "tests.fedapp.own_parts:Embedding",
        "client_records": "never",
        "client_device": "cpu",  # a GPU stops for good at an index that is out of range
        **values,
    }
    paths, said = [], []
    for grid in (vectorized_grid(), sequential_grid()):
        caplog.clear()
        paths.append(run(grid, small(**own)))
        said.append([text for text in caplog.messages if "IndexError: index out of range in self" in text])
    assert_equal_runs(*paths)
    assert said[0] == said[1] != []
    assert all("client 1 (node 2)" in text for text in said[0])
    assert summary_of(paths[0])["failures"] > 0


def requests_of(config: RunConfig, grid: SequentialGrid) -> list[Message]:
    """Two of each: good ones, one to a node without data, one that makes the app raise, other kinds in between."""
    experiment = server.prepare(config, CLIENTS)
    fields = server.task_config(experiment)
    arrays = federation.to_arrays(experiment.model.state_dict())
    del grid.contexts[2].node_config["partition-id"]

    def request(kind: str, node: int, record: ConfigRecord | None = None) -> Message:
        own = {messages.CLIENT: node - 1, messages.TASK: 1, messages.SERVER_ROUND: 1}
        record = ConfigRecord({**fields, **own}) if record is None else record
        queried = kind in (messages.DESCRIBE, messages.ASK_DIRECTION)
        return messages.request(kind, node, record, ttl=60.0, arrays=None if queried else arrays)

    return [
        request(messages.TRAIN, 1),
        request(messages.TRAIN, 2),
        request(messages.EVALUATE, 3),
        request(messages.TRAIN, 4, ConfigRecord({"lr": 0.1})),
        request(messages.DESCRIBE, 1),
        request(messages.ASK_DIRECTION, 5),
        request(messages.TRAIN, 5),
        request(messages.TRAIN, 1, ConfigRecord({**fields, messages.CLIENT: 0, "lr": -1.0})),
    ]


def test_replies_are_those_of_the_sequential_engine(small):
    config = small(model="logistic", batch_size=64)
    found = []
    for grid in (vectorized_grid(), sequential_grid()):
        requests = requests_of(config, grid)
        replies = {reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(requests)}
        found.append([replies[request.metadata.message_id] for request in requests])
        assert list(grid.pull_messages([request.metadata.message_id for request in requests])) == []
    for reply, expected in zip(*found, strict=True):
        assert reply.metadata.src_node_id == expected.metadata.src_node_id
        assert reply.metadata.message_type == expected.metadata.message_type
        assert reply.has_error() == expected.has_error()
        if reply.has_error():
            assert (reply.error.code, reply.error.reason) == (expected.error.code, expected.error.reason)
            continue
        assert list(reply.content) == list(expected.content)
        metrics, others = messages.metrics_of(reply), messages.metrics_of(expected)
        assert list(metrics) == list(others)
        for key, value in metrics.items():
            assert value == pytest.approx(others[key], rel=1e-5)
        for key in (messages.ARRAYS, messages.DIRECTION):
            arrays, other = (messages.arrays_of(message, key) for message in (reply, expected))
            assert (arrays is None) == (other is None)
            for name in arrays or {}:
                np.testing.assert_allclose(arrays[name].numpy(), other[name].numpy(), rtol=0, atol=1e-6)
    codes = [reply.error.code if reply.has_error() else 0 for reply in found[0]]
    refused, raised = CANNOT_TAKE_PART, APP_RAISED
    assert codes == [0, refused, 0, raised, 0, 0, 0, refused]
    assert found[0][3].error.reason.startswith("KeyError: ")


def test_only_the_replies_that_are_asked_for_are_given_and_once(small):
    grid = vectorized_grid()
    requests = [
        message for message in requests_of(small(model="logistic"), grid) if message.metadata.dst_node_id != 4
    ]
    ids = list(grid.push_messages(requests))
    assert list(grid.pull_messages([])) == []
    first = list(grid.pull_messages(ids[:1]))
    assert [reply.metadata.reply_to_message_id for reply in first] == ids[:1]
    assert list(grid.pull_messages(["unknown"])) == []
    rest: list[Message] = []
    while len(rest) < len(ids) - 1:
        pulled = list(grid.pull_messages(ids))
        assert pulled
        rest += pulled
    assert sorted(reply.metadata.reply_to_message_id for reply in rest) == sorted(ids[1:])
    assert list(grid.pull_messages(ids)) == []


# Ctrl-C ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
@pytest.mark.parametrize("pulls", [1, 2 * CLIENTS + 2])
def test_a_run_can_be_interrupted_between_the_pulls_of_a_round(strategy, pulls, small, monkeypatch):
    monkeypatch.setattr(vectorized, "PULL_BUDGET", 1)  # one client a pull
    trained = 0

    class Counting(Trainer):
        def train(self, tasks: Any, groups: Any = ()) -> Any:
            nonlocal trained
            trained += len(tasks)
            return super().train(tasks, groups)

        def stacks(self, tasks: Any) -> Any:
            nonlocal trained
            trained += len(tasks)
            return super().stacks(tasks)

    grid = VectorizedGrid(client_app.app, CLIENTS, Counting(workers=1))
    number = 3 * (CLIENTS if strategy == "async-fedavg" else 1)
    config = small(strategy=strategy, model="logistic", num_server_rounds=number)
    path = run(grid, config, lambda: trained >= pulls)
    summary = summary_of(path)
    assert summary["status"] == "interrupted"
    # It stops at once, in the middle of a round; of one that asks for sums, some blocks are ahead.
    assert pulls <= trained <= pulls + (3 if strategy == "fedavg" else 0)
    assert summary["aggregations"] < number
    if strategy == "fedavg":
        assert summary["aggregations"] == pulls // CLIENTS  # complete rounds
    assert events(path)[-1]["aggregation"] == summary["aggregations"]
    assert vector_of(path).size == 650
