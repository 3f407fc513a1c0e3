"""Runs among clients that come and go, a second time: a table of tasks in plain Python, from docs/fleet.md alone.

Nothing is imported from what it judges. Of events at the same time arrivals and departures come first, but a task
that ends as its client departs is done. Times are looked up by client in tables: ``seconds``, and ``stretches`` of
[start, end) that come again after ``period``.
"""

from dataclasses import dataclass, field

CLOSE = 1e-9


@dataclass
class Reference:
    """What happens by the rules: aggregations (time, {client: staleness}), and the tasks that are lost."""

    seconds: list[float]
    stretches: list[list[tuple[float, float]]]
    period: float
    aggregations: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    lost: list[tuple[float, int]] = field(default_factory=list)

    def end_of_stay(self, client: int, now: float) -> float | None:
        """Return until when a client is there that is there at a time; None if it isn't."""
        stays = [
            (start + k * self.period, end + k * self.period)
            for start, end in self.stretches[client]
            for k in range(int(now // self.period) + 4)
        ]
        stays.sort()
        joined: list[list[float]] = []
        for start, end in stays:
            if joined and start <= joined[-1][1] + CLOSE:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        return next((end for start, end in joined if start <= now + CLOSE < end), None)

    def next_stay(self, client: int, now: float) -> float:
        """Return when a client comes that isn't there."""
        starts = (
            start + k * self.period
            for start, _ in self.stretches[client]
            for k in range(int(now // self.period) + 4)
        )
        return min(start for start in starts if start > now)

    def run(self, scheme: str, number: int, *, m: int = 2, interval: float = 0.5) -> None:
        """Play so many aggregations of ``async``, ``fedbuff`` (m contributions) or ``fedfix``."""
        clients = range(len(self.seconds))
        # What each client does: comes at a time, works until a time (then done or lost), or waits for a model.
        state: dict[int, tuple[str, float]] = {}
        version = dict.fromkeys(clients, 0)
        waiting: list[int] = []

        def free(client: int, now: float) -> None:
            stays = self.end_of_stay(client, now)
            if stays is None:
                state[client] = "away", self.next_stay(client, now)
                return
            version[client] = len(self.aggregations)
            done = now + self.seconds[client]
            state[client] = ("lost", stays) if done > stays + CLOSE else ("done", done)

        def aggregate(now: float) -> None:
            came = sorted(waiting)
            self.aggregations.append((now, {c: len(self.aggregations) - version[c] for c in came}))
            waiting.clear()
            for client in came:
                free(client, now)

        for client in clients:
            free(client, 0.0)
        ticks = 0
        while len(self.aggregations) < number:
            due = [(time, client) for client, (what, time) in state.items() if what != "waits"]
            now = min((time for time, _ in due), default=float("inf"))
            tick = (ticks + 1) * interval
            if scheme == "fedfix" and now > tick + CLOSE:
                ticks += 1
                if waiting:
                    aggregate(tick)
                continue
            # At one time: who comes is there first, then the clients in order.
            same = [client for time, client in due if time <= now + CLOSE]
            client = min(same, key=lambda c: (state[c][0] != "away", c))
            what, now = state[client]
            if what == "done":
                waiting.append(client)
                state[client] = "waits", 0.0
                if len(waiting) == {"async": 1, "fedbuff": m}.get(scheme):
                    aggregate(now)
                continue
            if what == "lost":
                self.lost.append((now, client))
            free(client, now)
