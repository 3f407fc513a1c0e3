"""The event pump: handlers change the state of a run and yield what changed; one place makes models and dispatches.

Each handler is a generator of ``Change`` objects: after every change it says which clients are free, and whether a
model may be due. ``_advance`` takes the change: it aggregates if the method is ready; otherwise the free clients get
the model. No handler calls another one that aggregates.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flwr.app import Message

from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import ACCEPTED, LOST_IN_A_ROW, MAX_MISSES
from strategies.clients.roster import by_reason, display_names, sized_by
from strategies.clients.weights import of_each
from strategies.events.dispatcher import FIRST
from strategies.events.event_stream import Arrival, Event, HoldExpired, IntervalElapsed, RefreshClients
from strategies.events.executors import Combined
from strategies.events.session import EventSession
from strategies.events.tasks import AvailabilityChanged, HeldReply, Recheck, Retry, Task
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError
from strategies.flower.errors import RunError
from strategies.flower.grids import Work
from strategies.timing.availability import NEVER
from strategies.updates.pipeline import Contribution, LocalModel, fault_of
from strategies.updates.safeguards import HOLD_TIMES

log = logging.getLogger("flwr.strategies")

RETRY_AFTER = 10.0  # task times until a dropped client is asked again
NOBODY = "no client is left: each was lost or failed"
WILL_DROP = (
    "clients go away while they work (the first: %s, task %d, at %g s): such tasks are lost, see lost-tasks"
)


class Change(NamedTuple):
    """What a handler has changed.

    Attributes
    ----------
    free : sequence of ClientState, optional
        The clients that the event freed; empty: a place may be free; None: nobody is asked to work.
    arrived : bool
        Whether a contribution has arrived, so that the method is asked whether it is ready.
    recheck : bool
        Whether the method is asked although no contribution has arrived.
    interval_over : bool
        Whether an interval between two aggregations is over.
    """

    free: Sequence[ClientState] | None = ()
    arrived: bool = False
    recheck: bool = False
    interval_over: bool = False


class EventPump:
    """Handles the events of a run without rounds.

    Parameters
    ----------
    session : EventSession
        The run.
    """

    def __init__(self, session: EventSession) -> None:
        self.session, self.strategy = session, session.strategy
        self._lost_in_a_row = self._refused_in_a_row = 0
        # Clients at fault in a masked sum, whose failure is handled next.
        self._not_in_sum: list[ClientState] = []

    # ---- The pump ----------------------------------------------------------------------------------------------

    def begin(self, *, resumed: bool) -> None:
        """Dispatch the first tasks, or those that were under way when an earlier run ended."""
        session, run = self.session, self.session.run
        goes_on = session.more_to_come()
        if resumed:
            self._advance(Change(session.dispatcher.resume(more=goes_on)))
        if goes_on and not run.should_stop():
            self.strategy.check(
                len(session.task_table.members.keys() | {client.index for client in run.clients})
            )
            self._advance(Change(session.dispatcher.add_clients(run.clients) or None))
            session.log_concurrency()
        session.reporter.stability.note_model(run.model, 0.0)

    def handle(self, event: Event) -> None:
        """Handle an event, and all that follows from it."""
        for change in self._changes(event):
            self._advance(change)

    def _advance(self, change: Change) -> None:
        """Make a model if one is due; otherwise send the model to free clients."""
        if self._model_is_due(change):
            self._aggregate()
        elif change.free is not None and self.session.more_to_come():
            self.session.dispatcher.dispatch(change.free)

    def _model_is_due(self, change: Change) -> bool:
        """Return True if the interval is over, or the method is ready, and contributions wait."""
        waiting = len(self.session.task_table.buffer)
        if change.interval_over:
            return waiting > 0  # an empty interval is no aggregation
        if change.arrived:
            return bool(self.strategy.ready(waiting))
        return (
            change.recheck
            and waiting > 0
            and self.session.more_to_come()
            and bool(self.strategy.ready(waiting))
        )

    def _aggregate(self) -> None:
        """θ^{n+1} = θ^n + η_g Σ d_i Δ_i over the contributions that wait; their clients get the new model.

        The weight d_i of a contribution, also of a late one, is decided by ``weigh``.
        """
        session, run, task_table = self.session, self.session.run, self.session.task_table
        taken = task_table.take_out(self.strategy.take_from_buffer(task_table.buffer))
        contributions = [contribution.aged(run.aggregations) for contribution in taken]
        combined = session.executor.combine(contributions, self._weights_of(contributions))
        if combined is None:  # the run is stopped
            return
        owners = [task_table.members[contribution.client.index] for contribution in combined.contributions]
        self._move(combined)
        # After the step, whose size follows from the same numbers of contributions as the weights.
        for member, weight in zip(owners, combined.weights, strict=True):
            session.contribution_weights.settle(member)
            task_table.count(member, weight)
        if combined.model is not None:
            run.result.arrays = run.layout.to_record(combined.model)
            run.model = run.layout.rounded(combined.model)
            session.reporter.stability.note_model(
                run.model, len(combined.contributions) / self.strategy.max_concurrency
            )
        session.dispatcher.take_model()
        task_table.interval_stats.take(combined.contributions, run.flower.weighted_by_key)
        run.aggregations += 1
        if self.strategy.observes_periods:
            session.contribution_weights.expire()
        owners += self._reject(combined)
        done = run.aggregations >= session.total
        if not done:
            session.dispatcher.dispatch(owners)
        session.report(last=done)

    def _weights_of(self, contributions: Sequence[Contribution]) -> list[float]:
        """Return the method's weights d_i, at most as large as the safeguards allow."""
        by_own_time = self.session.contribution_weights.by_own_time  # which has a bound of its own
        most = 0.0 if by_own_time else self.session.safeguards.max_weight
        given = self.strategy.weigh(contributions)
        if self.strategy.capabilities.discounts_staleness:
            clients = [contribution.client for contribution in contributions]
            of_each(f"{self.session.run.name}.weigh or discount", given, clients)
        return [min(weight, most) if most else weight for weight in given]

    def _move(self, combined: Combined) -> None:
        """Check the next model (D,), and put the average of the buffers into it."""
        session, model, weight = self.session, combined.model, combined.buffer_weight
        if model is None:
            return
        session.server_step.validated(model)
        if session.receiver.clip is None:  # averages of buffers would tell of the data
            lr = min(1.0, weight * self.strategy.buffer_lr()) if weight else 0.0
            combined.buffers.put_into(model, lr, session.run.model)

    # ---- What an event changes ---------------------------------------------------------------------------------

    def _changes(self, event: Event) -> Iterator[Change]:
        """Yield what an event changes, and what follows for clients that a masked sum had to leave out."""
        yield from self._on(event)
        while self._not_in_sum:
            yield from self._after_failure(self._not_in_sum.pop(0))

    def _on(self, event: Event) -> Iterator[Change]:
        match event:
            case Arrival(task, reply):
                yield from self._on_reply(task, reply)
            case Retry(member) | AvailabilityChanged(member) if (
                self.session.task_table.members.get(member.client.index) is not member
            ):
                return  # the client is forgotten
            case Retry(member):
                yield Change(self.session.dispatcher.retry(member) or None)
            case AvailabilityChanged(member):
                yield Change(self.session.dispatcher.turn(member) or None)
                yield from self._if_gone_for_good(member)
            case Recheck():
                yield Change(None, recheck=True)
            case HoldExpired():
                yield from self._release()
            case IntervalElapsed():
                self.session.contribution_weights.own_time.intervals += 1
                yield Change(None, interval_over=True)
            case RefreshClients():
                yield from self._refresh_clients()

    def _refresh_clients(self) -> Iterator[Change]:
        """Look up the connected clients; clients that are new, or back, are free."""
        yield from self._release()
        session, run, task_table = self.session, self.session.run, self.session.task_table
        clients = session.population.refresh(session.grid, session.train_config, wait=False)
        if clients is run.clients:
            return
        if run.clients and not clients and run.scheduler.real_time:
            log.warning("no client is connected, the run waits for one")
        come, roster = session.population.come(run.clients, clients), session.population.roster
        run.clients = clients
        refused = roster.refused.keys() & roster.former.keys()
        task_table.forget_nodes({node_id: roster.former[node_id] for node_id in refused})
        yield Change(session.dispatcher.add_clients([client for client, _ in come]) or None)
        # A client that was away is asked at once, not only when its next try is due.
        yield Change([task_table.members[client.index] for client, replaces in come if not replaces])

    def _on_reply(self, task: Task, reply: Message | Work | None) -> Iterator[Change]:
        """Check the reply to a task, or note that none comes; hold it back until usual norms are known."""
        session, task_table, scheduler = self.session, self.session.task_table, self.session.run.scheduler
        member = task_table.close(task)
        session.timeline.arrived(member.client.index, scheduler.now())
        if task.dropped_out:
            yield from self._on_lost(member)
            return
        try:
            local = session.executor.receive(task, reply)
        except ArraysMismatchError as error:
            self._note_failure(member, str(error), fault_of(reply))
            yield from self._after_failure(member)
            return
        assert reply is not None
        # Not before: a dropped client that is asked again, and fails again, would begin the count anew for ever.
        self._lost_in_a_row = 0
        if scheduler.real_time:
            session.contribution_weights.expire()
        was_dropped = member.dropped
        # Failures in masked sums count until the client is in one.
        if session.executor.counts_on_arrival or was_dropped:
            member.count_again(session.run.aggregations)
        if was_dropped:
            log.warning("%s answers again and counts again", member.client, extra=member.client.fields)
            task_table.changed([member])
        now = scheduler.now()
        member.add_task_time(now - task.sent)
        if not self._needs_more_norms() or now >= task_table.patient_until:
            yield from self._release()
            if session.more_to_come():
                yield self._on_update(task, local, reply)
            return
        session.safeguards.observe(local)
        task_table.held_replies.append(HeldReply(task, local, reply))
        task_table.wait(member, 1)
        yield from self._release()
        if task_table.held_replies:
            yield Change()  # its place, where there are places

    def _release(self) -> Iterator[Change]:
        """Take in the replies that were held back, once the usual norm is known or the wait is over."""
        session, task_table = self.session, self.session.task_table
        held_replies = task_table.held_replies
        if not held_replies:
            return
        if self._needs_more_norms():
            self._limit_hold()
            if session.run.scheduler.now() < task_table.patient_until:
                return
            log.warning(
                "only %d clients have answered: which updates are too long isn't known yet", len(held_replies)
            )
        while held_replies and session.more_to_come():
            first = held_replies.popleft()
            task_table.wait(first.task.member, -1)
            yield self._on_update(*first)

    def _limit_hold(self) -> None:
        """Set until when replies are held back: from now on ``HOLD_TIMES`` as long as the first one's task.

        Devices make their own times. So that one that answers at once can't end the wait before the others answer,
        the wait on devices begins when half of them have answered, and is so many times as long as half of them take.
        """
        scheduler, task_table = self.session.run.scheduler, self.session.task_table
        first = task_table.held_replies[0].task.member
        typical = task_table.half_time() if scheduler.real_time else first.latest
        if typical is not None and task_table.patient_until == NEVER:
            task_table.patient_until = scheduler.now() + HOLD_TIMES * typical
            task_table.queue.push(task_table.patient_until, -FIRST, HoldExpired())

    def _needs_more_norms(self) -> bool:
        """Return True if too few clients have answered to say which updates are too long."""
        session = self.session
        num_clients = len(session.task_table.active_clients)
        return session.safeguards.needs_more_norms(num_clients, session.run.buffers)

    def _on_update(self, task: Task, local: LocalModel, reply: Message | Work) -> Change:
        """Put a valid local model through the chain, and its contribution into the buffer."""
        session, run, task_table = self.session, self.session.run, self.session.task_table
        member = task.member
        metrics = reply.metrics if isinstance(reply, Work) else messages.metrics_of(reply)
        sized = sized_by(member.client, metrics, run.flower.weighted_by_key)
        if sized.num_examples != member.client.num_examples:
            member.client = sized
            task_table.resized(member)
        session.contribution_weights.importances()  # how long its update may be depends on the clients' sizes
        session.receiver.transforms()(local)
        task_table.interval_stats.clipped += local.bounded
        asked = [*task.extra_vectors, *([messages.STEPS] if task.steps else ())]
        staleness = run.aggregations - task.version
        contribution = session.receiver.contribution(local, reply, task.version, staleness, asked)
        session.contribution_weights.note_arrival(member)
        accepted = self.strategy.accept(contribution)
        too_often = accepted and not session.contribution_weights.rate_allows(member, contribution)
        accepted = accepted and not too_often
        if session.executor.counts_on_arrival or not accepted:
            outcome, size = ACCEPTED if accepted else messages.TOO_OLD, contribution.num_bytes
            session.client_stats[member.client.index].record(outcome, clipped=local.bounded, num_bytes=size)
            session.timeline.end(member.client.index, run.scheduler.now(), outcome)
        if too_often:
            task_table.interval_stats.discard(contribution)
            return Change([member])
        if not accepted:
            self._refuse(contribution)
            return Change([member])
        self._refused_in_a_row = 0
        if run.flower.train_metrics_aggr_fn is not None and isinstance(reply, Message):
            task_table.interval_stats.add_content(reply.content)
        task_table.add_to_buffer(contribution)
        task_table.buffer[-1] = self.strategy.on_contribution(contribution)
        session.executor.accepted(task)
        return Change([member], arrived=True)

    def _refuse(self, contribution: Contribution) -> None:
        """Note a contribution that the method doesn't accept; end the run if it accepts none."""
        task_table = self.session.task_table
        task_table.interval_stats.discard(contribution)
        self._refused_in_a_row += 1
        if self._refused_in_a_row > LOST_IN_A_ROW * len(task_table.members):
            raise RunError(
                f"the last {self._refused_in_a_row} contributions didn't count, one after the other: "
                f"{self.session.run.name}'s accept, and its is_fresh_enough, must be True of some"
            )

    # ---- Tasks without a contribution --------------------------------------------------------------------------

    def _on_lost(self, member: ClientState) -> Iterator[Change]:
        """Note a task that is lost because its client went away; the client continues when it is back."""
        session, task_table, client = self.session, self.session.task_table, member.client
        now = session.run.scheduler.now()
        task_table.interval_stats.failures += 1
        task_table.interval_stats.lost += 1
        session.client_stats[client.index].record(messages.LOST)
        session.timeline.end(client.index, now, messages.LOST)
        session.run.warn_once(WILL_DROP, client, member.tasks, now)
        member.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > LOST_IN_A_ROW * max(len(task_table.members), 1):
            others = " but those whose contributions wait" if task_table.buffer else ""
            raise RunError(
                f"the last {self._lost_in_a_row} tasks were lost, one after the other: no client{others} is there "
                "for as long as its task takes (availability, task_failure, time_scenario)"
            )
        yield Change([member])
        yield from self._if_gone_for_good(member)

    def _if_gone_for_good(self, member: ClientState) -> Iterator[Change]:
        """Ask for a model where a client has gone for good: a method may have waited for that one alone."""
        if member.is_available or self.session.task_table.busy(member):
            return
        scheduler = self.session.run.scheduler
        if scheduler.next_available(member.client, scheduler.now()) == NEVER:
            yield Change(None, recheck=True)

    def _note_failure(self, member: ClientState, reason: str, outcome: str) -> None:
        """Enter a task that failed, or had an invalid reply, in client_stats."""
        session, client, now = self.session, member.client, self.session.run.scheduler.now()
        session.task_table.interval_stats.failures += 1
        session.task_table.interval_stats.lost += outcome == messages.LOST
        session.run.note_failure(reason)
        member.misses += 1
        member.invalid_replies = (
            0 if outcome in (messages.LATE, messages.LOST) else member.invalid_replies + 1
        )
        session.client_stats[client.index].record(outcome)
        session.timeline.end(client.index, now, outcome)
        log.warning("client %s, task %d: %s", client.display_name, member.tasks, reason, extra=client.fields)

    def _after_failure(self, member: ClientState) -> Iterator[Change]:
        """Ask a client again after a failure; drop it after several failures in a row, and ask it again later."""
        session, task_table, scheduler = self.session, self.session.task_table, self.session.run.scheduler
        if not scheduler.real_time:
            # In virtual time nothing else refreshes the clients; a node may have left, or changed its id.
            yield from self._refresh_clients()
        if member.misses < MAX_MISSES:
            yield Change([member])
            return
        if not member.dropped:
            log.warning(
                "%s is dropped after %d misses in a row, the others share its weight",
                member.client,
                member.misses,
                extra=member.client.fields,
            )
            member.drop(session.run.aggregations)
            task_table.changed([member])
            yield from self._release()
            if not task_table.active_clients and not scheduler.real_time:
                raise session.run.no_progress_error(NOBODY)
        elif scheduler.real_time and session.hopeless():
            raise session.run.no_progress_error(NOBODY)
        pause = RETRY_AFTER * float(scheduler.times([member], task_table.members.values())[0])
        task_table.queue.push(scheduler.now() + pause, member.client.index, Retry(member))
        yield Change(recheck=True)  # the others don't wait for it

    def _reject(self, combined: Combined) -> list[ClientState]:
        """Note the clients that a masked sum leaves out; return those that aren't at fault."""
        session, run, free, reasons = self.session, self.session.run, list[ClientState](), dict[int, str]()
        for index, (reason, reply, outcome) in combined.missed.items():
            if (member := session.task_table.members.get(index)) is None:
                continue
            if outcome is None:
                self._note_failure(member, reason, messages.fault_of(reply))
                self._not_in_sum.append(member)
                continue
            session.task_table.interval_stats.failures += 1
            session.task_table.interval_stats.lost += outcome == messages.LOST
            session.client_stats[index].record(outcome)
            session.timeline.end(index, run.scheduler.now(), outcome)
            free.append(member)
            reasons[index] = reason
        for reason, clients in by_reason([member.client for member in free], reasons).items():
            left_out = display_names(clients)
            log.warning("aggregation %d: left out client %s: %s", run.aggregations, left_out, reason)
        return free
