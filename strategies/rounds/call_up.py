"""Who is called up for a round: the clients that are there by their availability, free, and drawn."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.config import StrategyConfig
from strategies.core.population import Population
from strategies.core.run_state import RunState
from strategies.flower.errors import RunError
from strategies.flower.grids import RAY, engine_of
from strategies.rounds.closing import Closing
from strategies.rounds.selection import Chosen, Selection
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Scheduler

log = logging.getLogger("flwr.strategies")

Select = Callable[[Sequence[Client], np.random.Generator], Chosen]


class CallUp:
    """Calls up a round's participants.

    Parameters
    ----------
    select, check : callable
        Hooks of the method: who of the clients that are free takes part, and whether so many clients are enough.

    Attributes
    ----------
    nobody_comes : bool
        Whether no client is there any more, or none before the run's time is over.
    """

    def __init__(
        self,
        run: RunState,
        population: Population,
        selection: Selection,
        closing: Closing,
        select: Select,
        check: Callable[[int], None],
    ) -> None:
        self._run, self._population, self._selection, self._closing = run, population, selection, closing
        self._select, self._check = select, check
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.nobody_comes = False
        self._too_few: int | None = 0  # how many clients weren't enough so far; None once that is settled

    def participants(self, server_round: int, grid: Grid, config: ConfigRecord) -> Chosen | None:
        """Return a round's participants, in the order of the clients, and their weights; None if nobody comes.

        Raises
        ------
        RunError
            If there are too few clients.
        """
        run, selection, closing = self._run, self._selection, self._closing
        run.clients = self._population.look(grid, config)
        if not run.clients:  # stopped before they could answer
            return None
        self._check_number(grid)
        closing.log_objective()
        there, late = closing.free(grid), closing.waits_for_late_work
        free = present(run.pace, there, selection.scheme.may_draw, wait=not late)
        if not free and not closing.waits_for_late_work:
            self.nobody_comes = True
            return None
        chosen = closing.nobody(free) or self._select(free, selection.lots(server_round))
        return selection.without_stragglers(chosen, server_round)

    def _check_number(self, grid: Grid) -> None:
        """Check whether so many clients are enough, until they are or no more come; in real time more always may.

        Raises
        ------
        RunError
            If they are too few, or none of those that the config names is there.
        """
        if self._too_few is None:
            return
        before, self._too_few = self._too_few, None
        clients = self._run.clients
        number, named = len(clients), self._selection.scheme.fixed
        if named and not any(client.index in named for client in clients):
            raise RunError(f"participation = {self._selection.text!r}: none of these clients is there")
        try:
            # A round goes without those that are named and aren't there.
            self._check(max(number, 1 + max(named, default=-1)))
        except ValueError as error:
            if not self._run.pace.real_time:
                # Flower's simulation registers its nodes while the run is under way already.
                if engine_of(grid) != RAY or number <= before:
                    raise RunError(str(error)) from None
                self._too_few = number
            log.warning("%s; more clients may come", error)


def present(
    pace: Scheduler, clients: Sequence[Client], wanted: Callable[[int], bool], *, wait: bool
) -> list[Client]:
    """Return those of the clients that are there.

    Where none is that is ``wanted``, by its index, the clock moves on until one comes, if it may ``wait``. Nobody, if
    none ever comes, or not before the run's time is over: one line says so.
    """
    if pace.always:
        return list(clients)
    if wait and not _waited(pace, [client for client in clients if wanted(client.index)]):
        return []
    return [client for client in clients if pace.there(client)]


def _waited(pace: Scheduler, clients: Sequence[Client]) -> bool:
    """Move the clock on until one of the clients is there; tell whether one is."""
    now = pace.now()
    comes = min((pace.comes(client, now) for client in clients), default=NEVER)
    if comes == NEVER:
        log.warning("no client is there any more, from %g s on: the run ends", now)
    elif pace.over(comes):
        log.info("no client is there before %g s, when the run is over", comes)
    else:
        pace.clock.wait_until(comes)
        return True
    return False


def check_loop(pace: Scheduler, config: StrategyConfig) -> None:
    """Refuse a loop around a strategy, whose time doesn't pass, where clients come and go."""
    if not pace.always:
        raise RunError(
            f"availability = {config.availability!r}, task_failure = {config.task_failure:g}: time passes in the "
            "strategy's own start(), not in a loop around it, such as Flower's"
        )
