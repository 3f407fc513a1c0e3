"""Federated strategies for clients that differ in their data and in their speed.

A library of its own: Flower ``Strategy`` subclasses for any Flower app, which need flwr and numpy only ::

    from strategies import FedProx

    strategy = FedProx(FedProx.Config(proximal_mu=0.1, participation="uniform", fraction_train=0.2))
    result = strategy.start(grid, initial_arrays, num_rounds=50)
"""

from strategies.fedavg import FedAvg
from strategies.fedprox import FedProx
from strategies.spectral import Spectral
from strategies.synchronous import Progress, SynchronousConfig, SynchronousStrategy

# Name in the run config → class. Contract tests run over every entry.
REGISTRY: dict[str, type[SynchronousStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "spectral": Spectral,
}

__all__ = [
    "REGISTRY",
    "FedAvg",
    "FedProx",
    "Progress",
    "Spectral",
    "SynchronousConfig",
    "SynchronousStrategy",
]
