"""What the server finds out before a client starts: every user error, and what it prepares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from fedapp.config import ConfigError, RunConfig
from fedapp.data import DataError
from fedapp.engine.sequential import SequentialGrid
from fedapp.federation import records
from fedapp.models import ModelError
from fedapp.server import USER_ERRORS, build_strategy, prepare, task_config
from strategies import REGISTRY
from strategies.clock import VirtualClock, WallClock
from strategies.flower.grids import engine_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def refusal(config: RunConfig, num_clients: int = 5) -> tuple[type[Exception], str]:
    with pytest.raises(USER_ERRORS) as caught:
        prepare(config, num_clients)
    assert "\n" not in str(caught.value)
    return caught.type, str(caught.value)


def test_what_is_prepared(configure: Callable[..., RunConfig]) -> None:
    experiment = prepare(configure(model="logistic", server_device="cpu", test_fraction=0.25), 5)
    assert experiment.num_clients == experiment.partition.num_clients == 5
    # 1,797 digits, a quarter (449.25) to test on
    assert len(experiment.partition.test_indices) == 449
    assert experiment.partition.sizes.sum() == 1797 - 449
    assert experiment.device == torch.device("cpu")
    assert sum(value.numel() for value in experiment.model.parameters()) == 650


@pytest.mark.parametrize(
    ("values", "kind", "start"),
    [
        ({"strategy": "fedbuff", "buffer_size": 6000}, ConfigError, "buffer-size = 6000: there are "),
        (
            {
                "strategy": "fedbuff",
                "buffer_size": 2,
                "aggregation_rule": "median",
                "faulty_clients": 1,
                "client_weights": "uniform",
                "aggregation_weights": "identical",
            },
            ConfigError,
            "aggregation-rule = 'median', faulty-clients = 1: needs 3 contributions in the buffer or more, "
            "buffer-size = 2",
        ),
        (
            {"time_scenario": "trace:/no/such.csv"},
            ConfigError,
            "time-scenario = 'trace:/no/such.csv': is no file",
        ),
        (
            {"step_heterogeneity": "list:1,2"},
            ConfigError,
            "step-heterogeneity = 'list:1,2': has 2 numbers, must have one for each of the 5 clients",
        ),
        (
            {"participation": "fixed:0,5"},
            ConfigError,
            "participation names client 5: there are 5 clients, allowed are 0 to 4",
        ),
        ({"min_clients": 6}, ConfigError, "min-clients = 6: there are 5 clients"),
        (
            {"normalize": True},
            DataError,
            "normalize = true: dataset 'digits' has no published mean and deviation; allowed for mnist",
        ),
        (
            {"augment": "flip", "dataset": "synthetic", "model": "logistic"},
            ConfigError,
            "augment = 'flip': the inputs of 'synthetic' are vector; only images can be mirrored or moved",
        ),
        (
            {"partitioner": "natural"},
            DataError,
            "partitioner = 'natural': dataset 'digits' has no natural clients",
        ),
        ({"min_samples": 400}, DataError, "num-supernodes = 5: 'digits' has 1438 training rows"),
        ({"data_path": "/tmp"}, DataError, "data-path = '/tmp': 'digits' comes with scikit-learn"),
        (
            {"dataset": "npz", "data_path": "/no/such.npz"},
            DataError,
            "data-path = '/no/such.npz': no such file",
        ),
        (
            {"dataset": "mnist", "data_path": "/no/such"},
            DataError,
            "data-path = '/no/such': no such file or folder",
        ),
        ({"model": "lstm"}, ModelError, "model = 'lstm': lstm goes with text"),
        ({"model": "perceptron"}, ModelError, "model = 'perceptron': needs two features and two classes"),
        ({"dataset": "synthetic", "model": "cnn"}, ModelError, "model = 'cnn': needs images of 4x4 or more"),
    ],
)
def test_a_users_error_is_one_line(
    values: dict[str, Any], kind: type[Exception], start: str, configure: Callable[..., RunConfig]
) -> None:
    found, text = refusal(configure(**values))
    assert text.startswith(start)
    assert found is kind


def test_a_pair_takes_two_clients(configure: Callable[..., RunConfig]) -> None:
    _, text = refusal(configure(participation="paired"), 1)
    assert text == "participation = 'paired': needs 2 clients or more, there are 1"
    assert prepare(configure(participation="paired"), 2).num_clients == 2


def test_a_broken_npz(configure: Callable[..., RunConfig], broken_npz: str) -> None:
    _, text = refusal(configure(dataset="npz", data_path=broken_npz))
    assert text.startswith(f"data-path = {broken_npz!r}: is not an npz file")


@NO_GPU
def test_a_server_without_the_gpu_it_is_to_use(configure: Callable[..., RunConfig]) -> None:
    _, text = refusal(configure(server_device="cuda"))
    assert text == "server-device = 'cuda': this machine has no GPU; allowed are auto, cpu"


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(
    tracker: str, configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedapp.server.trackers.find_spec", lambda name: None)
    _, text = refusal(configure(tracker=tracker))
    assert text.startswith(f"tracker = {tracker!r}: it isn't installed")


def test_the_largest_seed_that_is_allowed_works(configure: Callable[..., RunConfig]) -> None:
    experiment = prepare(configure(seed=2**63 - 1), 5)
    assert task_config(experiment)["seed"] == 2**63 - 1


def test_clients_get_an_absolute_path(
    configure: Callable[..., RunConfig],
    save_npz: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_npz()
    monkeypatch.chdir(tmp_path)
    experiment = prepare(configure(dataset="npz", data_path="own.npz"), 2)
    assert experiment.config.data_path == path
    assert task_config(experiment)["data-path"] == path


NOT_SENT = (
    "proximal-mu",
    "registered-nodes",
    "keep",
    "best-of",
    "stop-at",
    "patience",
    "tiers",
    "edge-rounds",
)


def test_a_task_carries_the_whole_config_and_the_shape_of_the_data(
    configure: Callable[..., RunConfig],
) -> None:
    config = configure(lr=0.3)
    record = dict(task_config(prepare(config, 5)))
    shape = {
        records.DATA_KIND: "image",
        records.DATA_TYPE: "uint8",
        records.INPUT_SHAPE: [1, 8, 8],
        records.NUM_CLASSES: 10,
        records.TARGET_TYPE: "classes",
    }
    # proximal-mu comes from the strategy; who holds which partition, and when the run ends, is nothing for clients
    fields = {key: value for key, value in config.flat().items() if key not in NOT_SENT}
    # 40 rounds are what 0, no number, stands for
    assert record == {**fields, "clock": "virtual", "num-server-rounds": 40, **shape}


@pytest.mark.parametrize("name", REGISTRY)
def test_a_strategy_gets_its_config_from_the_run_config(
    name: str, configure: Callable[..., RunConfig]
) -> None:
    config = configure(strategy=name, eval_every=3, time_budget=0.3, seed=4, proximal_mu=0.7)
    strategy = build_strategy(config)
    assert type(strategy) is REGISTRY[name]
    assert (strategy.config.eval_every, strategy.config.time_budget, strategy.config.seed) == (3, 0.3, 4)
    assert isinstance(strategy.session.clock, VirtualClock)
    assert isinstance(build_strategy(configure(clock="wall")).session.clock, WallClock)


def test_fedprox_gets_its_pull(configure: Callable[..., RunConfig]) -> None:
    strategy = build_strategy(configure(strategy="fedprox", proximal_mu=0.7))
    assert strategy.local_rule() == {"proximal-mu": 0.7}
    assert build_strategy(configure(proximal_mu=0.7)).local_rule() == {}


def test_the_spectral_method_gets_its_parameters(configure: Callable[..., RunConfig]) -> None:
    config = configure(
        strategy="spectral", perturbation_beta=0.25, message_floor=1e-6, neighbours=3, neighbour_memory=0.5
    )
    strategy = build_strategy(config)
    assert strategy.local_rule() == {"strategies.beta": 0.25}
    assert strategy.config.neighbour_memory == 0.5
    assert strategy.config.client_weights == "adjacency"  # whatever the run config says
    assert (strategy.session.graph.floor, strategy.session.graph.neighbours) == (1e-6, 3)
    at_one = build_strategy(configure(strategy="spectral", perturbation_beta=1.0))
    assert at_one.local_rule() == {}
    assert at_one.session.graph is not None


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_adjacency_weights_for_the_baselines(name: str, configure: Callable[..., RunConfig]) -> None:
    config = configure(strategy=name, client_weights="adjacency", message_floor=1e-6, neighbours=3)
    strategy = build_strategy(prepare(config, 5).config)
    assert (strategy.session.graph.floor, strategy.session.graph.neighbours) == (1e-6, 3)
    assert build_strategy(configure(strategy=name)).session.graph is None


def test_engines_are_told_apart() -> None:
    assert engine_of(InMemoryGrid.__new__(InMemoryGrid)) == "ray"
    assert engine_of(SequentialGrid.__new__(SequentialGrid)) == "sequential"
    assert engine_of(HttpGrid.__new__(HttpGrid)) == "deployment"
