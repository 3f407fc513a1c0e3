"""The run of a region: its devices answer together, as one device of another SuperLink (``strategies.tiers.relay``).

The ServerApp of the region's run serves the worker's protocol on the socket that its run config calls ``relay``. The
region's SuperNode at the other SuperLink has this path in its node config, and hands every message over there.
"""

from contextlib import closing
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.serverapp import Grid

from fedapp.client.handlers import CANNOT_TAKE_PART
from fedapp.config import ConfigError, RunConfig
from fedapp.worker.protocol import WorkerError
from fedapp.worker.serving import Worker
from strategies.clock import WallClock
from strategies.core.run_state import RunOptions
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT, engine_of
from strategies.tiers.relay import Relay

# Fields of a region's rounds that are keys of its run.
_FIELDS = (
    "min_clients",
    "participation",
    "registered_nodes",
    "compression_down",
    *("safeguards", "size_ratio_bound", "examples_bound", "update_norm_bound"),
    *("secure_sums", "secure_neighbours", "secure_threshold", "secure_clipping", "secure_metrics"),
)


def serve_region(grid: Grid, config: RunConfig) -> None:
    """Answer for the devices of a SuperLink as one device of another, until this process is told to end.

    Raises
    ------
    ConfigError
        If the clients are those of a simulation, or another process listens on the socket.
    """
    if engine_of(grid) != DEPLOYMENT:
        raise ConfigError(
            f"relay = {config.relay!r}: only devices of a SuperLink are a region of another; a simulation has "
            "tiers = regions:R, and allowed is an empty relay"
        )
    relay = Relay(
        grid,
        timeout=config.round_timeout,
        run_options=RunOptions(clock=WallClock()),
        of_relays=config.edge_rounds if config.tiers == "relays" else 0,
        **{name: getattr(config, name) for name in _FIELDS},
    )

    def answer(message: Message, context: Context) -> Message:
        if _asks_a_region(message):
            return relay(message, context.node_config)
        text = "tiers = none: this client is a relay, which answers for a region; allowed is tiers = relays"
        return Message(Error(CANNOT_TAKE_PART, text), reply_to=message)

    try:
        with closing(relay):
            Worker(Path(config.relay).absolute(), answer).serve()
    except WorkerError as error:
        raise ConfigError(f"relay = {config.relay!r}: {error}") from None


def _asks_a_region(message: Message) -> bool:
    config = message.content.get(messages.CONFIG) if message.has_content() else None
    return config is not None and messages.EDGE_ROUNDS in config
