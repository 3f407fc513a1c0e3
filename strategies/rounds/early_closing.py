"""Who is asked in rounds that may close early, and whose clients are still at work; what such rounds minimise.

See strategies/rounds/deadline.py for how a round closes, and strategies/rounds/timed_rounds.py for what comes of it.
"""

import logging
from collections.abc import Collection, Sequence
from math import inf
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from strategies import streams
from strategies.clients.roster import Client
from strategies.clients.weights import Draw, Weights
from strategies.core.config import SynchronousConfig
from strategies.core.lifecycle import State
from strategies.core.strategy import FederatedStrategy
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.exchange import looks
from strategies.rounds.deadline import NEXT, Closing, LateWork, closing, number_to_ask
from strategies.rounds.expected_participation import Played, Rules, play
from strategies.rounds.round import Early, Round
from strategies.rounds.round_scheme import RoundScheme
from strategies.updates.aggregation import MEAN
from strategies.updates.server_optimizer import FEDEXP

log = logging.getLogger("flwr.strategies")


def bytes_of(reply: Message | None) -> int:
    """Return the size in bytes of a reply's arrays; 0 if there are none."""
    return messages.total_bytes(reply) if reply is not None and reply.has_content() else 0


# A client that has been asked so often in rounds that were played through, and never counted, never does.
SEVERAL = 5


class EarlyClosing(RoundScheme):
    """Who is asked, and who isn't as they are at work."""

    late_work: LateWork
    #: Why an update of an earlier round can't count, for ``late = "next"``; "" if it can.
    of_one_round: ClassVar[str] = ""
    #: Whether a client's last update counts in every round, whoever is in time.
    counts_again: ClassVar[bool] = False
    _round: Round | None = None
    _foreseen: tuple[tuple[int, ...], Played | None] = (), None  # of which clients, and what
    _objective_said = False
    _bytes_late = 0  # of replies that came when their rounds were over, and aren't told yet

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        self._check_early()

    def _check_early(self) -> None:
        """Refuse what can't be where rounds close early."""
        config, scheme = self.config, self.participation.scheme
        given = f"over_select = {config.over_select:g}"
        if config.over_select and scheme not in ("uniform", "md", "flower"):
            raise ValueError(f"{given}: goes with participation uniform, md or flower, not with {scheme!r}")
        if config.over_select and type(self).select is not RoundScheme.select:
            raise ValueError(f"{given}: {type(self).__name__} chooses clients by itself (select)")
        if type(self).select is not RoundScheme.select and (scheme, config.fraction_train) != ("full", 1.0):
            # It may well read them, or ask its base.
            log.warning(
                "participation = %r, fraction_train = %g: %s chooses clients by itself (select), by these "
                "only where it reads them",
                config.participation,
                config.fraction_train,
                type(self).__name__,
            )
        if not self.closes_early:
            return
        if scheme == "paired":
            raise ValueError(
                f"round_deadline = {config.round_deadline:g}: participation = 'paired' needs the last client in "
                "every round, who may be at work on an earlier one; allowed are full, uniform, md, flower, fixed:…"
            )
        why = self.of_one_round
        if config.server_optimizer == FEDEXP:
            why = f"the step size of server_optimizer = {FEDEXP!r} is that of the updates of one round"
        if config.late == NEXT and why:
            raise ValueError(f"late = {NEXT!r}: {why}; allowed is drop")

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the scheme, the rule, or to ask more than needed."""
        super().check(num_clients)
        scheme, over = self.participation, self.config.over_select
        if over and scheme.scheme != "md" and scheme.sample_size(num_clients) == num_clients:
            raise ValueError(
                f"over_select = {over:g}: all {num_clients} clients are asked without it; fraction_train = "
                f"{scheme.fraction:g} must be less"
            )

    @property
    def closes_early(self) -> bool:
        """Whether a round may close before all replies are there."""
        return bool(self.config.round_deadline or self.config.over_select)

    @property
    def keeps_on_clients(self) -> bool:
        """Whether clients keep something from task to task, so that also work that is dropped is seen later."""
        own_models = self.personal and type(self).personal_model is FederatedStrategy.personal_model
        return own_models or self.config.compression != "none"

    # ---- Who is asked ----------------------------------------------------------------------------------------

    def _number_to_draw(self) -> int | None:
        """Return how many are drawn, by the clients that are there, at work or not; None: as the scheme says."""
        return self._to_ask(self._number_there()) if self.closes_early else None

    def _to_ask(self, there: int) -> int:
        return number_to_ask(self.participation.sample_size(there), self.config.over_select)

    def _number_there(self) -> int:
        """Return how many clients are there now by their availability, at work or not."""
        if self.pace.always:
            return len(self.clients)
        return max(sum(self.pace.there(client) for client in self.clients), 1)

    def _free(self, grid: Grid) -> list[Client]:
        """Return the clients that aren't at work on what is late."""
        tasks = self.late_work.tasks
        if not tasks:
            return self.clients
        if self.pace.waits:
            ids = {task.request.message_id: i for i, task in tasks.items() if task.request and not task.reply}
            for index, reply in next(looks(grid, ids, 0.0, self.stopped), []):
                tasks[index].reply = reply
        if self.config.late != NEXT:
            over = {task.client for task in self.late_work.due_by(self.pace.now())}
            self._bytes_late += sum(bytes_of(task.reply) for task in tasks.values())
            self.late_work.done(over | {i for i, task in tasks.items() if task.reply})
        return [client for client in self.clients if client.index not in tasks]

    def _drawn(
        self, free: Sequence[Client], server_round: int
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Return who of the clients that are free takes part in a round, and their d_i; maybe nobody."""
        fixed, late = set(self.participation.fixed), self.late_work.tasks.keys()
        own = type(self).select is not RoundScheme.select
        if not free or (not own and fixed & late and not fixed & {client.index for client in free}):
            by_replies = any(task.weight is None for task in self.late_work.tasks.values())
            return [], None if by_replies else []
        return self.select(free, self._lots(server_round))

    def _lots(self, server_round: int) -> np.random.Generator:
        """Return the stream that a round's participants are drawn from."""
        return streams.generator(self.config.seed, "participants", server_round)

    def _early(
        self, participants: Sequence[Client], weights: Sequence[float] | None, server_round: int
    ) -> Early | None:
        """Return what a round needs to close early; None if it doesn't."""
        if not self.closes_early:
            return None
        indices = [client.index for client in participants]
        there = self._number_there()
        worth = dict(zip(indices, self._replies_worth(weights or [1.0] * len(indices), there), strict=True))
        due = self._due(participants, server_round)
        return Early(self.pace.now(), self._needed(there), worth, due, {}, {}, share=self._free_share())

    def _due(self, participants: Sequence[Client], server_round: int) -> dict[int, float]:
        """Return when each client's reply comes, or its client goes, by its index; nothing in real time."""
        foretold = {client.index: self.pace.foretold(client, server_round) for client in participants}
        return {index: time for index, time in foretold.items() if time is not None}

    def _free_share(self) -> float:
        """Return Σ p_i over the clients that were free, of all that are there: their d_i are by those alone."""
        if not self.late_work.tasks:
            return 1.0
        late = self.late_work.tasks
        here = [client for client in self.clients if client.index in late or self.pace.there(client)]
        p = self._importances(here)
        return float(sum(w for client, w in zip(here, p, strict=True) if client.index not in late))

    def _needed(self, there: int) -> float:
        """Return L, the replies that close a round when so many clients are there."""
        return self.participation.sample_size(there) if self.config.over_select else inf

    def _replies_worth(self, weights: Sequence[float], there: int) -> list[int]:
        """Return for how many of L each reply counts: where a client may be drawn twice, d_i is counts / draws."""
        if self.participation.scheme != "md" or not self.closes_early:
            return [1] * len(weights)
        return [round(weight * self._to_ask(there)) for weight in weights]

    def _plan(self, early: Early, failed: Collection[int] = ()) -> Closing:
        """Return how a round closes in virtual time, given whose replies aren't valid."""
        return closing(
            early.due,
            early.began,
            deadline=self.config.round_deadline,
            needed=early.needed,
            worth=early.worth,
            failed=failed,
            busy=[task.due for task in self.late_work.tasks.values()] if self._own_loop else (),
        )

    # ---- What is minimised -----------------------------------------------------------------------------------

    def _expected_weights(self, p: Weights) -> Weights | None:
        expected = super()._expected_weights(p)
        if not self.closes_early or self.counts_again or expected is None:
            return expected
        foreseen = self._foreseen_shares()  # of those that are there
        return foreseen if foreseen is not None and len(foreseen) == len(p) else None

    def _foreseen_shares(self) -> Weights | None:
        """Return q_i (C,); None where nobody can know, or so many clients are that it would take too long."""
        played = self._played()
        return played.shares if played is not None and played.sure else None

    def _played(self) -> Played | None:
        """Return what rounds of the clients that are there come to; None where nobody can know."""
        if not self.closes_early or type(self).select is not RoundScheme.select or not self.clients:
            return None
        sized = self.config.client_weights != "samples" or all(c.described for c in self.clients)
        key = tuple(client.index for client in self.clients)
        if self.pace.weighs and not self.loads.known(self._sends_companions):
            return None
        if sized and self._foreseen[0] != key:
            p, config = self._importances(self.clients), self.config
            rules = Rules(config.round_deadline, self._needed, config.late, self._worth_of, self._may_draw)
            played = self.pace.foresee(lambda schedule: play(schedule, self.clients, p, self._draw, rules))
            self._foreseen = key, played
        return self._foreseen[1] if sized else None

    @property
    def _sends_companions(self) -> bool:
        own, base = type(self), FederatedStrategy
        return own.companions is not base.companions or own.outgoing is not base.outgoing

    def _worth_of(self, draw: Draw, there: int) -> list[int]:
        return self._replies_worth(draw.weights, there)

    def _may_draw(self, place: int) -> bool:
        return self.participation.may_draw(self.clients[place].index)

    def _draw(self, places: Sequence[int], p: Weights, server_round: int, there: int) -> Draw:
        """Draw as ``select`` does."""
        free, scheme = [self.clients[place] for place in places], self.participation
        if scheme.scheme == "fixed":
            if not {client.index for client in free} & set(scheme.fixed):
                return Draw((), ())
            scheme = self._participation_among(free)
        return scheme.draw(p, self._lots(server_round), self._to_ask(there))

    @property
    def _tells_shares(self) -> bool:
        """Whether d_i says how much a client counts: not where a method or a robust rule puts updates together."""
        weighed = self.config.aggregation_rule == MEAN and not self.counts_again
        return weighed and (self.by_weights or not self._wants_all)

    def weights_distance(self, q: Weights) -> float:
        """Return ½ Σ |q_i − p_i|: how far the objective that is minimised is from the federated one."""
        return 0.5 * float(np.abs(q - self._importances(self.clients)).sum())

    def _say_objective(self) -> None:
        """Say at the beginning which objective the run minimises, where that can be known, and who never counts.

        Raises
        ------
        RunError
            If nobody ever counts, or a method waits for one who never does.
        """
        if not self.closes_early or self._objective_said or (played := self._played()) is None:
            return
        self._objective_said = True
        never = [
            c
            for c, asked, counted in zip(self.clients, played.asked, played.counted, strict=True)
            if asked >= SEVERAL and not counted
        ]
        rules = f"round_deadline = {self.config.round_deadline:g}, over_select = {self.config.over_select:g}"
        if not played.counted.any() or (never and self.counts_again):
            waits = f"{type(self).__name__} waits for {never[0]}, which is never" if never else ""
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
                len(self.clients),
                named,
            )
        if self._tells_shares and played.sure:
            self._say_distance(played.shares, "this run minimises")
        elif self._tells_shares:
            log.warning(
                "rounds close before slow clients are done, so that fast ones count more: how much more, of "
                "so many clients, the end says"
            )

    def _say_observed(self) -> None:
        """Say at the end who counted how much, where that couldn't be known before."""
        if not self.closes_early or not self.clients or self.stopped() or self._foreseen_shares() is not None:
            return
        weights = self.accounts.column("weight", max(client.index for client in self.clients) + 1)
        q = np.array([weights[client.index] for client in self.clients])
        if q.sum() > 0 and self._tells_shares:
            self._say_distance(q / q.sum(), "this run counted its clients by")

    def _say_distance(self, q: Weights, what: str) -> None:
        p = self._importances(self.clients)
        if (distance := self.weights_distance(q)) > 1e-6:
            most = int(np.argmax(q - p))
            log.warning(
                "%s Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f (½ Σ |q_i − p_i|), as rounds "
                "close before slow clients are done; %s counts most in excess, %.4f for %.4f",
                what,
                distance,
                self.clients[most],
                q[most],
                p[most],
            )

    # ---- Its loop, and going on where an earlier run was -----------------------------------------------------

    def _check_loop(self) -> None:
        """Refuse a loop around the strategy where late work would need this object's own."""
        if not self.closes_early or self._own_loop:
            return
        config = self.config
        if config.late == NEXT or self.pace.waits:
            given = f"round_deadline = {config.round_deadline:g}, over_select = {config.over_select:g}"
            raise RunError(
                f"{f'late = {NEXT!r}' if config.late == NEXT else given}: a loop around the strategy, such as that "
                "of Flower's differential-privacy wrappers, waits for all replies of a round before any counts; call "
                "the strategy's own start()"
            )

    def at_work(self) -> list[int]:
        """Add those that are at work on what is late."""
        late = (task.client for task in list(self.late_work.tasks.values()) if task.reply is None)
        return list({*super().at_work(), *late})

    def _evaluating(self) -> list[Client]:
        """Leave out, in real time, who is at work: nobody waits for them."""
        if not self.pace.waits:
            return self.clients
        return [client for client in self.clients if client.index not in self.late_work.tasks]

    def state(self) -> State:
        """Add late work that is under way."""
        return super().state() | self.late_work.state()

    def restore(self, state: State) -> None:
        """Take up late work that was under way, too."""
        super().restore(state)
        self.late_work = LateWork.restored(state)

    def reset(self) -> None:
        """Forget late work."""
        super().reset()
        self.late_work = LateWork()
        self._foreseen, self._objective_said = ((), None), False

    def _take_up_late_work(self) -> None:
        """Say what changes nothing. Go on with late work, in a run that goes on; in real time it is lost."""
        config, tasks = self.config, self.late_work.tasks
        if config.late == NEXT and not self.closes_early:
            log.warning(
                "late = %r changes nothing: without round_deadline or over_select nothing is late", NEXT
            )
        if self.pace.waits and config.round_deadline > self.timeout:
            log.warning(
                "round_deadline = %g changes nothing: no round waits longer than timeout = %g s",
                config.round_deadline,
                self.timeout,
            )
        if tasks and self.pace.waits:
            log.warning("late work of %d clients was under way when the run ended: it is lost", len(tasks))
            self.late_work = LateWork()
            return
        for task in tasks.values():
            if self.config.late == NEXT:
                self.timeline.begin(task.client, task.began, task.due, task.parts)
