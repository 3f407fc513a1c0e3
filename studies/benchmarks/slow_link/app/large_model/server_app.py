"""The ServerApp: FedAvg over both clients; appends the time of each round, and the model's error, to a file."""

import json
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from large_model.model import ADAPTERS, error_of, initial
from strategies import FedAvg

CLIENTS = 2

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    adapters, rounds = float(config["adapters"]), int(config["num-server-rounds"])

    def write(**event: object) -> None:
        with Path(str(config["events"])).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **event}) + "\n")

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_available_nodes=CLIENTS,
        describe=True,
        compression=config["compression"],
        compression_down=config["compression-down"],
        observer=lambda seen: write(round=seen.aggregation, **seen.metrics),
        **({"trained": [ADAPTERS]} if adapters else {}),
    )
    result = strategy.start(
        grid,
        initial(int(config["values"]), adapters),
        num_rounds=rounds,
        timeout=float(config["round-timeout"]),
    )
    write(error=error_of(result.arrays, rounds, CLIENTS, bool(adapters)))
