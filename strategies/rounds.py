"""The round loop of the synchronous strategies, and the hooks an algorithm fills in.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/weights.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on who answers first. A reply that
is an error, missing, not finite or of another shape or dtype is left out, named in the log and counted; its weight is
shared over the others. A round with no valid reply keeps the model, and the optimizer takes no step.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import messages, streams
from strategies.accounts import ACCEPTED
from strategies.aggregation import MEAN, RULES, RobustRule, WeightedSum, least_updates
from strategies.arrays import ArraysMismatchError, Layout, Vector
from strategies.base import FederatedStrategy, StrategyConfig
from strategies.chain import Check, Clip, Contribution, Link, Noise, chain
from strategies.errors import RunError
from strategies.exchange import in_order
from strategies.reporting import EvaluateFn
from strategies.roster import Client, sized_by_replies
from strategies.safeguards import bounded
from strategies.weights import Participation

log = logging.getLogger("flwr.strategies")


@dataclass(frozen=True)
class SynchronousConfig(StrategyConfig):
    """What every synchronous strategy can be told.

    Parameters
    ----------
    participation, fraction_train : str, float
        Who takes part in a round: see ``strategies.weights.Participation``.
    aggregation_rule, faulty_clients : str, int
        How updates are put together: Σ d_i Δ_i (``mean``), or a robust rule that bears so many clients which send
        anything: see ``strategies.aggregation``.
    dp, dp_clipping_norm, dp_noise_multiplier : str, float, float
        ``central`` differential privacy: no update counts with a norm above S, and the sum gets Gaussian noise of
        deviation z S max d_i. ``local`` is the clients' own affair.
    """

    participation: str = "full"
    fraction_train: float = 1.0
    aggregation_rule: str = MEAN
    faulty_clients: int = 0
    dp: str = "none"
    dp_clipping_norm: float = 1.0
    dp_noise_multiplier: float = 1.0


@dataclass
class _Round:
    """A round under way: the model sent and, by client index, who got it and with which weight."""

    number: int  # from 1
    layout: Layout
    model: Vector
    clients: list[Client]
    weights: list[float]
    requests: list[Metadata]
    bytes_down: int
    failures: dict[int, str] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)  # of strategies/accounts.py
    bounded: set[int] = field(default_factory=set)
    bytes_up: int = 0
    loss: float = 0.0  # Σ d_i times the training loss of the clients that tell it, and the Σ of their d_i
    loss_weight: float = 0.0


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
        self.participation = Participation.parse(self.config.participation, self.config.fraction_train)
        self._round: _Round | None = None
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
            drawn = len(scheme.fixed) or (
                scheme.sample_size(num_clients) if scheme.scheme == "uniform" else num_clients
            )
            if drawn < least_updates(rule, faulty):
                raise ValueError(
                    f"aggregation_rule = {rule!r}, faulty_clients = {faulty}: needs {least_updates(rule, faulty)} "
                    f"clients a round or more, {drawn} take part"
                )

    # ---- Flower's hooks -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        if server_round == 1:  # under Flower's own Strategy.start, the only sign that a run begins
            self.reset()
        self.clients = clients = self._take_part(grid, config)
        if not clients:  # stopped before they could answer
            return []
        rng = streams.generator(self.config.seed, "participants", server_round)
        draw = self._participation_among(clients).draw(self._importances(clients), rng)
        participants = [clients[position] for position in draw.clients]
        layout = Layout.of(arrays)
        self.model = layout.to_vector(arrays)
        companions = self.companions(participants)
        requests = [
            messages.request(
                messages.TRAIN,
                client.node_id,
                self._train_config(client, server_round, server_round, config),
                ttl=self.timeout,
                arrays=arrays,
                companions={name: layout.to_record(vector) for name, vector in next(companions, {}).items()},
            )
            for client in participants
        ]
        self._round = _Round(
            number=server_round,
            layout=layout,
            model=self.model,
            clients=participants,
            weights=list(draw.weights),
            requests=[request.metadata for request in requests],
            bytes_down=sum(messages.total_bytes(request) for request in requests),
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
        streaming = (
            self.streams
            and all(client.num_examples is not None for client in current.clients)
            and not self._must_look_first
        )
        if not streaming:
            replies = list(replies)
            if self.stopped():
                return None, None  # a round that was cut off would count only its fast clients
        weights = self._weights_of(current, replies)
        rule, faulty = self.config.aggregation_rule, self.config.faulty_clients
        gathered = WeightedSum(len(current.model)) if rule == MEAN else RobustRule(rule, faulty)
        self._gather(current, weights, replies, gathered)
        if streaming and self.stopped():
            return None, None
        metrics = self._metrics_of(current)
        self._settle(server_round, current)
        total = gathered.result(weights)
        if total is None:
            number = metrics[messages.PARTICIPANTS]
            few = "no valid reply" if not number else f"{number} valid replies are too few for {rule}"
            log.warning("round %d: %s, the model stays as it is", server_round, few)
            return None, metrics
        update = self.direction(total)
        if self._noise is not None:
            self._noise(update, gathered.sensitivity(weights), self._noise_stream(server_round))
        return current.layout.to_record(self._moved(current.model, update)), metrics

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
        self._set_timeout(timeout)
        self.summary()
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        if self._begin(initial_arrays) is None:
            self._report(0, self._result, evaluate_fn, MetricRecord(), evaluate=True)
        result = self._result
        for server_round in range(self.aggregations + 1, num_rounds + 1):
            requests = list(self.configure_train(server_round, result.arrays, train_config, grid))
            if self.stopped() or not self._fits_budget(server_round):
                break
            replies = (reply for _, reply in self._awaited(grid, requests))
            arrays, train_metrics = self.aggregate_train(server_round, replies)
            if arrays is None and self.stopped():  # cut off; a round that is complete counts
                break
            result.arrays = arrays or result.arrays
            self.clock.wait_until(self.pace.now() + self._duration(server_round))
            self.aggregations, metrics = server_round, train_metrics or MetricRecord()
            result.train_metrics_clientapp[server_round] = metrics
            if evaluate := server_round % self.config.eval_every == 0 or server_round == num_rounds:
                metrics = self._evaluate_on_clients(server_round, result, evaluate_config, grid, metrics)
            self._report(server_round, result, evaluate_fn, metrics, evaluate=evaluate)
        if self.aggregations > self._evaluated:  # stopped early, between two evaluations
            self._report(self.aggregations, result, evaluate_fn, MetricRecord(), evaluate=True)
        self._check_worked(initial_arrays)
        return result

    def _noise_stream(self, server_round: int) -> np.random.Generator:
        """Return a round's stream of noise, which nobody can know unless the run is to be repeated."""
        if not self.repeatable:
            return streams.unpredictable()
        return streams.generator(self.config.seed, "central-noise", server_round)

    # ---- Parts of a round -----------------------------------------------------------------------------------

    def _participation_among(self, clients: list[Client]) -> Participation:
        """Translate the client indices of scheme ``fixed`` to positions among those that are there."""
        if self.participation.scheme != "fixed":
            return self.participation
        positions = tuple(i for i, client in enumerate(clients) if client.index in self.participation.fixed)
        if missing := set(self.participation.fixed) - {client.index for client in clients}:
            log.warning("participation names clients that aren't there: %s", sorted(missing))
        if not positions:
            raise RunError(f"participation = {self.config.participation!r}: none of these clients is there")
        return replace(self.participation, fixed=positions)

    def _weights_of(self, current: _Round, replies: Iterable[Message]) -> list[float]:
        """Weights d_i of the participants; by the sizes in their replies where none were known before."""
        unknown = any(client.num_examples is None for client in current.clients)
        if (
            not unknown
            or self.config.client_weights != "samples"
            or self.participation.scheme in ("md", "paired")
        ):
            return current.weights
        by_client = zip(current.clients, in_order(current.requests, replies), strict=True)
        by_node = {client.node_id: reply for client, reply in by_client if reply is not None}
        sizes = [client.num_examples or 0 for client in sized_by_replies(current.clients, by_node)]
        return self._by_size(current.clients, sizes).tolist() if any(sizes) else current.weights

    def _links(self) -> list[Link | None]:
        """Clip as the clients have done, if they are ours, before anybody sees the model."""
        bound, *others = super()._links()
        return [bound, self._clip, *others]

    def _gather(
        self, current: _Round, weights: Sequence[float], replies: Iterable[Message], gathered: WeightedSum
    ) -> None:
        """Take the valid replies in, in the order of the clients; keep the reasons against the others."""
        check, links = Check(current.layout), chain(*self._links())
        if self._must_look_first:
            replies = list(replies)
            self._look_at_norms(current, check, replies)
        answers = in_order(current.requests, replies)
        for client, weight, reply in zip(current.clients, weights, answers, strict=True):
            try:
                local = check(client, reply, current.model)
            except ArraysMismatchError as error:
                current.failures[client.index] = str(error)
                current.outcomes[client.index] = messages.fault_of(reply)
                continue
            assert reply is not None
            links(local)
            contribution = Contribution.of(local, reply, version=current.number - 1, staleness=0)
            moves = self._look_at(self.counted(contribution))
            gathered.add(weight, bounded(weight, moves, self.config.update_norm_bound))
            current.outcomes[client.index] = ACCEPTED
            if local.bounded:
                current.bounded.add(client.index)
            current.bytes_up += contribution.num_bytes
            if isinstance(loss := contribution.metrics.get(messages.TRAIN_LOSS), float):
                current.loss += weight * loss
                current.loss_weight += weight

    @property
    def _must_look_first(self) -> bool:
        """Whether nobody knows yet what norms are usual: then all of the round are looked at before any counts."""
        return self.safeguards.learns_norms and not self.safeguards.norms.knows_enough(len(self.clients))

    def _look_at_norms(self, current: _Round, check: Check, replies: Iterable[Message]) -> None:
        for client, reply in zip(current.clients, in_order(current.requests, replies), strict=True):
            with suppress(ArraysMismatchError):
                self.safeguards.norms.see(check(client, reply, current.model))

    def _metrics_of(self, current: _Round) -> MetricRecord:
        metrics = MetricRecord(
            {
                messages.PARTICIPANTS: len(current.clients) - len(current.failures),
                messages.FAILURES: len(current.failures),
                messages.BYTES_DOWN: current.bytes_down,
                messages.BYTES_UP: current.bytes_up,
            }
        )
        if self.config.update_norm_bound or self.safeguards.learns_norms:
            metrics[messages.CLIPPED] = len(current.bounded)
        if current.loss_weight > 0:
            metrics[messages.TRAIN_LOSS] = current.loss / current.loss_weight
        return metrics

    def _settle(self, server_round: int, current: _Round) -> None:
        """Enter what came of a round in the accounts; name every client left out, in one line per reason."""
        for index, outcome in current.outcomes.items():
            self.accounts[index].tasks += 1
            self.accounts[index].note(outcome, clipped=index in current.bounded)
        for reason in dict.fromkeys(current.failures.values()):
            left_out = [client for client in current.clients if current.failures.get(client.index) == reason]
            named = ", ".join(client.located for client in left_out)
            who = {"aggregation": server_round, "clients": [client.fields for client in left_out]}
            log.warning("round %d: left out client %s: %s", server_round, named, reason, extra=who)

    def _duration(self, server_round: int) -> float:
        """Seconds by which the round under way moves the clock on."""
        return 0.0 if self._round is None else self.pace.round_time(self._round.clients, server_round)

    def _fits_budget(self, server_round: int) -> bool:
        return not self.pace.budget or not self.pace.over(self.pace.now() + self._duration(server_round))
