"""Keys of the run itself: how long, where it goes, and on what it computes."""

from typing import TYPE_CHECKING, Annotated, Literal

from fedapp.config.key import (
    SIMULATED,
    Count,
    Flag,
    Keys,
    Port,
    Positive,
    Setting,
    Text,
    Threads,
    if_,
    key,
    pattern,
)
from fedapp.config.strategy_keys import with_parameters
from fedapp.names import Engine

ROUNDS = 40  # of a synchronous strategy, where num-server-rounds = 0

# Keys that the run of a region reads (fedapp/worker/region.py).
OF_REGIONS = (
    "relay",
    "clock",
    "min-clients",
    "round-timeout",
    "participation",
    "registered-nodes",
    "compression-down",
    "tiers",
    "edge-rounds",
    "log-format",
    "safeguards",
    "size-ratio-bound",
    "examples-bound",
    "update-norm-bound",
    "secure-sums",
    "secure-neighbours",
    "secure-threshold",
    "secure-clipping",
    "secure-metrics",
)

DeviceChoice = Literal["auto", "cpu", "cuda"]


def _uses_gpus(setting: Setting) -> bool:
    return setting.gpus and not setting.config.client_device == setting.config.server_device == "cpu"


def _exports(setting: Setting) -> bool:
    return bool(setting.config.metrics_port > 0)


@with_parameters("run")
class RunKeys(Keys):
    """What is the same for every method, data and model."""

    if TYPE_CHECKING:  # parameters of strategies that the app itself reads
        best_of: str
        eval_every: int
        keep: str
        min_clients: int
        patience: int
        seed: int
        stop_at: str
        time_budget: float

    num_server_rounds: Annotated[
        Count,
        key(
            "rounds, or aggregations without rounds; 0: 40 rounds, or as many aggregations as take as "
            "long, with eval-every in rounds"
        ),
    ]
    round_timeout: Annotated[
        Positive, key("real seconds to wait for a reply, except by engines in one process")
    ]
    client_evaluation: Annotated[Flag, key("evaluate the model on the clients, too")]
    client_records: Annotated[
        Literal["auto", "always", "last", "never"],
        key(
            "when a simulation's server evaluates each client's rows (last: at round num-server-rounds); auto: "
            "always if cheap or without rounds, else last"
        ),
    ]
    figures: Annotated[Flag, key("draw the run's figures when it ends")]
    checkpoint_every: Annotated[Count, key("aggregations between two checkpoints; 0: none")]
    resume: Annotated[Text, key("folder of a run to go on with")]
    record_divergence: Annotated[
        Flag, key("measure how unlike objectives are, and how far local models drift")
    ]
    engine: Annotated[
        Engine,
        key(
            "what runs a simulation's clients: many at once (vectorized) or one by one (sequential) in the server's "
            "process, or Flower's simulation (ray); auto: ray if clients share a GPU or RAY_ADDRESS names a cluster, "
            "else vectorized",
            SIMULATED,
        ),
    ]
    server_device: Annotated[DeviceChoice, key("what the server evaluates on")]
    client_device: Annotated[DeviceChoice, key("what clients train on")]
    tf32: Annotated[Flag, key("let a GPU multiply in TF32 (three digits)", if_("a GPU", _uses_gpus))]
    client_threads: Annotated[
        Threads,
        key(
            "threads of a client's training, on the vectorized engine of evaluation alone; 0: PyTorch's number"
        ),
    ]
    results_dir: Annotated[Text, key("where the run's folder goes")]
    tracker: Annotated[
        Literal["none", "tensorboard", "wandb", "mlflow"], key("where else metrics are logged")
    ]
    log_format: Annotated[Literal["text", "json"], key("form of the app's own log lines")]
    metrics_port: Annotated[Port, key("where Prometheus can read the metrics; 0: nowhere")]
    metrics_host: Annotated[
        Text, key("this machine's address for Prometheus", if_("metrics-port > 0", _exports))
    ]
    relay: Annotated[
        Text,
        key(
            "path of the socket on which a region's devices answer as one device of another SuperLink; empty: a run "
            "of its own",
            if_("devices", lambda setting: setting.on_devices),
        ),
    ]
    run_name: Annotated[
        str,
        pattern(
            "a folder name that begins with a letter, a digit or _, without / and control characters",
            r"^(\w[^/\\\x00-\x1f\x7f]*)?$",
        ),
        key("the run's folder; empty: STRATEGY-DATASET-MODEL-NNN"),
    ]


def scaled(eval_every: int, aggregations: int) -> int:
    """Return ``eval-every`` in aggregations, where it counts rounds: ``aggregations`` take as long as 40 rounds."""
    return max(1, round(eval_every * aggregations / ROUNDS))
