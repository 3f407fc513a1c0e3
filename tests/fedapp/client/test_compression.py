"""Compressed updates in the app: what leaves a client, alike on the engines, and a run that is resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapp import client_app, server
from fedapp.client.privacy import NO_UPDATE
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.training.trainer import Trainer
from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.updates.compression import is_compressed, size_of
from strategies.updates.compression_residual import RESIDUALS
from tests.runs import arrays_of, lines_of, same_files, vector_of

CLIENTS = 4
NAMES = ["fp16", "int8", "topk:0.05", "qsgd:4"]


def grid_of(engine: str) -> SequentialGrid:
    if engine == "sequential":
        return SequentialGrid(client_app.app, CLIENTS)
    return VectorizedGrid(client_app.app, CLIENTS, Trainer(None, 2))


@pytest.fixture
def go(tmp_path):
    """Run the app in this process; return the run's folder."""

    def run(
        name: str, engine: str = "sequential", grid: Any = None, stop_after: int = 99, **values: Any
    ) -> Path:
        given = {key.replace("_", "-"): value for key, value in values.items()}
        if "resume" not in given:
            given = {"model": "logistic", "num-server-rounds": 4, "l2": 1e-3, "run-name": name, **given}
            given["results-dir"] = str(tmp_path)
        experiment = server.prepare(RunConfig.load(given), CLIENTS)
        metrics = tmp_path / name / "metrics.jsonl"

        def should_stop() -> bool:
            return metrics.exists() and len(metrics.read_text().splitlines()) > stop_after

        return server.run(grid or grid_of(engine), experiment, should_stop).path

    return run


def of_method(strategy: str, compression: str) -> Any:
    """A pair of a method and a code: every code with FedAvg, and every method with one code, in the default run."""
    marks = () if strategy == "fedavg" or compression == "topk:0.05" else pytest.mark.thorough
    return pytest.param(strategy, compression, marks=marks)


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [of_method(strategy, name) for name in NAMES for strategy in ("fedavg", "scaffold", "async-fedavg")],
)
def test_the_vectorized_engine_gives_the_sequential_one_s_model(go, compression, strategy):
    # Rounding decides where two values are as large, or one lies between two levels: an entry of a client's update
    # may be there on one engine and left out for the next on the other.
    options = {"strategy": strategy, "compression": compression, "eval_every": 1}
    one, other = (go(engine, engine, **options) for engine in ("sequential", "vectorized"))
    distance = np.linalg.norm(vector_of(one) - vector_of(other)) / np.linalg.norm(vector_of(one))
    assert distance < 2e-3
    told = [[line.get(messages.BYTES_UP) for line in lines_of(path)] for path in (one, other)]
    assert told[0] == told[1]


@pytest.mark.parametrize("compression", [*NAMES, "none"])
def test_the_bytes_of_a_round_are_those_foretold(go, compression):
    lines = lines_of(go("run", compression=compression, num_server_rounds=2))
    layout = Layout(("1.weight", "1.bias"), ((10, 64), (10,)), (np.dtype(np.float32),) * 2)
    up, down = CLIENTS * size_of(layout, compression), CLIENTS * size_of(layout)
    assert [line[messages.BYTES_UP] for line in lines[1:]] == [up, 2 * up]
    assert [line[messages.BYTES_DOWN] for line in lines[1:]] == [down, 2 * down]


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "async-fedavg", "fedprox"])
def test_a_compressed_model_is_the_same_on_the_engines(go, strategy):
    options = {"strategy": strategy, "compression_down": "int8", "eval_every": 1}
    one, other = (go(engine, engine, **options) for engine in ("sequential", "vectorized"))
    assert np.allclose(vector_of(one), vector_of(other), rtol=0, atol=1e-5)
    told = [[line.get(messages.BYTES_DOWN) for line in lines_of(path)] for path in (one, other)]
    assert told[0] == told[1]
    plain = lines_of(go("plain", strategy=strategy, eval_every=1))
    assert told[0][-1] < (0.7 if strategy == "scaffold" else 0.4) * plain[-1][messages.BYTES_DOWN]


def test_a_compressed_model_is_soon_there(go, tmp_path):
    # At 1,000 bits a second down a model of some 2,800 bytes takes 22.8 s, and one of a byte a value 5.9 s.
    profile = tmp_path / "devices.csv"
    profile.write_text(
        "client,speed,down,up,latency\n" + "".join(f"{i},1e9,1e3,1e9,0\n" for i in range(CLIENTS))
    )
    scenario = f"profile:{profile}"
    took = [
        lines_of(go(name, compression_down=name, time_scenario=scenario))[1]["time"]
        for name in ("none", "int8")
    ]
    lines = [lines_of(tmp_path / name)[1] for name in ("none", "int8")]
    assert took == pytest.approx([8 * line[messages.BYTES_DOWN] / CLIENTS / 1e3 for line in lines], rel=0.01)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "values",
    [
        {"compression": "topk:0.05", "participation": "uniform", "fraction_train": 0.5},
        {"compression": "int8", "strategy": "fedbuff", "buffer_size": 2, "eval_every": 1},
        {"compression": "topk:0.05", "strategy": "ditto", "participation": "uniform", "fraction_train": 0.5},
    ],
    ids=["fedavg", "fedbuff", "ditto"],
)
def test_a_resumed_run_equals_one_that_went_through(go, engine, values):
    common = {**values, "num_server_rounds": 5, "checkpoint_every": 1}
    whole = go("whole", engine, **common)
    part = go("part", engine, stop_after=2, **common)
    assert len(lines_of(part)) == 3
    (left_out,) = (part / "checkpoint").glob("*/left-out.npy")
    assert np.load(left_out).any()
    again = go("again", engine, resume=str(part))
    if (engine, values.get("strategy")) == ("vectorized", "fedbuff"):  # tasks meet in other batches
        assert vector_of(again) == pytest.approx(vector_of(whole), abs=1e-4)
        return
    assert same_files(again, whole, "model.safetensors")
    assert lines_of(again)[-1] == lines_of(whole)[-1]


# Privacy ---------------------------------------------------------------------------------------------------------


def test_with_local_privacy_what_is_compressed_has_its_noise(go):
    # What the code means and what it leaves out add up to what local privacy lets go, to the last round.
    class Watching(SequentialGrid):
        replies: dict[int, list[Any]]

        def _work(self, message: Any) -> Any:
            reply = super()._work(message)
            if message.metadata.message_type == messages.TRAIN:
                self.replies.setdefault(message.metadata.dst_node_id, []).append((message, reply))
            return reply

    private = {"dp": "local", "dp_clipping_norm": 0.5, "dp_noise_multiplier": 0.2, "num_server_rounds": 1}
    plain, coded = Watching(client_app.app, CLIENTS), Watching(client_app.app, CLIENTS)
    plain.replies, coded.replies = {}, {}
    go("plain", grid=plain, **private)
    go("coded", grid=coded, compression="topk:0.1", **private)
    for node, context in coded.contexts.items():
        ((request, reply),), ((_, whole),) = coded.replies[node], plain.replies[node]
        record, released = messages.arrays_of(reply), messages.arrays_of(whole)
        assert record is not None
        assert released is not None
        assert is_compressed(record)
        layout = Layout.of(messages.arrays_of(request))  # type: ignore[arg-type]
        private_update = layout.to_vector(released) - layout.to_vector(messages.arrays_of(request))  # type: ignore[arg-type]
        left_out = context.state[RESIDUALS]["since"].numpy()  # type: ignore[index]
        sent = private_update - left_out
        assert np.count_nonzero(np.abs(sent) > 1e-6) == 65  # a tenth of 650
        kept = np.sort(np.abs(private_update))[-65:]
        assert np.sort(np.abs(sent[np.abs(sent) > 1e-6])) == pytest.approx(kept, rel=1e-5)
    assert NO_UPDATE not in [
        reply.error.code for ((_, reply),) in coded.replies.values() if reply.has_error()
    ]


def test_central_privacy_goes_with_it_and_the_model_stays_near(go):
    private = {
        "dp": "central",
        "dp_clipping_norm": 0.1,
        "dp_noise_multiplier": 1e-6,
        "client_weights": "uniform",
    }
    path = go("run", compression="qsgd:1", num_server_rounds=3, init="zeros", **private)
    # Three rounds, of which none moves the model further than S, however long coarse codes make updates.
    assert np.linalg.norm(vector_of(path)) <= 3 * 0.1 + 1e-4
    assert np.linalg.norm(vector_of(path)) > 0.01


# Models with more than weights -----------------------------------------------------------------------------------


class Normalising(torch.nn.Sequential):
    """A model with running statistics and counts."""

    def __init__(self, inputs: int = 64, outputs: int = 10) -> None:
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(inputs, 12),
            torch.nn.BatchNorm1d(12),
            torch.nn.ReLU(),
            torch.nn.Linear(12, outputs),
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_running_statistics_are_averaged_as_without(go, engine):
    values = {"model": f"{__name__}:Normalising", "num_server_rounds": 1, "batch_size": 16}
    plain, coded = (
        arrays_of(go(name, engine, compression=compression, **values))
        for name, compression in (("plain", "none"), ("coded", "topk:0.05"))
    )
    for name, array in plain.items():
        same = array.tobytes() == coded[name].tobytes()
        assert same == (".running_" in name or "num_batches" in name)


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["topk:2", "topk:0", "qsgd:0", "qsgd:17", "topk:e"])
def test_a_code_that_is_none_is_one_line_before_a_client_starts(value):
    with pytest.raises(ConfigError) as caught:
        server.prepare(RunConfig.load({"compression": value}), CLIENTS)
    allowed = "none, fp16, int8, topk:F with F in (0, 1], or qsgd:BITS with BITS 1 to 16"
    assert str(caught.value) == f"compression = {value!r}: allowed are {allowed}"
