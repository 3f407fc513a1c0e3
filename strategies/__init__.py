"""Federated strategies for clients that differ in their data and in their speed.

A library of its own: Flower ``Strategy`` subclasses for any Flower app, on flwr and numpy (graphs: scipy) ::

    from strategies import FedProx

    strategy = FedProx(FedProx.Config(proximal_mu=0.1, participation="uniform", fraction_train=0.2))
    result = strategy.start(grid, initial_arrays, num_rounds=50)
"""

from strategies.async_fedavg import AsyncFedAvg
from strategies.base import FederatedStrategy, StrategyConfig
from strategies.events import AsynchronousStrategy
from strategies.fedavg import FedAvg
from strategies.fedbuff import FedBuff
from strategies.fedfix import FedFix
from strategies.fedprox import FedProx
from strategies.progress import Progress
from strategies.rounds import SynchronousConfig, SynchronousStrategy
from strategies.scheme import AsynchronousConfig
from strategies.spectral import Spectral

# Name in the run config → class. Contract tests run over every entry.
REGISTRY: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "spectral": Spectral,
    "async-fedavg": AsyncFedAvg,
    "fedfix": FedFix,
    "fedbuff": FedBuff,
}

__all__ = [
    "REGISTRY",
    "AsyncFedAvg",
    "AsynchronousConfig",
    "AsynchronousStrategy",
    "FedAvg",
    "FedBuff",
    "FedFix",
    "FedProx",
    "FederatedStrategy",
    "Progress",
    "Spectral",
    "StrategyConfig",
    "SynchronousConfig",
    "SynchronousStrategy",
]
