"""All uses of Flower's non-public modules, each with its reason; flwr 1.41 to 1.43.

Public are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation``. The linter refuses other
modules of Flower anywhere else. If a version of Flower lacks one of these, the import says so, and what needs it.

The public call that would replace each use; Flower has none of them yet:

=================================================  ==================================================================
non-public                                         public call that would replace it
=================================================  ==================================================================
``ErrorCode``, texts of mods' errors               names of the codes in ``flwr.app``, one code for each mod's refusal
``make_message``, ``_message_id``,                 ``Message(content or error, metadata=…)``, which Flower's own code
``_reply_to_message_id``, a copied ``_metadata``   calls and its signature leaves out, and ``copy.copy`` of a message
``message_to_proto``, ``context_to_proto``         ``Message.to_bytes`` and ``Context.to_bytes``, and their inverses
``Run``, ``TaskIdentity``                          a ``Grid`` in one process, in ``flwr.serverapp``
``create_message_error_unavailable_res_message``   the same ``Grid``, with nodes that leave
``Grid._runtime_client``, ``Grid._client``,        ``Grid.pull_messages(max_bytes=…)``
``ConfirmMessageReceivedRequest``
``InMemoryGrid`` by its name                       ``Grid.is_simulation``
``DeprecatedRunInfoStore``, found by ``gc``        ``Grid.get_nodes`` with the contexts of simulated clients
``backend_config_stream`` of a frame               the federation config in the ServerApp's ``Context``
``ClientApp``, found by ``gc``                     the simulated ClientApp in the ServerApp's ``Context``
``ClientApp._registered_funcs``, ``._mods``        ``ClientApp.message_types`` and ``ClientApp.mods``
``FedAvg._construct_messages``,                    the same names without ``_``: every subclass that fills in a hook
``FedAvg._check_and_log_replies``                  of ``FedAvg`` calls them
``flatten_dict``, ``parse_config_args``            a function that reads what ``flwr run --run-config`` reads
``superlink.extensions``                           an entry point for paths of a SuperLink's HTTP API
``start_client_internal`` and its loop             a hook of the SuperNode that sees a bundle before its code runs
``run_simulation`` (public, but deprecated)        a call that takes both apps and runs them as ``flwr run`` does
``InMemoryNodeState`` of a SuperNode                a reply for a task that expires before its message is fetched
``FORCE_EXIT_TIMEOUT_SECONDS``                     a ClientApp's end that waits for its ``context.state``
``SQLITE_PRAGMAS`` of a SuperLink's database       settings for its database, for messages of large models
``FleetHttpClient``, and httpx's pool of sockets   a SuperNode that uploads over slow links, and goes on after a cut
=================================================  ==================================================================
"""

import gc
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from threading import Lock
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.serverapp.strategy import FedAvg

#: Seconds that a ClientApp's process may take at its end; Flower's client gives one request 30 s.
LONGEST_END = 60
#: Bytes of an upload that a SuperNode hands to the kernel at once, and that wait there, beside those under way.
PIECE, MOST_UNSENT = 1 << 16, 1 << 17

#: The versions of Flower that all tests of the library have passed.
TESTED = ("1.41.0", "1.42.0")

Scalar = int | float | str | bytes  # a value of a record that nobody can change


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Turn a failed import or look-up of a part of Flower that isn't public into one line; ``what`` needs the part.

    Raises
    ------
    ImportError
        In one line: what of Flower is gone, and what doesn't work without it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        gone = str(error).partition(" (")[0]  # without the file's path
        raise ImportError(
            f"flwr {version('flwr')}: {gone}, so {what} can't work; strategies is tested with flwr "
            f"{' and '.join(TESTED)}"
        ) from None


with needed_for("the reasons for which a reply is missing"):
    from flwr.common.constant import ErrorCode

with needed_for("strategies.simulate, compression, and a worker that stays on a device"):
    from flwr.app.message.message import make_message
    from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Context as ContextProto
    from flwr.proto.message_pb2 import Message as MessageProto

with needed_for("the bound on the bytes of a reply"):
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

with needed_for("a Grid in one process: strategies.simulate and MemoryGrid"):
    from flwr.supercore.run import Run as Run  # exported
    from flwr.supercore.task_identity import TaskIdentity

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

with needed_for("the reasons for which a reply is missing"):
    #: Error codes of replies, which have no public names: the message's time to live is over; all codes that the
    #: SuperLink sends itself if a node doesn't answer; an exception of the ClientApp in a simulation, and on a
    #: device; a mod that refuses the message; and the end of a ClientApp's process.
    MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE
    NOBODY_ANSWERED = (MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE)
    UNKNOWN, APP_RAISED = ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    MOD_FAILED = ErrorCode.MOD_FAILED_PRECONDITION
    CRASHED = ErrorCode.CLIENT_APP_CRASHED

#: The reason of Flower, and of this library in its place, of a reply whose objects the SuperLink lacks.
OBJECTS_MISSING = "Reply message objects are unavailable"

with needed_for("a subclass that fills in configure_train or aggregate_train"):
    #: What subclasses of Flower's strategies call in their ``configure_train`` and ``aggregate_train``: methods of
    #: any strategy that has Flower's attributes.
    construct_messages = FedAvg._construct_messages
    check_and_log_replies = FedAvg._check_and_log_replies

#: What Flower's mods for differential privacy say of a message, and of a reply, without arrays.
FINDS_NO_ARRAYS = "expects exactly one ArrayRecord, but found 0"
#: The record that Flower's mods for secure aggregation miss in a training message of any strategy, and the records
#: that an app or a mod of Flower's older API misses.
SECURE_AGGREGATION = "secaggplus_configs"
OLDER_API = ("fitins.parameters", "evaluateins.parameters")

RUN_ID = 1
#: The server's own node id.
SERVER = 1


def be_the_server() -> None:
    """Let this process make messages outside a ServerApp: their constructor asks who is sending."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SERVER


def empty_run() -> Run:
    """Return the run record that a Grid needs, empty except for its id."""
    return Run.create_empty(run_id=RUN_ID)


def give_id(message: Message, message_id: str) -> None:
    """Set a message's id, as a Grid does when the message is pushed; Flower has no public setter."""
    message.metadata.__dict__["_message_id"] = message_id


def copy_of(message: Message) -> Message:
    """Return a copy of a message, as a network makes one; bytes and numbers, which nobody can change, are shared."""
    made = copy(message)
    made.__dict__["_metadata"] = copy(message.metadata)
    if message.has_content():
        made.content = content = message.content.copy()
        for name, record in message.content.items():
            own: Any = record.copy()
            content[name] = own
            for key, value in record.items():
                if not isinstance(value, Scalar):
                    own[key] = copy(value)  # an array or a list
    return made


def message_to_bytes(message: Message) -> bytes:
    """Return a message, its content included, as the protobuf that Flower's processes send each other."""
    return bytes(message_to_proto(message).SerializeToString())


def message_from_bytes(data: bytes) -> Message:
    """Return the message of ``message_to_bytes``; raises the exceptions of protobuf for invalid bytes."""
    return message_from_proto(MessageProto.FromString(data))


def context_to_bytes(context: Context) -> bytes:
    """Return a client's context as protobuf."""
    return bytes(context_to_proto(context).SerializeToString())


def context_from_bytes(data: bytes) -> Context:
    """Return the context of ``context_to_bytes``; raises the exceptions of protobuf for invalid bytes."""
    return context_from_proto(ContextProto.FromString(data))


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a copy of a message with other content; both share their metadata, and so their id."""
    return make_message(metadata=message.metadata, content=content)


def with_error(message: Message, code: int, reason: str) -> Message:
    """Return an error reply in place of an invalid reply."""
    return make_message(metadata=message.metadata, error=Error(code, reason))


def as_reply_to(reply: Message, message_id: str) -> Message:
    """Make a reply the reply to the message of an id; Flower has no public setter."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
    return reply


def unavailable_reply(metadata: Metadata) -> Message:
    """Return the SuperLink's error reply for a disconnected node; the import takes a second."""
    with needed_for("a node that disconnects from a MemoryGrid"):
        from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message

    return create_message_error_unavailable_res_message(metadata, "node_unavail")


class BoundedPulls:
    """The client of the SuperLink's API that a deployment's Grid has, with a bound on the bytes of each reply.

    ``Grid.pull_messages`` reads replies whole, whatever their size; there is no public call that says how large a
    reply is before it is read. Flower reads a reply object by object, of 5 MiB at most. Here the objects of a reply
    beyond the bound count as lost, so that Flower stops reading it, and the SuperLink is told to drop the rest.

    Parameters
    ----------
    client : object
        Flower's own client, which does all the rest.
    most_bytes : callable
        Returns the most bytes of a reply.

    Attributes
    ----------
    refused : dict of str to int
        The bound by which replies were refused, by the id of the request.
    """

    def __init__(self, client: Any, most_bytes: Callable[[], float]) -> None:
        self._client, self._most_bytes = client, most_bytes
        self.refused: dict[str, int] = {}
        self._lock = Lock()
        self._waiting: list[_PulledReply] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        """Look which replies have arrived, and which objects they consist of."""
        response, most = self._client.PullMessages(request), self._most_bytes()
        replies = zip(response.messages_list, response.message_object_trees, strict=True)
        self._waiting = [
            _PulledReply(message.metadata, set(_object_ids(tree)), most) for message, tree in replies
        ]
        return response

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        """Read an object of a reply; beyond the bound there is none."""
        response = self._client.PullObject(request)
        with self._lock:
            owners = [each for each in self._waiting if request.object_id in each.objects]
            for each in owners:
                each.read[request.object_id] = len(response.object_content)
            if not owners or not all(each.is_too_large for each in owners):
                return response
            first = [each for each in owners if each.metadata.reply_to_message_id not in self.refused]
            self.refused |= {each.metadata.reply_to_message_id: int(each.most) for each in first}
        for each in first:
            self._drop(each.metadata.message_id, request)
        return type(response)(object_found=False)

    def lost(self, pulled: Sequence[Message]) -> list[Message]:
        """Return an error reply for each reply that had arrived and isn't among those that Flower ``pulled``.

        From 1.43 on Flower only logs a reply whose objects are missing, as those beyond the bound are.
        """
        there = {reply.metadata.reply_to_message_id for reply in pulled}
        waiting, self._waiting = self._waiting, []
        return [_unread(each.metadata) for each in waiting if each.metadata.reply_to_message_id not in there]

    def _drop(self, message_id: str, request: Any) -> None:
        """Tell the SuperLink to drop a reply, which a request for one of its objects is about."""
        node, run_id = request.node, request.run_id
        confirmed = ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=message_id)
        self._client.ConfirmMessageReceived(confirmed)


def _unread(of_reply: Any) -> Message:
    """Return an error reply in place of one whose objects can't be read, by its metadata as protobuf."""
    metadata = Metadata(
        of_reply.run_id,
        of_reply.message_id,
        of_reply.src_node_id,
        of_reply.dst_node_id,
        of_reply.reply_to_message_id,
        of_reply.group_id,
        of_reply.created_at,
        of_reply.ttl,
        of_reply.message_type,
    )
    return make_message(metadata=metadata, error=Error(MESSAGE_UNAVAILABLE, OBJECTS_MISSING))


@dataclass
class _PulledReply:
    """A reply whose objects are being read."""

    metadata: Any  # as protobuf
    objects: set[str]
    most: float
    read: dict[str, int] = field(default_factory=dict)  # the bytes of its objects, by id

    @property
    def is_too_large(self) -> bool:
        """Whether the objects that were read have more bytes than a reply may have."""
        return sum(self.read.values()) > self.most


def _object_ids(tree: Any) -> Iterator[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _object_ids(child)


def bounded_pulls(grid: "Grid", most_bytes: Callable[[], float]) -> BoundedPulls | None:
    """Let a Grid read no reply with more bytes; return the bound, or None for a Grid that isn't Flower's own.

    Flower's Grid of a deployment (1.38 and later) has its client of the SuperLink as ``_client``; its property
    ``_runtime_client`` connects the Grid first.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        return None
    bound = BoundedPulls(client._client if isinstance(client, BoundedPulls) else client, most_bytes)
    grid._client = bound  # type: ignore[attr-defined]
    return bound


def is_simulation(grid: "Grid") -> bool:
    """Return True for the Grid of Flower's simulation, by its class name, because Grids don't report their kind."""
    return type(grid).__name__ == "InMemoryGrid"


def simulated_contexts(run_id: int) -> Callable[[], list[Context]]:
    """Find the clients of a Flower simulation in this process; return a function that returns their contexts.

    Flower's Simulation Runtime keeps them in objects that only a local variable of its thread names.
    """
    kept = [each for each in gc.get_objects() if type(each).__name__ == "DeprecatedRunInfoStore"]
    nodes = [each for each in kept if run_id in each.run_infos]
    return lambda: [node.retrieve_context(run_id) for node in nodes]


def simulation_backend() -> dict[str, dict[str, Any]]:
    """Return ``client_resources`` and ``init_args`` of a Flower simulation in this process; {} without one.

    Flower doesn't tell the apps: only a local variable of its main thread has the federation config.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != "flwr.simulation.run_simulation":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config_stream", "{}") if frame is not None else "{}"
    found: dict[str, dict[str, Any]] = json.loads(config)
    return found


def client_apps() -> list["ClientApp"]:
    """Return the ClientApps in this process: Flower's simulation has loaded its app before the ServerApp runs."""
    from flwr.clientapp import ClientApp

    return [each for each in gc.get_objects() if issubclass(type(each), ClientApp)]


def lacks_handler(app: "ClientApp", message_type: str) -> bool:
    """Return True if an app is known to have no handler of a type of message such as ``query.describe``.

    It isn't known of a subclass that handles messages by itself, nor if a version of Flower keeps handlers elsewhere.
    """
    from flwr.clientapp import ClientApp

    handlers = getattr(app, "_registered_funcs", None)
    return (
        type(app).__call__ is ClientApp.__call__
        and isinstance(handlers, dict)
        and message_type not in handlers
    )


def mod_that_wants_arrays(app: "ClientApp") -> str:
    """Return the name of a mod of an app that refuses messages and replies without arrays; "" if none is known.

    These are Flower's mods for differential privacy. Mods of one handler alone aren't looked at.
    """
    from flwr.clientapp import mod

    known = (mod.fixedclipping_mod, mod.adaptiveclipping_mod)
    return next((_name(each) for each in _mods(app) if each in known or isinstance(each, mod.LocalDpMod)), "")


def mod_for_secure_aggregation(app: "ClientApp") -> str:
    """Return the name of a mod of an app that is one of Flower's for secure aggregation; "" if none is known."""
    named = [_name(each) for each in _mods(app) if str(getattr(each, "__module__", "")).startswith("flwr.")]
    return next((name for name in named if name in ("secagg_mod", "secaggplus_mod")), "")


def _mods(app: "ClientApp") -> list[Any]:
    return list(getattr(app, "_mods", None) or [])


def _name(mod: Any) -> str:
    return str(getattr(mod, "__name__", type(mod).__name__))


def flatten_dict(nested: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables as one level, with keys that are joined by dots; the import takes 0.1 s."""
    with needed_for("the configuration of an app"):
        from flwr.common.config import flatten_dict as flattened

    return flattened(nested)


def read_pairs(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs or one TOML file as ``flwr run`` does, whose parser has no public name.

    Raises
    ------
    click.ClickException, ValueError
        If it can't be read.
    """
    with needed_for("key=value pairs of a command line"):
        from flwr.common.config import parse_config_args

    return parse_config_args(list(texts))


class AppRefusedError(Exception):
    """A SuperNode doesn't run an app; the message says why."""


def check_apps(
    node_config: Callable[[dict[str, Any]], dict[str, Any]],
    check: Callable[[str, str], None],
    refusal: Callable[[str], Error],
) -> None:
    """Let Flower's SuperNode, in this process, refuse messages of apps before their code is there.

    Parameters
    ----------
    node_config : callable
        Returns the node config that contexts have, given that of the command line.
    check : callable
        Raises AppRefusedError if an app mustn't run, by its name, ``publisher/name``, and the SHA-256 of its bundle,
        hexadecimal.
    refusal : callable
        Returns the error with which a message is answered, given the reason.
    """
    with needed_for("allow-apps of a node config"):
        command = import_module("flwr.supernode.cli.flower_supernode")
        loop = import_module("flwr.supernode.start_client_internal")
        from flwr.common.config import get_fab_config, get_metadata_from_config

        start, pull, insert = (
            command.start_client_internal,
            loop._pull_and_store_message,
            loop._insert_message,
        )

    def started(**given: Any) -> None:
        start(**{**given, "node_config": node_config(given["node_config"])})

    def pulled(**given: Any) -> int | None:
        received: list[Message] = []
        runs: list[Any] = []

        def receive() -> Any:
            found = given["receive"]()
            received.extend([] if found is None else [found[0]])
            return found

        def get_run(run_id: int) -> Any:
            runs.append(given["get_run"](run_id))
            return runs[-1]

        def get_fab(fab_hash: str, run_id: int) -> Any:
            fab, run = given["get_fab"](fab_hash, run_id), runs[-1]
            digest = sha256(fab.content).hexdigest()
            try:
                name, number = get_metadata_from_config(get_fab_config(fab.content))
            except Exception as error:  # a server may send any bytes
                raise AppRefusedError(f"the app's bundle can't be read ({error})") from None
            # By these Flower finds the code that it runs, so that they have to be of what is checked.
            said = run.fab_id, run.fab_version, run.fab_hash, fab.hash_str
            if said != (name, number, digest, digest):
                raise AppRefusedError("the app's bundle isn't the one that the run names")
            check(name, digest)
            return fab

        try:
            run_id: int | None = pull(**{**given, "receive": receive, "get_run": get_run, "get_fab": get_fab})
        except AppRefusedError as refused:
            insert(
                Message(refusal(str(refused)), reply_to=received[-1]), given["state"], given["object_store"]
            )
            run_id = received[-1].metadata.run_id
        return run_id

    command.start_client_internal = started  # type: ignore[attr-defined]
    loop._pull_and_store_message = pulled  # type: ignore[attr-defined]


def on_unfetched_task(end: Callable[[], None]) -> bool:
    """Let Flower's SuperNode, in this process, call ``end`` once a task expires whose message wasn't fetched.

    Flower answers only for tasks whose messages were fetched. False if this version of Flower has no such hook.
    """
    try:
        kind: Any = import_module("flwr.supernode.nodestate.in_memory_nodestate").InMemoryNodeState
        answer = kind._on_task_tokens_expired
    except (ImportError, AttributeError):
        return False

    def answer_or_end(state: Any, tasks: Sequence[Any]) -> None:
        runs = {task.run_id for task in tasks}
        with state.lock_msg_store:
            stuck = any(
                not entry.is_retrieved
                and not entry.message.metadata.reply_to_message_id
                and entry.message.metadata.run_id in runs
                for entry in state.msg_store.values()
            )
        if stuck:
            end()
        answer(state, tasks)

    kind._on_task_tokens_expired = answer_or_end
    return True


def steady_uploads() -> bool:
    """Let Flower's SuperNode, in this process, upload over slow links, and go on where an upload broke off.

    Flower sends an object of 5 MiB in one call, which TLS must end within 30 s, and waits 30 s for the answer once
    the kernel's buffers have the rest, which hold megabytes: too little for a slow link. Here each piece has its own
    30 s, and the kernel holds little that isn't under way (TCP_NOTSENT_LOWAT).

    A handshake that a cut link lets time out, or breaks off, names SSL in its error, and Flower gives up at the name,
    as if a certificate were wrong. Here it is a timeout like others, after which Flower tries again.

    An object whose upload broke off is sent again; if the first one has arrived all the same, the SuperLink doesn't
    store the second, and Flower gives up the whole reply. Here this object counts as stored. If it isn't, because
    its session is over, the ServerApp is told so.

    False if this version of Flower has no such client.
    """
    try:
        kind: Any = import_module("flwr.supernode.fleet_http_client").FleetHttpClient
        httpx: Any = import_module("httpx")
        stream: Any = httpx.SyncByteStream
        transport_error = httpx.TransportError
        init, push, call = kind.__init__, kind.PushObject, kind._unary_unary
    except (ImportError, AttributeError):
        return False
    broken: set[tuple[str, str]] = set()

    class Pieces(stream):  # type: ignore[misc]
        def __init__(self, content: bytes) -> None:
            self.content = content

        def __iter__(self) -> Iterator[bytes]:
            for start in range(0, len(self.content), PIECE):
                yield self.content[start : start + PIECE]

    def in_pieces(request: Any) -> None:
        request.stream = Pieces(request.content)

    def in_steady_pieces(client: Any, *arguments: Any, **options: Any) -> None:
        init(client, *arguments, **options)
        http: Any = getattr(client, "_client", None)
        if hasattr(http, "event_hooks"):
            http.event_hooks = {**http.event_hooks, "request": [*http.event_hooks["request"], in_pieces]}
        pool: Any = getattr(getattr(http, "_transport", None), "_pool", None)
        if hasattr(pool, "_socket_options") and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            option = socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT
            pool._socket_options = [*(pool._socket_options or ()), option]

    def push_object(client: Any, request: Any) -> Any:
        key = request.session_id, request.object_id
        try:
            response = push(client, request)
        except Exception:
            broken.add(key)
            raise
        if key in broken:
            broken.discard(key)
            response.stored = True
        return response

    def unary_unary(client: Any, **options: Any) -> Any:
        try:
            return call(client, **options)
        except transport_error as error:
            if isinstance(error, httpx.TimeoutException) or "EOF occurred" in str(error):
                raise type(error)("the connection timed out or broke off") from error
            raise

    kind.__init__, kind.PushObject, kind._unary_unary = in_steady_pieces, push_object, unary_unary
    return True


def hand_over_state() -> bool:
    """Let this ClientApp's process hand over its state at its end; False if this version of Flower has no such bound.

    Flower ends the process after 5 s, and a large state takes longer: it is lost, and the next message fails, too, as
    its ClientApp "stopped responding".
    """
    module: Any = sys.modules.get("flwr.supercore.exit.exit")
    if not hasattr(module, "FORCE_EXIT_TIMEOUT_SECONDS"):
        return False
    module.FORCE_EXIT_TIMEOUT_SECONDS = max(module.FORCE_EXIT_TIMEOUT_SECONDS, LONGEST_END)
    return True


def database_settings(settings: dict[str, str]) -> bool:
    """Let Flower's SuperLink, in this process, open its database with these settings (SQLite's pragmas), too.

    False if this version of Flower has no such list.
    """
    try:
        module: Any = import_module("flwr.supercore.sql_mixin")
        flowers = dict(module.SQLITE_PRAGMAS)
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    module.SQLITE_PRAGMAS = tuple({**flowers, **settings}.items())
    return True


def extend_superlink(configure: Callable[[Any], None]) -> None:
    """Let Flower's SuperLink, in this process, pass its FastAPI app to ``configure`` before it serves.

    Flower calls this hook for extensions of its own that aren't public.
    """
    with needed_for("fedapp deploy fetch"):
        extensions = import_module("flwr.superlink.extensions")
        before = extensions.configure_app

    def both(app: Any) -> None:
        before(app)
        configure(app)

    extensions.configure_app = both  # type: ignore[attr-defined]


def add_control_header(app: Any, name: str, value_of: Callable[[str, Any, Any], str]) -> None:
    """Let a SuperLink, by its FastAPI app, answer requests to its Control API with one more header.

    ``value_of`` gets the path, and the messages of the request and of its answer; with "" there is no header.
    """
    with needed_for("fedapp deploy audit"):
        headers_of = import_module("starlette.datastructures").MutableHeaders
        middleware = import_module("starlette.middleware").Middleware
        stack = app.user_middleware

    class ControlHeader:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            path = str(scope.get("path", ""))

            async def with_header(message: Any) -> None:
                state = scope.get("state", {})
                if message["type"] == "http.response.start" and "protobuf_response" in state:
                    value = value_of(path, state.get("protobuf_request"), state["protobuf_response"])
                    if value:
                        headers_of(scope=message)[name] = value
                await send(message)

            await self.app(scope, receive, with_header if path.startswith("/v1/control/") else send)

    # The last one is the innermost: the messages are there before Flower's own middleware has made bytes of them.
    stack.append(middleware(ControlHeader))


def node_of_key(app: Any) -> Callable[[bytes], int | None]:
    """Return the function with which a SuperLink, by its FastAPI app, finds the node of a registered key in PEM."""
    with needed_for("fedapp deploy logs"):
        find: Callable[[bytes], int | None] = app.state.linkstate_factory.state().get_node_id_by_public_key
    return find


def simulate(server_app: "ServerApp", client_app: "ClientApp", **options: Any) -> None:
    """Simulate in this process: ``flwr.simulation.run_simulation``, which Flower has deprecated for ``flwr run``.

    ``flwr run`` needs a SuperLink, an installed app and a configuration in the user's home, and can't be handed the
    apps; so the deprecated call stays, without its warning, until Flower has another.
    """
    from flwr.simulation import run_simulation

    logger = logging.getLogger("flwr")
    logger.addFilter(_without_deprecation)
    try:
        run_simulation(server_app, client_app, **options)
    finally:
        logger.removeFilter(_without_deprecation)


def _without_deprecation(record: logging.LogRecord) -> bool:
    return "run_simulation" not in record.getMessage()


def _matters(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


@contextmanager
def without_chatter() -> Iterator[None]:
    """Suppress Flower's log lines below warnings; child loggers are unaffected."""
    logger = logging.getLogger("flwr")
    logger.addFilter(_matters)
    try:
        yield
    finally:
        logger.removeFilter(_matters)
