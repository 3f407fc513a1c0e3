"""The round loop of the synchronous strategies, and the hooks an algorithm fills in.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/weights.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on who answers first. A reply that
is an error, missing, not finite or of another shape or dtype is left out, named in the log and counted; its weight is
shared over the others. A round with no valid reply keeps the model, and the optimizer takes no step.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import messages, streams
from strategies.aggregation import MEAN, RULES, WeightedSum, gathering, least_updates
from strategies.arrays import ArraysMismatchError, Vector
from strategies.base import FederatedStrategy
from strategies.chain import Check, Clip, Contribution, Link, Noise, UnweighedError, chain
from strategies.config import StrategyConfig, SynchronousConfig
from strategies.errors import RunError
from strategies.exchange import in_order
from strategies.metrics import MetricsMean
from strategies.packing import packing
from strategies.reporting import EvaluateFn
from strategies.roster import Client, sized_by_replies
from strategies.round import Round
from strategies.safeguards import bounded
from strategies.stragglers import Stragglers
from strategies.untrained import Untrained
from strategies.weights import Participation, Weights

log = logging.getLogger("flwr.strategies")


class SynchronousStrategy(FederatedStrategy):
    """The loop that FedAvg, FedProx and the spectral method share; a Flower Strategy for any Flower app.

    The parameters are those of ``strategies.base.FederatedStrategy``. In virtual time a round takes as long as its
    slowest participant. Under Flower's own ``Strategy.start`` the rounds are the same; clock, time budget and
    observer belong to this one.
    """

    Config: ClassVar[type[StrategyConfig]] = SynchronousConfig
    config: SynchronousConfig
    #: Whether a reply is done with as it comes, so that a round's models are never all in memory. Not where a hook
    #: changes what later rounds rest on, as a cache does: a round that is cut off must leave no trace.
    streams: ClassVar[bool] = True

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        self.participation = Participation.parse(
            self.config.participation, self.config.fraction_train, self.flower.min_train_nodes
        )
        self.stragglers = Stragglers(self.config)
        own = type(self)
        #: Whether a hook wants to see all contributions of a round at once.
        self._wants_all = (
            own.weigh is not SynchronousStrategy.weigh or own.aggregate is not FederatedStrategy.aggregate
        )
        self._worth: dict[int, float] = {}
        self._round: Round | None = None
        self._check_equality()
        config = self.config
        self._clip = Clip(config.dp_clipping_norm) if config.dp == "central" else None
        noise = Noise(config.dp_noise_multiplier, config.dp_clipping_norm)
        self._noise = noise if config.dp == "central" else None

    def _check_equality(self) -> None:
        """Refuse what rests on all clients counting alike where they don't."""
        config, scheme = self.config, self.participation.scheme
        if config.aggregation_rule not in RULES:
            raise ValueError(
                f"aggregation_rule = {config.aggregation_rule!r}: allowed are {', '.join(RULES)}"
            )
        asked = {
            f"aggregation_rule = {config.aggregation_rule!r}": config.aggregation_rule != MEAN,
            f"dp = {config.dp!r}": config.dp == "central",
        }
        if self._wants_all and (name := next((name for name, there in asked.items() if there), "")):
            raise ValueError(
                f"{name}: {type(self).__name__} puts updates together by itself (weigh, aggregate)"
            )
        for name in (name for name, there in asked.items() if there):
            if all(asked.values()):
                raise ValueError(
                    f"{name} with dp = 'central': its noise is that of a mean; allowed is one of the two"
                )
            if config.client_weights != "uniform":
                raise ValueError(
                    f"{name}: takes clients as equals; client_weights = {config.client_weights!r}, allowed is uniform"
                )
            if scheme in ("md", "paired"):
                raise ValueError(
                    f"{name}: takes clients as equals; participation = {scheme!r}, allowed are full, uniform, fixed:…"
                )

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the participation scheme or the aggregation rule."""
        self.participation.check(num_clients)
        if (rule := self.config.aggregation_rule) != MEAN:
            scheme, faulty = self.participation, self.config.faulty_clients
            there = scheme.sample_size(num_clients) if scheme.scheme in ("uniform", "flower") else num_clients
            drawn = self.stragglers.counting(len(scheme.fixed) or there)
            if drawn < least_updates(rule, faulty):
                raise ValueError(
                    f"aggregation_rule = {rule!r}, faulty_clients = {faulty}: needs {least_updates(rule, faulty)} "
                    f"clients a round or more, {drawn} take part"
                )

    # ---- What an algorithm may fill in: see strategies/__init__.py --------------------------------------------

    def select(
        self, clients: Sequence[Client], rng: np.random.Generator
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Return who takes part in a round and their weights d_i; None: by the sizes that their replies tell.

        Parameters
        ----------
        clients : sequence of Client
            Those that are there, by index.
        rng : np.random.Generator
            The round's own.
        """
        sized = self.config.client_weights != "samples" or all(c.num_examples is not None for c in clients)
        scheme = self._participation_among(clients)
        if not sized and scheme.scheme in ("md", "uniform"):
            raise RunError(
                f"participation = {scheme.scheme!r}: its weights rest on the number of examples of all clients, and "
                "not all answer query.describe with it; allowed are full, flower, or client_weights = uniform"
            )
        draw = scheme.draw(self._importances(clients), rng)
        by_replies = not sized and scheme.scheme != "paired"
        return [clients[place] for place in draw.clients], None if by_replies else draw.weights

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of a round, which come in client order."""
        d = [self._worth[contribution.client.index] for contribution in contributions]
        return [weight * (sum(self._worth.values()) / sum(d)) for weight in d] if sum(d) > 0 else d

    # ---- Flower's hooks -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        if not self._own_loop:
            self._follow(server_round, arrays, grid)
            self.wrapped.asks(server_round, config)
        self.clients = clients = self._take_part(grid, config)
        if not clients:  # stopped before they could answer
            return []
        rng = streams.generator(self.config.seed, "participants", server_round)
        participants, weights = self.stragglers.among(*self.select(clients, rng), server_round)
        self.model = self._layout.to_vector(arrays)
        companions, requests = self.companions(participants), []
        beside: Mapping[str, Vector] = {}
        for client in participants:
            beside = next(companions, {})
            own = self._train_config(client, server_round, server_round, config)
            own.update(self.stragglers.asks(client))
            requests.append(self._train_request(client, own, arrays, beside))
        self._round = Round(
            number=server_round,
            model=self.model,
            clients=list(participants),
            weights=weights,
            requests=[request.metadata for request in requests],
            companions=tuple(beside),
            bytes_down=sum(messages.total_bytes(request) for request in requests),
            metrics=MetricsMean(self.flower.weighted_by_key, self.flower.train_metrics_aggr_fn),
        )
        return requests

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the valid replies of the round together; None for the arrays if there is none.

        A round that is cut off leaves no trace: None for both.
        """
        current = self._round
        if current is None:
            raise RuntimeError("aggregate_train is called after configure_train")
        self.wrapped.passes_on()
        streaming = self.streams and current.weights is not None and not self._must_look_first
        if not streaming:
            replies = list(replies)
            if self.stopped():
                return None, None  # a round that was cut off would count only its fast clients
        weights = self._weights_of(current, replies)
        self._worth = {client.index: d for client, d in zip(current.clients, weights, strict=True)}
        size, rule = len(current.model), self.config.aggregation_rule
        gathered = gathering(rule, self.config.faulty_clients, size, squares=self.optimizer.reads_squares)
        apart = self._gather(current, weights, replies, gathered)
        if streaming and self.stopped():
            return None, None
        metrics = current.told(clipped=bool(self.config.update_norm_bound) or self.safeguards.learns_norms)
        current.settle(self.accounts, self.timeline, self.pace.now())
        moved = self._step(current, weights, gathered)
        if moved is None:
            number = metrics[messages.PARTICIPANTS]
            few = "no valid reply" if not number else f"{number} valid replies are too few for {rule}"
            log.warning("round %d: %s, the model stays as it is", server_round, few)
            return None, metrics
        current.credit(self.accounts, self._worth)
        if self._noise is None:  # what isn't trained would tell of the data; it stays as it is
            apart.put_into(moved)
        return self._layout.to_record(moved), metrics

    def _step(self, current: Round, weights: Sequence[float], gathered: WeightedSum) -> Vector | None:
        """Return the next global model (D,); None if there is nothing that it could be made of."""
        if self._wants_all:
            if not (taken := current.contributions):
                return None
            weights = self.weigh(taken)
            self._worth = {each.client.index: d for each, d in zip(taken, weights, strict=True)}
            return self._sound(self.aggregate(current.model, taken, weights))
        total = gathered.result(weights)
        if total is None:
            return None
        update = self.direction(total)
        if self._noise is not None:
            self._noise(update, gathered.sensitivity(weights), self._noise_stream(current.number))
            update[self._untrained_at] = 0.0
        return self._sound(self._moved(current.model, update, gathered.mean_square(weights)))

    # ---- The loop -------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run up to ``num_rounds`` rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        Parameters
        ----------
        timeout : float
            Seconds that a round waits for its replies; also the time to live of its messages.

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        grid = packing(grid)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        with self._running(grid, timeout):
            return self._run(grid, initial_arrays, num_rounds, train_config, evaluate_config, evaluate_fn)

    def _run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        if self._begin(initial_arrays) is None:
            self._report(0, self._result, evaluate_fn, MetricRecord(), evaluate=True)
        result = self._result
        for server_round in range(self.aggregations + 1, num_rounds + 1):
            requests = list(self.configure_train(server_round, result.arrays, train_config, grid))
            if self.stopped() or not self._fits_budget(server_round):
                break
            replies: Iterable[Message] = self._replies(self._round, grid, requests)
            if type(self).aggregate_train is not SynchronousStrategy.aggregate_train:
                replies = list(replies)  # as Flower's own loop gives them
            arrays, train_metrics = self.aggregate_train(server_round, replies)
            if arrays is None and self.stopped():  # cut off; a round that is complete counts
                break
            result.arrays = arrays or result.arrays
            self.clock.wait_until(self.pace.now() + self._duration(server_round))
            self.aggregations, metrics = server_round, train_metrics or MetricRecord()
            result.train_metrics_clientapp[server_round] = metrics
            every = self.config.eval_every or 1
            told = self._told_of(result)
            if evaluate := server_round % every == 0 or server_round == num_rounds:
                metrics = self._evaluate_on_clients(server_round, told, evaluate_config, grid, metrics)
            self._report(server_round, told, evaluate_fn, metrics, evaluate=evaluate)
        if self.aggregations > self._evaluated:  # stopped early, between two evaluations
            self._report(self.aggregations, self._told_of(result), evaluate_fn, MetricRecord(), evaluate=True)
        self._check_worked(initial_arrays)
        return self._told_of(result)

    def _noise_stream(self, server_round: int) -> np.random.Generator:
        """Return a round's stream of noise, which nobody can know unless the run is to be repeated."""
        if not self.repeatable:
            return streams.unpredictable()
        return streams.generator(self.config.seed, "central-noise", server_round)

    # ---- Parts of a round -----------------------------------------------------------------------------------

    def _participation_among(self, clients: Sequence[Client]) -> Participation:
        """Translate the client indices of scheme ``fixed`` to positions among those that are there."""
        if self.participation.scheme != "fixed":
            return self.participation
        positions = tuple(i for i, client in enumerate(clients) if client.index in self.participation.fixed)
        if missing := set(self.participation.fixed) - {client.index for client in clients}:
            log.warning("participation names clients that aren't there: %s", sorted(missing))
        if not positions:
            raise RunError(f"participation = {self.config.participation!r}: none of these clients is there")
        return replace(self.participation, fixed=positions)

    def _expected_weights(self, p: Weights) -> Weights | None:
        return None if self._wants_all and not self.by_weights else self._by_scheme(p)

    def _by_scheme(self, p: Weights) -> Weights | None:
        indices = [client.index for client in self.clients]
        here = tuple(indices.index(index) for index in self.participation.fixed if index in indices)
        chosen = type(self).select is not SynchronousStrategy.select
        if chosen or (self.participation.scheme == "fixed" and not here):
            return None
        return replace(self.participation, fixed=here).expected_weights(p)

    def _weights_of(self, current: Round, replies: Iterable[Message]) -> Sequence[float]:
        """Weights d_i of the participants; by the sizes in their replies where none were known before."""
        if current.weights is not None:
            return current.weights
        pairs = zip(current.clients, in_order(current.requests, replies), strict=True)
        by_node = {client.node_id: reply for client, reply in pairs if reply is not None}
        sized = sized_by_replies(current.clients, by_node, self.flower.weighted_by_key)
        sizes, number = [client.num_examples or 0 for client in sized], len(sized)
        return self._by_size(current.clients, sizes).tolist() if any(sizes) else [1 / number] * number

    def _links(self) -> list[Link | None]:
        """Clip as the clients have done, if they are ours, before anybody sees the model."""
        bound, *others = super()._links()
        return [bound, self._clip, *others]

    def _gather(
        self, current: Round, weights: Sequence[float], replies: Iterable[Message], gathered: WeightedSum
    ) -> Untrained:
        """Take the valid replies in, in the order of the clients; keep the reasons against the others.

        Return what isn't trained, set apart.
        """
        apart = Untrained(self._untrained_at, robust=self.config.aggregation_rule != MEAN)
        check, links, unweighed = self._reads(apart), chain(*self._links()), False
        if self._must_look_first:
            replies = list(replies)
            self._look_at_norms(current, check, replies)
        answers = in_order(current.requests, replies)
        for client, weight, reply in zip(current.clients, weights, answers, strict=True):
            try:
                local = check(client, reply, current.model)
            except ArraysMismatchError as error:
                self._why = str(error)
                current.leave_out(client, self._why, reply)
                unweighed = unweighed or isinstance(error, UnweighedError)
                continue
            assert reply is not None
            self.wrapped.look(local, apart.positions, reply)
            links(local)
            contribution = Contribution.of(local, reply, current.number - 1, 0, self.flower.arrayrecord_key)
            self._check_applied(contribution, [*current.companions, *self.stragglers.asks(client)])
            if self._wants_all:
                current.contributions.append(contribution)
            else:
                moves = self._look_at(self.counted(contribution))
                gathered.add(weight, bounded(weight, moves, self.config.update_norm_bound))
            apart.add(weight, contribution.untrained)
            current.take_in(contribution, weight, reply, bounded=local.bounded)
        if unweighed and len(current.failures) == len(current.clients):
            raise RunError(f"no client counts: {next(iter(current.failures.values()))}")
        self._check_mods(current)
        self.wrapped.judge()
        return apart

    @property
    def _must_look_first(self) -> bool:
        """Whether nobody knows yet what norms are usual: then all of the round are looked at before any counts."""
        return self.safeguards.learns_norms and not self.safeguards.norms.knows_enough(len(self.clients))

    def _look_at_norms(self, current: Round, check: Check, replies: Iterable[Message]) -> None:
        for client, reply in zip(current.clients, in_order(current.requests, replies), strict=True):
            with suppress(ArraysMismatchError):
                self.safeguards.norms.see(check(client, reply, current.model))

    def _duration(self, server_round: int) -> float:
        """Seconds by which the round under way moves the clock on."""
        return 0.0 if self._round is None else self.pace.round_time(self._round.clients, server_round)

    def _fits_budget(self, server_round: int) -> bool:
        return not self.pace.budget or not self.pace.over(self.pace.now() + self._duration(server_round))
