"""What all strategies share: what a method fills in, how clients count, and what becomes of their work."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients import fairness
from strategies.clients.accounts import ACCEPTED
from strategies.clients.roster import Client
from strategies.clients.weights import IMPORTANCES, Weights, importances
from strategies.clock import Clock
from strategies.core.client_vectors import ClientVectors
from strategies.core.config import StrategyConfig, configured
from strategies.core.lifecycle import Lifecycle
from strategies.core.progress import Observer
from strategies.flower import messages
from strategies.flower.arrays import LARGEST_SQUARE, Vector
from strategies.flower.errors import DivergedError, RunError
from strategies.flower.exchange import never
from strategies.rounds.round import Round
from strategies.timing.availability import check_presence
from strategies.timing.time_scenario import TimeScenario
from strategies.updates.aggregation import MEAN, WeightedSum
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Bound, Check, Contribution, Link, Tell
from strategies.updates.server_optimizer import FEDEXP, OPTIMIZERS

log = logging.getLogger("flwr.strategies")

# Told of every valid local model (D,), by client index, before it is aggregated; the array is on loan.
Witness = Callable[[int, Vector], None]


class FederatedStrategy(Lifecycle):
    """Base of the synchronous and the asynchronous loop.

    Parameters
    ----------
    config : StrategyConfig
        The algorithm's own frozen config.
    options
        Fields of the config by name, in place of a config or to change it, and the keywords of Flower's own
        strategies (``strategies.core.config.FlowerOptions``): ``FedProx(proximal_mu=0.1, fraction_train=0.5)``.
    clock : Clock, optional
        ``VirtualClock()`` or ``WallClock()``. By default it follows from where a run is: real time on devices,
        virtual time in any simulation; each run begins with a new one, and the log says which.
    observer : callable
        Called with a ``Progress`` after every aggregation. Without one the log says how a run goes.
    witness : callable
        Called with the client's index and its model (D,) for every valid reply, before it is aggregated.
    stopped : callable
        Asked at every poll; True ends the run with the last complete aggregation.

    Raises
    ------
    TypeError
        If there is no such keyword, or its value is of another type.
    ValueError
        If a value can't be.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    config: StrategyConfig
    # What the log takes for usual, by default what ``Config()`` has.
    usual: StrategyConfig | None = None
    # Whether noise that protects data comes from the seed, as in a simulation, where there is nothing to protect.
    repeatable: bool = False
    #: Whether it goes round by round, each of models of one age, or takes work as it comes.
    has_rounds: ClassVar[bool] = True
    #: Whether an ``aggregate`` of its own counts clients by the weights d_i that it is given.
    by_weights: ClassVar[bool] = False
    #: The global model (D,) that the next aggregation moves; don't write to it.
    model: Vector

    def __init__(
        self,
        config: StrategyConfig | None = None,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        witness: Witness | None = None,
        stopped: Callable[[], bool] = never,
        **options: Any,
    ) -> None:
        own, self.flower = configured(type(self).__name__, self.Config, config, options)
        self.config = self._adapt(own)
        if self.config.eval_every < 0:
            raise ValueError(f"eval_every = {self.config.eval_every}: must be 0 or more")
        if not self.config.time_scenario.startswith(("trace:", "profile:")):
            TimeScenario(self.config.time_scenario, 1)  # checks the name; a file needs the number of clients
        check_presence(self.config.availability, self.config.task_failure)
        if own.client_weights not in (*IMPORTANCES, "adjacency"):
            raise ValueError(
                f"client_weights = {own.client_weights!r}: allowed are {', '.join(IMPORTANCES)}, adjacency"
            )
        given = "client_weights" in options or own.client_weights != StrategyConfig.client_weights
        if own.client_weights != self.config.client_weights and given:
            log.warning(
                "client_weights = %r isn't read: %s's are %s",
                own.client_weights,
                type(self).__name__,
                self.config.client_weights,
            )
        self.witness = witness
        self._check_extrapolation()
        super().__init__(clock, observer, stopped)

    def _check_extrapolation(self) -> None:
        """Refuse a step size that rests on the length of a round's sum where there is none."""
        own, config, name = type(self), self.config, self.config.server_optimizer
        rule, dp = getattr(config, "aggregation_rule", MEAN), getattr(config, "dp", "none")
        base = FederatedStrategy
        summed = (own.aggregate is base.aggregate or self.by_weights) and own.direction is base.direction
        if name != FEDEXP or (self.has_rounds and summed and (rule, dp == "central") == (MEAN, False)):
            return
        why = f"the updates of {own.__name__} aren't those of one round, summed by their weights"
        if rule != MEAN:
            why = f"with aggregation_rule = {rule!r} there is no sum"
        elif dp == "central":
            why = "with dp = 'central' the lengths would tell of the data"
        others = ", ".join(other for other in OPTIMIZERS if other != FEDEXP)
        raise ValueError(
            f"server_optimizer = {name!r}: takes its step size from the lengths of the updates and of their sum; "
            f"{why}; allowed are {others}"
        )

    # ---- What an algorithm fills in: see strategies/__init__.py -----------------------------------------------

    def check(self, num_clients: int) -> None:
        """Raise ValueError if the config is none for so many clients."""

    def local_rule(self) -> dict[str, float]:
        """Return the message fields that tell clients the algorithm's local step."""
        return {}

    def outgoing(self, client: Client) -> Mapping[str, messages.RecordType]:
        """Return records for a client beside the model, by name; those of replies are in ``Contribution.records``."""
        return {}

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield for each of the clients what it is sent beside the model: vectors (D,) by record name.

        They arrive as records of the model's layout. By default none; a loop asks once for all that it sends. One
        under the model's own name, ``arrayrecord_key``, is sent in its place.
        """
        return iter(())

    def received(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated; the array is on loan."""

    def counted(self, contribution: Contribution) -> Vector:
        """Return what of a contribution is weighted and summed, (D,); by default its update Δ_i."""
        return contribution.update

    def direction(self, total: Vector) -> Vector:
        """Return the update (D,) that the server optimizer takes, from the sum over what counted, (D,)."""
        return total

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next global model (D,) from this one (D,) and the contributions with their weights d_i.

        By default the server optimizer's step by the ``direction`` of Σ d_i × what ``counted`` returns.
        """
        squares, bound = self.optimizer.reads_squares, self.config.update_norm_bound
        total = WeightedSum(len(model), len(weights), squares=squares, bound=bound)
        for weight, contribution in zip(weights, contributions, strict=True):
            total.add(weight, self._look_at(self.counted(contribution)))
        total.end()
        return self._moved(model, self.direction(total.total), total.squares)

    def own_lr(self) -> float:
        """Return η_g where config and server optimizer leave it to the method."""
        return 1.0

    def vectors(self, name: str) -> ClientVectors:
        """Return a vector (D,) of each client that the method remembers under this name, at first 0."""
        if name not in self.memory.vectors:
            self.memory.vectors[name] = ClientVectors(np.zeros(len(self.model)), max(len(self.clients), 1))
        return self.memory.vectors[name]

    def without_companions(self) -> str:
        """Say with which parameter nothing goes beside the model; "" if there is none."""
        return ""

    def _adapt(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with what the algorithm demands."""
        return config

    def summary(self) -> None:
        """Log the strategy, and what of its config isn't usual."""
        usual = self.usual or self.Config()
        values = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        unusual = [f"{key} = {value!r}" for key, value in values.items() if value != getattr(usual, key)]
        log.info("%s: %s", type(self).__name__, ", ".join(unusual) or "default settings")

    # ---- Who counts how much ----------------------------------------------------------------------------------

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        if not (clients := self._counting):
            return {}
        return dict(zip((c.index for c in clients), self._importances(clients).tolist(), strict=True))

    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return what is known of each client, by index: how often it counted, and how much it ought to and did.

        How much is told where weights say it: not under a robust rule, nor where a method chooses clients or puts
        their work together by itself.
        """
        counts = self.config.client_weights != "samples" or all(
            c.num_examples is not None for c in self.clients
        )
        p = self.importance() if counts else {}
        size = max(self.accounts.size, max(p, default=-1) + 1)
        shares = {"importance": p} if p else {}
        weighed = getattr(self.config, "aggregation_rule", MEAN) == MEAN
        if p and weighed and (expected := self._expected_weights(np.array(list(p.values())))) is not None:
            shares["expected-share"] = dict(zip(p, expected.tolist(), strict=True))
        told = {name: [values.get(index, 0.0) for index in range(size)] for name, values in shares.items()}
        if weighed and (type(self).aggregate is FederatedStrategy.aggregate or self.by_weights):
            told["observed-share"] = fairness.shares(self.accounts.column("weight", size))
        counted = self.accounts.column(ACCEPTED, size)
        return {"participation": counted, **told, **self._costs_of_clients(size)}

    def minimised(self) -> dict[int, float]:
        """Return what the clients that count now ought to count, by index: p_i, or what a scheme has in its place."""
        return self.importance()

    def _expected_weights(self, p: Weights) -> Weights | None:
        """Return the share (n,) that each client has of what is minimised, by its p_i (n,); None if nobody knows."""
        return None

    def _take_part(self, grid: Grid, config: ConfigRecord, *, wait: bool = True) -> list[Client]:
        """Look who is there; with a graph, who is in it. Without ``wait``, newcomers are in once they answer."""
        clients = self.roster.refresh(grid, config) if wait else self.roster.look(grid, config)
        if self.graph is not None and clients:
            self.graph.guarded = self.safeguards.active
            clients = self.graph.refresh(grid, clients, config, self.timeout, self.stopped)
        self.pace.enrol(clients)
        if clients:
            self.left_out.hand_back(self.run_id)
        return clients

    def _importances(self, clients: Sequence[Client]) -> Weights:
        if self.graph is not None:
            return self.graph.weights(clients)
        # Sizes may come with the replies (strategies/clients/roster.py): who hasn't told counts as the mean of the
        # others.
        sizes = [client.num_examples or 0 for client in clients]
        if not any(sizes):
            return importances("uniform", [1] * len(clients))
        return self._by_size(clients, sizes, unknown_as_mean=0 in sizes)

    def _by_size(
        self, clients: Sequence[Client], sizes: Sequence[float], *, unknown_as_mean: bool = False
    ) -> Weights:
        """Return p_i (n,) of clients by the sizes that they tell; 0: one hasn't, and counts 0, or as the mean."""
        kind = self.config.client_weights
        if kind == "samples":
            sizes = self.safeguards.sizes(clients, sizes)
            if unknown_as_mean:
                mean = sum(sizes) / sum(size > 0 for size in sizes)
                sizes = [size or mean for size in sizes]
        return importances(kind, sizes)

    # ---- Messages ---------------------------------------------------------------------------------------------

    def _train_config(
        self, client: Client, server_round: int, task: int, config: ConfigRecord
    ) -> ConfigRecord:
        own = config.copy()  # the caller's stays as it is
        own[messages.SERVER_ROUND] = server_round
        own[messages.CLIENT] = client.index
        own[messages.TASK] = task
        for key, value in {**self.local_rule(), **self._compression_fields()}.items():
            own[key] = value
        return own

    def _train_request(
        self, client: Client, config: ConfigRecord, arrays: ArrayRecord, companions: Mapping[str, Vector]
    ) -> Message:
        """Return a client's task, with what goes beside the model."""
        beside = {name: self._layout.to_record(vector) for name, vector in companions.items()}
        return messages.request(
            messages.TRAIN,
            client.node_id,
            config,
            ttl=self.timeout,
            arrays=arrays,
            companions={**self.outgoing(client), **beside},
            keys=self.flower.keys,
        )

    def _replies(self, current: Round | None, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send a round's requests, and yield its replies as they come."""
        if current is not None:
            current.begin(requests, self.timeline, self.pace)
            requests = current.to_work_on(requests)
        awaited = self._awaited(grid, requests, lambda index: self.timeline.arrived(index, self.pace.now()))
        return (reply for _, reply in awaited)

    def _reads(self, apart: Untrained) -> Check:
        """Return what reads replies, and sets apart what isn't trained."""
        return Check(
            self._layout,
            self.flower.arrayrecord_key,
            self.flower.weighted_by_key,
            must_weigh=self.config.client_weights == "samples",
            untrained=apart,
            compression=self._compression(),
            whole=self._say_whole,
        )

    def _check_applied(self, contribution: Contribution, companions: Iterable[str]) -> None:
        """Say once that a client doesn't say that its local steps go by the method's rule."""
        asked = [*self.local_rule(), *self._beside(companions)]
        applied = contribution.records.get(messages.APPLIED)
        done = dict(applied) if isinstance(applied, ConfigRecord) else {}
        records = done.get(messages.RECORDS)
        known = [*done, *(records if isinstance(records, list) else [])]
        if missing := [name for name in asked if name not in known]:
            self._say_once(
                "clients don't say that their local steps go by %s: if they don't, this is another method "
                "(a reply says so in its ConfigRecord %r)",
                ", ".join(missing),
                messages.APPLIED,
            )

    def _beside(self, companions: Iterable[str]) -> list[str]:
        """Return the records that go beside the model, without one in its place."""
        return [name for name in companions if name != self.flower.arrayrecord_key]

    def _check_mods(self, current: Round) -> None:
        """Raise RunError if mods of the app let nobody train who is there: they would never do."""
        self._refused_by_mods |= current.by_mods
        self._refused_by_mods -= current.outcomes.keys() - current.by_mods
        if not self.clients or not {client.index for client in self.clients} <= self._refused_by_mods:
            return
        text = f"a mod of the app lets no client train ({next(iter(current.failures.values()))})"
        if beside := self._beside(current.companions):
            other = self.without_companions()
            text += f": beside the model each is sent {', '.join(beside)}; allowed are mods that let it pass"
            text += f", or {other}" if other else ""
        raise RunError(text)

    @property
    def path_bound(self) -> float:
        """How many times the usual a client's path counts as at most (strategies/methods/shared/local_path.py); 0:
        no bound."""
        return self.config.size_ratio_bound if self.safeguards.active else 0.0

    # ---- What becomes of work ---------------------------------------------------------------------------------

    def _links(self) -> list[Link | None]:
        """Return what a local model goes through between the check and the sum."""
        bound, witness = self.config.update_norm_bound, self.witness
        return [
            Bound(bound) if bound else None,
            self.safeguards.norms if self.safeguards.learns_norms else None,
            Tell(self.received),
            Tell(lambda client, model: witness(client.index, model)) if witness else None,
        ]

    def _moved(self, model: Vector, update: Vector, squares: float = 0.0) -> Vector:
        """Return the next global model (D,), by the server optimizer, from this one and the update (D,).

        ``squares`` is Σ d_i ‖Δ_i‖², where the optimizer reads it.
        """
        lr = self.config.server_lr or self.optimizer.usual_lr or self.own_lr()
        self.optimizer.lr, self.optimizer.squares = lr, squares
        moved = self.optimizer.step(model, update)
        if self.aggregations == 0 and not self._any_moved and np.isfinite(update).all():
            log.warning(
                "the first aggregation left the model as it was: are the steps (lr, server_lr) too small?"
            )
        return moved

    def _sound(self, moved: Vector) -> Vector:
        """Return the model (D,) that an aggregation made, the method's own too.

        Raises
        ------
        DivergedError
            If it is none that can be trained on.
        """
        if not float(np.einsum("i,i->", moved, moved)) <= LARGEST_SQUARE or self._layout.overflows(moved):
            raise DivergedError(
                f"aggregation {self.aggregations + 1} made a model that isn't finite, or too large to train on: the "
                "steps are too large (lr, server_lr), or the noise is"
            )
        return moved

    def _look_at(self, update: Vector) -> Vector:
        """Note whether any client's update (D,) is one."""
        self._any_moved = self._any_moved or bool(update.any())
        return update

    def most_tasks(self) -> int:
        """Return how many tasks a client has been handed at most; every round counts, whoever took part."""
        return self.aggregations
