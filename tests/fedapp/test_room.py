"""Whether a simulation of Flower has room for a client is known before Ray starts."""

import os
import sys
import types

import pytest
import torch

import fedapp
from fedapp import room
from strategies.flower.internals import simulation_backend
from strategies.flower.simulated import in_ray_actor

CPUS, GPUS = os.cpu_count() or 1, torch.cuda.device_count()


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        (
            {"num_gpus": 0.1},
            {"num_gpus": 0},
            "client-resources-num-gpus = 0.1: the simulation has no GPU, so",
        ),
        ({"num_gpus": GPUS + 1}, {}, f"client-resources-num-gpus = {GPUS + 1}: the simulation has "),
        ({"num_gpus": 3}, {"num_gpus": 2}, "client-resources-num-gpus = 3: the simulation has 2 GPUs, so"),
        ({"num_gpus": 0.5}, {"num_gpus": 1}, ""),
        (
            {"num_cpus": CPUS + 1},
            {},
            f"client-resources-num-cpus = {CPUS + 1}: the simulation has {CPUS} CPUs, so",
        ),
        ({"num_cpus": CPUS + 1}, {"num_cpus": CPUS + 1}, ""),
        ({"num_cpus": CPUS}, {}, ""),
    ],
)
def test_a_client_that_has_no_room_is_one_line(asked, given, said, monkeypatch):
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0} | asked, "init_args": given}
    monkeypatch.setattr(room, "simulation_backend", lambda: backend)
    line = room.lacks_room()
    assert line.startswith(said)
    assert bool(line) == bool(said)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # a cluster, whose machines aren't known
    assert room.lacks_room() == ""


def test_a_ray_that_another_thread_is_importing_counts_as_not_started(monkeypatch):
    """Flower's main thread imports Ray while the ServerApp asks."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    backend = {"client_resources": {"num_cpus": CPUS + 1, "num_gpus": 0.0}, "init_args": {}}
    assert room.lacks_room(backend).startswith(f"client-resources-num-cpus = {CPUS + 1}: the simulation has ")
    assert not in_ray_actor()


@pytest.mark.slow
def test_a_ray_that_has_been_started_has_what_it_was_started_with():
    """So the one line doesn't depend on whether Flower's main thread has started Ray by now."""
    import ray

    ray.init(num_cpus=1, num_gpus=0, include_dashboard=False)
    try:
        for asked, said in (
            ({"num_cpus": 2}, "client-resources-num-cpus = 2: the simulation has 1 CPU, so"),
            ({}, ""),
        ):
            backend = {
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0} | asked,
                "init_args": {"num_cpus": 8},
            }
            assert room.lacks_room(backend).startswith(said)
            assert bool(room.lacks_room(backend)) == bool(said)
    finally:
        ray.shutdown()


def test_a_run_from_python_says_it_before_ray_starts(tmp_path):
    with pytest.raises(
        fedapp.ConfigError, match=f"client-resources-num-cpus = {CPUS + 1}: the simulation has {CPUS} "
    ):
        fedapp.run(
            engine="ray",
            federation_config={"client-resources-num-cpus": CPUS + 1},
            num_clients=2,
            results_dir=tmp_path / "runs",
        )
    assert not (tmp_path / "runs").exists()


def test_outside_a_simulation_of_flower_nothing_is_asked_for():
    assert simulation_backend() == {}
    assert room.lacks_room() == ""
