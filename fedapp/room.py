"""Whether Flower's simulation has room for one client on this machine.

Flower itself finds out after it has started Ray, and then ends without naming a key.
"""

import os
from collections.abc import Mapping
from typing import Any

from strategies.flower.internals import simulation_backend
from strategies.flower.simulated import started_ray


def lacks_room(backend: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """Return one line if no client could start in a simulation of Flower; "" otherwise.

    ``backend`` is what the simulation asks of Ray; by default that of the simulation in this process, if it is one.
    """
    backend = simulation_backend() if backend is None else backend
    asked, given = backend.get("client_resources", {}), backend.get("init_args", {})
    if not asked or "RAY_ADDRESS" in os.environ:
        return ""  # a cluster has more than this machine
    if (ray := started_ray()) is not None:
        started = ray.cluster_resources()
        given = {"num_cpus": started.get("CPU", 0), "num_gpus": started.get("GPU", 0)}
    cpus, gpus = asked.get("num_cpus", 1), asked.get("num_gpus", 0)
    if cpus > (there := given.get("num_cpus", os.cpu_count() or cpus)):
        return _line("client-resources-num-cpus", cpus, f"{there:g} CPU{'s' * (there != 1)}")
    if gpus > 0 and gpus > (there := given["num_gpus"] if "num_gpus" in given else _gpus()):
        return _line(
            "client-resources-num-gpus", gpus, f"{f'{there:g}' if there else 'no'} GPU{'s' * (there > 1)}"
        )
    return ""


def _line(key: str, value: float, there: str) -> str:
    return (
        f"{key} = {value:g}: the simulation has {there}, so no client could start; lower it, or leave it out"
    )


def _gpus() -> int:
    import torch  # seconds, which only a run on GPUs waits for

    return torch.cuda.device_count()
