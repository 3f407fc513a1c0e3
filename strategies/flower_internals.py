"""All that this project uses of Flower beside its public modules, each with why; flwr 1.28 to 1.41.

Public are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation``. The linter refuses other
modules of Flower anywhere else.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Message, Metadata
from flwr.common.config import flatten_dict
from flwr.common.constant import ErrorCode

try:
    from flwr.supercore.run import Run
except ModuleNotFoundError:  # in flwr 1.28
    from flwr.common.typing import Run  # type: ignore[attr-defined, no-redef]

try:
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError:  # before flwr 1.38, where a message doesn't ask who is sending
    TaskIdentity = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

__all__ = [
    "APP_RAISED",
    "MESSAGE_UNAVAILABLE",
    "MOD_FAILED",
    "SERVER",
    "UNKNOWN",
    "Run",
    "be_the_server",
    "empty_run",
    "flatten_dict",
    "give_id",
    "is_simulation",
    "read_pairs",
    "simulate",
    "unavailable_reply",
]

#: Error codes of replies, which have no public names: its time to live is over; what a simulation says of an app
#: that raised something, what a device does, and that a mod in front of the app refuses.
MESSAGE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE
UNKNOWN, APP_RAISED = ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_RAISED_EXCEPTION
MOD_FAILED = ErrorCode.MOD_FAILED_PRECONDITION

RUN_ID = 1
#: The server's own node id.
SERVER = 1


def be_the_server() -> None:
    """Let this process make messages outside a ServerApp: their constructor asks who is sending."""
    if TaskIdentity is not None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SERVER


def empty_run() -> Run:
    """Return what a Grid's ``run`` has to be, with nothing in it but its id."""
    return Run.create_empty(run_id=RUN_ID)


def give_id(message: Message, message_id: str) -> None:
    """Give a message the id that a Grid gives when it is pushed; it can't be set otherwise."""
    message.metadata.__dict__["_message_id"] = message_id


def unavailable_reply(metadata: Metadata) -> Message:
    """Return what the SuperLink says in place of a node that is gone; the import takes a second."""
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message

    return create_message_error_unavailable_res_message(metadata, "node_unavail")


def is_simulation(grid: "Grid") -> bool:
    """Tell the Grid of Flower's simulation from the one of a deployment; neither says what it is."""
    return type(grid).__name__ == "InMemoryGrid"


def read_pairs(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs or one TOML file as ``flwr run`` does, whose parser has no public name.

    Raises
    ------
    click.ClickException, ValueError
        If it can't be read.
    """
    from flwr.common.config import parse_config_args

    return parse_config_args(list(texts))


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
