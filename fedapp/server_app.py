"""The ServerApp: config → data for evaluation, model, strategy; and the run directory."""

import errno
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fedapp import federation, local_work
from fedapp.checkpoint import Checkpoint
from fedapp.client_app import to_arrays, to_state
from fedapp.config import ConfigError, RunConfig, defaults, read_run
from fedapp.data import DataError, Dataset, Partition
from fedapp.data.message import gaussian_epsilon
from fedapp.display import Display
from fedapp.divergence import DivergenceMeter
from fedapp.evaluation import evaluate
from fedapp.models import ModelError
from fedapp.privacy import check_privacy
from fedapp.report import read_metrics
from fedapp.results import RunDirectory
from fedapp.trackers import check_tracker, make_tracker
from strategies import REGISTRY, AsynchronousStrategy, FederatedStrategy, Progress, messages
from strategies.arrays import Layout, Vector
from strategies.clock import VirtualClock, WallClock
from strategies.exchange import never
from strategies.roster import wait_for_nodes
from strategies.time_scenario import TimeScenario

log = logging.getLogger("flwr.fedapp")

app = ServerApp()

# What the user can mend by changing the config or the data.
USER_ERRORS = (ConfigError, DataError, ModelError)

# What writing to a disk that is full, broken or read-only raises.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class Experiment:
    """Everything of a run that is known before a client starts."""

    config: RunConfig
    num_clients: int
    dataset: Dataset
    partition: Partition
    model: nn.Module
    device: torch.device


def prepare(config: RunConfig, num_clients: int) -> Experiment:
    """Check the config against the data, the model and the number of clients, and load what the server needs.

    Raises
    ------
    ConfigError, DataError, ModelError
        With one clear message, before any client is started.
    """
    try:
        work_of_clients(config, num_clients)
        strategy = build_strategy(config)
        strategy.check(num_clients)
        if isinstance(strategy, AsynchronousStrategy):
            _check_asynchronous(config)
        # What the strategy demands, such as the spectral method's weights, is what the run's record says.
        resolved = {field.name: getattr(strategy.config, field.name) for field in fields(strategy.config)}
        config = config.model_copy(update=resolved)
        check_privacy(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.resume and (before := read_run(config.resume)[1]) != num_clients:
        raise ConfigError(f"num-supernodes = {num_clients}: the run to resume has {before} clients")
    if config.min_clients > num_clients:
        raise ConfigError(f"min-clients = {config.min_clients}: there are {num_clients} clients")
    check_tracker(config)
    device = _server_device(config)
    config = config.model_copy(update={"data_path": federation.absolute(config.data_path)})
    dataset = federation.dataset_of(config, num_clients)
    partition = federation.partition_of(config, num_clients)
    model = federation.model_of(config, dataset.kind, dataset.input_shape, dataset.num_classes)
    if config.normalize:
        dataset.inputs(partition.test_indices[:1], normalize=True)  # says so if no values are published
    return Experiment(config, num_clients, dataset, partition, model, device)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run from Flower's run config."""
    values = context.run_config
    if values.get("resume"):  # Flower fills in the defaults: a value that is one counts as not given
        values = {key: value for key, value in values.items() if value != defaults().get(key)}
    config = RunConfig.load(values)
    num_clients = len(wait_for_nodes(grid, config.min_clients, config.round_timeout))
    if config.resume and engine_of(grid) == "deployment":  # devices may be missing
        num_clients = read_run(config.resume)[1]
    run(grid, prepare(config, num_clients))


def run(
    grid: Grid,
    experiment: Experiment,
    stopped: Callable[[], bool] = never,
    directory: RunDirectory | None = None,
) -> RunDirectory:
    """Run the federation and record it.

    Parameters
    ----------
    directory : RunDirectory, optional
        Where to; by default one is made as the config says.
    stopped : callable
        Asked at every poll; True ends the run after the last complete round, with a complete run directory.
    """
    config, engine = experiment.config, engine_of(grid)
    if config.record_divergence and engine == "deployment":
        raise ConfigError(
            "record-divergence = true: only a simulation has all clients' data; allowed is false"
        )
    recorder = Recorder(experiment, engine, directory or RunDirectory(config))
    strategy = recorder.strategy = build_strategy(config, recorder, stopped)
    strategy.witness = recorder.measure if config.record_divergence else None
    strategy.repeatable = engine != "deployment"
    recorder.begin()
    status = "failed"
    try:
        strategy.start(
            grid,
            to_arrays(experiment.model.state_dict()),
            num_rounds=config.num_server_rounds,
            timeout=config.round_timeout,
            train_config=task_config(experiment),
            evaluate_fn=recorder.evaluate,
        )
        status = "interrupted" if stopped() else "finished"
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise ConfigError(
            f"results-dir = {config.results_dir!r}: {recorder.directory.path} can't be written to any more "
            f"({error.strerror}); what it has stays, and resume continues from its checkpoint"
        ) from None
    finally:
        # A full disk, which may be what ended the run, must not hide why.
        with suppress(*((OSError,) if status == "failed" else ())):
            recorder.end(status)
        recorder.directory.close()
    return recorder.directory


def build_strategy(
    config: RunConfig, observer: Callable[[Progress], None] | None = None, stopped: Callable[[], bool] = never
) -> FederatedStrategy:
    """Make the configured strategy: its config's fields are run-config keys."""
    strategy = REGISTRY[config.strategy]
    values = {field.name: getattr(config, field.name) for field in fields(strategy.Config)}
    clock = WallClock() if config.clock == "wall" else VirtualClock()
    return strategy(strategy.Config(**values), clock=clock, observer=observer, stopped=stopped)


def _check_asynchronous(config: RunConfig) -> None:
    """Refuse what needs rounds."""
    if config.participation != "full":
        raise ConfigError(
            f"participation = {config.participation!r}: {config.strategy} works with every client; allowed is full"
        )
    if config.aggregation_rule != "mean":
        raise ConfigError(
            f"aggregation-rule = {config.aggregation_rule!r}: compares updates of one round, from one model; "
            f"{config.strategy} has no rounds, allowed is mean"
        )
    if config.dp == "central":
        raise ConfigError(
            "dp = 'central': its account is of rounds in which each client counts once, with the same weight; "
            f"{config.strategy} has no rounds, allowed are none, local"
        )


def task_config(experiment: Experiment) -> ConfigRecord:
    """Return what every message to a client carries: the run config and the shape of the data.

    Its ``step-heterogeneity`` is the list of all clients' work, so that a client needs nothing else to know its own.
    """
    config = experiment.config
    work = local_work.to_text(work_of_clients(config, experiment.num_clients))
    return ConfigRecord(
        {
            **config.flat(),
            "step-heterogeneity": "none" if config.step_heterogeneity == "none" else work,
            **federation.schema_fields(experiment.dataset),
        }
    )


def work_of_clients(config: RunConfig, num_clients: int) -> list[int]:
    """Return E_k, the local epochs or local steps of every client, by index; ValueError if they can't be told."""
    times = TimeScenario(config.time_scenario, num_clients, config.seed).means
    usual = config.local_epochs or config.local_steps
    return local_work.local_work(config.step_heterogeneity, usual, times, config.seed)


def engine_of(grid: Grid) -> str:
    """Name the engine behind a grid."""
    names = {"InMemoryGrid": "ray", "SequentialGrid": "sequential", "VectorizedGrid": "vectorized"}
    return names.get(type(grid).__name__, "deployment")


class Recorder:
    """Evaluates the model, writes the run directory as the run goes, and shows progress."""

    def __init__(self, experiment: Experiment, engine: str, directory: RunDirectory) -> None:
        self.experiment = experiment
        self.config = experiment.config
        self.engine = engine
        self.clock = WallClock()
        self.directory = directory
        self.display = Display(experiment.config.num_server_rounds)
        self.tracker = make_tracker(self.config, self.directory.path)
        self.totals = dict.fromkeys((messages.FAILURES, messages.BYTES_UP, messages.BYTES_DOWN), 0)
        self.last: dict[str, float] = {}
        self._saved = 0  # the last aggregation in a checkpoint
        self._rest = 0.0  # wall seconds until which no other is written
        self.strategy: FederatedStrategy | None = None
        self._graph_of: tuple[int, ...] = ()
        self._test: tuple[Tensor, Tensor] | None = None
        self._meter: DivergenceMeter | None = None

    def begin(self) -> None:
        """Write what is known before the first round; with something to resume, set everything to where it was."""
        self.directory.write_config(self.experiment.num_clients)
        self.directory.write_partition(self.experiment.partition)
        if (checkpoint := self.directory.checkpoint) is not None:
            self._resume(checkpoint)
        elif self.config.resume:
            self.directory.cut_metrics(0)
        self._write_summary("running")
        self.display.start(self.directory.path)

    def _resume(self, checkpoint: Checkpoint) -> None:
        assert self.strategy is not None
        state, kept = checkpoint.strategy, checkpoint.recorder
        try:
            self.strategy.restore(state)
        except ValueError as error:
            raise ConfigError(f"resume = {self.config.resume!r}: {error}") from None
        self._saved = state["aggregations"]
        self.totals, self.last = kept["totals"], kept["last"]
        self.clock.resume(kept["wall-seconds"])
        self.directory.cut_metrics(kept["metrics-size"])
        if kept["line"] is not None:
            layout = Layout.of(to_arrays(self.experiment.model.state_dict()))
            self._publish(kept["line"], layout.to_record(np.array(state["model"], dtype=np.float64)))

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Score the global model on the test rows; over unseen clients also the spread of their accuracies."""
        experiment, partition = self.experiment, self.experiment.partition
        if self._test is None:
            self._test = federation.to_tensors(
                experiment.dataset, partition.test_indices, self.config.normalize, experiment.device
            )
        model = experiment.model.to(experiment.device)
        score = evaluate(model, to_state(arrays, experiment.device), *self._test)
        metrics = MetricRecord({"loss": score.loss, "accuracy": score.accuracy})
        if self.config.test_on == "unseen-clients":
            metrics["accuracy-std"] = float(score.by_client(partition.test_offsets).std())
        if isinstance(self.strategy, AsynchronousStrategy) and self.engine != "deployment":
            metrics[messages.CLIENT_LOSSES] = self._client_losses(arrays)
        return metrics

    def _client_losses(self, arrays: ArrayRecord) -> list[float]:
        """Return f_i(w) of every client of a simulation, whose data are all here."""
        experiment, partition = self.experiment, self.experiment.partition
        training = federation.training_tensors(self.config, experiment.num_clients, experiment.device)
        model = experiment.model.to(experiment.device)
        score = evaluate(model, to_state(arrays, experiment.device), *training)
        sums = np.add.reduceat(score.losses, partition.client_offsets[:-1])
        return (sums / partition.sizes).tolist()  # type: ignore[no-any-return]

    def measure(self, client: int, local_model: Vector) -> None:
        """Take a client's trained model (D,) into divergence and drift of the aggregation under way."""
        experiment, strategy = self.experiment, self.strategy
        assert strategy is not None
        if self._meter is None:
            training = federation.training_tensors(self.config, experiment.num_clients, experiment.device)
            model = experiment.model.to(experiment.device)
            self._meter = DivergenceMeter(model, *training, experiment.partition.client_offsets)
        layout = Layout.of(to_arrays(experiment.model.state_dict()))
        state = to_state(layout.to_record(local_model), experiment.device)
        self._meter.take(client, state, strategy.importance())

    def __call__(self, progress: Progress) -> None:
        """Take note of an aggregation; an evaluated one is written."""
        for key in self.totals:
            self.totals[key] += int(progress.metrics.get(key, 0))
        metrics = {**progress.metrics, **(self._meter.metrics() if self._meter else {})}
        if self.config.dp != "none" and progress.aggregation:
            metrics["dp-epsilon"] = self._privacy_spent(progress.aggregation)
        self.last = {**metrics, **self.totals, "aggregation": progress.aggregation}
        line = None
        if progress.evaluated:
            line = {
                "aggregation": progress.aggregation,
                "time": progress.time,
                "clock": self.config.clock,
                **metrics,
                **self.totals,
                **({"clients": progress.clients} if progress.clients else {}),
            }
        if self._is_checkpoint(progress):
            self._checkpoint(line)
        if line is not None:
            self._publish(line, progress.arrays)
        self.display.update(progress)

    def _privacy_spent(self, aggregation: int) -> float:
        """Return the ε of the client that has sent most; of every round, whether a client took part or not."""
        releases = aggregation
        if isinstance(self.strategy, AsynchronousStrategy):
            releases = max(1, *(member.tasks for member in self.strategy.members.values()))
        return gaussian_epsilon(self.config.dp_noise_multiplier, self.config.dp_delta, releases)

    def _publish(self, line: Mapping[str, Any], arrays: ArrayRecord) -> None:
        """Write what an evaluation changes in the run directory."""
        self.directory.append_metrics(line)
        self.tracker.log({key: value for key, value in line.items() if key != "clients"})
        self.directory.write_model(to_state(arrays, torch.device("cpu")))
        self._write_graph()
        self._write_summary("running")

    def _is_checkpoint(self, progress: Progress) -> bool:
        """Tell whether an aggregation is saved.

        In real time, before it is reported, so that none that was reported is ever lost. In virtual time what is lost
        comes again exactly as it was: checkpoints may take a twentieth of the run's time, and an evaluation that
        there is only because the run ends here isn't part of what is resumed.
        """
        config, aggregation = self.config, progress.aggregation
        if config.checkpoint_every == 0 or aggregation == 0:
            return False
        due = aggregation >= self._saved + config.checkpoint_every
        if config.clock == "wall":
            return due or progress.evaluated or self.display.announces(aggregation)
        on_schedule = not progress.evaluated or aggregation % config.eval_every == 0
        return due and on_schedule and self.clock.now() >= self._rest

    def _checkpoint(self, line: Mapping[str, Any] | None) -> None:
        assert self.strategy is not None
        began = self.clock.now()
        recorder = {
            "totals": self.totals,
            "last": self.last,
            "wall-seconds": began,
            "metrics-size": self.directory.metrics_size(),
            "line": line,  # not in metrics.jsonl yet
        }
        state = self.strategy.state()
        self.directory.write_checkpoint(Checkpoint(state, recorder))
        self._saved = state["aggregations"]
        self._rest = self.clock.now() + 20 * (self.clock.now() - began)

    def _write_graph(self) -> None:
        graph = self.strategy.graph if self.strategy else None
        if graph is not None and graph.clients != self._graph_of:
            self.directory.write_graph(graph.snapshot())
            self._graph_of = graph.clients

    def end(self, status: str) -> None:
        """Write the closing summary and the figures, and show them."""
        self.display.stop()
        self.tracker.close()
        summary = self._write_summary(status)
        if self.last:
            from fedapp.report.figures import draw_curves, draw_partition  # matplotlib is slow to import

            draw_curves(self.directory.path)
            dataset = self.experiment.dataset
            draw_partition(self.directory.path, dataset.y, dataset.num_classes)
            self.display.close(summary, read_metrics(self.directory.path), self.directory.path)

    def _write_summary(self, status: str) -> dict[str, object]:
        summary: dict[str, object] = {
            "status": status,
            "strategy": self.config.strategy,
            "engine": self.engine,
            "num-clients": self.experiment.num_clients,
            "wall-seconds": self.clock.now(),
            "aggregations": 0,
            **{key: value for key, value in self.last.items() if key != "aggregation"},
        }
        summary["aggregations"] = self.last.get("aggregation", 0)
        self.directory.write_summary(summary)
        return summary


def _server_device(config: RunConfig) -> torch.device:
    if config.server_device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("server-device = 'cuda': this machine has no GPU; allowed are auto, cpu")
    use_gpu = config.server_device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_gpu else "cpu")
