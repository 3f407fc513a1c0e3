"""The server: Flower's, but for where the strategy is imported from."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from sklearn_fedprox.task import get_model_params, make_model
from strategies import FedProx  # in place of flwr.serverapp.strategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server."""
    model = make_model(float(context.run_config["lr"]))
    strategy = FedProx(proximal_mu=float(context.run_config["proximal-mu"]))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_model_params(model)),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    last = result.evaluate_metrics_clientapp[max(result.evaluate_metrics_clientapp)]
    print(f"Accuracy on the clients: {last['eval_acc']:.3f}")
