"""The server: Flower's, but for the strategy."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from jax_fedbuff.task import init_params
from strategies import FedBuff

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    strategy = FedBuff(buffer_size=int(context.run_config["buffer-size"]))  # in place of FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(np.asarray(w)) for name, w in init_params().items()}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    last = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    print(f"Accuracy on the clients: {last['eval_acc']:.3f}")
