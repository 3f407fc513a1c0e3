"""The server: Flower's, but for the strategy."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from numpy_spectral.task import FEATURES
from strategies import Spectral

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    beta = float(context.run_config["perturbation-beta"])
    strategy = Spectral(perturbation_beta=beta)  # in place of FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(FEATURES)]),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    last = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    print(f"Accuracy on the clients: {last['eval_acc']:.3f}")
