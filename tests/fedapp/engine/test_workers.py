"""The vectorized engine's workers on Ray: the bits of one process, whatever their number and whoever is lost."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from fedapp import federation
from fedapp.client import request
from fedapp.config import ConfigError
from fedapp.config.options import SimulationConfig
from fedapp.engine import workers
from fedapp.engine.run import run_on
from fedapp.engine.workers import Workers
from fedapp.federation.rows import RowsAsNeeded, rows_as_needed
from strategies.flower.errors import RunError
from tests.runs import same_files

CLIENTS = 30


@pytest.fixture
def run(configure, tmp_path):
    """Make a short run; return its folder."""
    numbers = itertools.count()

    def go(number: int = 0, federation_config: dict[str, Any] | None = None, **values: Any) -> Path:
        given = {
            "num_server_rounds": 3,
            "eval_every": 1,
            "model": "mlp",
            "min_samples": 2,
            "results_dir": str(tmp_path),
            "run_name": f"run-{next(numbers)}",
            **values,
        }
        simulation = SimulationConfig.read(
            {"num-supernodes": CLIENTS, "workers": number, **(federation_config or {})}
        )
        return run_on("vectorized", configure(**given), simulation).path

    return go


# Rows that are read as they are needed ---------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True, "standardize"])
def test_rows_that_are_read_as_they_are_needed_are_those_of_all(normalize, configure):
    config = configure(normalize=normalize, dataset="digits") if normalize != True else configure()  # noqa: E712
    partition = federation.partition_of(config, 7)
    dataset = federation.with_moments(config, federation.dataset_of(config, 7), partition)
    x, y = federation.training_tensors(config, 7, federation.CPU, dataset.moments)
    rows = rows_as_needed(config, 7, federation.CPU, dataset.moments)
    assert isinstance(rows, RowsAsNeeded)
    assert torch.equal(rows.y, y)
    for client in (5, 2, 5):
        begin, end = partition.client_offsets[client : client + 2].tolist()
        rows.need(begin, end)
        assert torch.equal(rows.x[begin:end], x[begin:end])
    assert rows.clients == 2
    begin, end = partition.client_offsets[:2].tolist()
    assert not rows.x[begin:end].any()  # nobody asked for client 0


def test_rows_that_are_not_read_take_no_memory():
    class Wide:
        """Ten million rows of 4,000 numbers: 160 GB."""

        y = np.zeros(10**7, np.int64)

        def inputs(self, rows: np.ndarray, normalize: Any) -> np.ndarray:
            return np.full((len(rows), 4000), 2.0, np.float32)

    rows = RowsAsNeeded(Wide(), np.arange(10**7), False)  # type: ignore[arg-type]
    rows.need(5_000_000, 5_000_010)
    assert float(rows.x[5_000_000:5_000_010].sum()) == 80_000
    assert float(rows.x[4_999_999].sum()) == 0


# Ray -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_ray():
    """Start Ray on this machine with four logical CPUs and two logical GPUs."""
    ray.init(num_cpus=4, num_gpus=2, logging_level="error", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "fedavg", "participation": "uniform", "fraction_train": 0.7},
        {"strategy": "scaffold", "model": "logistic"},
        {"strategy": "ditto", "test_on": "own", "client_evaluation": True},
        {"strategy": "fedbuff", "num_server_rounds": 20, "time_scenario": "F80"},
        {"strategy": "fedprox", "model": "tests.fedapp.own_parts:other_on_ray"},
        {"strategy": "fedfix", "model": "tests.fedapp.own_parts:other_on_ray", "fedfix_interval": 1.0},
    ],
    ids=lambda values: values["strategy"],
)
def test_the_number_of_workers_changes_no_bit(values, run):
    alone = run(**values)
    for number in (1, 2, 4):
        assert same_files(run(number, **values), alone)


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("strategy", ["fedavg", "ditto"])
def test_a_worker_that_dies_in_a_round_is_replaced_and_nothing_is_lost(strategy, run, monkeypatch):
    made: list[Workers] = []
    taken = itertools.count()

    class Dying(Workers):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

        def _take(self, *arguments: Any) -> None:
            if next(taken) in (2, 9):
                ray.kill(self.seats[0].actor)
            super()._take(*arguments)

    monkeypatch.setattr(workers, "Workers", Dying)
    values = {"strategy": strategy, "test_on": "own", "client_evaluation": True}
    assert same_files(run(2, **values), run(**values))
    assert made[0].lost >= 1


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_parts_of_gpus_are_given_to_workers(run):
    parts = {"client-resources-num-gpus": 0.5, "init-args-num-gpus": 2}
    assert same_files(run(4, parts), run())
    with pytest.raises(
        ConfigError, match=r"workers = 4: .*num-gpus = 0.75 for each, they need 3 GPUs; Ray has 2"
    ):
        run(4, {**parts, "client-resources-num-gpus": 0.75})


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_a_gpu_of_the_process_that_asks_is_no_trouble(run, monkeypatch):
    alone = run()
    request._limit_gpu_share.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # here; not where workers are
    parts = {"client-resources-num-gpus": 0.5}
    assert same_files(run(1, parts, server_device="cpu"), alone)
    assert request._limit_gpu_share.cache_info().misses == 1  # it was asked for, and Ray is there


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_more_than_ray_has_room_for_is_refused_and_leaves_no_folder(run, tmp_path):
    with pytest.raises(
        ConfigError, match=r"workers = 3: .*num-cpus = 2 for each, they need 6 CPUs; Ray has 4"
    ):
        run(3, {"client-resources-num-cpus": 2}, results_dir=str(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_workers_of_several_cpus_change_no_bit(run):
    values = {"local_epochs": 2, "batch_size": 0}
    assert same_files(run(2, {"client-resources-num-cpus": 2}, **values), run(**values))


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_workers_that_never_begin_end_the_run_with_their_reason(run, monkeypatch):
    class Unable:
        def __init__(self, *arguments: Any) -> None:
            raise ModuleNotFoundError("No module named 'torch'")

        def place(self) -> str:
            return ""

    monkeypatch.setattr(workers, "RayWorker", Unable)
    with pytest.raises(RunError, match=r"workers were lost, one after the other; the last one: .*torch"):
        run(1)


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_a_client_whose_training_raises_is_left_out(strategy, run, save_npz, caplog):
    categories, owners = np.full((60, 1), 7, np.float32), np.repeat(np.arange(CLIENTS), 2)
    categories[0], categories[12] = 49, 30  # 30, of client 6, isn't known to the model, and isn't the largest
    labels = np.arange(60) % 3
    path = save_npz(
        x_train=categories,
        y_train=labels,
        x_test=np.full((60, 1), 7, np.float32),
        y_test=labels,
        group_train=owners,
        group_test=owners,
    )
    values = {
        "strategy": strategy,
        "dataset": "npz",
        "data_path": path,
        "partitioner": "natural",
        "normalize": False,
        "model": "tests.fedapp.own_parts:Embedding",
        "client_records": "never",
    }
    assert same_files(run(2, **values), run(**values))
    said = [text for text in caplog.messages if "client 6 (node 7)" in text]
    assert len(said) == 2 * 3
    assert all("IndexError: index out of range in self" in text for text in said)


@pytest.mark.thorough
@pytest.mark.usefixtures("on_ray")
def test_what_a_worker_raises_is_raised_here(run, monkeypatch):
    class Broken:
        def __init__(self, *arguments: Any) -> None:
            """Take what a RayWorker takes."""

        def place(self) -> str:
            return ""

        def sums(self, *arguments: Any) -> None:
            raise ZeroDivisionError("as a worker's own")

    monkeypatch.setattr(workers, "RayWorker", Broken)
    with pytest.raises(ZeroDivisionError, match="as a worker's own"):
        run(1)


@pytest.mark.slow
def test_a_machine_that_is_lost_in_a_round_changes_nothing(run, monkeypatch):
    values = {"strategy": "fedavg", "num_server_rounds": 4}
    alone = run(**values)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        others = [cluster.add_node(num_cpus=1) for _ in range(3)]
        cluster.wait_for_nodes()
        taken = itertools.count()

        class Losing(Workers):
            def _take(self, *arguments: Any) -> None:
                if next(taken) == 9:
                    cluster.remove_node(others.pop(), allow_graceful=False)
                super()._take(*arguments)

        monkeypatch.setattr(workers, "Workers", Losing)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        path = run(4, **values)
        assert len(others) == 2
        assert same_files(path, alone)
    finally:
        ray.shutdown()
        cluster.shutdown()
