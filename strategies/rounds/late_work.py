"""Tasks of clients that weren't done when their rounds closed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message, Metadata
from numpy.typing import NDArray

from strategies.clients.accounts import Parts
from strategies.clock import RESOLUTION
from strategies.flower.arrays import Vector


@dataclass
class LateTask:
    """A client's task that wasn't done when its round closed.

    Attributes
    ----------
    client, number : int
        Index of the client, and number of the round.
    began, due : float
        Clock seconds at which the task was handed out, and at which it ends; in real time, at which it is given up.
    weight : float, optional
        The client's d_i in its round; None: the size in the reply is the weight.
    base : array (D,), optional
        The model that was sent; None if the work is dropped.
    beside : mapping of str to array (D,)
        Vectors that were sent beside the model.
    request : Metadata, optional
        Metadata of the request, once it is sent.
    reply : Message, optional
        In real time, the reply, if it has come.
    parts : Parts, optional
        The parts of the task's duration, in virtual time, if they are known.
    sent_bytes : int
        Size of the request in bytes.
    """

    client: int
    number: int
    began: float
    due: float
    weight: float | None = None
    base: NDArray[Any] | None = None
    beside: Mapping[str, Vector] = field(default_factory=dict)
    request: Metadata | None = None
    reply: Message | None = None
    parts: Parts | None = None
    sent_bytes: int = 0


class LateWork:
    """The tasks that weren't done when their rounds closed; a client has one at most."""

    def __init__(self) -> None:
        self.tasks: dict[int, LateTask] = {}

    def add(self, task: LateTask) -> None:
        """Note a task."""
        self.tasks[task.client] = task

    def done(self, clients: Collection[int]) -> None:
        """Forget the tasks of clients that are done, or gone."""
        for client in clients:
            self.tasks.pop(client, None)

    def due_by(self, now: float) -> list[LateTask]:
        """Return the tasks that end by a clock time, by client."""
        return [task for _, task in sorted(self.tasks.items()) if task.due <= now + RESOLUTION]

    def state(self) -> dict[str, Any]:
        """Return the late tasks for a resumed run; {} if there are none."""
        if not self.tasks:
            return {}
        tasks = [task for _, task in sorted(self.tasks.items())]
        kept = [task for task in tasks if task.base is not None]
        bases = {id(task.base): task.base for task in kept}  # clients that got the same model share one
        places = [list(bases).index(id(task.base)) if task.base is not None else None for task in tasks]
        names = dict.fromkeys(name for task in kept for name in task.beside)
        return {
            "late-tasks": [
                [t.client, t.number, t.began, t.due, t.weight, at, t.sent_bytes]
                for t, at in zip(tasks, places, strict=True)
            ],
            **({"late-parts": [t.parts for t in tasks]} if any(t.parts for t in tasks) else {}),
            **({"late-bases": np.array(list(bases.values()))} if bases else {}),
            **{f"late-sent-{name}": np.array([task.beside[name] for task in kept]) for name in names},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "LateWork":
        """Return the work of a state."""
        work = cls()
        bases = [np.array(base) for base in state.get("late-bases", ())]
        sent = {key.removeprefix("late-sent-"): key for key in state if key.startswith("late-sent-")}
        rows = state.get("late-tasks", ())
        known = state.get("late-parts", [None] * len(rows))  # an earlier version's has none,
        for row, (client, number, began, due, weight, at, *sent_bytes) in enumerate(
            rows
        ):  # neither have its rows
            task = LateTask(client, number, began, due, weight, sent_bytes=sum(sent_bytes))
            if (parts := known[row]) is not None:
                task.parts = Parts(*parts)
            if at is not None:  # all have one, or none
                task.base = bases[at]
                task.beside = {name: np.array(state[key][row]) for name, key in sent.items()}
            work.add(task)
        return work
