"""The ServerApp: Flower's FedAvg over all clients; writes the last model's accuracy to a file."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    model = task.make_model(config["model"])
    kind = FedAvg
    if config["swapped"]:
        import strategies  # here, so that the run of Flower's class doesn't have its cost

        kind = strategies.FedAvg
    result = kind(fraction_train=1.0, fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=config["num-server-rounds"]
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    Path(config["accuracy-file"]).write_text(str(task.accuracy(model, config["data"])), "utf-8")
