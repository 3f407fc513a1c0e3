"""What a client sets in its process: the share of a GPU that it keeps to, and how the GPU computes."""

import pytest
import ray
import torch

from fedapp.client import request
from fedapp.client.request import device_of
from fedapp.config.options import SimulationConfig
from fedapp.engine.run import run_on, torch_as_it_was
from fedapp.names import IN_PROCESS
from fedapp.server import prepare


class OnRay:
    """Ray's context of a process: an actor's, or another's, which has no resources."""

    def __init__(self, actor: str | None) -> None:
        self.actor = actor

    def get_actor_id(self) -> str | None:
        return self.actor

    def get_assigned_resources(self) -> dict[str, float]:
        assert self.actor, "This method is only available when the process is a worker"
        return {"CPU": 1.0, "GPU": 0.25}


@pytest.fixture
def shares(monkeypatch):
    """Collect the shares of a GPU that a process keeps to, as if it had one."""
    taken: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    request._limit_gpu_share.cache_clear()
    with torch_as_it_was():
        yield taken
    request._limit_gpu_share.cache_clear()


@pytest.mark.parametrize(("actor", "share"), [("a1", [0.25]), (None, [])])
def test_a_worker_of_ray_keeps_to_its_share_and_others_have_none(
    actor, share, shares, configure, monkeypatch
):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: OnRay(actor))
    assert device_of(configure()) == torch.device("cuda")
    assert shares == share


def test_ray_that_is_imported_alone_is_not_started(shares, configure, monkeypatch):
    monkeypatch.setattr(ray, "get_runtime_context", lambda: pytest.fail("Ray would start a cluster"))
    assert device_of(configure()) == torch.device("cuda")
    assert shares == []


@pytest.mark.usefixtures("shares")
def test_the_key_says_how_it_computes(configure):
    for tf32, precision in ((False, "ieee"), (True, "tf32")):
        device_of(configure(tf32=tf32))
        assert torch.backends.cudnn.conv.fp32_precision == precision


@pytest.mark.usefixtures("shares")
def test_the_server_computes_as_the_clients_do(configure):
    for tf32, precision in ((False, "ieee"), (True, "tf32")):
        experiment = prepare(configure(tf32=tf32, client_device="cpu"), 3)
        assert experiment.device == torch.device("cuda")
        assert torch.backends.cudnn.conv.fp32_precision == precision
        assert "tf32" not in experiment.unread


@pytest.mark.parametrize("on_devices", [False, True])
def test_without_a_gpu_the_key_is_read_by_devices_alone(on_devices, configure, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experiment = prepare(configure(tf32=True), 3, on_devices=on_devices)
    assert ("tf32" in experiment.unread) is not on_devices


@pytest.mark.parametrize("engine", IN_PROCESS)
def test_a_run_leaves_torch_its_threads(engine, configure, tmp_path):
    torch.set_num_threads(3)
    config = configure(num_server_rounds=1, model="logistic", results_dir=str(tmp_path))
    run_on(engine, config, SimulationConfig.read({"num-supernodes": 3}))
    assert torch.get_num_threads() == 3
