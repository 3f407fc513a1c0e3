"""Federated strategies for clients that differ in their data and in their speed.

A library of its own: Flower ``Strategy`` subclasses for any Flower app, on flwr and numpy (graphs: scipy) ::

    from strategies import FedFix

    strategy = FedFix(fedfix_interval=30.0)      # any of Flower's keywords too: min_available_nodes=5, …
    result = strategy.start(grid, initial_arrays, num_rounds=50)

A strategy takes Flower's keywords with Flower's meaning, and its own method's; a wrong one is a TypeError. Clients
stay as they are. On devices time is real, in a simulation it is virtual, without anybody saying so.

A method of your own
--------------------
A subclass of ``FedAvg`` (or ``SynchronousStrategy``) goes round by round, one of ``AsynchronousStrategy`` takes work
as it comes. Its parameters are fields of a frozen config; all else it says in hooks, of which each has a default::

    @dataclass(frozen=True)
    class EveryConfig(AsynchronousConfig):
        every: int = parameter(3, ge=1)          # refuses others; `every: int = 3` does as well

    class Every(AsynchronousStrategy):
        Config = EveryConfig

        def ready(self, arrived):                # or `interval`: seconds between two aggregations
            # A client with a buffered update idles, so accept fewer contributions if fewer clients remain.
            return arrived >= min(self.config.every, len(self.session.task_table.active_clients))

    Every(every=5).start(grid, initial_arrays, num_rounds=50)

In both loops. A contribution has ``client``, ``update`` Δ_i, ``base`` (the model it was sent), ``model`` w_i,
``staleness``, ``metrics`` and ``records``; vectors are (D,) in float64, ``self.session.model`` is the global one::

    def local_rule(self):                        # fields of the message: what clients' local steps depend on
        return {messages.ALPHA: self.config.proximal_mu}

    def extra_vectors(self, clients):            # vectors beside the model, by record name
        for client in clients:
            own = self.session.client_vectors("variates").get(client.index)
            yield {messages.CONSTANT: self.c - own}  # added

    def extra_records(self, client):             # other records for a client; back in c.records
        return {"hint": ConfigRecord({"rate": 0.1})}

    def on_local_model(self, client, local_model):  # take note of w_i before it is aggregated
        self.session.memory["last"] = client.index

    def weigh(self, contributions):              # d_i; by default those of the draw, time-based or identical
        return [(1 + c.staleness) ** -0.5 / len(contributions) for c in contributions]

    def transform_update(self, c):               # what is weighted and summed, in place of Δ_i
        return c.update / c.metrics["num-steps"]

    def server_update(self, total):              # what the server optimizer takes, in place of the sum
        return self.session.client_vectors("updates").weighted_sum(self.session.client_weights())

    def aggregate(self, model, contributions, weights):  # or the whole step
        return model + sum(d * c.update for d, c in zip(weights, contributions))

    def personal_model(self, client):            # with `personal = True`: what it scores beside the global model
        return self.session.client_vectors("models").get(client.index)

An extra vector under the model's own name is sent in its place. ``uses_given_weights = True`` says that an
``aggregate`` of its own counts clients by those weights, and ``self.session.objective_weights()`` has E[d_i] of all
by the scheme. With ``messages.PATH`` in ``local_rule`` clients tell how far their steps went (``local_path``).

In rounds::

    def select(self, clients, rng):              # who takes part, and their d_i; None: by p_i
        return clients[:3], None

Without rounds (``self.session.task_table`` says who works on what, ``self.session.scheduler`` knows the time)::

    def is_fresh_enough(self, staleness):        # late work: False throws it away, its client gets the new model
        return staleness < 10

    def accept(self, c):                         # the same, where more than its age says so
        return c.staleness < 10 and c.metrics["train-loss"] < 100

    def select_idle(self, free):                 # who is handed the model, now that these are free
        return [member for member in free if not member.waiting]

    def resend_model(self, client):              # (version, model) of an earlier one, in place of the newest
        return self.had.get(client.index)

    def task_steps(self, client):                # of a task; ``reference_steps`` take the scenario's time
        return 20 if client.index < 5 else 4

    def on_contribution(self, c):                # take note of an accepted one; returns what of it waits
        return c

    def take_from_buffer(self, waiting):         # of what has come, what the next aggregation takes
        return waiting[:3]

    def discount(self, staleness):               # what late work is worth, beside work on the present model
        return (1 + staleness) ** -0.5

    def contribution_periods(self, times):       # P_i: time-based weights are d_i = p_i P_i
        return np.ceil(times / self.interval)

``expected_periods(times)`` has the P_i that come about, where ``contribution_periods`` has others: by these a run
tells what it minimises. A client whose work waits goes on with ``trains_while_waiting = True``. A config that is an
``AsyncConfigBase`` has no ``aggregation_weights``; ``default_aggregation_weights = "identical"`` says then that all
weigh the same. With ``aggregates_each_arrival = True`` a robust rule takes the last updates of several clients, else
those of the aggregation.

A strategy is a method with its settings; ``self.session`` is its present run, and each run has a new one. What a
method remembers is ``self.session.memory`` (arrays, and values that JSON holds) and
``self.session.client_vectors(name)`` (a vector of each client): empty when a run begins, saved with it, and back when
it goes on. ``begin(layout, model)`` is told of both. Parts of a method's own with ``state`` and ``restore`` are
returned by ``stateful_components``, anew for each run. A round-based method that fills in none of the hooks that see
single updates or messages (extra_records, extra_vectors, on_local_model, weigh, transform_update, aggregate) lets a
simulation's engine compute the sum, with bit-identical results (``strategies.updates.sums``). Random draws are
``strategies.streams.generator(seed, purpose, ids)``. A round-based method with a memory sets ``aggregates_on_arrival
= False``, because a cancelled round must not change the memory.

SCAFFOLD, FedNova, FedAsync, Ringmaster and power-of-choice, made of these, are in examples/methods.py, and
``strategies.testing.MemoryGrid`` runs them without a network.
"""

from flwr.serverapp import strategy as _flower

from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.clock import VirtualClock, WallClock
from strategies.core.config import AsyncConfigBase, AsynchronousConfig, StrategyConfig, SynchronousConfig
from strategies.core.conflicts import ConflictError
from strategies.core.parameters import parameter
from strategies.core.reporter import Progress
from strategies.core.strategy import FederatedStrategy
from strategies.events.strategy import AsynchronousStrategy
from strategies.flower import messages
from strategies.flower.arrays import Layout, Vector
from strategies.flower.errors import DivergedError, RunError
from strategies.flower.frozen import cache_frozen_parameters
from strategies.flower.namesakes import warn_of_namesakes
from strategies.flower.packing import unpack_arrays
from strategies.methods.ace import ACE
from strategies.methods.aced import ACED
from strategies.methods.area import AREA
from strategies.methods.async_fedavg import AsyncFedAvg
from strategies.methods.async_spectral import AsyncSpectral
from strategies.methods.ca2fl import CA2FL
from strategies.methods.delay_adaptive import DelayAdaptive
from strategies.methods.ditto import Ditto
from strategies.methods.fadas import FADAS
from strategies.methods.fedamp import FedAMP
from strategies.methods.fedasync import FedAsync
from strategies.methods.fedau import FedAU
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedawe import FedAWE
from strategies.methods.fedbuff import FedBuff
from strategies.methods.fedcompass import FedCompass
from strategies.methods.feddyn import FedDyn
from strategies.methods.fedfix import FedFix
from strategies.methods.fednova import FedNova
from strategies.methods.fedprox import FedProx
from strategies.methods.fedstale import FedStale
from strategies.methods.flower_names import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
)
from strategies.methods.malenia import Malenia
from strategies.methods.mifa import Mifa
from strategies.methods.qfedavg import QFedAvg
from strategies.methods.rennala import Rennala
from strategies.methods.ringleader import Ringleader
from strategies.methods.ringmaster import Ringmaster
from strategies.methods.scaffold import Scaffold
from strategies.methods.spectral import Spectral
from strategies.rounds.strategy import SynchronousStrategy
from strategies.simulation.run import simulate
from strategies.tiers.grid import TieredGrid
from strategies.timing.availability import make_availability
from strategies.updates.client_compression import compress_updates
from strategies.updates.compression import size_of
from strategies.updates.pipeline import Contribution

# The version of the library and of the app. Flower reads a copy in pyproject.toml, which a test compares.
__version__ = "0.1.0"

warn_of_namesakes()

# isinstance(strategy, flwr.serverapp.strategy.FedAvg) is True of these classes, as of Flower's own under their names.
for _kind in (
    *(FedAvg, FedProx, QFedAvg, FedAdagrad, FedAdam, FedYogi, FedAvgM),
    *(FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan),
):
    getattr(_flower, _kind.__name__).register(_kind)

REGISTRY: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "spectral": Spectral,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "mifa": Mifa,
    "fedstale": FedStale,
    "fedau": FedAU,
    "fedawe": FedAWE,
    "ditto": Ditto,
    "fedamp": FedAMP,
    "async-fedavg": AsyncFedAvg,
    "fedfix": FedFix,
    "fedbuff": FedBuff,
    "async-spectral": AsyncSpectral,
    "fedcompass": FedCompass,
    "fedasync": FedAsync,
    "delay-adaptive": DelayAdaptive,
    "ringmaster": Ringmaster,
    "ringleader": Ringleader,
    "rennala": Rennala,
    "malenia": Malenia,
    "ca2fl": CA2FL,
    "ace": ACE,
    "aced": ACED,
    "area": AREA,
    "fadas": FADAS,
}
"""The methods by their name in the run config; contract tests run over every entry."""

__all__ = [
    "ACE",
    "ACED",
    "AREA",
    "CA2FL",
    "FADAS",
    "REGISTRY",
    "AsyncConfigBase",
    "AsyncFedAvg",
    "AsyncSpectral",
    "AsynchronousConfig",
    "AsynchronousStrategy",
    "Bulyan",
    "Client",
    "ClientState",
    "ConflictError",
    "Contribution",
    "DelayAdaptive",
    "Ditto",
    "DivergedError",
    "FedAMP",
    "FedAU",
    "FedAWE",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedCompass",
    "FedDyn",
    "FedFix",
    "FedMedian",
    "FedNova",
    "FedProx",
    "FedStale",
    "FedTrimmedAvg",
    "FedYogi",
    "FederatedStrategy",
    "Krum",
    "Layout",
    "Malenia",
    "Mifa",
    "MultiKrum",
    "Progress",
    "QFedAvg",
    "Rennala",
    "Ringleader",
    "Ringmaster",
    "RunError",
    "Scaffold",
    "Spectral",
    "StrategyConfig",
    "SynchronousConfig",
    "SynchronousStrategy",
    "TieredGrid",
    "Vector",
    "VirtualClock",
    "WallClock",
    "cache_frozen_parameters",
    "compress_updates",
    "make_availability",
    "messages",
    "parameter",
    "simulate",
    "size_of",
    "unpack_arrays",
]
