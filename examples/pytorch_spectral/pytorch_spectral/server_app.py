"""The server: Flower's, but for the strategy."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from pytorch_spectral.task import Net
from strategies import Spectral

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    torch.manual_seed(0)
    strategy = Spectral(
        perturbation_beta=float(context.run_config["perturbation-beta"])
    )  # in place of FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    last = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    print(f"Accuracy on the clients: {last['eval_acc']:.3f}")
