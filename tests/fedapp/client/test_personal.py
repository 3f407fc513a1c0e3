"""Clients' own models and test rows in the app: on both engines in process, on devices, and what is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedapp import federation, server
from fedapp.client.handlers import handle
from fedapp.client.kept import MOST_FILES, RECORD, keep_model, kept_model
from fedapp.client.request import local_data
from fedapp.config import RunConfig
from fedapp.data import DataError
from fedapp.engine.run import make_grid
from fedapp.report.client_tables import last_clients
from fedapp.server.personal import evaluates_on_clients
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.internals import RUN_ID, be_the_server
from tests.runs import lines_of
from tests.selection import covering

CLIENTS = 4
COMMON = {"model": "logistic", "num-server-rounds": 2, "test-on": "own"}


@pytest.fixture
def go(run_app):
    """Run the app for two rounds; return the run's folder."""
    return lambda engine="vectorized", name="", **given: run_app(
        COMMON, CLIENTS, name=name or engine, engine=engine, **given
    )


def model(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


# ---- What doesn't change -------------------------------------------------------------------------------------------


SHARED: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "momentum": 0.5, "ditto_lambda": 0.0},
    "some": {
        "participation": "uniform",
        "fraction_train": 0.5,
        "server_optimizer": "adam",
        "server_lr": 0.05,
    },
    "statistics": {
        "model": "tests.fedapp.own_parts:normalising",
        "ditto_lambda": 2.0,
        "optimizer": "adam",
        "lr": 0.01,
    },
}


@pytest.mark.parametrize(("engine", "name"), covering(["sequential", "vectorized"], SHARED, together=1))
def test_the_global_model_of_ditto_is_fedavgs_bit_for_bit(go, engine, name):
    others = SHARED[name]
    plain = {key: value for key, value in others.items() if key != "ditto_lambda"}
    assert model(go(engine, "ditto", strategy="ditto", **others)) == model(go(engine, "fedavg", **plain))


def test_without_a_pull_dittos_own_models_are_trained_alone_bit_for_bit(go):
    # Whatever becomes of the global model: here it moves a tenth as far.
    def own(pull: float, server_lr: float) -> tuple[list[float], list[float]]:
        given = {"model": "mlp", "ditto_lambda": pull, "server_lr": server_lr}
        last = last_clients(go(name=f"{pull}-{server_lr}", strategy="ditto", **given))
        return last["personal-loss"], last["loss"]

    (alone, loss), (same, other) = own(0.0, 1.0), own(0.0, 0.1)
    assert alone == same
    assert loss != other
    assert own(0.5, 1.0)[0] != own(0.5, 0.1)[0]


@pytest.mark.parametrize("strategy", ["fedavg", "spectral", "fedbuff"])
def test_fine_tuning_leaves_no_trace_in_the_model(go, strategy):
    without, tuned = (
        go(name=f"{epochs}", strategy=strategy, buffer_size=2, fine_tune_epochs=epochs) for epochs in (0, 2)
    )
    assert model(without) == model(tuned)
    before, after = lines_of(without)[-1], lines_of(tuned)[-1]
    assert not any(key.startswith("personal-") for key in before)
    assert after["personal-loss-mean"] < after["client-loss-mean"]
    same = [key for key in before if not key.startswith("client-")]
    assert {key: before[key] for key in same} == {key: after[key] for key in same}


# ---- Engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "ditto", "model": "mlp", "ditto_lambda": 0.5, "momentum": 0.3},
        {"strategy": "ditto", "participation": "uniform", "fraction_train": 0.5, "batch_size": 0},
        {"strategy": "ditto", "model": "tests.fedapp.own_parts:normalising"},
        {"strategy": "fedamp", "model": "mlp", "fedamp_sigma": 3.0},
        {"strategy": "fedamp", "model": "tests.fedapp.own_parts:normalising", "participation": "md"},
        {"strategy": "feddyn", "fine_tune_epochs": 2, "model": "mlp"},
    ],
    ids=lambda given: "-".join(str(value) for value in given.values())[:40],
)
def test_both_engines_agree_client_by_client(go, given):
    one, other = (last_clients(go(engine, **given)) for engine in ("sequential", "vectorized"))
    assert set(one) == set(other)
    assert {"accuracy", "personal-accuracy", "loss", "personal-loss"} <= set(one)
    for name in ("loss", "personal-loss"):
        assert one[name] == pytest.approx(other[name], rel=1e-4, nan_ok=False)
        assert len(one[name]) == CLIENTS
    assert one["personal-loss"] != pytest.approx(one["loss"], rel=1e-2)


def test_statistics_of_a_clients_own_model_are_its_own(go):
    # As the initial ones, mean 0 and variance 1, an own model would score as if nothing were normalised.
    path = go(strategy="fedamp", model="tests.fedapp.own_parts:normalising", num_server_rounds=8, lr=0.05)
    assert np.mean(last_clients(path)["personal-accuracy"]) > 0.6


def test_every_client_is_scored_on_its_own_test_rows_by_any_method(go):
    path = go(strategy="fedfix", num_server_rounds=6)
    told, last = last_clients(path), lines_of(path)[-1]
    with np.load(path / "partition.npz") as stored:
        sizes = np.diff(stored["test_offsets"])
        assert len(stored["test_offsets"]) == CLIENTS + 1
    assert last["accuracy"] == pytest.approx(sizes @ told["accuracy"] / sizes.sum())
    assert last["loss"] == pytest.approx(sizes @ told["loss"] / sizes.sum())
    assert last["client-accuracy-mean"] == pytest.approx(np.mean(told["accuracy"]))
    assert last["client-accuracy-jain"] <= 1
    # The objective is that of the rows that are trained on.
    other = go(name="held-out", strategy="fedfix", num_server_rounds=1, test_on="held-out")
    assert "federated-loss" in last
    assert "federated-loss" in lines_of(other)[-1]
    assert last["federated-loss"] != pytest.approx(last["client-loss-mean"], rel=1e-3)


# ---- What is refused, and said -----------------------------------------------------------------------------------


def test_min_samples_that_leave_nothing_to_test_on_are_refused():
    with pytest.raises(
        DataError, match="min-samples = 1: with test-on = 'own' a client needs 2 rows or more"
    ):
        server.prepare(RunConfig.load({**COMMON, "min-samples": 1}), CLIENTS)


@pytest.mark.parametrize(
    ("given", "engine", "scored", "said"),
    [
        ({}, "sequential", True, ""),
        (
            {"test-on": "held-out"},
            "ray",
            True,
            "test-on = 'held-out': clients' own models are scored on the rows that",
        ),
        ({"dp": "local"}, "sequential", False, "dp = 'local': clients' own models aren't scored"),
        ({}, DEPLOYMENT, False, "client-evaluation = false: on devices clients' own models aren't scored"),
        ({"client-evaluation": True}, DEPLOYMENT, True, ""),
    ],
)
def test_one_line_says_where_own_models_are_not_scored(given, engine, scored, said, caplog):
    config = RunConfig.load({**COMMON, "strategy": "ditto", **given})
    assert evaluates_on_clients(config, server.experiment.build_strategy(config), engine) is scored
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True] * bool(said)


def test_test_rows_that_a_dataset_ships_are_divided_too(save_npz, caplog):
    caplog.set_level("INFO")
    values = {**COMMON, "dataset": "npz", "data-path": save_npz(test=True), "partitioner": "iid"}
    made = server.prepare(RunConfig.load(values), CLIENTS)
    assert len(made.partition.client_indices) + len(made.partition.test_indices) == 40
    assert (
        "test-on = 'own': the 10 test rows that 'npz' ships are divided over the clients with the others"
        in caplog.text
    )


# ---- Devices ------------------------------------------------------------------------------------------------------


def request(config: RunConfig, kind: str, arrays: ArrayRecord | None = None, **more: Any) -> Message:
    be_the_server()
    dataset = federation.dataset_of(config, 1)
    fields = {**config.flat(), **federation.schema_fields(dataset), messages.SERVER_ROUND: 1}
    record = ConfigRecord({**fields, messages.CLIENT: 0, messages.TASK: 1, **more})
    if kind == messages.DESCRIBE:
        del record[messages.CLIENT]
    return messages.request(kind, 1, record, ttl=60.0, arrays=arrays)


def device(tmp_path: Path, data: str, **more: Any) -> Context:
    return Context(
        RUN_ID, 1, {"data-path": data, "state-path": str(tmp_path / "state"), **more}, RecordDict(), {}
    )


def initial(config: RunConfig) -> ArrayRecord:
    dataset = federation.dataset_of(config, 1)
    return federation.initial_arrays(
        federation.model_of(config, dataset.kind, dataset.input_shape, dataset.num_outputs)
    )


@pytest.fixture
def own(save_npz):
    path = save_npz(test=True)  # 30 rows to train on and 10 to test on
    values = {**COMMON, "dataset": "npz", "data-path": path, "test-fraction": 0.25, "strategy": "ditto"}
    return RunConfig.load(values), path


def test_a_device_trains_on_no_row_that_it_is_tested_on(own, tmp_path):
    config, path = own
    context = device(tmp_path, path)
    asked = request(config, messages.DESCRIBE)
    described = messages.metrics_of(handle(asked, context))
    trained = handle(request(config, messages.TRAIN, initial(config)), context)
    assert described["num-examples"] == messages.metrics_of(trained)["num-examples"] == 30  # of all 40
    found = [
        local_data(config, message.content.config_records["config"], context)
        for message in (asked, request(config, messages.TRAIN, **{messages.CLIENT: 5}))
    ]
    assert np.array_equal(found[0].rows, found[1].rows)  # whatever its place
    assert found[0].test_rows is not None
    assert sorted([*found[0].rows, *found[0].test_rows]) == list(range(40))
    # Rows that are only tested on may hold anything.
    with np.load(path) as stored:
        spoiled = {name: stored[name].copy() for name in stored}
    every = np.concatenate([spoiled["x_train"], spoiled["x_test"]])
    every[found[0].test_rows] = 255
    np.savez(path, **{**spoiled, "x_train": every[:30], "x_test": every[30:]})
    federation.forget()
    again = handle(request(config, messages.TRAIN, initial(config)), device(tmp_path, path))
    assert again.content["arrays"] == trained.content["arrays"]


def test_a_device_with_one_row_says_that_it_cannot_take_part(tmp_path):
    path = tmp_path / "one.npz"
    np.savez(path, x_train=np.zeros((1, 4), np.uint8), y_train=np.zeros(1, np.int64))
    values = {**COMMON, "dataset": "npz", "data-path": str(path), "loss": "cross-entropy"}
    config = RunConfig.load(values)
    reply = handle(request(config, messages.DESCRIBE), device(tmp_path, str(path)))
    assert reply.error.reason == (
        "test-on = 'own' and hold-out = 'last' need 2 rows of a client or more, one to train and one to test on; "
        "it has 1"
    )


RULE = {messages.PERSONAL: 0.5, messages.KEPT_FOR: 77}


def scores(config: RunConfig, arrays: ArrayRecord, context: Context, **more: Any) -> dict[str, Any]:
    return dict(
        messages.metrics_of(handle(request(config, messages.EVALUATE, arrays, **{**RULE, **more}), context))
    )


def test_a_devices_own_model_outlives_its_supernode_and_is_of_one_run(own, tmp_path):
    config, path = own
    arrays, context = initial(config), device(tmp_path, path)
    handle(request(config, messages.TRAIN, arrays, **RULE), context)
    kept = context.state[RECORD]
    assert isinstance(kept, ArrayRecord)
    told = scores(config, arrays, context)
    assert told["personal-loss"] != told["loss"]
    anew = device(tmp_path, path)  # Flower has forgotten the state
    assert scores(config, arrays, anew) == told
    handle(request(config, messages.TRAIN, arrays, **RULE, **{messages.TASK: 2}), anew)
    twice = anew.state[RECORD]
    handle(request(config, messages.TRAIN, arrays, **RULE, **{messages.TASK: 2}), context)
    assert context.state[RECORD] == twice != kept
    # Another run's, and one in a folder that has none: the model that is sent, until there is one.
    for other in ({messages.KEPT_FOR: 78}, {messages.KEPT_FOR: 0}):
        begun = scores(config, arrays, device(tmp_path, path), **other)
        assert begun["personal-loss"] == begun["loss"]
    (file,) = (tmp_path / "state").iterdir()
    assert file.name == "77.personal"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_device_never_tells_its_own_model(own, tmp_path):
    config, path = own
    context = device(tmp_path, path)
    handle(request(config, messages.TRAIN, initial(config), **RULE), context)
    reply = handle(request(config, messages.ASK_KEPT), context)
    assert reply.error.reason == "this device's own model doesn't leave it"
    trained = handle(request(config, messages.TRAIN, initial(config), **RULE), context)
    assert list(trained.content.array_records) == ["arrays"]
    assert trained.content["arrays"] != context.state[RECORD]


def test_what_is_wrong_with_a_devices_folder_is_said(own, tmp_path):
    config, path = own
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "77.personal").write_bytes(b"\xff\xff\xff")
    reply = handle(request(config, messages.TRAIN, initial(config), **RULE), device(tmp_path, path))
    assert reply.error.reason.startswith(f"state-path = {str(folder)!r}: 77.personal can't be read (")
    (folder / "77.personal").unlink()
    folder.rmdir()
    folder.write_text("a file")
    reply = handle(request(config, messages.TRAIN, initial(config), **RULE), device(tmp_path, path))
    assert reply.error.reason.startswith(f"state-path = {str(folder)!r}: can't be written to (")


def test_files_of_the_last_few_runs_are_kept(tmp_path):
    arrays = ArrayRecord({"w": Array(np.ones(2, np.float32))})
    for run in range(1, MOST_FILES + 3):
        keep_model(device(tmp_path, "x"), ConfigRecord({messages.KEPT_FOR: run}), arrays)
    assert len(list((tmp_path / "state").iterdir())) == MOST_FILES
    assert kept_model(device(tmp_path, "x"), ConfigRecord({messages.KEPT_FOR: run})) == arrays
    assert kept_model(device(tmp_path, "x"), ConfigRecord({messages.KEPT_FOR: 1})) is None


@pytest.mark.parametrize("own", [{"strategy": "ditto"}, {"personal": "1.bias"}])
def test_a_second_run_on_the_same_grid_begins_anew(own, tmp_path):
    def run(grid: Any, name: str) -> list[float]:
        values = {**COMMON, **own, "results-dir": str(tmp_path), "run-name": name}
        path = server.run(grid, server.prepare(RunConfig.load(values), CLIENTS)).path
        return [line["personal-loss"] for line in lines_of(path) if "personal-loss" in line]

    same, other = (make_grid("vectorized", CLIENTS, workers=1) for _ in range(2))
    first = run(same, "first")
    assert run(same, "second") == first == run(other, "other")
    assert len(first) == 2


def test_what_clients_keep_is_what_a_model_of_the_run_looks_like(go, tmp_path):
    values = {**COMMON, "strategy": "ditto", "results-dir": str(tmp_path), "run-name": "kept"}
    grid = make_grid("vectorized", CLIENTS, workers=1)
    path = server.run(grid, server.prepare(RunConfig.load(values), CLIENTS)).path
    ours = safetensors.numpy.load_file(path / "model.safetensors")
    for context in grid.contexts.values():  # type: ignore[attr-defined]
        kept = context.state[RECORD]
        assert {name: array.numpy().shape for name, array in kept.items()} == {
            name: array.shape for name, array in ours.items()
        }
        assert any((array.numpy() != ours[name]).any() for name, array in kept.items())
