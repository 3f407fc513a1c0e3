"""Capabilities of a Grid beside messages: name its engine, describe its clients, and work on tasks without messages.

A Grid whose clients are in this process, an engine's, may be a ``WorkingGrid``: an asynchronous strategy gives it the
model as a vector, and the outcome of a task is a vector again. Every update still goes through the chain and through
every hook of a method by itself, as a reply's update does. Messages go to other Grids, and with a method that puts
records of its own into a request (``Capabilities.writes_requests``), and in runs whose clients answer with more than
a model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.flower.arrays import Layout, Vector
from strategies.flower.errors import RunError
from strategies.flower.internals import (
    Run,
    client_apps,
    is_simulation,
    lacks_handler,
    mod_for_secure_aggregation,
    mod_that_wants_arrays,
)
from strategies.flower.messages import MASKS

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp


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
        Layout of the model.
    base : array (D,)
        The model that all clients are sent, in its own precision; read-only.
    config : ConfigRecord
        The config record of every request of the run.
    server_round : int
        The aggregation that the tasks are for, from 1.
    tasks : sequence of HandedTask
        The tasks, in the order of the clients.
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
    """The result of a task.

    Attributes
    ----------
    model : Vector
        The trained model (D,), which the server may write to.
    metrics : MetricRecord
        The metrics, as in a reply.
    num_bytes : int
        Size in bytes of the arrays that a reply would have.
    reason : str
        Reason of a failure; "" for a completed task.
    """

    model: Vector
    metrics: MetricRecord
    num_bytes: int = 0
    reason: str = ""


@runtime_checkable
class WorkingGrid(Protocol):
    """A Grid whose clients can also work without messages."""

    def can_work(self, request: WorkRequest) -> bool:
        """Return True if the Grid can do such tasks, for any client."""
        ...

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        """Accept the tasks; return an id for each task."""
        ...

    def work(self, task_id: str) -> Work | None:
        """Work for a while; return the result of a task, only once, or None if the task isn't done yet."""
        ...


class NodeChanges(NamedTuple):
    """The nodes of a Grid that came and went since an earlier look.

    Attributes
    ----------
    version : int
        What the next look gives as ``since``, 1 or more.
    came, gone : collection of int
        The ids of the nodes that are connected now, or aren't now. A node that came and went is in ``gone``.
    """

    version: int
    came: Collection[int]
    gone: Collection[int]


@runtime_checkable
class ChangingGrid(Protocol):
    """A Grid that knows which nodes came and went, so that a look at thousands of nodes costs what has changed."""

    def node_changes(self, since: int) -> NodeChanges | None:
        """Return which nodes came and went since a version; 0: since there were none; None: it isn't known."""
        ...


def asked_ids(
    reply_to_message_ids: Iterable[str] | None, message_ids: Iterable[str] | None
) -> list[str] | None:
    """Return the ids of the requests whose replies are to be pulled; None: of all requests.

    They are the arguments of ``Grid.pull_messages`` from Flower 1.43 on, of which the first is the positional one;
    before, ``message_ids`` is the only one. Positional arguments and both names are the same on all versions here.

    Raises
    ------
    ValueError
        If both are given.
    """
    if reply_to_message_ids is not None and message_ids is not None:
        raise ValueError("pull_messages takes reply_to_message_ids or message_ids, which is its former name")
    given = message_ids if reply_to_message_ids is None else reply_to_message_ids
    return None if given is None else list(given)


def pulled_from(grid: Grid, ids: Sequence[str] | None) -> list[Message]:
    """Return the replies of another Grid; None, for all of them, needs a Grid of Flower 1.43 or of this library."""
    pull: Callable[..., Iterable[Message]] = grid.pull_messages
    return list(pull() if ids is None else pull(ids))


class GridAround(Grid):
    """The base class of Grids around another one, which does what a subclass doesn't do otherwise.

    Attributes
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    """

    grid: Grid

    @property
    def engine(self) -> str:
        """The other Grid's engine."""
        return engine_of(self.grid)

    @property
    def all_connected(self) -> bool:
        """Whether no further node will connect, as far as the other Grid says."""
        return bool(getattr(self.grid, "all_connected", False))

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run's record."""
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message; Flower has deprecated this in favour of ``Message(...)``."""
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are connected."""
        return self.grid.get_node_ids()

    def node_changes(self, since: int) -> NodeChanges | None:
        """Return which nodes came and went, if the other Grid says so."""
        return self.grid.node_changes(since) if isinstance(self.grid, ChangingGrid) else None

    def get_nodes(self) -> Any:
        """Return the nodes that are connected."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, and return their ids."""
        return self.grid.push_messages(messages)

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Pull the replies that there are."""
        return pulled_from(self.grid, asked_ids(reply_to_message_ids, message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages as they are, and return the replies that have come after ``timeout`` seconds."""
        return self.grid.send_and_receive(messages, timeout=timeout)


class AddressedGrid(GridAround):
    """Some of the nodes of another Grid.

    Parameters
    ----------
    grid : Grid
    nodes : collection of int
        The ids of the nodes.
    """

    def __init__(self, grid: Grid, nodes: Collection[int]) -> None:
        self.grid, self.nodes = grid, nodes

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of those nodes that are connected."""
        return [node_id for node_id in self.grid.get_node_ids() if node_id in self.nodes]

    def node_changes(self, since: int) -> NodeChanges | None:
        """Return which of those nodes came and went, if the other Grid says so."""
        if (changes := super().node_changes(since)) is None:
            return None
        came, gone = (
            [node_id for node_id in ids if node_id in self.nodes] for ids in (changes.came, changes.gone)
        )
        return NodeChanges(changes.version, came, gone)

    def get_nodes(self) -> Any:
        """Return those nodes that are connected."""
        return [node for node in self.grid.get_nodes() if node.node_id in self.nodes]


def addressed(grid: Grid, participation: str, nodes: Collection[int] | None) -> Grid:
    """Return the Grid of the nodes that ``participation`` addresses; None: of all.

    Raises
    ------
    RunError
        If the Grid is a simulation's, whose nodes nobody registered.
    """
    if nodes is None:
        return grid
    if engine_of(grid) not in (DEPLOYMENT, MEMORY):
        raise RunError(
            f"participation = {participation!r}: addresses registered devices, and a simulation has none; allowed "
            "are full, uniform, md, poisson, turns, paired, flower, fixed:I,J,…"
        )
    return AddressedGrid(grid, nodes)


def innermost(grid: Grid) -> Grid:
    """Return the Grid that sends the messages to the nodes."""
    while isinstance(grid, GridAround):
        grid = grid.grid
    return grid


DEPLOYMENT, RAY, MEMORY = "deployment", "ray", "memory"


def engine_of(grid: Grid) -> str:
    """Return a Grid's engine: ``sequential``, ``vectorized``, ``ray``, ``deployment``, or ``memory`` in tests."""
    name = getattr(grid, "engine", None)
    return name if isinstance(name, str) else RAY if is_simulation(grid) else DEPLOYMENT


def nobody_handles(grid: Grid, message_type: str) -> bool:
    """Return True if the ClientApp of a simulation is known to have no handler of a type of message.

    Asking would log an exception for every client that is asked. A Grid of processes knows its app; for Flower's
    simulation all ClientApps in this process are looked at.
    """
    apps = _apps(grid)
    return bool(apps) and all(lacks_handler(app, message_type) for app in apps)


def handles(grid: Grid, message_type: str) -> bool:
    """Return True if the ClientApp of all nodes is known to have a handler of a type of message."""
    apps = _apps(grid) or getattr(innermost(grid), "apps_for_queries", [])
    return bool(apps) and not any(lacks_handler(app, message_type) for app in apps)


def mod_without_evaluation(grid: Grid) -> str:
    """Return the mod for which clients of a simulation can't evaluate a model; "" if none is known.

    It refuses replies without arrays, and Flower's engines drop its answer.
    """
    return _mod_of_all(grid, mod_that_wants_arrays)


def check_mods(grid: Grid) -> None:
    """Raise RunError if the ClientApp of a simulation is known to have a mod with which no client can train."""
    if mod := _mod_of_all(grid, mod_for_secure_aggregation):
        raise RunError(f"{mod}: {MASKS}; take the mod out of the app")


def _mod_of_all(grid: Grid, find: Callable[["ClientApp"], str]) -> str:
    """Return the mod that all apps of a simulation have; "" if an app, which may be the one that runs, lacks it."""
    found = [find(app) for app in _apps(grid)]
    return found[0] if found and all(found) else ""


def _apps(grid: Grid) -> list["ClientApp"]:
    """Return the ClientApps of a simulation; none for devices."""
    grid = innermost(grid)
    own = getattr(grid, "client_app", None)
    return client_apps() if is_simulation(grid) else [own] if own is not None else []


# The metrics of a client's answer in the handshake (strategies/clients/roster.py): its partition, its number of
# examples, and whatever else it reports.
Description = Mapping[str, Any]


@runtime_checkable
class DescribingGrid(Protocol):
    """A Grid that knows the descriptions of its clients; asking thousands of clients by messages takes a minute."""

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return the descriptions of some of these nodes, by id; the other nodes are asked by a message."""
        ...
