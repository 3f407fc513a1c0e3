"""FedCompass: local steps assigned by the clients' speeds, so that their work arrives in groups.

Z. Li, P. Chaturvedi, S. He, H. Chen, G. Singh, V. Kindratenko, E. A. Huerta, K. Kim and R. Madduri, "FedCompass:
efficient cross-silo federated learning on heterogeneous client devices using a computing power-aware scheduler",
ICLR 2024, algorithm 1; the rules are those of the authors' scheduler in APPFL. All clients begin with Q_max local
steps. Whoever is done is assigned to a group of clients that are expected at about the same time, with a number of
steps from Q_min to Q_max that suits its speed (strategies/events/arrival_groups.py). When all clients of a group have
come, or at its latest time, λ times as far away as the expected one,

    W ← W + η_g Σ p_i s(δ_i) Δ_i      over those that have come, and those that came too late for their groups before

and those that have come are assigned again, the fastest first. Who comes too late is assigned at once, and its update
counts with the next group. A client's first update, before its speed is known, is aggregated alone. δ_i is the
staleness when an update is aggregated, and s(δ) is 1 by default.

A client's seconds of a step are those of its last tasks, the newest with 9/10 of the weight. In virtual time a task
of Q steps takes Q/Q_max of the time that the time scenario says, or Q/k with ``timed_local_steps`` = k. Clients are
told the number of steps by the field ``strategies.steps``. A client counts p_i in each group that it is in, so that
who is in more groups counts more; the run reports the objective that it minimises. Where a client comes again while
its late update still waits, both count; APPFL keeps the last.

A client receives the model and sends one back; the server keeps the updates that wait for their groups, 8 D bytes
each.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.core.parameters import parameter
from strategies.events.arrival_groups import ArrivalGroups
from strategies.events.strategy import AsynchronousStrategy
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.timing.event_queue import EventQueue
from strategies.timing.scheduler import Times
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class FedCompassConfig(AsyncConfigBase):
    """Parameters of FedCompass.

    Parameters
    ----------
    min_local_steps, max_local_steps : int
        Q_min and Q_max, bounds of a task's local steps
    timed_local_steps : int
        k: so many local steps take the time that the time scenario says of a task; 0: Q_max
    group_slack : float
        λ: a group waits for late clients λ times its expected time
    staleness_discount : str
        s(δ), the factor of a contribution that is δ aggregations old: 1, (δ + 1)^−A, or 1 up to B and beyond it
        1/(A (δ − B) + 1)
    """

    min_local_steps: int = parameter(4, ge=1)
    max_local_steps: int = parameter(20, ge=1)
    timed_local_steps: int = parameter(0, ge=0)
    group_slack: float = parameter(1.2, ge=1)
    staleness_discount: str = discount_parameter()


class FedCompass(AsynchronousStrategy):
    """FedCompass (Li et al. 2024, algorithm 1).

    New model: when all clients of a group have come, or at its latest time.
    Rule: W moves by Σ p_i s(δ) Δ_i over the group; the server sets each task's steps, so that groups arrive
    together.
    Needs: clients that do the asked number of steps.
    Helps: where speeds differ by a constant factor, and stale updates are to be avoided.
    """

    Config: ClassVar[type[StrategyConfig]] = FedCompassConfig
    config: FedCompassConfig

    groups: ArrivalGroups
    _alone = False  # whether the newest contribution is aggregated alone, as its client has no group

    def default_server_lr(self) -> float:
        """Return η_g = 1: the weights p_i of one contribution of every client sum to 1."""
        return 1.0

    @property
    def reference_steps(self) -> int:
        """Return k, or Q_max."""
        return self.config.timed_local_steps or self.config.max_local_steps

    def task_steps(self, client: Client) -> int:
        """Return the local steps to which a client is assigned."""
        return self.groups.tasks[client.index].steps

    def select_idle(self, free: Sequence[ClientState]) -> Iterable[ClientState]:
        """Assign the clients that don't wait for their group, the fastest first, and return them."""
        free = list(super().select_idle(free)) if self.concurrency else free
        task_table, groups, now = self.session.task_table, self.groups, self.session.scheduler.now()
        if not free and not task_table.tasks:  # all wait, too late for their groups: they found the next one
            late = [m for m in task_table.active_clients if m.client.index in groups.general]
            free = [m for m in late if m.is_available][: self.concurrency]
        chosen = [m for m in free if not groups.waits(m.client.index) and not task_table.busy(m)]
        for member in sorted(chosen, key=lambda m: (groups.speeds.get(m.client.index, 0.0), m.client.index)):
            if (latest := groups.assign(member.client.index, now)) is not None:
                task_table.wake(latest)
        self._ask_if_due(now)
        return chosen

    def _ask_if_due(self, now: float) -> None:
        """Ask at once where a group is complete without an arrival: of a client that is now in another."""
        if self.groups.due(now) is not None:
            self.session.task_table.wake(now)

    def on_contribution(self, contribution: Contribution) -> Contribution:
        """Put a contribution into its group, or let it be aggregated alone."""
        self._alone = self.groups.arrive(contribution.client.index, self.session.scheduler.now())
        return contribution

    def ready(self, arrived: int) -> bool:
        """Return True if the newest contribution has no group, or a group is to be aggregated."""
        return self._alone or self._due() is not None

    def _due(self) -> int | None:
        """Return the group that is to be aggregated: at T_latest after all replies of that instant; None: none."""
        return self.groups.due(self.session.scheduler.now(), self.session.task_table.queue.next_due())

    def take_from_buffer(self, waiting: Sequence[Contribution]) -> Sequence[Contribution]:
        """Return the contributions of the group, and those that were too late; or the newest one alone."""
        group = None if self._alone else self._due()
        self._alone = False
        if group is None:
            return waiting[-1:]
        come, late = self.groups.groups[group].come, Counter(self.groups.general)
        taken = []
        for contribution in waiting:
            index = contribution.client.index
            if late[index]:  # a client's late contribution is before its others
                late[index] -= 1
                taken.append(contribution)
            elif index in come:
                taken.append(contribution)
        self.groups.close(group)
        return taken

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return p_i s(δ_i)."""
        p, s = self.session.client_weights(), discount_of(self.config.staleness_discount)
        return [p.get(c.client.index, 0.0) * s(c.staleness) for c in contributions]

    def predict_num_aggregations(self, times: Times, seconds: float) -> int:
        """Return how many aggregations so many seconds have, by playing the groups through."""
        groups, queue, done = self._new_groups(), EventQueue(), 0

        def dispatch(clients: Sequence[int], now: float) -> None:
            for client in sorted(clients, key=lambda each: (groups.speeds.get(each, 0.0), each)):
                groups.assign(client, now)
                part = groups.tasks[client].steps / self.reference_steps
                queue.push(now + part * float(times[client]), client, client)

        dispatch(range(len(times)), 0.0)
        while queue.next_due() <= seconds * (1 + 1e-9):
            now, client = queue.pop()
            done += groups.arrive(client, now)
            free = {client}
            while (number := groups.due(now)) is not None:
                done += 1
                free |= set(groups.groups[number].come)
                groups.close(number)
            dispatch([each for each in sorted(free) if not groups.waits(each)], now)
        return max(done, 1)

    def stateful_components(self) -> Sequence[Any]:
        """Return the groups."""
        self.groups, self._alone = self._new_groups(), False
        return [self.groups]

    def _new_groups(self) -> ArrivalGroups:
        config = self.config
        return ArrivalGroups(config.min_local_steps, config.max_local_steps, config.group_slack)
