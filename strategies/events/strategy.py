"""The event loop of the asynchronous strategies.

Fraboni et al. 2023, algorithm 1 and eq. 6. Clients work at their own speed on the model they were sent:

    θ^{n+1} = θ^n + η_g Σ_{i ∈ S_n} d_i Δ_i(ρ_i(n)),    Δ_i = trained model − the model that client was *sent*

S_n are the clients whose work arrived since the last aggregation; the new model goes only to them. A scheme says
*when* to aggregate and with *which* d_i, and is a subclass with two methods. For the weight it tells how many
aggregations pass from one contribution of client i to the next, P_i: then d_i = p_i P_i makes every client count
p_i in the long run ("time-based"), while the same d for all ("identical") favours the fast. It may also say what
becomes of work that is late, and whom to hand the model.

What happens next, in virtual or in real time, strategies/timing/scheduler.py knows; who works on what,
strategies/events/tasks.py;
who is handed the model, strategies/events/dispatch.py.

Nothing stalls the loop: every task has a deadline and its message a time to live. An error, a silent loss or an
invalid model is a miss, named in the log; after ``MAX_MISSES`` in a row the client is dropped from p, and asked again
later; where nobody ever does better, the run ends. A late reply to a task that was given up is never pulled, and none
is counted twice.
"""

import logging

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.clients.accounts import ACCEPTED
from strategies.clients.roster import sized_by
from strategies.core.reporting import EvaluateFn
from strategies.events.dispatch import FIRST, HandingOut
from strategies.events.evaluation import EvaluationUnderWay
from strategies.events.scheme import Scheme
from strategies.events.statistics import Tally
from strategies.events.tasks import Held, Ledger, Member, Task
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError
from strategies.flower.direct import Work
from strategies.flower.errors import RunError
from strategies.flower.exchange import Mail
from strategies.flower.packing import packing
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Arrival, Event, Look, PatienceOver, Retry, Tick, Turn
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Contribution, Local, chain, fault_of
from strategies.updates.safeguards import PATIENCE

log = logging.getLogger("flwr.strategies")

MAX_MISSES = 3  # in a row: the client is dropped from p
RETRY_AFTER = 10.0  # task times until a dropped client is asked again
LOST_IN_A_ROW = 200  # tasks for each client: then it is certain that none will be done
NOBODY = "no client is left: each was lost or failed"
NO_MODEL = "the run is over, at %g s, before its first model was made: %d contributions wait for it"
STUCK = (
    "ready(%d) is False, and nobody is at work: %d contributions wait, and %d of %d clients count; %s must be "
    "content with len(self.ledger.counting)"
)
LOSES = (
    "clients go away while they work (the first: %s, task %d, at %g s): such tasks are lost, see lost-tasks"
)


class AsynchronousStrategy(HandingOut):
    """The event loop; a scheme fills in ``ready`` or ``interval``, and more where it has to.

    The parameters are those of ``strategies.core.strategy.FederatedStrategy``; ``num_rounds`` of ``start`` are
    aggregations.
    """

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
        """Run until ``num_rounds`` aggregations are done, or the time budget is spent.

        Parameters
        ----------
        timeout : float
            Real seconds after which a task is given up; also the time to live of its message. In real time a task is
            given up earlier, after five times the client's usual or last time, but not within a minute
            (``strategies.timing.scheduler.SHORTEST_DEADLINE``); of a client that is dropped, each later.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.

        Returns
        -------
        Result
            The final model, and the metrics by aggregation.
        """
        if type(self).ready is Scheme.ready and self.interval is None:
            raise RunError(f"{type(self).__name__} makes no model: it fills in neither ready nor interval")
        grid = packing(grid)
        self._mail, self.total = Mail(grid, timeout, self.stopped), num_rounds
        self._evaluate_fn = evaluate_fn
        self._train = ConfigRecord() if train_config is None else train_config
        self._evaluate = self._train if evaluate_config is None else evaluate_config
        with self._running(grid, timeout):
            return self._run(grid, initial_arrays, num_rounds)

    def _run(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int) -> Result:
        state = self._begin(initial_arrays)
        self.ledger, self._check = Ledger(works_on=self.works_on), self._reads(Untrained(self._untrained_at))
        self._lost_in_a_row = 0
        self._evaluation = EvaluationUnderWay(self._mail, self._take_evaluation)
        self._told, self._told_by_client = {}, {}
        self._over = False
        working = self.aggregations < num_rounds
        if working:
            self.clients = self._take_part(grid, self._train)
        self._working = self._works_without_messages(grid)
        if state is None:
            self.pace.begin()
        else:
            self._take_up(state)
        if working and not self.stopped():
            self.check(len(self.ledger.members.keys() | {client.index for client in self.clients}))
            self._welcome()
        if state is None:
            self._report(0, self._result, self._evaluate_fn, MetricRecord(), evaluate=True)
        events = self.pace.events(self.ledger, self._mail, self.interval)
        while self.aggregations < num_rounds and not self.stopped():
            self._check_waiting()
            if (event := next(events, None)) is None:
                if not self.aggregations and not self.stopped():
                    waiting = len(self.ledger.buffer) + len(self.ledger.held)
                    log.warning(NO_MODEL, self.pace.now(), waiting)
                break
            self._handle(event)
        self._over = True
        if self.ledger.since.unevaluated:
            self._report_evaluation(self.ledger.since.metrics())
        self._check_worked(initial_arrays)
        self._log_objective()
        return self._result

    def _check_waiting(self) -> None:
        """Raise RunError where a scheme waits for more than there is; in real time, where devices may come, warn."""
        ledger, pace = self.ledger, self.pace
        if not ledger.buffer or self.interval is not None or ledger.held:
            return
        if any(not task.member.dropped for task in ledger.tasks.values()):
            return
        goes_on = (pace.budget or self._may_come()) if len(ledger.agenda) else not pace.always
        if (self.works_on or not ledger.counting) if pace.waits else goes_on:  # more comes, or an end
            return
        waiting = len(ledger.buffer)
        values = waiting, waiting, len(ledger.counting), len(ledger.members), type(self).__name__
        if not pace.waits:
            raise RunError(STUCK % values)
        self._say_once(f"{STUCK}. The run waits for another client", *values)

    def _may_come(self) -> bool:
        """Tell whether work may come of somebody's whose doesn't wait; whoever is dropped is asked once more."""
        members = self.ledger.members.values()
        return any(m.misses <= MAX_MISSES if m.dropped else not m.waiting or self.works_on for m in members)

    def _handle(self, event: Event) -> None:
        match event:
            case Arrival(task, reply):
                self._arrive(task, reply)
            case Retry(member):
                self._retry(member)
            case Turn(member):
                self._turn(member)
                self._go_on_without(member)
            case PatienceOver():
                self._release()
            case Tick():
                if self.ledger.buffer:  # an interval with nothing in it is no aggregation
                    self._aggregate()
            case Look():
                self._look()

    # ---- Tasks ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look who is there; hand the model to those who are new, or back."""
        self._release()
        clients = self._take_part(self._mail.grid, self._train, wait=False)
        if clients is not self.clients:
            before = {client.index for client in self.clients}
            if before and not clients and self.pace.waits:
                log.warning("no client is connected, the run waits for one")
            self.clients = clients
            self._welcome()
            # Who was away is asked at once, not only when its next try is due.
            self._offer([self.ledger.members[c.index] for c in clients if c.index not in before])

    def _arrive(self, task: Task, reply: Message | Work | None) -> None:
        """Take a reply, or its absence, into account."""
        member, ledger = self.ledger.close(task), self.ledger
        self.timeline.arrived(member.client.index, self.pace.now())
        if task.gone:
            self._lose(member)
            return
        self._lost_in_a_row = 0
        try:
            local = self._check(member.client, reply, task.base)
        except ArraysMismatchError as error:
            self._miss(member, str(error), fault_of(reply))
            return
        assert reply is not None
        if self.pace.learns:
            ledger.standing = None
        if member.dropped:
            log.warning("%s answers again and counts again", member.client, extra=member.client.fields)
            ledger.changed()
        member.count_again(self.aggregations)
        now = self.pace.now()
        member.took(now - task.sent)
        if (
            self.safeguards.learns_norms
            and not self.safeguards.norms.knows_enough(len(ledger.counting))
            and now < ledger.patient_until
        ):
            if not ledger.held:
                ledger.patient_until = now + PATIENCE * (now - task.sent)
                ledger.agenda.push(ledger.patient_until, -FIRST, PatienceOver())
            self.safeguards.norms.see(local)
            ledger.held.append(Held(task, local, reply))
            ledger.wait(member, 1)
            self._release()
            if ledger.held:
                self._offer([])  # its place, where there are places
        else:
            self._release()
            if self.aggregations < self.total:
                self._take_in(task, local, reply)

    def _release(self) -> None:
        """Take in what was held back until it is known which norms are usual, or until that takes too long."""
        ledger, held = self.ledger, self.ledger.held
        if not held:
            return
        enough = self.safeguards.norms.knows_enough(len(ledger.counting))
        if enough or self.pace.now() >= ledger.patient_until:
            if not enough:
                log.warning(
                    "only %d clients have answered: which updates are too long isn't known yet",
                    len(self.safeguards.norms.norms),
                )
            while held and self.aggregations < self.total:
                first = held.popleft()
                ledger.wait(first.task.member, -1)
                self._take_in(*first)

    def _take_in(self, task: Task, local: Local, reply: Message | Work) -> None:
        """Let a valid local model go through the chain, and into the buffer."""
        member, ledger = task.member, self.ledger
        chain(*self._links())(local)
        ledger.since.clipped += local.bounded
        staleness = self.aggregations - task.version
        contribution = Contribution.of(local, reply, task.version, staleness, self.flower.arrayrecord_key)
        if isinstance(reply, Message):
            self._check_applied(contribution, task.companions)
        told = sized_by(member.client, contribution.metrics, self.flower.weighted_by_key)
        if told.num_examples != member.client.num_examples:
            member.client = told
            ledger.resized()
        accepted = self.accept(contribution)
        outcome = ACCEPTED if accepted else messages.TOO_OLD
        size = contribution.num_bytes
        self.accounts[member.client.index].note(outcome, clipped=local.bounded, num_bytes=size)
        self.timeline.end(member.client.index, self.pace.now(), outcome)
        if not accepted:
            ledger.since.discard(contribution)
            self._offer([member])
            return
        if self.flower.train_metrics_aggr_fn is not None and isinstance(reply, Message):
            ledger.since.keep(reply.content)
        ledger.keep(contribution)
        if self.ready(len(ledger.buffer)):
            self._aggregate()
        else:
            self._offer([member])

    def _lose(self, member: Member) -> None:
        """Take into account that a client went away while it worked: no fault of its, it goes on when it is there."""
        ledger, client = self.ledger, member.client
        ledger.since.failures += 1
        ledger.since.lost += 1
        self.accounts[client.index].note(messages.LOST)
        self.timeline.end(client.index, self.pace.now(), messages.LOST)
        self._say_once(LOSES, client, member.tasks, self.pace.now())
        self._lost_in_a_row += 1
        if self._lost_in_a_row > LOST_IN_A_ROW * max(len(ledger.members), 1):
            raise RunError(
                f"the last {self._lost_in_a_row} tasks were lost, one after the other: no client is there for as "
                "long as its task takes (availability, task_failure, time_scenario)"
            )
        self._offer([member])
        self._go_on_without(member)

    def _go_on_without(self, member: Member) -> None:
        """Ask for a model where a client has gone for good: a scheme may have waited for that one alone."""
        if member.there or self.ledger.busy(member):
            return
        if self.pace.comes(member.client, self.pace.now()) == NEVER and self._is_ready():
            self._aggregate()

    def _is_ready(self) -> bool:
        """Tell whether what waits is to be a model, though nothing has come."""
        ledger = self.ledger
        return bool(ledger.buffer) and self.aggregations < self.total and self.ready(len(ledger.buffer))

    def _miss(self, member: Member, reason: str, outcome: str) -> None:
        ledger, client = self.ledger, member.client
        ledger.since.failures += 1
        self._any_missed, self._why = True, reason
        member.misses += 1
        member.unfit = 0 if outcome == messages.LATE else member.unfit + 1
        self.accounts[client.index].note(outcome)
        self.timeline.end(client.index, self.pace.now(), outcome)
        log.warning("client %s, task %d: %s", client.located, member.tasks, reason, extra=client.fields)
        if not self.pace.waits:
            self._look()  # nobody else does: a miss is the sign that a node may be gone, or back under a new id
        if member.misses < MAX_MISSES:
            self._offer([member])
            return
        if not member.dropped:
            log.warning(
                "%s is dropped after %d misses in a row, the others share its weight",
                client,
                member.misses,
                extra=client.fields,
            )
            member.drop(self.aggregations)
            ledger.changed()
            self._release()
            if not ledger.counting and not self.pace.waits:
                raise self.given_up(NOBODY)
        elif self.pace.waits and self._hopeless():
            raise self.given_up(NOBODY)
        pause = RETRY_AFTER * float(self.pace.times([member], ledger)[0])
        ledger.agenda.push(self.pace.now() + pause, client.index, member)
        if self._is_ready():
            self._aggregate()  # the others don't wait for it
        elif self.aggregations < self.total:
            self._offer([])

    def _hopeless(self) -> bool:
        """Tell whether nobody's work was ever of use, and all who are connected answered in vain when asked again.

        An app or a model that fails everywhere won't be well by itself. Whoever is at work may do better, but that
        is waited for a while only: of many clients, one always is.
        """
        busy, members = self.ledger.busy, self.ledger.members
        if not self.clients or any(member.answers for member in members.values()):
            return False
        connected = (members[client.index] for client in self.clients)
        return all(m.unfit > (2 * MAX_MISSES if busy(m) else MAX_MISSES) for m in connected)

    # ---- Aggregation -------------------------------------------------------------------------------------------

    def _aggregate(self) -> None:
        """θ^{n+1} = θ^n + η_g Σ d_i Δ_i over what has arrived, in client order; those clients get the new model."""
        ledger, contributions = self.ledger, self.ledger.take_buffer()
        owners = [ledger.members[contribution.client.index] for contribution in contributions]
        most = self.safeguards.heaviest
        weights = [min(weight, most) if most else weight for weight in self.weigh(contributions)]
        apart = Untrained(self._untrained_at)
        for member, contribution, weight in zip(owners, contributions, weights, strict=True):
            ledger.count(member, weight)
            apart.add(weight, contribution.untrained)
        moved = self._sound(self.aggregate(self.model, contributions, weights))
        apart.put_into(moved, min(1.0, apart.weight * self.untrained_lr()), self.model)
        self._result.arrays = self._layout.to_record(moved)
        self._take_model(self._layout.rounded(moved))
        ledger.since.take(contributions, self.flower.weighted_by_key)
        self.aggregations += 1
        if self.observes_periods:
            ledger.standing = None
        done = self.aggregations >= self.total
        if not done:
            self._offer(owners)
        if done or self._is_due():
            self._report_evaluation(ledger.since.metrics())
        else:
            self._report(self.aggregations, self._result, None, MetricRecord(), evaluate=False)

    def _is_due(self) -> bool:
        """Tell whether to evaluate, after an aggregation."""
        if every := self.config.eval_every:
            return self.aggregations % every == 0
        return len(self.ledger.since.staleness) >= len(self.ledger.counting)

    def _report_evaluation(self, metrics: MetricRecord) -> None:
        """Report the model with an evaluation; ``metrics`` are those since the last one."""
        function, contents = self.flower.train_metrics_aggr_fn, self.ledger.since.contents
        if function is not None and contents:
            metrics = MetricRecord({**metrics, **function(contents, self.flower.weighted_by_key)})
        self.ledger.since = Tally()
        metrics["weights-distance"] = self.weights_distance()
        clients = self.shares_of_clients()
        result, grid, number = self._result, self._mail.grid, self.aggregations
        result.train_metrics_clientapp[number] = metrics
        metrics = self._evaluate_on_clients(number, result, self._evaluate, grid, metrics)
        self._report(number, result, self._evaluate_fn, metrics, evaluate=True, clients=clients)
