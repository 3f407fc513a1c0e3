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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strategies.clients import client_metrics
from strategies.clients.client_state import ClientState
from strategies.clients.weights import mean_and_spread, of_each
from strategies.core.config import IDENTICAL, AsyncConfigBase
from strategies.core.population import Population
from strategies.core.reporter import Reporter
from strategies.core.run_state import RunState
from strategies.events import observed_periods
from strategies.events.event_stream import checked_interval
from strategies.events.own_time import HALVED, OwnTime
from strategies.events.tasks import TaskTable
from strategies.flower.arrays import Vector
from strategies.timing.scheduler import Times
from strategies.updates.safeguards import Safeguards

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
    """By client index: p_i, d_i, P_i, and q̃_i, the share of the objective that client i has in the long run."""

    client_weights: dict[int, float]
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
    summed : bool
        Whether the model moves by the weighted sum. By a robust rule clients' shares q̃_i in it are unknown.
    windowed : bool
        Whether each arrival moves the model by a robust rule over the clients' last updates.
    favours_fast : bool
        Whether clients count the more, the faster they are.
    sees_updates : bool
        Whether the server has single updates, not their masked sums.

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
        safeguards: Safeguards,
        aggregation_weights: str,
        hooks: WeightHooks,
        *,
        summed: bool = True,
        windowed: bool = False,
        favours_fast: bool = False,
        sees_updates: bool = True,
    ) -> None:
        self._run, self._task_table = run, task_table
        self._population, self._safeguards = population, safeguards
        self.aggregation_weights, self._hooks, self._summed = aggregation_weights, hooks, summed
        self._windowed, self._favours_fast = windowed, favours_fast and not windowed
        self._looks, self.own_time = sees_updates, OwnTime()
        # The task table's changes, Δt, and the state of the graph of clients, at the last look.
        self._looked: tuple[int, float | None, object] = (-1, None, None)
        self._client_weights: dict[int, float] | None = None
        self._current: ClientWeights | None = None
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
        """Whether what a client weighs in a time is bounded: with safeguards, in real time, which devices make."""
        return self._run.scheduler.real_time and self._safeguards.active

    def gives_up(self) -> bool:
        """Return ``bounds_time``: whether an answer is awaited only as long as other devices take, and a budget."""
        return self.bounds_time

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

    def rate_allows(self, member: ClientState, update: Vector) -> bool:
        """Return False if the client of an update (D,) answers too often for it to count."""
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
        if not (self._looks and self._favours_fast) or own.agrees(index, present, update):
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
        return bound if self._looks or not self._favours_fast else bound * HALVED

    def settle(self, member: ClientState) -> None:
        """Note that a client's contribution was aggregated."""
        if self.by_own_time:
            due, most = self._due(member), self._longest()
            self.own_time.pay(
                member.client.index, self._number(), member.since, min(max(due - most, 0.0), most)
            )

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
        self._current = None

    def _look(self) -> None:
        """Forget the weights if the clients that count, the time between aggregations or the graph has changed."""
        present = (self._task_table.changes, self._interval(), self._population.version)
        if self._looked != present:
            self._looked = present
            self._client_weights = self._current = None

    def client_weights(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        self._look()
        if self._client_weights is None:
            clients = [member.client for member in self._task_table.active_clients]
            self._client_weights = (
                self._by_index(self._population.client_weights_of(clients)) if clients else {}
            )
        return self._client_weights

    @property
    def current(self) -> ClientWeights:
        """The weights of all clients that count now."""
        self._look()
        task_table = self._task_table
        if self._current is None:
            if not task_table.active_clients:  # all are dropped
                return ClientWeights({}, {})
            client_weights = self.client_weights()
            p = np.array(list(client_weights.values()))
            if self.aggregation_weights == IDENTICAL and not self.by_own_time:
                d = np.full(len(p), self._hooks.identical_weight(len(p)))
            else:
                periods = self._weighting_periods(
                    self._with_bounded_rates(self.cycles(self._task_table.active_clients))
                )
                known = np.isfinite(periods)
                d = p * np.where(known, periods, 0.0)  # a client that never contributes weighs nothing
                if known.any() and not d.any():
                    self._run.warn_once(
                        "%s.contribution_periods gives 0 for each client that contributes: no work counts, and the "
                        "model stays as it is; allowed are numbers >= 0, and not 0 for all",
                        self._run.name,
                    )
            if not self.by_own_time:
                d = self._safeguards.weights([member.client for member in task_table.active_clients], d)
            self._current = ClientWeights(client_weights, self._by_index(d))
        return self._current

    def weight(self, index: int) -> float:
        """Return d_i of a client, 0 if it doesn't count; with observed P_i without computing the other weights."""
        self._look()
        task_table = self._task_table
        if self.by_own_time:
            member = task_table.members[index]
            return 0.0 if member.dropped else min(self._due(member), self._longest())
        if self._current is not None or not self._hooks.observes_periods:
            return self.current.weight.get(index, 0.0)
        member = task_table.members[index]
        if member.dropped:
            return 0.0
        if self.aggregation_weights == IDENTICAL:
            d = self._hooks.identical_weight(len(task_table.active_clients))
        else:
            d = self.client_weights()[index] * task_table.observed.period(member, self._run.aggregations)
        return float(self._safeguards.weights([member.client], np.array([d]))[0])

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
            return self._step_of(np.array(list(self.current.weight.values())), num_busy, longest)
        contributions = self._task_table.observed.contributions
        if self._step is not None and self._step[2] == number:
            value, before, _ = self._step
            if contributions < before + max(before // FOLLOWS, 1):
                return value
        p = np.array(list(self.client_weights().values()))
        value = self._step_of(p * self.observed_periods(), num_busy, longest)
        self._step = (value, contributions, number)
        return value

    def _step_of(self, weights: NDArray[np.float64], num_busy: int | None, longest: float) -> float:
        most = math.inf if self.by_own_time else self._safeguards.max_weight or math.inf
        if longest < math.inf:
            weights = np.minimum(weights, longest * np.array(list(self.client_weights().values())))
        return steady_step(np.minimum(weights, most), num_busy or len(weights))

    def expected_share(self) -> dict[int, float]:
        """Return q̃_i by client index, computed at evaluations only."""
        current = self.current
        if current.weight and not current.contribution_periods:
            times = self.cycles(self._task_table.active_clients)
            periods = (
                self._weighting_periods(times)
                if self._hooks.observes_periods
                else self._checked("expected_periods", self._hooks.expected_periods(times))
            )
            current.contribution_periods.update(self._by_index(periods))
        if current.weight and (self._hooks.discounts_staleness or not current.expected_share):
            if (over_time := self._weights_over_time()) is not None:
                q = np.array(list(over_time.values()))
            else:
                q = np.array(list(self.weights_so_far().values())) / np.array(
                    list(current.contribution_periods.values())
                )
            current.expected_share.update(self._by_index(q / (q.sum() or 1.0)))
        shares = current.expected_share
        if (left := self._safeguards.shrinkage(shares)) is None:
            return shares
        q = np.array(list(shares.values())) * left  # what is shortened counts less
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

    def _with_bounded_rates(self, times: Times) -> Times:
        """Return the task times (n,), of clients whose rate is bounded those with which their contributions count."""
        if not (self.bounds_time and self._rate_bound):
            return times
        return np.maximum(times, np.median(times) / self._rate_bound)

    def _weighting_periods(self, times: Times) -> Times:
        if self._hooks.observes_periods:
            return self.observed_periods()
        return self._checked("contribution_periods", self._hooks.contribution_periods(times))

    def _checked(self, hook: str, contribution_periods: Times) -> Times:
        """Return what a hook gives for P_i (n,); raise RunError unless it is a number >= 0, or infinite, for each."""
        clients = [member.client for member in self._task_table.active_clients]
        return of_each(
            f"{self._run.name}.{hook}",
            contribution_periods,
            clients,
            infinite="a client that never contributes",
        )

    def cycles(self, members: Iterable[ClientState]) -> Times:
        """Return the expected cycle times (n,) of clients, seconds per contribution, absences included."""
        return self._run.scheduler.cycles(members, self._task_table.members.values(), self._interval())

    def _interval(self) -> float | None:
        return checked_interval(f"{self._run.name}.interval", self._hooks.interval)

    def _by_index(self, values: NDArray[np.float64]) -> dict[int, float]:
        indices = (member.client.index for member in self._task_table.active_clients)
        return dict(zip(indices, values.tolist(), strict=True))

    # ---- Reports ---------------------------------------------------------------------------------------------------

    def total_variation(self) -> float:
        """Return ½ Σ |q̃_i − p_i|, the distance of the effective weights from the importances."""
        p, q = self.current.client_weights, self.expected_share()
        return 0.5 * sum(abs(p[index] - q[index]) for index in p)

    def losses(self, losses: Mapping[int, float]) -> Mapping[str, float]:
        """Return the federated loss Σ p_i f_i and, if known, the surrogate loss Σ q̃_i f_i that the run minimises.

        Each with its spread; f_i come by client index.
        """
        if not self._task_table.members:
            return {}
        reported = mean_and_spread("federated-loss", self.client_weights(), losses)
        if not self._summed:
            return reported
        return {**reported, **mean_and_spread("surrogate-loss", self.expected_share(), losses)}

    def of_clients(self, reporter: Reporter) -> dict[str, list[float]]:
        """Return per-client statistics, by index: contributions, weights, importance, expected and observed share."""
        members, departed = self._task_table.members, self._task_table.departed
        participation = {index: contributions for index, (contributions, _) in departed.items()}
        participation |= {i: self._task_table.contributions_of(member) for i, member in members.items()}
        everybody = members.values()
        times = self._run.scheduler.times(everybody, everybody).tolist()
        columns: dict[str, Mapping[int, float]] = {
            "participation": participation,
            "weight": self.weights_so_far(),
            "task-time": dict(zip(members, times, strict=True)),
            "importance": self.current.client_weights,
        }
        if self._summed:
            columns["expected-share"] = self.expected_share()
            given = self._weights_over_time() or {i: member.weight for i, member in members.items()}
            total = sum(given.values()) or 1.0
            columns["observed-share"] = {i: weight / total for i, weight in given.items()}
        size = max(participation) + 1
        return {**client_metrics.columns(columns, size, missing=0.0), **reporter.costs_of_clients(size)}

    def log_objective(self) -> None:
        """Log the objective that the run minimised, if it wasn't the federated objective."""
        if not self._summed or not self._task_table.members or self._run.should_stop():
            return
        p, q = self.current.client_weights, self.expected_share()
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
