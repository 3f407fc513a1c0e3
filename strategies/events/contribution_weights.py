"""The weights of contributions in an asynchronous run.

p_i is a client's importance, d_i the weight of its contributions, and q̃_i its share of the objective that is really
minimised: q̃_i ∝ d_i / P_i, with P_i the aggregations from one contribution of the client to the next (Fraboni et al.
2023, section 3). A method is unbiased where q̃ = p.

The default step size of the server follows from d_i (docs/theory.md): with τ_c of C clients at work

    η_g = min(1, C / (τ_c Σ d_i), 1 / max d_i)

so that one contribution of each client at work together moves the model as far as a round of FedAvg does, and no
contribution alone moves it further.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strategies.clients import client_metrics
from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.clients.weights import mean_and_spread, of_each
from strategies.core.config import IDENTICAL, AsyncConfigBase
from strategies.core.population import Population
from strategies.core.reporter import Reporter
from strategies.core.run_state import RunState
from strategies.events import observed_periods
from strategies.events.arrival_rule import ArrivalRule
from strategies.events.event_stream import checked_interval
from strategies.events.own_time import HALVED, OwnTime
from strategies.events.tasks import TaskTable
from strategies.timing.scheduler import Times
from strategies.updates.pipeline import Contribution

log = logging.getLogger("flwr.strategies")

FOLLOWS = 16  # with observed P_i the step is computed anew when contributions have grown by this part of their number


def steady_step(weights: NDArray[np.float64], num_busy: int) -> float:
    """Return η_g = min(1, C / (τ_c Σ d_i), 1 / max d_i), by the weights d_i (C,) and τ_c, the clients at work.

    A step within 1e-9 (relative) of 1 is exactly 1, so that the method is FedAvg bit for bit where it is FedAvg.
    """
    if not (total := float(weights.sum())) > 0:
        return 1.0
    step = min(len(weights) / num_busy / total, 1 / float(weights.max()))
    return 1.0 if step > 1 or math.isclose(step, 1.0, rel_tol=1e-9) else step


@dataclass(frozen=True)
class ClientWeights:
    """By client index: d_i, P_i, and q̃_i, the share of the objective that client i has in the long run."""

    weight: dict[int, float]
    contribution_periods: dict[int, float] = field(default_factory=dict)
    expected_share: dict[int, float] = field(default_factory=dict)


class WeightHooks(Protocol):
    """What the weights of contributions ask of the method; see ``AsynchronousStrategy``."""

    interval: float | None

    def default_server_lr(self) -> float:
        """Return η_g where the config has none."""

    @property
    def observes_periods(self) -> bool:
        """Whether P_i are those observed, not those of the method."""

    @property
    def discounts_staleness(self) -> bool:
        """Whether d_i is known only when a contribution comes: then those that came say what a client counts."""

    def contribution_periods(self, times: Times) -> Times:
        """Return P_i (n,) by task times (n,)."""

    def expected_periods(self, times: Times) -> Times:
        """Return P_i (n,) that really come about, by task times (n,)."""

    def identical_weight(self, num_clients: int) -> float:
        """Return d for ``identical``."""

    def weights_over_time(self) -> Mapping[int, float] | None:
        """Return what each client has moved the model so far, where a contribution does so again after it came."""


class ContributionWeights:
    """Computes the clients' weights, again whenever p_i or an estimate of P_i has changed.

    Parameters
    ----------
    aggregation_weights : str
        How contributions weigh: ``time-based``, ``observed`` or ``identical``.
    hooks : WeightHooks
        The method.
    robust : ArrivalRule, optional
        The robust rule in place of the weighted sum, in whose result the clients' shares q̃_i are unknown.
    favours_fast : bool
        Whether clients count the more, the faster they are, in a weighted sum.

    Attributes
    ----------
    own_time : OwnTime
        What each client's next contribution is due, with safeguards in real time.
    """

    def __init__(
        self,
        run: RunState,
        task_table: TaskTable,
        population: Population,
        aggregation_weights: str,
        hooks: WeightHooks,
        robust: ArrivalRule | None = None,
        *,
        favours_fast: bool = False,
    ) -> None:
        self._run, self._task_table = run, task_table
        self._population, self._safeguards = population, population.safeguards
        self.aggregation_weights, self._hooks, self._summed = aggregation_weights, hooks, robust is None
        # Whether each arrival moves the model by a robust rule over the clients' last updates.
        self._windowed = robust is not None and robust.window > 0
        self._favours_fast, self.own_time = favours_fast and not self._windowed, OwnTime()
        # The task table's changes, Δt, and the version of the graph of clients, of which the weights are.
        self._present_at: tuple[int, float | None, object] = (-1, None, None)
        # p_i and d_i (n,) of the clients that count, and both by index, each if it has been asked for.
        self._p: NDArray[np.float64] | None = None
        self._d: NDArray[np.float64] | None = None
        self._client_weights: dict[int, float] | None = None
        self._current: ClientWeights | None = None
        # η_g of these d_i, by what else it follows from.
        self._steps: dict[tuple[int | None, float, float], float] = {}
        # With observed P_i: η_g, and the contributions and clients when it was computed.
        self._step: tuple[float, int, int] | None = None

    def state(self) -> dict[str, Any]:
        """Return what clients are due, and the step that observed P_i gave, and when, if there is one."""
        step = {} if self._step is None else {"own-step": list(self._step)}
        return {**step, **(self.own_time.state() if self.bounds_time else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the dues and the step."""
        self.own_time.restore(state)
        value, contributions, clients = state.get("own-step", (0.0, 0, 0))
        self._step = (float(value), int(contributions), int(clients)) if clients else None

    # ---- By the clients' own time (strategies/events/own_time.py) --------------------------------------------------

    @property
    def bounds_time(self) -> bool:
        """Whether what a client weighs in a time, and how long its answer is awaited, is bounded.

        So it is with safeguards in real time, as devices make their own times.
        """
        return self._run.scheduler.real_time and self._safeguards.active

    @property
    def by_own_time(self) -> bool:
        """Whether contributions weigh by what their client's own time is due."""
        return self.bounds_time and (self.aggregation_weights != IDENTICAL or self._windowed)

    def note_arrival(self, member: ClientState) -> None:
        """Note that a client has answered, whether or not the method accepts its work."""
        if self.bounds_time:
            self.own_time.note(member.client.index, self._present)

    @property
    def _present(self) -> dict[int, ClientState]:
        return {member.client.index: member for member in self._task_table.active_clients}

    def rate_allows(self, member: ClientState, contribution: Contribution) -> bool:
        """Return False if the client of a contribution answers too often for it to count."""
        if not self.bounds_time or not (bound := self._rate_bound):
            return True
        own, index, present = self.own_time, member.client.index, self._present
        if not own.within(index, present, bound):
            self._run.warn_once(
                "%s answers more than %g times as often as the median of the others: further answers are discarded "
                "(rate_bound)",
                member.client,
                bound,
            )
            return False
        unseen = not self._favours_fast or self._run.config.uses_secure_sums
        if unseen or own.agrees(index, present, contribution.update):
            return True
        self._run.warn_once(
            "%s answers more often than the median of the others, and against the course of their updates: such "
            "answers are discarded (rate_bound)",
            member.client,
        )
        return False

    @property
    def _rate_bound(self) -> float:
        """How many times as often as the median of the others a client counts; 0: no bound."""
        config = self._run.config
        bound = config.rate_bound if isinstance(config, AsyncConfigBase) else 0.0
        return bound * HALVED if self._favours_fast and config.uses_secure_sums else bound

    def settle(self, member: ClientState) -> None:
        """Note that a client's contribution was aggregated."""
        if self.by_own_time:
            most = self._longest()
            left = min(max(self._due(member) - most, 0.0), most)
            self.own_time.pay(member.client.index, self._number(), member.since, left)

    def _due(self, member: ClientState) -> float:
        p = self.client_weights().get(member.client.index, 0.0)
        return self.own_time.due(member.client.index, p, self._number(), member.since)

    def _number(self) -> int:
        """Return n, the number of the aggregation under way, or of intervals."""
        return self._run.aggregations + 1 if self._hooks.interval is None else self.own_time.intervals

    def _longest(self) -> float:
        """Return 1/η_g, the weight with which a contribution moves the model as far as a round of FedAvg does."""
        return 1 / (self._run.config.server_lr or self._hooks.default_server_lr())

    def expire(self) -> None:
        """Note that estimates of P_i have changed."""
        self._d = self._current = None
        self._steps = {}

    def _refresh(self) -> None:
        """Forget the weights if the clients that count, the time between aggregations or the graph has changed."""
        present = (self._task_table.changes, self.interval(), self._population.version)
        if self._present_at != present:
            self._present_at = present
            self._p = self._client_weights = None
            self.expire()

    def importances(self) -> NDArray[np.float64]:
        """Return p_i (n,) of the clients that count now."""
        self._refresh()
        if self._p is None:
            active, population = self._task_table.active, self._population
            if not active.members:
                self._p = np.empty(0)
            elif population.follows_from_sizes and not np.isnan(sizes := active.column("size", _sizes)).any():
                self._p = population.client_weights_of_sizes(sizes)
            else:
                self._p = population.client_weights_of(self._active())
        return self._p

    def client_weights(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        p = self.importances()
        if self._client_weights is None:
            self._client_weights = self._by_index(p)
        return self._client_weights

    @property
    def current(self) -> ClientWeights:
        """The weights of all clients that count now."""
        d = self._weights()
        if self._current is None:
            self._current = ClientWeights(self._by_index(d))
        return self._current

    def _weights(self) -> NDArray[np.float64]:
        """Return d_i (n,) of the clients that count now."""
        self._refresh()
        if self._d is None:
            members = self._task_table.active_clients
            if not members:  # all are dropped
                return np.empty(0)
            p = self.importances()
            if self.aggregation_weights == IDENTICAL and not self.by_own_time:
                d = np.full(len(p), self._hooks.identical_weight(len(p)))
            else:
                periods = self._weighting_periods()
                known = np.isfinite(periods)
                d = p * np.where(known, periods, 0.0)  # a client that never contributes weighs nothing
                if known.any() and not d.any():
                    self._run.warn_once(
                        "%s.contribution_periods gives 0 for each client that contributes: no work counts, and the "
                        "model stays as it is; allowed are numbers >= 0, and not 0 for all",
                        self._run.name,
                    )
            if not self.by_own_time:
                d = self._safeguards.weights(members, d)
            self._d = d
        return self._d

    def weight(self, index: int) -> float:
        """Return d_i of a client, 0 if it doesn't count; with observed P_i without computing the other weights."""
        self._refresh()
        task_table = self._task_table
        if self.by_own_time:
            member = task_table.members[index]
            return 0.0 if member.dropped else min(self._due(member), self._longest())
        place = task_table.active.place(index)
        if self._d is not None or not self._hooks.observes_periods:
            weights = self._weights()
            return 0.0 if place is None else float(weights[place])
        member = task_table.members[index]
        if member.dropped or place is None:
            return 0.0
        if self.aggregation_weights == IDENTICAL:
            d = self._hooks.identical_weight(len(task_table.active_clients))
        else:
            d = float(self.importances()[place]) * task_table.observed.period(member, self._run.aggregations)
        return float(self._safeguards.weights([member], np.array([d]))[0])

    def step(self, num_busy: int | None = None, *, longest: float = math.inf) -> float:
        """Return the method's own step size η_g (``steady_step``), from the d_i of all clients that count now.

        Observed P_i are means over the run so far, and the step follows them slowly: it is computed anew when the
        contributions have grown by 1/16 of their number, or when clients come or go.

        Parameters
        ----------
        num_busy : int, optional
            τ_c, the number of clients at work at once, by default all.
        longest : float
            The number of aggregations for which a contribution counts at most: then d_i = p_i min(P_i, ``longest``).
        """
        number = len(self._task_table.active_clients)
        if not number:
            return 1.0
        identical = self.aggregation_weights == IDENTICAL and not self.by_own_time
        if not self._hooks.observes_periods or identical:
            weights = self._weights()
            known = num_busy, longest, self._most_weight()
            if known not in self._steps:
                self._steps[known] = self._step_of(weights, num_busy, longest)
            return self._steps[known]
        contributions = self._task_table.observed.contributions
        if self._step is not None and self._step[2] == number:
            value, before, _ = self._step
            if contributions < before + max(before // FOLLOWS, 1):
                return value
        d = self.importances() * self.observed_periods()
        value = self._step_of(d, num_busy, longest)
        self._step = (value, contributions, number)
        return value

    def _step_of(self, weights: NDArray[np.float64], num_busy: int | None, longest: float) -> float:
        if longest < math.inf:
            weights = np.minimum(weights, longest * self.importances())
        return steady_step(np.minimum(weights, self._most_weight()), num_busy or len(weights))

    def _most_weight(self) -> float:
        """Return the upper bound of d_i; infinity: there is none."""
        return math.inf if self.by_own_time else self._safeguards.max_weight or math.inf

    def expected_share(self) -> dict[int, float]:
        """Return q̃_i by client index, computed at evaluations only."""
        current = self.current
        if current.weight and not current.contribution_periods:
            if self._hooks.observes_periods:
                periods = self.observed_periods()
            else:
                times = self.cycles(self._task_table.active_clients)
                periods = self._checked("expected_periods", self._hooks.expected_periods(times))
            current.contribution_periods.update(self._by_index(periods))
        if current.weight and (self._hooks.discounts_staleness or not current.expected_share):
            if (over_time := self._weights_over_time()) is not None:
                q = _values(over_time)
            else:
                q = _values(self.weights_so_far()) / _values(current.contribution_periods)
            current.expected_share.update(self._by_index(q / (q.sum() or 1.0)))
        shares = current.expected_share
        if (left := self._safeguards.shrinkage(shares)) is None:
            return shares
        q = _values(shares) * left  # what is shortened counts less
        return dict(zip(shares, (q / (q.sum() or 1.0)).tolist(), strict=True))

    def weights_so_far(self) -> dict[int, float]:
        """Return d_i by client index; where d_i depends on staleness, the mean over the client's contributions."""
        weights_so_far, known = self.current.weight, self._task_table.members
        if not self._hooks.discounts_staleness:
            return weights_so_far
        total = self._weights_over_time() or {i: known[i].weight for i in weights_so_far}
        came = {i: total[i] / known[i].contributions for i in weights_so_far if known[i].contributions}
        return weights_so_far | came

    def _weights_over_time(self) -> dict[int, float] | None:
        """Return what the clients that count have moved the model, by index; None if the method doesn't say it."""
        if not (given := self._hooks.weights_over_time()):
            return None
        return {index: given.get(index, 0.0) for index in self.current.weight}

    def observed_periods(self) -> Times:
        """Return P_i (n,) of the clients that count, observed since each joined.

        The aggregation under way counts where d_i = p_i P_i, and not where d_i is of a client's own time.
        """
        done = self._run.aggregations - self.by_own_time
        return observed_periods.contribution_periods(self._task_table.active_clients, done)

    def _weighting_periods(self) -> Times:
        """Return P_i (n,) by which clients weigh; where rates are bounded, by the times with which they count."""
        if self._hooks.observes_periods:
            return self.observed_periods()
        times = self.cycles(self._task_table.active_clients)
        if self.bounds_time and self._rate_bound:
            times = np.maximum(times, np.median(times) / self._rate_bound)
        return self._checked("contribution_periods", self._hooks.contribution_periods(times))

    def _checked(self, hook: str, contribution_periods: Times) -> Times:
        """Return what a hook gives for P_i (n,); raise RunError unless it is a number >= 0, or infinite, for each."""
        name, infinite = f"{self._run.name}.{hook}", "a client that never contributes"
        return of_each(name, contribution_periods, self._task_table.active_clients, infinite=infinite)

    def cycles(self, members: Iterable[ClientState]) -> Times:
        """Return the expected cycle times (n,) of clients, seconds per contribution, absences included."""
        scheduler, table, interval = self._run.scheduler, self._task_table, self.interval()
        if scheduler.keeps_times and members is table.active_clients:
            return table.active.column("cycle", lambda new: scheduler.cycles(new, new, interval), interval)
        return scheduler.cycles(members, table.members.values(), interval)

    def interval(self) -> float | None:
        """Return the method's ``interval``; raise RunError if it is none between two different times."""
        return checked_interval(f"{self._run.name}.interval", self._hooks.interval)

    def _active(self) -> list[Client]:
        return [member.client for member in self._task_table.active_clients]

    def _by_index(self, values: NDArray[np.float64]) -> dict[int, float]:
        return dict(zip((client.index for client in self._active()), values.tolist(), strict=True))

    # ---- Reports ---------------------------------------------------------------------------------------------------

    def total_variation(self) -> float:
        """Return ½ Σ |q̃_i − p_i|, the distance of the effective weights from the importances."""
        p, q = self.client_weights(), self.expected_share()
        return 0.5 * sum(abs(p[index] - q[index]) for index in p)

    def losses(self, losses: Mapping[int, float]) -> Mapping[str, float]:
        """Return the federated loss Σ p_i f_i and, if known, the surrogate loss Σ q̃_i f_i that the run minimises.

        Each with its spread; f_i come by client index.
        """
        if not self._task_table.members:
            return {}
        reported = mean_and_spread("federated-loss", self.client_weights(), losses)
        if self._summed:
            reported |= mean_and_spread("surrogate-loss", self.expected_share(), losses)
        return reported

    def of_clients(self, reporter: Reporter) -> dict[str, list[float]]:
        """Return per-client statistics, by index: contributions, weights, importance, expected and observed share."""
        members, participation = self._task_table.members, self._task_table.contributions
        everybody = members.values()
        times = self._run.scheduler.times(everybody, everybody).tolist()
        columns: dict[str, Mapping[int, float]] = {
            "participation": participation,
            "weight": self.weights_so_far(),
            "task-time": dict(zip(members, times, strict=True)),
            "importance": self.client_weights(),
        }
        if self._summed:
            columns["expected-share"] = self.expected_share()
            given = self._weights_over_time() or {i: member.weight for i, member in members.items()}
            shares = client_metrics.shares([*given.values()])
            columns["observed-share"] = dict(zip(given, shares, strict=True))
        size = max(participation) + 1
        return {**client_metrics.columns(columns, size, missing=0.0), **reporter.costs_of_clients(size)}

    def log_objective(self) -> None:
        """Log the objective that the run minimised, if it wasn't the federated objective."""
        if not self._summed or not self._task_table.members or self._run.should_stop():
            return
        p, q = self.client_weights(), self.expected_share()
        if (distance := self.total_variation()) > 1e-6:
            most = max(p, key=lambda index: q[index] - p[index])
            log.warning(
                "this run minimised Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f "
                "(½ Σ |q_i − p_i|); %s counted most in excess, %.4f for %.4f",
                distance,
                self._task_table.members[most].client,
                q[most],
                p[most],
            )


def _sizes(members: Sequence[ClientState]) -> NDArray[np.float64]:
    """Return n_i (n,), NaN where a client hasn't reported its number of examples."""
    sizes = [member.client.num_examples for member in members]
    return np.array([math.nan if size is None else size for size in sizes], dtype=np.float64)


def _values(by_index: Mapping[int, float]) -> NDArray[np.float64]:
    return np.array(list(by_index.values()))
