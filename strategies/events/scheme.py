"""What an asynchronous scheme says, and what every client counts in it.

p_i is a client's importance, d_i the weight of its contributions, and q̃_i its share of the objective that is really
minimised: q̃_i ∝ d_i / P_i, P_i the aggregations from one contribution of the client to the next (Fraboni et al. 2023,
section 3). A scheme is unbiased where q̃ = p. The loop is in strategies/events/strategy.py.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import streams
from strategies.clients.fairness import ByClient, of_clients
from strategies.clients.weights import mean_and_spread
from strategies.core.config import StrategyConfig
from strategies.core.parameters import parameter
from strategies.core.strategy import FederatedStrategy
from strategies.events import observed_periods as observed
from strategies.events.evaluation import EvaluationUnderWay
from strategies.events.tasks import Ledger, Member, Standing
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.timing.scheduler import Times
from strategies.updates.chain import Contribution

log = logging.getLogger("flwr.strategies")

OBSERVED, IDENTICAL = "observed", "identical"
WEIGHTS = ("time-based", OBSERVED, IDENTICAL)


@dataclass(frozen=True)
class EventsConfig(StrategyConfig):
    """What every asynchronous strategy can be told, also one whose paper says how contributions weigh.

    Parameters
    ----------
    concurrency : int
        M_c, clients at work at once: when one is free, whoever is idle is drawn for its place; 0: all of them.
        Task times then don't tell how often a client contributes, so that time-based weights are by what is observed.
    """

    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 0:
            raise ValueError(f"concurrency = {self.concurrency}: must be 0 (all) or more")


@dataclass(frozen=True)
class AsynchronousConfig(EventsConfig):
    """What an asynchronous strategy can be told that weighs contributions as one likes.

    Parameters
    ----------
    aggregation_weights : str
        ``time-based`` (unbiased): by the law of task times and availability where that is known, as in virtual time,
        else by what is observed. ``observed``: by that in any case, as a server has to that knows no law.
        ``identical``.
    arrival_weight_bound : float
        A safeguard: d_i is at most this, where the d_i of a synchronous round sum to 1; 0: no bound.
    """

    aggregation_weights: str = "time-based"
    arrival_weight_bound: float = parameter(2.0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation_weights not in WEIGHTS:
            raise ValueError(
                f"aggregation_weights = {self.aggregation_weights!r}: allowed are {', '.join(WEIGHTS)}"
            )


# Flower's hooks of a round, and what to override in their place.
_INSTEAD = {
    "configure_train": "choose, local_rule, outgoing or companions",
    "aggregate_train": "accept, weigh, counted or aggregate",
}


class Scheme(FederatedStrategy):
    """What a subclass tells the event loop, and who is worth what by it.

    Attributes
    ----------
    ledger : Ledger
        Who takes part, who works on what, and what waits for the next aggregation.
    pace : Pace
        Time.
    total : int
        Aggregations that were asked for.
    """

    Config: ClassVar[type[StrategyConfig]] = AsynchronousConfig
    config: EventsConfig
    has_rounds: ClassVar[bool] = False
    ledger: Ledger
    total: int
    _evaluation: EvaluationUnderWay
    _told: dict[str, Any]  # by clients that evaluated, since the last report
    _told_by_client: dict[str, ByClient]
    _over: bool

    def __init__(self, config: EventsConfig | None = None, **run: Any) -> None:
        for name, instead in _INSTEAD.items():
            if getattr(type(self), name) is not getattr(Scheme, name):
                raise TypeError(
                    f"{type(self).__name__}.{name} would never be called, as there are no rounds: override {instead}"
                )
        super().__init__(config, **run)

    # ---- Flower's hooks, which a loop without rounds has no use for --------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: there are no rounds."""
        self._refuse_rounds()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: there are no rounds."""
        self._refuse_rounds()

    def _refuse_rounds(self) -> NoReturn:
        raise RunError(
            f"{type(self).__name__} has no rounds: call its own start(), not one around it, such as that of Flower's "
            "differential-privacy wrappers"
        )

    def reset(self) -> None:
        """Begin new books, too."""
        super().reset()
        self.ledger = Ledger(works_on=self.works_on)

    def at_work(self) -> list[int]:
        """Add those that have a task under way."""
        tasks = [task for task in self.ledger.tasks.copy().values() if not task.lost]
        return list({*super().at_work(), *(task.member.client.index for task in tasks)})

    # ---- What a scheme fills in: see strategies/__init__.py ---------------------------------------------------

    #: Seconds between two aggregations; None: when ``ready`` says so.
    interval: float | None = None
    #: How contributions weigh, ``time-based`` or ``identical``, where the config has no ``aggregation_weights``.
    weighing: ClassVar[str] = "time-based"
    #: Whether a client goes on working while its work waits for the next aggregation.
    works_on: ClassVar[bool] = False

    def ready(self, arrived: int) -> bool:
        """Tell whether to aggregate, now that ``arrived`` contributions wait."""
        return False

    def accept(self, contribution: Contribution) -> bool:
        """Tell whether a contribution counts; if not, it is thrown away, and its client is free at once.

        By default where its staleness is ``fresh``.
        """
        return self.fresh(contribution.staleness)

    def fresh(self, staleness: int) -> bool:
        """Tell whether work counts that is so many aggregations old: how long a run is may follow from it."""
        return True

    def choose(self, free: Sequence[Member]) -> Iterable[Member]:
        """Return who is handed the model now.

        Asked whenever clients have become free: at the start, when one is new, has answered or missed, when their
        work went into a new model, and when one that was dropped may be asked again. The answer may name any other
        client as well; those that have a task under way are passed over.

        Parameters
        ----------
        free : sequence of Member
            The clients that the event freed. By default they get the model, unless their work waits for the next
            aggregation: then they get that one's. With a ``concurrency`` the free places go to any idle clients.
        """
        if not self.config.concurrency:
            return [member for member in free if self.works_on or not member.waiting]
        ledger, idle = self.ledger, self.ledger.free
        if not (places := min(max(self.config.concurrency - len(ledger.tasks), 0), len(idle))):
            return []
        rng = streams.generator(self.config.seed, "next-clients", ledger.handed_out)
        return [ledger.members[idle[place]] for place in rng.choice(len(idle), places, replace=False)]

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of an aggregation, which come in client order."""
        return [self._weight(c.client.index) * self.discount(c.staleness) for c in contributions]

    def discount(self, staleness: int) -> float:
        """Return what a contribution is worth that is so many aggregations old, beside one on the present model."""
        return 1.0

    @property
    def discounts(self) -> bool:
        """Whether d_i is known only when a contribution comes: then those that came say what a client counts."""
        return type(self).discount is not Scheme.discount or type(self).weigh is not Scheme.weigh

    def periods(self, times: Times) -> Times:
        """Return P_i (C,): aggregations from one contribution of client i to the next, by its task time τ_i (C,).

        Where clients come and go, τ_i is the mean time from one contribution of a client that waits for no other to
        the next: its work, what it works for nothing, and when it isn't there; infinite if it is never done.

        By default as observed since the client is there (``strategies.events.observed_periods``).
        """
        return observed.periods(self.ledger.counting, self.aggregations)

    def expected_periods(self, times: Times) -> Times:
        """Return the P_i that really come about, where random task times make them differ from ``periods``."""
        return self.periods(times)

    def identical_weight(self, num_clients: int) -> float:
        """Return d for ``aggregation_weights = "identical"``."""
        return 1.0

    def untrained_lr(self) -> float:
        """Return η of strategies/updates/buffers.py: how far an arrival moves what isn't trained."""
        return self.own_lr()

    @property
    def most_at_work(self) -> int:
        """τ_c: clients that are at work at once, at most."""
        number = max(len(self.ledger.counting), 1)
        return min(self.config.concurrency or number, number)

    # ---- Who is worth what --------------------------------------------------------------------------------------

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        ledger = self.ledger
        if ledger.importance is None:
            clients = [member.client for member in ledger.counting]
            ledger.importance = self._by_index(self._importances(clients)) if clients else {}
        return ledger.importance

    @property
    def standing(self) -> Standing:
        """What every client that counts is worth now; worked out anew when p or an estimate of P_i has changed."""
        ledger = self.ledger
        if ledger.standing is None:
            if not ledger.counting:  # all are dropped
                return Standing({}, {})
            importance = self.importance()
            p = np.array(list(importance.values()))
            if self._weighing == IDENTICAL:
                d = np.full(len(p), self.identical_weight(len(p)))
            else:
                periods = self._periods(self._cycles())
                d = p * np.where(np.isfinite(periods), periods, 0.0)  # who never contributes weighs nothing
            d = self.safeguards.weights([member.client for member in ledger.counting], d)
            ledger.standing = Standing(importance, self._by_index(d))
        return ledger.standing

    def _weight(self, index: int) -> float:
        """Return d_i of a client, 0 if it doesn't count; where P_i are observed without a look at the others."""
        ledger = self.ledger
        if ledger.standing is not None or not self.observes_periods:
            return self.standing.weight.get(index, 0.0)
        member = ledger.members[index]
        if member.dropped:
            return 0.0
        if self._weighing == IDENTICAL:
            d = self.identical_weight(len(ledger.counting))
        else:
            d = self.importance()[index] * ledger.observed.period(member, self.aggregations)
        return float(self.safeguards.weights([member.client], np.array([d]))[0])

    def _expected_share(self) -> dict[int, float]:
        """q̃_i by client index; worked out when it is asked for, at evaluations."""
        standing = self.standing
        if standing.weight and not standing.periods:
            times = self._cycles()
            periods = self._periods(times) if self.observes_periods else self.expected_periods(times)
            standing.periods.update(self._by_index(periods))
        if standing.weight and (self.discounts or not standing.expected_share):
            q = np.array(list(self._worth().values())) / np.array(list(standing.periods.values()))
            standing.expected_share.update(self._by_index(q / (q.sum() or 1.0)))
        return standing.expected_share

    def _cycles(self) -> Times:
        """Return how long each client that counts works for a contribution, with the time that it isn't there."""
        return self.pace.cycles(self.ledger.counting, self.ledger, self.interval)

    def _worth(self) -> dict[int, float]:
        """Return d_i by client index, where they depend on staleness the mean of those that came."""
        worth, known = self.standing.weight, self.ledger.members
        if not self.discounts:
            return worth
        came = {i: known[i].weight / known[i].contributions for i in worth if known[i].contributions}
        return worth | came

    def _by_index(self, values: Times) -> dict[int, float]:
        indices = (member.client.index for member in self.ledger.counting)
        return dict(zip(indices, values.tolist(), strict=True))

    @property
    def observes_periods(self) -> bool:
        """Whether P_i are those observed: nobody knows them beforehand, or the law of times isn't to be looked at."""
        unknown = self._weighing == OBSERVED or type(self).periods is Scheme.periods
        return bool(self.config.concurrency) or unknown

    @property
    def _weighing(self) -> str:
        return getattr(self.config, "aggregation_weights", self.weighing)

    def _periods(self, times: Times) -> Times:
        return Scheme.periods(self, times) if self.observes_periods else self.periods(times)

    def most_tasks(self) -> int:
        """Return how many tasks a client has been handed at most."""
        return max((member.tasks for member in self.ledger.members.values()), default=0)

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def _evaluate_on_clients(
        self, aggregation: int, result: Result, config: ConfigRecord, grid: Grid, metrics: MetricRecord
    ) -> MetricRecord:
        """Wait for the clients only at the end, and in virtual time; what they say meanwhile is reported next."""
        if not self.pace.waits:
            return super()._evaluate_on_clients(aggregation, result, config, grid, metrics)
        last = self._over or aggregation >= self.total or self.stopped()
        if last:
            self._evaluation.end()
        requests = list(self.configure_evaluate(aggregation, result.arrays, config, grid))
        self._evaluation.begin(aggregation, requests)
        if last:
            nodes = {request.metadata.dst_node_id for request in requests}
            self._asked = {client.node_id: client.index for client in self.clients if client.node_id in nodes}
            self._evaluation.wait(self._asked)
        told, self._told = self._told, {}
        self._by_client, self._told_by_client = self._told_by_client, {}
        if told.get(messages.EVALUATED) == aggregation:
            del told[messages.EVALUATED]
        return MetricRecord({**metrics, **told})

    def _take_evaluation(self, number: int, replies: list[Message], late: Sequence[int]) -> None:
        self._say_missing(number, late, len(late) + len(replies))
        if (averages := self.aggregate_evaluate(number, replies)) is not None:
            self._result.evaluate_metrics_clientapp[number] = averages
            self._told = {of_clients(key): value for key, value in averages.items()} | {
                messages.EVALUATED: number
            }
            self._told_by_client = self._told_by(replies)

    # ---- Diagnostics ---------------------------------------------------------------------------------------------

    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return what is known of each client, by index: how often it counted, with what, and what it is worth."""
        standing, known, q, worth = self.standing, self.ledger.members, self._expected_share(), self._worth()
        indices = list(range(max(known) + 1))
        members = [known.get(index) for index in indices]
        times = dict(zip(known, self.pace.times(known.values(), self.ledger).tolist(), strict=True))
        given = sum(member.weight for member in known.values())
        return {
            "participation": [float(m.contributions) if m else 0.0 for m in members],
            "weight": [worth.get(index, 0.0) for index in indices],
            "task-time": [times.get(index, 0.0) for index in indices],
            "importance": [standing.importance.get(index, 0.0) for index in indices],
            "expected-share": [q.get(index, 0.0) for index in indices],
            "observed-share": [m.weight / given if m and given else 0.0 for m in members],
            **self._costs_of_clients(len(members)),
        }

    def weights_distance(self) -> float:
        """Return ½ Σ |q̃_i − p_i|: how far the objective that is minimised is from the federated one."""
        p, q = self.standing.importance, self._expected_share()
        return 0.5 * sum(abs(p[index] - q[index]) for index in p)

    def _losses(self, losses: object) -> dict[str, float]:
        """Add the surrogate loss Σ q̃_i f_i, which the run really minimises, and its spread."""
        if not isinstance(losses, list) or not self.ledger.members:
            return {}
        return {
            **mean_and_spread("federated-loss", self.importance(), losses),
            **mean_and_spread("surrogate-loss", self._expected_share(), losses),
        }

    def _log_objective(self) -> None:
        """Say which objective the run minimised, if it wasn't the federated one."""
        if not self.ledger.members or self.stopped():
            return
        p, q = self.standing.importance, self._expected_share()
        if (distance := self.weights_distance()) > 1e-6:
            most = max(p, key=lambda index: q[index] - p[index])
            log.warning(
                "this run minimised Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f "
                "(½ Σ |q_i − p_i|); %s counted most in excess, %.4f for %.4f",
                distance,
                self.ledger.members[most].client,
                q[most],
                p[most],
            )
