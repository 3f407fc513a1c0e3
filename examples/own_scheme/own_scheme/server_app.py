"""The server: Flower's, but for the strategy."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from own_scheme.scheme import Every
from own_scheme.task import FEATURES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    every, most_stale = int(context.run_config["every"]), int(context.run_config["most-stale"])
    strategy = Every(every=every, most_stale=most_stale)  # in place of FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(FEATURES)]),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    last = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    print(f"Accuracy on the clients: {last['eval_acc']:.3f}")
