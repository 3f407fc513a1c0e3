"""The ServerApp: Flower's FedAvg over all clients; writes the last model's accuracy to a file."""

from importlib import import_module
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    learner = import_module(f"quickstart.in_{config['library']}")
    kind = FedAvg
    if config["swapped"]:
        import strategies  # here, so that the run of Flower's class doesn't have its cost

        kind = strategies.FedAvg
    result = kind(fraction_train=1.0, fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=learner.initial(config), num_rounds=config["num-server-rounds"]
    )
    Path(config["accuracy-file"]).write_text(str(learner.accuracy(result.arrays, config)), "utf-8")
