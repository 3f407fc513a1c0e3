"""What leaves a device: every reply of whole runs of every strategy, on devices with data of their own."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto

from fedapp.client_app import app
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import prepare, run
from strategies import REGISTRY
from strategies.flower import messages

RULES = {
    "fedprox": {messages.APPLIED: {messages.ALPHA: 0.1}},
    "spectral": {messages.APPLIED: {messages.BETA: 0.5, messages.RECORDS: [messages.NEIGHBOURS]}},
    "async-spectral": {messages.APPLIED: {messages.BETA: 0.5, messages.RECORDS: [messages.NEIGHBOURS]}},
    # How far steps of 0.1 went: 40 rows in batches of 10 are 4 of them.
    "fednova": {messages.APPLIED: {messages.PATH: 0.4}},
    "scaffold": {messages.APPLIED: {messages.PATH: 0.4, messages.RECORDS: [messages.CONSTANT]}},
    "feddyn": {messages.APPLIED: {messages.ALPHA: 0.01, messages.RECORDS: [messages.CONSTANT]}},
    "ditto": {messages.APPLIED: {messages.PERSONAL: 0.1}},
    "fedamp": {messages.APPLIED: {messages.ALPHA: 0.1}},
    "fedcompass": {messages.APPLIED: {messages.STEPS: 20}},  # max-local-steps: all begin with it
}
DEVICES, ROWS, WIDTH = 3, 40, 6
SECRET = "patients-of-dr-smith"  # in every device's path
CLASSES = ("benign", "malign")

# All that a reply may hold: the names of its records' entries, by message type.
DESCRIBED = {"num-examples", "gpu"}
TRAINED = {"num-examples", "num-steps", "train-loss"}
EVALUATED = {"num-examples", "loss", "accuracy"}


class RecordingGrid(SequentialGrid):
    """Keeps every reply, with the type of the message that it answers."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(app, len(paths))
        for number, (context, path) in enumerate(zip(self.contexts.values(), paths, strict=True)):
            context.node_config = {"data-path": path, "name": f"device-{number}"}
        self.replies: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = list(super().pull_messages(message_ids))
        self.replies += found
        return found


@pytest.fixture
def paths(tmp_path):
    """The server's table and one for every device."""
    rng = np.random.default_rng(0)
    written = []
    for number in range(1 + DEVICES):
        label = np.arange(ROWS) % 2
        x = rng.normal(size=(ROWS, WIDTH)) + 2 * label[:, np.newaxis]
        lines = [",".join([*(f"x{i}" for i in range(WIDTH)), "label"])]
        lines += [",".join([*map(str, row), CLASSES[y]]) for row, y in zip(x, label, strict=True)]
        path = tmp_path / f"{SECRET}-{number}.csv"
        path.write_text("\n".join(lines))
        written.append(str(path))
    return written


@pytest.mark.parametrize(
    ("strategy", "client_weights", "source"),
    [
        *((name, "samples", "data") for name in sorted(REGISTRY)),
        ("fedbuff", "adjacency", "data"),
        ("spectral", "adjacency", "updates"),
    ],
)
def test_nothing_but_the_update_counts_and_the_direction_leaves_a_device(
    strategy, client_weights, source, paths, tmp_path
):
    config = RunConfig.load(
        {
            "strategy": strategy,
            "client-weights": client_weights,
            "graph-source": source,
            "dataset": "files",
            "data-path": paths[0],
            "model": "logistic",
            "num-server-rounds": 2,
            "client-evaluation": True,
            "buffer-size": 2,
            "server-lr": 0.1,
            "batch-size": 10,
            "checkpoint-every": 0,  # a simulation's has what clients keep, which these refuse to tell
            "results-dir": str(tmp_path / "results"),
        }
    )
    experiment = prepare(config, DEVICES)
    grid = RecordingGrid(paths[1:])
    run(grid, experiment)

    model = {name: value.numpy().nbytes for name, value in experiment.model.state_dict().items()}
    assert model == {"1.weight": 4 * 2 * WIDTH, "1.bias": 4 * 2}
    seen = set()
    for reply in grid.replies:
        assert reply.has_content(), reply.error
        kind, content = reply.metadata.message_type, reply.content
        seen.add(kind)
        words = {record: dict(values) for record, values in content.config_records.items()}
        name = f"device-{reply.metadata.src_node_id - 1}"  # what its operator calls it
        rule = RULES.get(strategy, {}) if kind == messages.TRAIN else {}  # by which of ours it went
        assert words == ({"device": {"name": name}} if kind == messages.DESCRIBE else rule)
        arrays = {
            record: {name: array.numpy().nbytes for name, array in arrays.items()}
            for record, arrays in content.array_records.items()
        }
        metrics = {record: set(values) for record, values in content.metric_records.items()}
        if kind == messages.TRAIN:
            assert (arrays, metrics) == ({"arrays": model}, {"metrics": TRAINED})
        elif kind == messages.EVALUATE:
            own = (
                {f"personal-{name}" for name in ("loss", "accuracy")}
                if REGISTRY[strategy].capabilities.personal
                else set()
            )
            assert (arrays, metrics) == ({}, {"metrics": EVALUATED | own})
        elif kind == messages.DESCRIBE:
            assert (arrays, metrics) == ({}, {"metrics": DESCRIBED})
            assert content.metric_records["metrics"]["num-examples"] == ROWS
        else:  # one direction in the space of the inputs
            assert kind == messages.ASK_DIRECTION
            assert (arrays, metrics) == ({"direction": {"direction": 8 * WIDTH}}, {})
        for values in content.metric_records.values():
            for key, value in values.items():
                assert isinstance(value, int | float), key
        sent = message_to_proto(reply).SerializeToString()
        assert SECRET.encode() not in sent
        assert len(sent) < sum(sum(sizes.values()) for sizes in arrays.values()) + 1500
    graph = client_weights == "adjacency" or strategy in ("spectral", "async-spectral")
    expected = {messages.DESCRIBE, messages.TRAIN, messages.EVALUATE} | (
        {messages.ASK_DIRECTION} if graph and source == "data" else set()
    )
    assert seen == expected


def test_a_refusal_names_the_schema_and_no_data(paths, tmp_path):
    config = RunConfig.load(
        {
            "dataset": "files",
            "data-path": paths[0],
            "model": "logistic",
            "num-server-rounds": 2,
            "results-dir": str(tmp_path / "results"),
        }
    )
    Path(paths[2]).write_text(Path(paths[2]).read_text().replace("malign", "unknown"))
    Path(paths[3]).write_text("x0,label\nSmith,benign\n")
    grid = RecordingGrid(paths[1:])
    directory = run(grid, prepare(config, DEVICES))
    described = [r for r in grid.replies if r.metadata.message_type == messages.DESCRIBE]
    reasons = [reply.error.reason if reply.has_error() else None for reply in described]
    assert reasons == [
        None,
        "this client's data have the classes 'unknown', the model's are 'benign', 'malign'",
        f"data-path = {paths[3]!r}: column 'x0' has type string; numbers are needed (encode = true makes columns "
        "of 0 and 1 of texts)",
    ]
    # Training goes on with the one that fits.
    trained = [r.metadata.src_node_id for r in grid.replies if r.metadata.message_type == messages.TRAIN]
    assert trained == [1, 1]
    assert '"status": "finished"' in (directory.path / "summary.json").read_text()
