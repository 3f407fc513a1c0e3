"""Federated strategies for clients that differ in their data and in their speed.

A library of its own: Flower ``Strategy`` subclasses for any Flower app, on flwr and numpy (graphs: scipy) ::

    from strategies import FedProx

    strategy = FedProx(FedProx.Config(proximal_mu=0.1, participation="uniform", fraction_train=0.2))
    result = strategy.start(grid, initial_arrays, num_rounds=50)

A method of your own
--------------------
A subclass of ``FedAvg`` (or ``SynchronousStrategy``) goes round by round, one of ``AsynchronousStrategy`` takes work
as it comes. Its parameters are fields of a frozen config; all else it says in hooks, of which each has a default::

    @dataclass(frozen=True)
    class EveryConfig(AsynchronousConfig):
        every: int = 3

    class Every(AsynchronousStrategy):
        Config = EveryConfig

        def ready(self, arrived):                    # or `interval`: seconds between two aggregations
            return arrived >= self.config.every

    Every(Every.Config(every=5)).start(grid, initial_arrays, num_rounds=50)

In both loops. A contribution has ``client``, ``update`` Δ_i, ``base`` (the model it was sent), ``model`` w_i,
``staleness``, ``metrics`` and ``arrays``; vectors are (D,) in float64, ``self.model`` is the global one::

    def local_rule(self):                            # fields of the message: what clients' local steps depend on
        return {messages.ALPHA: self.config.proximal_mu}

    def companions(self, clients):                   # vectors beside the model, by record name; back in c.arrays
        for client in clients:
            yield {messages.CONSTANT: self.c - self.variates.get(client.index)}   # added to every gradient

    def received(self, client, local_model):         # take note of w_i before it is aggregated
        self.cache.put(client.index, local_model)

    def counted(self, c):                            # what is weighted and summed, in place of Δ_i
        return c.update / c.metrics["num-steps"]

    def direction(self, total):                      # what the server optimizer takes, in place of the sum
        return self.cache.weighted_sum(self.importance())

Without rounds (``self.ledger`` says who works on what, ``self.pace`` knows the time)::

    def accept(self, c):                             # late work: False throws it away
        return c.staleness < 10

    def choose(self, free):                          # who is handed the model, now that these are free
        return [member for member in free if not member.waiting]

    def weigh(self, contributions):                  # d_i, in place of time-based or identical weights
        return [(1 + c.staleness) ** -0.5 / len(contributions) for c in contributions]

    def periods(self, times):                        # P_i: time-based weights are d_i = p_i P_i
        return np.ceil(times / self.interval)

A memory goes into ``reset`` (a run begins), ``state`` and ``restore`` (a run goes on). A vector of each client is a
``strategies.cache.ClientVectors``, random draws are ``strategies.streams.generator(seed, purpose, ids)``. In rounds,
a method with a memory sets ``streams = False``, so that a round that is cut off leaves no trace in it::

    def state(self):
        return super().state() | self.cache.state("updates")

    def restore(self, state):
        super().restore(state)
        self.cache = ClientVectors.restored(state, "updates")

Whole methods made of these are in tests/strategies/test_hooks.py, and ``strategies.testing.MemoryGrid`` runs them
without a network.
"""

from strategies.async_fedavg import AsyncFedAvg
from strategies.base import FederatedStrategy, StrategyConfig
from strategies.errors import DivergedError, RunError
from strategies.events import AsynchronousStrategy
from strategies.fedavg import FedAvg
from strategies.fedbuff import FedBuff
from strategies.fedfix import FedFix
from strategies.fedprox import FedProx
from strategies.progress import Progress
from strategies.rounds import SynchronousConfig, SynchronousStrategy
from strategies.scheme import AsynchronousConfig
from strategies.spectral import Spectral

__version__ = "0.1.0"

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
    "DivergedError",
    "FedAvg",
    "FedBuff",
    "FedFix",
    "FedProx",
    "FederatedStrategy",
    "Progress",
    "RunError",
    "Spectral",
    "StrategyConfig",
    "SynchronousConfig",
    "SynchronousStrategy",
]
