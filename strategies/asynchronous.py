"""The event loop of the asynchronous strategies.

papers/002_840aee1ee8a82ff9.txt, algorithm 1 and eq. 6. Clients work at their own speed on the model they were sent:

    θ^{n+1} = θ^n + η_g Σ_{i ∈ S_n} d_i Δ_i(ρ_i(n)),    Δ_i = trained model − the model that client was *sent*

S_n are the clients whose work arrived since the last aggregation; the new model goes only to them. A scheme says
*when* to aggregate and with *which* d_i, and is a subclass with two methods. For the weight it tells how many
aggregations pass from one contribution of client i to the next, P_i: then d_i = p_i P_i makes every client count
p_i in the long run ("time-based"), while the same d for all ("identical") favours the fast.

Two clocks. In virtual time arrivals follow from the time scenario alone: a task is handed out as soon as it is
known, so that all workers stay busy, and the clock jumps to the next arrival that is due and waits for that one
reply. Due times within 1e-9 s are equal, and equal ones are taken in client order. In real time, replies count
when they come, and τ_i is the running mean of what was observed.

Nothing stalls the loop: every task has a deadline and its message a time to live. An error, a silent loss or an
invalid model is a miss, named in the log; after ``MAX_MISSES`` in a row the client is dropped from p, and asked again
later. A late reply to a task that was given up is never pulled, and none is counted twice.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from strategies import messages
from strategies.arrays import ArraysMismatchError, Layout, clip_update
from strategies.base import EvaluateFn, FederatedStrategy, State, StrategyConfig, mean_and_spread
from strategies.clock import RESOLUTION, WallClock
from strategies.exchange import collect
from strategies.roster import Client
from strategies.tasks import Agenda, Contribution, Member, Standing, Tally, Task

log = logging.getLogger("flwr.strategies")

Times = NDArray[np.float64]

MAX_MISSES = 3  # in a row: the client is dropped from p
RETRY_AFTER = 10.0  # task times until a dropped client is asked again
REFRESH_EVERY = 5.0  # real seconds between two looks at who is connected
SHORTEST_DEADLINE = 60.0  # real seconds that a task is given at least, when ``timeout`` allows
KEPT = ("tasks", "misses", "dropped", "contributions", "weight", "observed")  # of a member, by a resumed run
ABSENT = 0  # node id of a client of a resumed run that isn't there
SHORTEST_POLL, LONGEST_POLL = 0.005, 0.5  # real seconds between two looks for replies


@dataclass(frozen=True)
class AsynchronousConfig(StrategyConfig):
    """What every asynchronous strategy can be told.

    Parameters
    ----------
    aggregation_weights : str
        ``time-based`` (unbiased) or ``identical``.
    """

    aggregation_weights: str = "time-based"

    def __post_init__(self) -> None:
        if self.aggregation_weights not in ("time-based", "identical"):
            raise ValueError(
                f"aggregation-weights = {self.aggregation_weights!r}: allowed are time-based, identical"
            )


class AsynchronousStrategy(FederatedStrategy):
    """The event loop; a scheme fills in ``ready`` or ``interval``, and ``periods``.

    The parameters are those of ``strategies.base.FederatedStrategy``; ``num_rounds`` of ``start`` are aggregations.
    """

    Config: ClassVar[type[StrategyConfig]] = AsynchronousConfig
    config: AsynchronousConfig

    # ---- What a scheme fills in -----------------------------------------------------------------------------

    #: Seconds between two aggregations; None: when ``ready`` says so.
    interval: float | None = None

    def ready(self, arrived: int) -> bool:
        """Tell whether to aggregate, now that ``arrived`` contributions wait."""
        return False

    def periods(self, times: Times) -> Times:
        """Return P_i (C,): aggregations from one contribution of client i to the next, by its task time τ_i (C,)."""
        raise NotImplementedError

    def expected_periods(self, times: Times) -> Times:
        """Return the P_i that really come about, where random task times make them differ from ``periods``."""
        return self.periods(times)

    def identical_weight(self, num_clients: int) -> float:
        """Return d for ``aggregation_weights = "identical"``."""
        return 1.0

    # ---- Flower's hooks, which a loop without rounds has no use for --------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: there are no rounds."""
        raise NotImplementedError(f"{type(self).__name__} has no rounds: call its own start()")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: there are no rounds."""
        raise NotImplementedError(f"{type(self).__name__} has no rounds: call its own start()")

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
            given up earlier, after five times the client's usual time, but not within ``SHORTEST_DEADLINE``.

        Returns
        -------
        Result
            The final model, and the metrics by aggregation.
        """
        self._set_timeout(timeout)
        self.summary()
        self._grid, self._total, self._evaluate_fn = grid, num_rounds, evaluate_fn
        self._train = ConfigRecord() if train_config is None else train_config
        self._evaluate = self._train if evaluate_config is None else evaluate_config
        state = self._begin(initial_arrays)
        self._layout = Layout.of(initial_arrays)
        self._model = self._layout.to_vector(self._result.arrays)
        self._sent = self._model.astype(self._layout.narrow)
        self.members: dict[int, Member] = {}
        self._pending: dict[str, Task] = {}
        self._agenda = Agenda()  # ids of tasks by due time (virtual) or deadline (real); members to ask again
        self._buffer: list[Contribution] = []
        self._since = Tally()
        self._standing: Standing | None = None
        self._counted: list[Member] | None = None
        self._real = WallClock()
        self._looked = 0.0
        working = self.aggregations < num_rounds
        if working:
            self.clients = self._take_part(grid, self._train)
            self._looked = self._real.now()
        if state is None:
            self._began = self._origin = self.clock.now()
        else:
            self._take_up(state)
        if working and not self.stopped():
            self.check(len(self.members.keys() | {client.index for client in self.clients}))
            self._welcome()
        if state is None:
            self._report(0, self._result, evaluate_fn, MetricRecord(), evaluate=True)
        step = self._step_real if isinstance(self.clock, WallClock) else self._step_virtual
        while self.aggregations < num_rounds and not self.stopped() and step():
            pass
        if self._since.unevaluated:
            self._report_evaluation(self._since.metrics())
        self._log_objective()
        return self._result

    def _step_virtual(self) -> bool:
        """Take the next event in virtual time; False at the end of the time budget."""
        arrival, tick = self._agenda.next_due(), self._next_tick()
        now = min(arrival, tick)
        if now == float("inf"):
            raise RuntimeError("no client is left: each was lost or failed; the log names the reasons")
        if self._beyond_budget(now):
            return False
        if arrival > tick + RESOLUTION:
            self.clock.wait_until(tick)
            self._aggregate()
            return True
        due, item = self._agenda.pop()
        if isinstance(item, Member):
            self.clock.wait_until(due)
            self._hand_out([item])
        elif (task := self._pending.get(item)) is not None:
            reply = self._await(task)
            if not self.stopped():
                self.clock.wait_until(due)
                self._arrive(task, reply)
        return True

    def _step_real(self) -> bool:
        """Take what has come in real time; False at the end of the time budget."""
        if self._beyond_budget(self.clock.now()):
            return False
        waiting = [message_id for message_id, task in self._pending.items() if not task.lost]
        came = [
            (task, reply)
            for reply in self._grid.pull_messages(waiting)
            if (task := self._pending.get(reply.metadata.reply_to_message_id)) is not None
        ]
        for task, reply in sorted(came, key=lambda pair: pair[0].member.client.index):
            if self.aggregations < self._total and task.message_id in self._pending:  # a reply may come twice
                self._arrive(task, reply)
        now = self.clock.now()
        while self._agenda.next_due() <= now:
            _, item = self._agenda.pop()
            if isinstance(item, Member):
                self._hand_out([item])
            elif (late := self._pending.get(item)) is not None:
                self._arrive(late, None)
        if self._next_tick() <= now and self.aggregations < self._total:
            if self.interval is not None and now > self._next_tick() + self.interval:
                self._origin = now - (self.aggregations + 1) * self.interval  # one for all that were missed
            self._aggregate()
        if self._real.now() - self._looked > REFRESH_EVERY:
            self._look()
        if not came:
            fastest = float(self._times(self.members.values()).min())
            pause = min(max(0.05 * fastest, SHORTEST_POLL), LONGEST_POLL)
            self.clock.wait_until(min(now + pause, self._next_tick(), self._agenda.next_due()))
        return True

    def _next_tick(self) -> float:
        """Clock time of the next aggregation by the clock, (n+1) Δt after the first task."""
        return (
            float("inf") if self.interval is None else self._origin + (self.aggregations + 1) * self.interval
        )

    def _beyond_budget(self, time: float) -> bool:
        budget = self.config.time_budget
        return bool(budget) and time > self._began + budget + RESOLUTION

    # ---- Tasks ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look who is there; hand the model to those who are new, or back."""
        self._looked = self._real.now()
        clients = self._take_part(self._grid, self._train, wait=False)
        if clients is not self.clients:
            before = {client.index for client in self.clients}
            if before and not clients and isinstance(self.clock, WallClock):
                log.warning("no client is connected, the run waits for one")
            self.clients = clients
            self._welcome()
            # Who was away is asked at once, not only when its next try is due.
            self._hand_out([self.members[c.index] for c in clients if c.index not in before])

    def _welcome(self) -> None:
        fresh = []
        for client in self.clients:
            member = self.members.get(client.index)
            if member is None:
                member = self.members[client.index] = Member(client)
            elif member.client.node_id == client.node_id:
                continue
            elif member.dropped:
                log.warning("client %d is back, as node %d", client.index, client.node_id)
            member.client, member.misses, member.dropped = client, 0, False
            self._pending.pop(member.task, None)  # its former node will not answer
            fresh.append(member)
        if fresh:
            self._changed()
            self._hand_out(fresh)

    def _hand_out(self, members: Sequence[Member]) -> None:
        """Send the global model, as one task each, to clients that have no task and whose work doesn't wait."""
        waiting = {c.member.client.index for c in self._buffer}
        free = {m.client.index: m for m in members if m.task not in self._pending}
        members = [member for index, member in free.items() if index not in waiting]
        for member in members:
            member.tasks += 1
        self._since.bytes_down += len(members) * messages.num_bytes(self._result.arrays)
        now = self.clock.now()
        self._send({member.client.index: now for member in members}, self.aggregations, self._sent)

    def _send(self, sent: Mapping[int, float], version: int, base: NDArray[Any]) -> None:
        """Send a version of the model (D,) as the task of clients by index, at these clock seconds."""
        current = version == self.aggregations
        arrays = self._result.arrays if current else self._layout.to_record(base.astype(np.float64))
        members = [self.members[index] for index in sent]
        requests = [
            messages.request(
                messages.TRAIN,
                member.client.node_id,
                self._train_config(member.client, version + 1, member.tasks, self._train),
                ttl=self.timeout,
                arrays=arrays,
            )
            for member in members
        ]
        pushed = set(self._grid.push_messages(requests))
        for member, request in zip(members, requests, strict=True):
            index, message_id = member.client.index, request.metadata.message_id
            lost = message_id not in pushed
            self._pending[message_id] = Task(member, version, base, message_id, sent[index], lost)
            member.task = message_id
            wait = 0.0 if lost and isinstance(self.clock, WallClock) else self._expected_time(member)
            self._agenda.push(sent[index] + wait, index, message_id)

    def _expected_time(self, member: Member) -> float:
        """Clock seconds until a task handed out now is due: its virtual time, or in real time its deadline."""
        if not isinstance(self.clock, WallClock):
            return self._task_time(member.client, member.tasks)
        total, number = member.observed
        usual = 5 * total / number if number else float("inf")
        return min(self.timeout, max(usual, SHORTEST_DEADLINE) if number else self.timeout)

    def _await(self, task: Task) -> Message | None:
        """Wait, in real time, for the reply to one task; None if it doesn't come."""
        if task.lost:
            return None
        return collect(self._grid, {task.message_id: 0}, self.timeout, self.stopped).get(0)

    def _arrive(self, task: Task, reply: Message | None) -> None:
        """Take a reply, or its absence, into account."""
        del self._pending[task.message_id]
        member = task.member
        try:
            delta = self._read_model(self._layout, reply)
        except ArraysMismatchError as error:
            self._miss(member, str(error))
            return
        if (bound := self.config.update_norm_bound) and clip_update(delta, task.base, bound):
            self._since.clipped += 1
        if self.witness:
            self.witness(member.client.index, delta)
        delta -= task.base
        if isinstance(self.clock, WallClock):
            self._standing = None  # an estimate of τ_i has changed
        if member.dropped:
            log.warning("client %d answers again and counts again", member.client.index)
            self._changed()
        member.misses, member.dropped = 0, False
        member.observed[0] += self.clock.now() - task.sent
        member.observed[1] += 1
        assert reply is not None
        self._learn_size(member, reply)
        num_bytes = messages.total_bytes(reply)
        self._buffer.append(Contribution(member, delta, task.version, messages.metrics_of(reply), num_bytes))
        if self.ready(len(self._buffer)):
            self._aggregate()

    def _miss(self, member: Member, reason: str) -> None:
        self._since.failures += 1
        member.misses += 1
        index = member.client.index
        log.warning("client %d (node %d), task %d: %s", index, member.client.node_id, member.tasks, reason)
        if not isinstance(self.clock, WallClock):
            self._look()  # in virtual time, a miss is the sign that a node may be gone, or back under a new id
        if member.misses < MAX_MISSES:
            self._hand_out([member])
            return
        if not member.dropped:
            log.warning("client %d is dropped after %d misses in a row, the others share its weight",
                        index, member.misses)  # fmt: skip
            member.dropped = True
            self._changed()
            if not self._counting() and not isinstance(self.clock, WallClock):
                raise RuntimeError("no client is left: each was lost or failed; the log names the reasons")
        pause = RETRY_AFTER * float(self._times([member])[0])
        self._agenda.push(self.clock.now() + pause, index, member)
        if self._buffer and self.aggregations < self._total and self.ready(len(self._buffer)):
            self._aggregate()  # the others don't wait for it

    def _learn_size(self, member: Member, reply: Message) -> None:
        """Take the number of examples from a reply, where the handshake didn't tell (strategies/roster.py)."""
        if member.client.num_examples is None:
            number = messages.whole(messages.metrics_of(reply).get(messages.NUM_EXAMPLES))
            member.client, self._standing = replace(member.client, num_examples=number), None

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def state(self) -> State:
        """Add the books: clients, and in virtual time the tasks under way with the models they started from."""
        pending = [] if isinstance(self.clock, WallClock) else list(self._pending.values())
        bases = {task.version: task.base for task in pending}
        members = self.members.values()
        return {
            **super().state(),
            "began": self._began,
            "origin": self._origin,
            "since": deepcopy(vars(self._since)),
            "clients": [member.client.index for member in members],
            "num-examples": [member.client.num_examples for member in members],
            **{name: deepcopy([getattr(member, name) for member in members]) for name in KEPT},
            "retries": [(due, item.client.index) for due, item in self._agenda if isinstance(item, Member)],
            "tasks-under-way": [(task.version, task.member.client.index, task.sent) for task in pending],
            "versions": list(bases),
            "bases": np.array(list(bases.values())),
        }

    def _take_up(self, state: State) -> None:
        """Fill the books from the state of an earlier run, and hand out again what was under way."""
        vars(self._since).update(deepcopy(state["since"]))
        self._began, self._origin = state["began"], state["origin"]
        self.clock.resume(state["time"])  # waiting for the clients didn't count
        present = {client.index: client for client in self.clients}
        for place, (index, size) in enumerate(zip(state["clients"], state["num-examples"], strict=True)):
            client = present.get(index, Client(ABSENT, index, size, MetricRecord()))
            if client.num_examples is None:
                client = replace(client, num_examples=size)
            self.members[index] = Member(client, **{name: deepcopy(state[name][place]) for name in KEPT})
            if index not in present:
                log.warning("client %d of the run so far isn't there: the others share its weight", index)
                self.members[index].dropped = True
        again: dict[int, dict[int, float]] = {}
        for version, index, sent in state["tasks-under-way"]:
            if index in present:
                again.setdefault(version, {})[index] = sent
        bases = dict(zip(state["versions"], state["bases"], strict=True))
        for version, tasks in again.items():
            self._send(tasks, version, np.array(bases[version]))
        there = [member for index, member in self.members.items() if index in present]
        for due, index in state["retries"]:
            if index in present:
                self._agenda.push(due, index, self.members[index])
        if self.aggregations < self._total:
            resting = {index for _, index in state["retries"] if self.members[index].dropped}
            self._hand_out([member for member in there if member.client.index not in resting])

    # ---- Aggregation -------------------------------------------------------------------------------------------

    def _aggregate(self) -> None:
        """θ^{n+1} = θ^n + η_g Σ d_i Δ_i over what has arrived, in client order; those clients get the new model."""
        contributions = sorted(self._buffer, key=lambda c: c.member.client.index)
        self._buffer = []
        total = np.zeros_like(self._model)
        for contribution in contributions:
            contribution.member.contributions += 1
        for contribution in contributions:
            weight = self.standing.weight[contribution.member.client.index]
            contribution.member.weight += weight
            total += weight * contribution.delta
        if contributions:
            moved = self.optimizer.step(self._model, total)
            self._result.arrays = self._layout.to_record(moved)
            self._model = self._layout.rounded(moved)
            self._sent = self._model.astype(self._layout.narrow)
        self._since.take(contributions, self.aggregations)
        self.aggregations += 1
        done = self.aggregations >= self._total
        if contributions and not done:
            self._hand_out([contribution.member for contribution in contributions])
        if done or self.aggregations % self.config.eval_every == 0:
            self._report_evaluation(self._since.metrics())
        else:
            self._report(self.aggregations, self._result, None, MetricRecord(), evaluate=False)

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        return self.standing.importance

    @property
    def standing(self) -> Standing:
        """What every client that counts is worth now; worked out anew when p or an estimate of τ_i has changed."""
        if self._standing is None:
            counting = self._counting()
            if not counting:  # all are dropped
                return Standing({}, {})
            p = self._importances([member.client for member in counting])
            if self.config.aggregation_weights == "identical":
                d = np.full(len(p), self.identical_weight(len(p)))
            else:
                d = p * self.periods(self._times(counting))
            self._standing = Standing(self._by_index(p), self._by_index(d))
        return self._standing

    def _expected_share(self) -> dict[int, float]:
        """q̃_i by client index; worked out when it is asked for, at evaluations."""
        standing = self.standing
        if standing.weight and not standing.expected_share:
            periods = self.expected_periods(self._times(self._counting()))
            q = np.array(list(standing.weight.values())) / periods
            standing.expected_share.update(self._by_index(q / q.sum()))
        return standing.expected_share

    def _by_index(self, values: Times) -> dict[int, float]:
        indices = (member.client.index for member in self._counting())
        return dict(zip(indices, values.tolist(), strict=True))

    def _changed(self) -> None:
        """Take note that other clients count than before."""
        self._standing = self._counted = None

    def _counting(self) -> list[Member]:
        if self._counted is None:
            members = (self.members[index] for index in sorted(self.members))
            self._counted = [member for member in members if not member.dropped]
        return self._counted

    def _times(self, members: Iterable[Member]) -> Times:
        """τ_i: the scenario's mean, or the mean of what was observed; before the first answer that of the others."""
        if not isinstance(self.clock, WallClock):
            return np.array([self._mean_task_time(member.client) for member in members])
        known = [m.observed[0] / m.observed[1] for m in self.members.values() if m.observed[1]]
        usual = float(np.mean(known)) if known else 1.0
        return np.array([m.observed[0] / m.observed[1] if m.observed[1] else usual for m in members])

    # ---- Diagnostics ---------------------------------------------------------------------------------------------

    def _report_evaluation(self, metrics: MetricRecord) -> None:
        self._since = Tally()
        standing = self.standing
        p, d, q = standing.importance, standing.weight, self._expected_share()
        indices = list(range(max(self.members) + 1))
        members = [self.members.get(index) for index in indices]
        times = dict(zip(self.members, self._times(self.members.values()).tolist(), strict=True))
        given = sum(member.weight for member in self.members.values())
        metrics["weights-distance"] = 0.5 * sum(abs(p[index] - q[index]) for index in p)
        self._result.train_metrics_clientapp[self.aggregations] = metrics
        metrics = self._evaluate_on_clients(
            self.aggregations, self._result, self._evaluate, self._grid, metrics
        )
        self._report(
            self.aggregations,
            self._result,
            self._evaluate_fn,
            metrics,
            evaluate=True,
            clients={
                "participation": [float(m.contributions) if m else 0.0 for m in members],
                "weight": [d.get(index, 0.0) for index in indices],
                "task-time": [times.get(index, 0.0) for index in indices],
                "importance": [p.get(index, 0.0) for index in indices],
                "expected-share": [q.get(index, 0.0) for index in indices],
                "observed-share": [m.weight / given if m and given else 0.0 for m in members],
            },
        )

    def _losses(self, losses: object) -> dict[str, float]:
        """Add the surrogate loss Σ q̃_i f_i, which the run really minimises, and its spread."""
        if not isinstance(losses, list) or not self.members:
            return {}
        return {
            **mean_and_spread("federated-loss", self.importance(), losses),
            **mean_and_spread("surrogate-loss", self._expected_share(), losses),
        }

    def _log_objective(self) -> None:
        """Say which objective the run minimised, if it wasn't the federated one."""
        if not self.members or self.stopped():
            return
        p, q = self.standing.importance, self._expected_share()
        distance = 0.5 * sum(abs(p[index] - q[index]) for index in p)
        if distance > 1e-6:
            most = max(p, key=lambda index: q[index] - p[index])
            log.warning(
                "this run minimised Σ q_i f_i, not the federated Σ p_i f_i: their distance is %.3f "
                "(½ Σ |q_i − p_i|); client %d counted most in excess, %.4f for %.4f",
                distance, most, q[most], p[most],
            )  # fmt: skip
