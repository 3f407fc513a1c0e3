"""The objective of rounds in which not all whose work is asked for count: because rounds close early, or tasks fail.

It is computed beforehand in virtual time, and observed in real time.
"""

import logging
from collections.abc import Sequence

import numpy as np

from strategies.clients.accounts import Accounts
from strategies.clients.weights import Weights
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.population import Population
from strategies.core.run_state import RunState
from strategies.flower.errors import RunError
from strategies.rounds.deadline import NEXT, RoundSize
from strategies.rounds.expected_participation import Played, Rules, play
from strategies.rounds.participation import Draw
from strategies.rounds.selection import Selection

log = logging.getLogger("flwr.strategies")

# A client that was asked this many times in the rounds played in advance, and never counted, is taken never to count.
SEVERAL = 5
SAID_AT_THE_END = (
    "rounds close before slow clients are done, so that fast ones count more: how much more, of so many clients, is "
    "logged at the end of the run"
)


class RoundObjective:
    """The clients' shares q_i of the objective, where some are in time, or done, more often than others."""

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        population: Population,
        selection: Selection,
        size: RoundSize,
        accounts: Accounts,
        capabilities: Capabilities,
    ) -> None:
        self._config, self._run, self._population, self._selection = config, run, population, selection
        self._size, self._accounts, self._capabilities = size, accounts, capabilities
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._foreseen: tuple[tuple[int, ...], Played | None] = (), None  # of which clients, and what
        self._said = False

    def shares(self) -> Weights | None:
        """Return q_i (C,); None if it can't be known, or would take too long to compute for this many clients."""
        played = self._played()
        return played.shares if played is not None and played.sure else None

    def distance(self, q: Weights) -> float:
        """Return ½ Σ |q_i − p_i|, the distance of the shares from the importances."""
        return 0.5 * float(np.abs(q - self._population.importances(self._run.clients)).sum())

    def log_beforehand(self) -> None:
        """Log once the objective of the run, where it can be known, and the clients that never count.

        Raises
        ------
        RunError
            If no client ever counts, or a method waits for one that never does.
        """
        if self._said or (played := self._played()) is None:
            return
        self._said = True
        shares = self._selection.weights_say_shares
        if not played.enough:
            if shares:
                log.warning(SAID_AT_THE_END)
            return
        clients, config = self._run.clients, self._config
        never = [
            c
            for c, asked, counted in zip(clients, played.asked, played.counted, strict=True)
            if asked >= SEVERAL and not counted
        ]
        rules = f"round_deadline = {config.round_deadline:g}, over_select = {config.over_select:g}"
        if not played.counted.any() or (never and self._capabilities.counts_again):
            waits = f"{self._run.name} waits for {never[0]}, which is never" if never else ""
            who = waits if played.counted.any() else "no client is ever"
            raise RunError(
                f"{rules}: {who} done when a round closes; allowed are a later deadline, or late = {NEXT!r}"
            )
        if never:
            named = ", ".join(str(client.index) for client in never[:10]) + ", …" * (len(never) > 10)
            log.warning(
                "%s: %d of %d clients never count, as they are always late: %s",
                rules,
                len(never),
                len(clients),
                named,
            )
        if shares and played.sure:
            self._log_distance(played.shares, "this run minimises")
        elif shares:
            log.warning(SAID_AT_THE_END)

    def log_observed(self) -> None:
        """Log the observed weights of the clients, where they couldn't be known before."""
        clients = self._run.clients
        if not clients or self._run.stopped() or self.shares() is not None:
            return
        weights = self._accounts.column("weight", max(client.index for client in clients) + 1)
        q = np.array([weights[client.index] for client in clients])
        if q.sum() > 0 and self._selection.weights_say_shares:
            self._log_distance(q / q.sum(), "this run counted its clients by")

    def _log_distance(self, q: Weights, what: str) -> None:
        p = self._population.importances(self._run.clients)
        if (distance := self.distance(q)) > 1e-6:
            most = int(np.argmax(q - p))
            log.warning(
                "%s Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f (½ Σ |q_i − p_i|), as rounds "
                "close before slow clients are done; %s counts most in excess, %.4f for %.4f",
                what,
                distance,
                self._run.clients[most],
                q[most],
                p[most],
            )

    def _played(self) -> Played | None:
        """Return the simulated rounds of the connected clients; None if their shares can't be known."""
        run, config, clients = self._run, self._config, self._run.clients
        if self._capabilities.chooses_clients or not clients:
            return None
        key = tuple(client.index for client in clients)
        if run.pace.weighs and not run.pace.loads.known(self._capabilities.sends_beside_model):
            return None
        if not self._population.sizes_are_known:
            return None
        if self._foreseen[0] != key:
            p, size = self._population.importances(clients), self._size
            rules = Rules(config.round_deadline, size.needed, config.late, self._worth, self._may_draw)
            played = run.pace.foresee(lambda schedule: play(schedule, clients, p, self._draw, rules))
            self._foreseen = key, played
        return self._foreseen[1]

    def _worth(self, draw: Draw, there: int) -> list[int]:
        return self._size.worth(draw.weights, there)

    def _may_draw(self, place: int) -> bool:
        return self._selection.scheme.may_draw(self._run.clients[place].index)

    def _draw(self, places: Sequence[int], p: Weights, server_round: int, there: int) -> Draw:
        """Draw by the participation scheme among the clients at ``places``."""
        free, scheme = [self._run.clients[place] for place in places], self._selection.scheme
        if scheme.scheme == "fixed":
            if not {client.index for client in free} & set(scheme.fixed):
                return Draw((), ())
            scheme = self._selection.among(free)
        return scheme.draw(p, self._selection.lots(server_round), self._size.to_ask(there))
