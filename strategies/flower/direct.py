"""Tasks without messages: a loop without rounds and a Grid whose clients are at hand needn't write letters.

Such a Grid, an engine's, may be a ``WorkingGrid``: it is handed the model as a vector, and what comes of a task is a
vector again. Every update still goes through the chain and every hook of a method by itself, as a reply's does. Other
Grids get messages, and so do a method that puts something of its own into a request
(``Capabilities.writes_requests``), and runs whose clients answer with more than a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flwr.app import ConfigRecord, MetricRecord
from numpy.typing import NDArray

from strategies.flower.arrays import Layout, Vector


class HandedTask(NamedTuple):
    """A client's task: its node, its index, and the number of the task."""

    node_id: int
    client: int
    number: int


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """Tasks on one version of the model.

    Attributes
    ----------
    layout : Layout
        The model's.
    base : array (D,)
        What all are sent, in the model's own precision; nobody writes to it.
    config : ConfigRecord
        What every request of the run says.
    server_round : int
        The aggregation that the tasks are for, from 1.
    tasks : sequence of HandedTask
        In the order of the clients.
    rule : mapping of str to float
        The fields of the method's local rule.
    """

    layout: Layout
    base: NDArray[Any]
    config: ConfigRecord
    server_round: int
    tasks: Sequence[HandedTask] = ()
    rule: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What came of a task.

    Attributes
    ----------
    model : Vector
        The trained model (D,), which the server may write to.
    metrics : MetricRecord
        As in a reply.
    num_bytes : int
        Size of the reply's arrays, had it been one.
    reason : str
        Why the task couldn't be done; "": it was.
    """

    model: Vector
    metrics: MetricRecord
    num_bytes: int = 0
    reason: str = ""


@runtime_checkable
class WorkingGrid(Protocol):
    """What a Grid is in addition whose clients work without messages."""

    def can_work(self, request: WorkRequest) -> bool:
        """Tell whether it can do such tasks, whoever's."""
        ...

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        """Take the tasks; return an id of each."""
        ...

    def work(self, task_id: str) -> Work | None:
        """Work for a while; return, once, what came of a task, or None if it isn't done yet."""
        ...
