"""The device that a client trains on."""

import functools
import sys

import torch

from fedapp.config import ConfigError, RunConfig
from fedapp.training.gpu import gpu


def device_of(config: RunConfig) -> torch.device:
    """Return the device that ``client-device`` asks for; ConfigError if this client has none."""
    if config.client_device == "cpu" or (config.client_device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("client-device = 'cuda': this client has no GPU; allowed are auto, cpu")
    _limit_gpu_share()
    return gpu(tf32=config.tf32)


@functools.cache
def _limit_gpu_share() -> None:
    """Keep to the fraction of the GPU's memory that Ray gave this worker."""
    if "ray" in sys.modules:
        import ray

        # Clients on Ray are actors; asked in another process, Ray starts a cluster, and says no.
        if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
            return
        share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
        if 0 < share < 1:
            torch.cuda.set_per_process_memory_fraction(share)
