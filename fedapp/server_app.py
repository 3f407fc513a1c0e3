"""The ServerApp: Flower's run config in, a run out."""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp import federation
from fedapp.config import ConfigError, RunConfig, defaults, read_run
from fedapp.config.run_keys import ROUNDS
from fedapp.logs import logging_as, plain_where_piped
from fedapp.report.files import read_summary
from fedapp.room import lacks_room
from fedapp.server import prepare, run
from fedapp.server.ending import one_line_errors, told_to_stop
from fedapp.server.progress import Heartbeat, HowFar, Sparingly
from fedapp.server.run import own_parts_named
from strategies.clients.registered import NodeRecord, addressed_nodes
from strategies.flower.exchange import never, wait_for_nodes
from strategies.flower.grids import DEPLOYMENT, RAY, addressed, engine_of

log = logging.getLogger("flwr.fedapp")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run from Flower's run config."""
    values = context.run_config
    plain_where_piped()
    with logging_as(values.get("log-format")), told_to_stop(), one_line_errors():
        if lacking := lacks_room():
            logging.getLogger("flwr").addFilter(lambda record: False)  # Flower's tracebacks of the same error
            raise ConfigError(lacking)
        if values.get("resume"):  # Flower fills in the defaults: a value that is one counts as not given
            values = {key: value for key, value in values.items() if value != defaults().get(key)}
        config = RunConfig.load(values)
        record = NodeRecord(config.registered_nodes)
        nodes = addressed_nodes(config.participation, record, config.min_clients)
        grid = addressed(grid, config.participation, nodes)
        number, on_devices = _wait_for_clients(grid, config), engine_of(grid) == DEPLOYMENT
        if config.relay:
            from fedapp.worker.region import serve_region

            serve_region(grid, config)
            return
        why = ""
        if engine_of(grid) == RAY:
            from fedapp.engine.run import chosen_engine, make_grid

            engine, why = chosen_engine(config.engine, secure_sums=config.secure_sums)
            config = config.model_copy(update={"engine": engine})
            if engine != RAY:  # no message goes to Flower's simulation
                federation.renew()
                grid = make_grid(engine, number)
        experiment = prepare(config, number, on_devices=on_devices)
        if why:
            log.info(why)
        with own_parts_named(config):
            run(grid, experiment)


def _wait_for_clients(grid: Grid, config: RunConfig) -> int:
    """Wait for the clients that a run begins with; return how many it is made for."""
    done = int(read_summary(Path(config.resume)).get("aggregations", 0)) if config.resume else 0
    heartbeat = Heartbeat(
        config.num_server_rounds or ROUNDS,
        lambda: HowFar(done, 0, len(list(grid.get_node_ids()))),
        Sparingly(),
    )
    should_stop = heartbeat.watching(never)
    num_clients = len(wait_for_nodes(grid, config.min_clients, config.round_timeout, should_stop))
    if config.resume and engine_of(grid) == DEPLOYMENT:  # devices may be missing
        num_clients = read_run(config.resume)[1]
    return num_clients
