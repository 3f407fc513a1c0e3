"""The ServerApp: Flower's run config in, a run out."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp.config import RunConfig, defaults, read_run
from fedapp.server import prepare, run
from strategies.engine_name import DEPLOYMENT, engine_of
from strategies.roster import wait_for_nodes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run from Flower's run config."""
    values = context.run_config
    if values.get("resume"):  # Flower fills in the defaults: a value that is one counts as not given
        values = {key: value for key, value in values.items() if value != defaults().get(key)}
    config = RunConfig.load(values)
    num_clients = len(wait_for_nodes(grid, config.min_clients, config.round_timeout))
    if config.resume and engine_of(grid) == DEPLOYMENT:  # devices may be missing
        num_clients = read_run(config.resume)[1]
    run(grid, prepare(config, num_clients))
