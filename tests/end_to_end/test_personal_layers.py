"""Layers of clients' own: FedPer, FedRep and FedBN in the whole app, against numpy in float64 and at their limits."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

import fedapp
from fedapp.config import ConfigError
from fedapp.report.client_tables import by_evaluation
from strategies import REGISTRY, size_of
from strategies.flower.arrays import Layout
from tests.end_to_end.softmax import KEYS, Problem, assert_close
from tests.end_to_end.softmax import Array as Matrix
from tests.end_to_end.test_personal_reference import (
    CLIENTS,
    CONFIG,
    L2,
    ROUNDS,
    STEPS,
    ZERO,
    alone,
    assert_scores,
    mean,
)
from tests.runs import arrays_of, lines_of, same_files
from tests.selection import only

BIAS = np.zeros((10, 65))
BIAS[:, -1] = 1.0  # 1 where an array is a client's own
# Clients that look at no single update, and others; without rounds; by a robust rule; with a server optimizer.
FIRST = ("fedavg", "scaffold", "fedbuff", "fedprox", "krum", "mifa")


def shared_of(problem: Problem, models: list[Matrix]) -> Matrix:
    """Return the mean of the clients' models where it is shared, and the initial model elsewhere."""
    return np.asarray(mean(problem, models) * (1 - BIAS))


@pytest.mark.parametrize(("engine", "pull"), [("sequential", 0.0), ("vectorized", 0.3)])
def test_fedper(run_app, engine, pull):
    """With a pull, to where a client's training starts, its own arrays among it."""
    keys = {"personal": "*.bias", "strategy": "fedprox", "proximal-mu": pull}
    path = run_app(CONFIG | keys, CLIENTS, engine=engine)
    problem, W, own = Problem(path), ZERO, [ZERO] * CLIENTS
    for _ in range(ROUNDS):
        starts = [W * (1 - BIAS) + one * BIAS for one in own]
        own = [problem.descend(i, starts[i], STEPS, l2=L2, pull=pull) for i in range(CLIENTS)]
        W = shared_of(problem, own)
    assert_close(path, W)
    assert_scores(path, [W * (1 - BIAS) + one * BIAS for one in own], W)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fedrep_trains_a_clients_own_arrays_first_and_then_the_others(run_app, engine):
    path = run_app(CONFIG | {"personal": "*.bias", "personal-epochs": 2}, CLIENTS, engine=engine)
    problem, W, own = Problem(path), ZERO, [ZERO] * CLIENTS

    def descend(i: int, w: Matrix, steps: int, moves: Matrix) -> Matrix:
        for _ in range(steps):
            w = w - KEYS["lr"] * moves * (problem.gradient(i, w) + L2 * w)
        return w

    for _ in range(ROUNDS):
        starts = [W * (1 - BIAS) + one * BIAS for one in own]
        first = [descend(i, starts[i], 2, BIAS) for i in range(CLIENTS)]  # an epoch is one batch
        own = [descend(i, first[i], STEPS, 1 - BIAS) for i in range(CLIENTS)]
        W = shared_of(problem, own)
    assert_close(path, W)
    assert_scores(path, [W * (1 - BIAS) + one * BIAS for one in own], W)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_where_all_arrays_are_a_clients_own_each_trains_alone(run_app, engine):
    path = run_app(CONFIG | {"personal": "*"}, CLIENTS, engine=engine)
    assert_scores(path, alone(Problem(path), ROUNDS * STEPS), ZERO)
    assert not any(array.any() for array in arrays_of(path).values())


def test_fedbn_keeps_the_layers_of_normalisation_with_their_statistics(tmp_path):
    keys: dict[str, Any] = {
        "model": "tests.fedapp.own_parts:normalising",
        "num_clients": 3,
        "num_server_rounds": 3,
        "class_imbalance": 5.0,
        "figures": False,
        "results_dir": str(tmp_path),
    }
    paths = [
        fedapp.run(**keys, engine=engine, personal="2.*", run_name=engine).path
        for engine in ("sequential", "vectorized")
    ]
    for path in paths:
        model = arrays_of(path)
        assert [
            model[f"2.{name}"].tolist() for name in ("weight", "bias", "running_mean", "running_var")
        ] == [
            [1.0] * 8,
            [0.0] * 8,
            [0.0] * 8,
            [1.0] * 8,
        ]
        last = lines_of(path)[-1]
        assert last["personal-loss"] < last["loss"]
    one, other = (np.array(by_evaluation(path)[3]["personal-loss"]) for path in paths)
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("personal", ["1.*", "*"])
def test_a_clients_own_arrays_do_not_travel(tmp_path, personal, compression):
    keys: dict[str, Any] = {
        "num_clients": 3,
        "num_server_rounds": 2,
        "batch_size": 64,
        "figures": False,
        "compression": compression,
    }
    path = fedapp.run(**keys, personal=personal, results_dir=str(tmp_path)).path
    shared = {name: array for name, array in arrays_of(path).items() if personal != "*" and name[0] == "3"}
    layout = Layout.of(ArrayRecord({name: Array(array) for name, array in shared.items()}))
    last = lines_of(path)[-1]
    assert last["bytes-down"] == 2 * 3 * layout.num_bytes
    assert last["bytes-up"] == 2 * 3 * size_of(layout, compression)


def test_without_rounds_clients_are_scored_as_their_tasks_have_ended_on_every_engine(tmp_path):
    keys: dict[str, Any] = {"strategy": "async-fedavg", "personal": "3.*", "num_clients": 4, "figures": False}
    keys |= {"num_server_rounds": 12, "results_dir": str(tmp_path), "client_records": "never"}
    one, other = (
        [
            line.get("personal-loss", 0.0)
            for line in lines_of(fedapp.run(**keys, engine=engine, run_name=engine).path)
        ]
        for engine in ("sequential", "vectorized")
    )
    assert one == pytest.approx(other, rel=1e-4)
    assert one[-1] < one[1]


def test_without_rounds_ray_is_refused_before_there_is_a_folder(tmp_path):
    keys: dict[str, Any] = {"strategy": "async-fedavg", "personal": "3.*", "engine": "ray", "num_clients": 2}
    with pytest.raises(
        ConfigError, match=r"^personal = '3.\*': on Ray .* AsyncFedAvg has no rounds; allowed with"
    ):
        fedapp.run(**keys, results_dir=str(tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.ci
@pytest.mark.thorough
def test_clients_on_ray_keep_what_they_keep_one_by_one(simulate):
    config = {"personal": "3.*", "personal-epochs": 1, "num-server-rounds": 3, "test-on": "own"}
    ray, sequential = (simulate(config, engine=engine) for engine in ("ray", "sequential"))
    assert ray.returncode == 0, ray.output
    assert ray.model == sequential.model
    for line, like in zip(lines_of(ray.path), lines_of(sequential.path), strict=True):
        assert [line.get(name) for name in ("personal-loss", "bytes-up", "bytes-down")] == [
            like.get(name) for name in ("personal-loss", "bytes-up", "bytes-down")
        ]
    assert lines_of(ray.path)[-1]["personal-loss"] < lines_of(ray.path)[1]["personal-loss"]


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff"])
def test_a_resumed_run_has_what_clients_kept(tmp_path, strategy):
    keys: dict[str, Any] = {
        "strategy": strategy,
        "personal": "3.*",
        "personal_epochs": 1,
        "batch_size": 64,
        "num_clients": 3,
        "buffer_size": 3,
        "aggregation_weights": "identical",
        "engine": "sequential",
        "checkpoint_every": 1,
        "figures": False,
        "results_dir": str(tmp_path),
    }
    whole = fedapp.run(**keys, num_server_rounds=4, run_name="whole").path
    part = fedapp.run(**keys, num_server_rounds=2, run_name="part").path
    assert fedapp.run(resume=str(part), num_server_rounds=4).path == part
    assert same_files(whole, part, "model.safetensors")
    assert lines_of(whole)[3:] == lines_of(part)[3:]  # at its end a run without rounds sends no model


def averages(name: str) -> bool:
    return not REGISTRY[name].capabilities.personal and "spectral" not in name


@pytest.mark.parametrize(
    "strategy", only(sorted(filter(averages, REGISTRY), key=lambda name: name not in FIRST), len(FIRST))
)
def test_with_every_strategy_that_averages_a_clients_own_arrays_stay_as_the_initial_model_has_them(
    tmp_path, strategy
):
    keys: dict[str, Any] = {"strategy": strategy, "num_clients": 3, "num_server_rounds": 3, "figures": False}
    keys |= {"buffer_size": 2, "batch_size": 64}
    path = fedapp.run(**keys, personal="1.*", results_dir=str(tmp_path), run_name="run").path
    none = fedapp.run(
        **keys | {"strategy": "fedavg", "time_budget": 1e-6}, results_dir=str(tmp_path), run_name="none"
    ).path
    model, initial = arrays_of(path), arrays_of(none)
    for name in ("1.weight", "1.bias"):
        assert model[name].tobytes() == initial[name].tobytes()
    assert model["3.weight"].tobytes() != initial["3.weight"].tobytes()
    assert lines_of(path)[-1]["personal-loss"] > 0
