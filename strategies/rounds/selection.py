"""Who takes part in a round: the clients that are there and free, the draw among them, and the weights d_i."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies import streams
from strategies.clients.by_index import ByIndex
from strategies.clients.client_statistics import ClientStatistics
from strategies.clients.roster import Client, sized_by_replies
from strategies.clients.weights import Weights, of_each, restricted_weights
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.population import Population
from strategies.core.run_state import RunState
from strategies.flower.errors import RunError
from strategies.flower.grids import RAY, engine_of
from strategies.rounds.deadline import number_needed, number_to_ask
from strategies.rounds.participation import Participation
from strategies.rounds.round import Chosen, Round
from strategies.rounds.stragglers import Stragglers
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Scheduler

log = logging.getLogger("flwr.strategies")


class Selection:
    """Draws a round's participants.

    Attributes
    ----------
    stragglers : Stragglers
        Participants that get only a part of their work done.
    each : float
        1 / (q C), the weight of every participant of the round that was drawn last, where the draw ``hides``; else 0.
    """

    def __init__(
        self, config: SynchronousConfig, run: RunState, population: Population, capabilities: Capabilities
    ) -> None:
        self._config, self._run, self._population = config, run, population
        self._capabilities = capabilities
        self.stragglers = Stragglers(config)
        self.each = 0.0
        self._number = 1  # of the round that is drawn next

    @property
    def scheme(self) -> Participation:
        """The participation scheme, as config and keywords are now."""
        config, least = cast(SynchronousConfig, self._run.config), self._run.flower.min_train_nodes
        return Participation.parse(config.participation, config.fraction_train, least)

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the scheme, the aggregation rule or over_select."""
        scheme, over = self.scheme, self._config.over_select
        scheme.check(num_clients)
        rule = cast(SynchronousConfig, self._run.config).rule()
        if rule is not None and (number := self.number_that_counts(num_clients)) < rule.least:
            raise ValueError(f"{rule.text}: needs {rule.least} clients a round or more, {number} take part")
        if over and scheme.scheme in ("uniform", "flower") and scheme.sample_size(num_clients) == num_clients:
            raise ValueError(
                f"over_select = {over:g}: all {num_clients} clients are asked without it; fraction_train = "
                f"{scheme.fraction:g} must be less"
            )

    def number_that_counts(self, num_clients: int) -> int:
        """Return how many of ``num_clients`` clients count in a round; with ``poisson`` and ``md`` at most."""
        scheme = self.scheme
        drawn = len(scheme.fixed) or num_clients // scheme.num_turns
        if scheme.scheme in ("uniform", "flower"):
            drawn = scheme.sample_size(num_clients)
        elif scheme.scheme == "full":
            drawn = number_needed(num_clients, self._config.over_select)
        return self.stragglers.num_active(drawn)

    def can_draw_from(self, clients: Sequence[Client]) -> bool:
        """Return True if a round can be drawn among these of the connected clients."""
        if self.scheme.scheme == "paired":  # its last client is in every round
            return len(clients) == len(self._run.clients)
        return any(self.scheme.is_eligible(client.index) for client in clients)

    def waits_for(self, busy_clients: Collection[int], free: Sequence[Client]) -> bool:
        """Return True if all connected clients that ``participation`` names are at work, and none is free."""
        if self._capabilities.chooses_clients:
            return False
        fixed, connected = set(self.scheme.fixed), {client.index for client in self._run.clients}
        return bool(fixed & connected & set(busy_clients)) and not fixed & {client.index for client in free}

    @property
    def hides(self) -> bool:
        """Whether differential privacy counts on the draw: on a coin for each client that nobody else knows."""
        return self._config.dp == "central" and self.scheme.scheme == "poisson"

    def sampling_rng(self, server_round: int) -> np.random.Generator:
        """Return the random generator of a round's draw, the next that is drawn."""
        self._number = server_round
        if self.hides and not self._run.options.deterministic_noise:
            return streams.unpredictable()
        return streams.generator(self._config.seed, "participants", server_round)

    def draw(self, clients: Sequence[Client], rng: np.random.Generator, number: int | None = None) -> Chosen:
        """Return the participants of a round and their weights d_i; None: by the sizes in their replies.

        ``number``: how many ``uniform``, ``md`` and ``flower`` draw; None: as the scheme says.
        """
        sized = self._config.client_weights != "samples" or all(client.described for client in clients)
        scheme = self.restrict_to(clients)
        _check_draw(scheme.scheme, len(clients), sized=sized)
        draw = scheme.draw(self._population.client_weights_of(clients), rng, number)
        if self.hides:
            # Not those that are free in real time: who is at work there tells who was drawn before.
            available = self._run.clients if self._run.scheduler.real_time else clients
            self.each = 1 / (scheme.fraction * len(available))
            draw = replace(draw, weights=(self.each,) * len(draw.clients))
        by_replies = not sized and scheme.scheme != "paired"
        return [clients[place] for place in draw.clients], None if by_replies else draw.weights

    def number_to_draw(self) -> int | None:
        """Return the number of participants to draw where rounds close early; None: as the scheme says."""
        if not self._config.closes_early:
            return None
        return number_to_ask(self.scheme.sample_size(self._number_present()), self._config.over_select)

    def replies_needed(self, weights: Sequence[float]) -> tuple[float, list[int]]:
        """Return L, the valid replies that close a round (infinity: all), and for how many each reply counts.

        A client that ``md`` has drawn twice counts for two replies: its weight d_i is its draws over all draws.
        """
        present, over_select, scheme = self._number_present(), self._config.over_select, self.scheme
        needed, multiplicities = scheme.sample_size(present), [1] * len(weights)
        if scheme.scheme == "full":
            needed = number_needed(present, over_select)
        if scheme.scheme == "md":
            multiplicities = [round(weight * number_to_ask(needed, over_select)) for weight in weights]
        return needed if over_select else inf, multiplicities

    def _number_present(self) -> int:
        """Return the number of clients that are present by their availability, at work or not; 1 at least."""
        scheduler, clients = self._run.scheduler, self._run.clients
        if scheduler.always:
            return len(clients)
        return max(sum(map(scheduler.is_available, clients)), 1)

    def share_beside(self, busy_clients: Collection[int]) -> float:
        """Return Σ p_i of the free clients over that of all that are present, with ``busy_clients`` (indices)."""
        if not busy_clients:
            return 1.0
        is_available = self._run.scheduler.is_available
        here = [c for c in self._run.clients if c.index in busy_clients or is_available(c)]
        p = self._population.client_weights_of(here)
        return float(sum(w for client, w in zip(here, p, strict=True) if client.index not in busy_clients))

    def restrict_to(self, clients: Sequence[Client]) -> Participation:
        """Return the scheme with the client indices of ``fixed`` as places among the connected clients."""
        scheme, indices = self.scheme, [client.index for client in clients]
        if scheme.scheme == "turns":
            due = (self._number - 1) % scheme.num_turns
            return scheme.at(place for place, index in enumerate(indices) if index % scheme.num_turns == due)
        if scheme.scheme != "fixed":
            return scheme
        # Some may be at work, and can't be drawn.
        available = {*indices, *(client.index for client in self._run.clients)}
        if missing := set(scheme.fixed) - available:
            log.warning("participation names clients that aren't there: %s", sorted(missing))
        here = scheme.at(place for place, index in enumerate(indices) if index in scheme.fixed)
        if not here.fixed:
            raise RunError(f"participation = {self._config.participation!r}: none of these clients is there")
        return here

    def weights_of(self, current: Round, replies: Sequence[Message | None]) -> Sequence[float]:
        """Return a round's weights d_i, from the sizes in its clients' replies if they weren't known before."""
        if current.weights is not None:
            return current.weights
        pairs = zip(current.clients, replies, strict=True)
        by_node = {client.node_id: reply for client, reply in pairs if reply is not None}
        sized = sized_by_replies(current.clients, by_node, self._run.flower.weighted_by_key)
        reported = {client.index: client for client in sized}
        self._population.roster.keep_sizes(sized)  # for those that are away in later rounds
        self._run.clients = ByIndex(reported.get(client.index, client) for client in self._run.clients)
        sizes, number = [client.num_examples or 0 for client in sized], len(sized)
        if not any(sizes):
            nobody_tells = all(client.num_examples is None for client in sized)
            return [1 / max(number, 1) if nobody_tells else 0.0] * number
        return self._population.by_size(current.clients, sizes).tolist()  # type: ignore[no-any-return]

    @property
    def weights_say_shares(self) -> bool:
        """Whether d_i is a client's share of the update: not where a method or a robust rule aggregates."""
        able = self._capabilities
        weighed = self._config.rule() is None and not able.logs_own_weights
        return weighed and (able.uses_given_weights or not able.needs_all_updates)

    # ---- What is minimised -------------------------------------------------------------------------------------

    def objective_weights(self) -> dict[int, float]:
        """Return E[d_i] of the clients that count now, by index, as if all were present and in time."""
        p = self._population.client_weights()
        if not p or self._capabilities.chooses_clients:
            return p
        shares = self._shares_among(range(len(p)), np.array(list(p.values())))
        return dict(zip(p, shares.tolist(), strict=True)) if shares.any() else p

    def expected(self, p: Weights) -> Weights | None:
        """Return each client's expected share (n,) of the objective; None if it can't be known.

        Where rounds close early or tasks fail, the clients that are in time share the weight of the others: fast
        clients count more often. How much more isn't known beforehand.
        """
        config = self._config
        loses = config.closes_early or config.task_failure
        return None if loses and not self._capabilities.reuses_last_update else self.drawn(p)

    def drawn(self, p: Weights) -> Weights | None:
        """Return E[d_i] (n,) under the scheme and the clients' availability; None if it can't be known."""
        able = self._capabilities
        if (able.needs_all_updates and not able.uses_given_weights) or able.chooses_clients:
            return None
        if self.stragglers.drops:
            return None
        if not self._shares_among(range(len(p)), p).any():
            return None
        return self._run.scheduler.expected(
            self._population.active_clients, lambda places: self._shares_among(places, p)
        )

    def corrected(self, p: Weights) -> Weights | None:
        """Return E[d_i] (n,) over the clients that ever finish a task, for methods that correct for participation."""
        drawn = self.drawn(p)
        if drawn is None or self._run.scheduler.always:
            return drawn
        return self.restricted(drawn > 0)

    def restricted(self, active: NDArray[np.bool_]) -> Weights:
        """Return the weights (n,) in the objective of those of the clients that are ``active`` (n,), with sum 1."""
        return restricted_weights(list(self.objective_weights().values()), active)

    def log_observed(self, client_stats: ClientStatistics) -> None:
        """Log by which weights the clients of a run have counted, where it couldn't be known beforehand."""
        clients = self._run.clients
        if not clients or self._run.should_stop() or not self.weights_say_shares:
            return
        weights = client_stats.column("weight", max(client.index for client in clients) + 1)
        q = np.array([weights[client.index] for client in clients])
        p = self._population.client_weights_of(clients)
        if q.sum() <= 0 or (distance := 0.5 * float(np.abs(q / q.sum() - p).sum())) <= 1e-6:
            return
        q = q / q.sum()
        most = int(np.argmax(q - p))
        log.warning(
            "this run counted its clients by Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f (½ Σ "
            "|q_i − p_i|), as rounds close before slow clients are done; %s counts most in excess, %.4f for %.4f",
            distance,
            clients[most],
            q[most],
            p[most],
        )

    def _shares_among(self, places: Sequence[int], p: Weights) -> Weights:
        """Return E[d_i] (m,) of the clients at ``places`` under the scheme; zeros if it draws none of them."""
        fixed, counting = self.scheme.fixed, self._population.active_clients
        here = self.scheme.at(at for at, place in enumerate(places) if counting[place].index in fixed)
        if self.scheme.scheme == "fixed" and not here.fixed:
            return np.zeros(len(places))
        some = p[list(places)] / p[list(places)].sum() if len(places) < len(p) else p
        return here.expected_weights(some)


def _check_draw(scheme: str, num_clients: int, *, sized: bool) -> None:
    """Raise RunError if the weights of a scheme can't be known, or too few clients are left for it."""
    if not sized and scheme in ("md", "uniform", "poisson", "turns"):
        raise RunError(
            f"participation = {scheme!r}: its weights rest on the number of examples of all clients, and not all "
            "answer query.describe with it; allowed are full, flower, or client_weights = uniform"
        )
    if scheme == "paired" and num_clients < 2:  # the others have left
        raise RunError("participation = 'paired': a round needs 2 clients, there is 1")


class CohortSampler:
    """Finds a round's participants among the connected clients.

    Parameters
    ----------
    session : RoundSession
        The run. (Its module imports this one, so that no type names it.)

    Attributes
    ----------
    no_client_available : bool
        Whether no client is present any more, or none before the time budget is over.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self.no_client_available = False
        # The largest number of clients that was too small so far; None once the number is accepted.
        self._too_few: int | None = 0

    def participants(self, server_round: int, grid: Grid, config: ConfigRecord) -> Chosen | None:
        """Return a round's participants, in the order of the clients, and their weights; None if no client comes.

        Raises
        ------
        RunError
            If there are too few clients.
        """
        session, run, selection = self._session, self._session.run, self._session.selection
        run.clients = session.population.refresh(grid, config)
        if not run.clients:  # stopped before they could answer
            return None
        self._check_number(grid)
        free, busy_clients = session.collector.free_clients(grid), session.collector.busy_clients()
        # Where all present clients are at work, the round asks nobody, and ends when the first one is free.
        free = present(run.scheduler, free, selection.scheme.is_eligible, wait=not busy_clients)
        if not free and not busy_clients:
            self.no_client_available = True
            return None
        chosen: Chosen = ([], [])
        if free and not selection.waits_for(busy_clients, free):
            chosen = session.strategy.select(free, selection.sampling_rng(server_round))
        clients, weights = chosen
        if session.strategy.capabilities.chooses_clients and weights is not None:
            of_each(f"{run.name}.select", weights, clients)
        stragglers: Stragglers = selection.stragglers
        return stragglers.without_stragglers(clients, weights, server_round)

    def others(
        self, asked: Collection[int], drawn: Round | None, grid: Grid, config: ConfigRecord
    ) -> list[Client] | None:
        """Return the clients at the nodes ``asked`` by a user-defined hook; None if all of them were drawn."""
        if drawn is not None and set(asked) <= {client.node_id for client in drawn.clients}:
            return None
        run = self._session.run
        if drawn is None:
            run.clients = self._session.population.refresh(grid, config)
        return [client for client in run.clients if client.node_id in asked]

    def _check_number(self, grid: Grid) -> None:
        """Check the number of clients, until it is enough or no more clients come; in real time more may always come.

        Raises
        ------
        RunError
            If the clients are too few, or none of the clients that the config names is connected.
        """
        if self._too_few is None:
            return
        before, self._too_few = self._too_few, None
        clients, strategy = self._session.run.clients, self._session.strategy
        number, named = len(clients), self._session.selection.scheme.fixed
        if named and not any(client.index in named for client in clients):
            raise RunError(
                f"participation = {strategy.config.participation!r}: none of these clients is there"
            )
        try:
            # A round goes without those that are named and aren't there.
            strategy.check(max(number, 1 + max(named, default=-1)))
        except ValueError as error:
            if not self._session.run.scheduler.real_time:
                # Flower's simulation registers its nodes while the run is under way already.
                if engine_of(grid) != RAY or number <= before:
                    raise RunError(str(error)) from None
                self._too_few = number
            log.warning("%s; more clients may come", error)


def present(
    scheduler: Scheduler, clients: Sequence[Client], wanted: Callable[[int], bool], *, wait: bool
) -> list[Client]:
    """Return the clients that are present, by their availability.

    If no client is present that is ``wanted``, by its index, the clock moves on until one comes, where ``wait`` is
    True. The list is empty if none ever comes, or not before the time budget is over, which is logged.
    """
    if scheduler.always:
        return list(clients)
    if wait and not _waited(scheduler, [client for client in clients if wanted(client.index)]):
        return []
    return [client for client in clients if scheduler.is_available(client)]


def _waited(scheduler: Scheduler, clients: Sequence[Client]) -> bool:
    """Move the clock on until one of the clients is present; return False if none comes in time."""
    now = scheduler.now()
    comes = min((scheduler.next_available(client, now) for client in clients), default=NEVER)
    if comes == NEVER:
        log.warning("no client is there any more, from %g s on: the run ends", now)
    elif scheduler.over(comes):
        log.info("no client is there before %g s, when the run is over", comes)
    else:
        scheduler.clock.wait_until(comes)
        return True
    return False
