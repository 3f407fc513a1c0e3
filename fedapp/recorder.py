"""What a run leaves behind: evaluates the model, and writes the run directory as the run goes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from fedapp import federation
from fedapp.checkpoint import Checkpoint
from fedapp.client_app import to_arrays, to_state
from fedapp.config import ConfigError, RunConfig, Value
from fedapp.data import Dataset, Partition
from fedapp.data.message import gaussian_epsilon
from fedapp.display import Display
from fedapp.report import read_metrics
from fedapp.results import RunDirectory
from fedapp.trackers import make_tracker
from fedapp.training.divergence import DivergenceMeter
from fedapp.training.evaluation import evaluate
from strategies import FederatedStrategy, Progress, messages
from strategies.arrays import Layout, Vector
from strategies.clock import WallClock


@dataclass(frozen=True)
class Experiment:
    """Everything of a run that is known before a client starts.

    Attributes
    ----------
    unread : mapping of str to value
        Keys that are given and that nothing in the run reads: see ``fedapp.config.unread``.
    """

    config: RunConfig
    num_clients: int
    dataset: Dataset
    partition: Partition
    model: nn.Module
    device: torch.device
    unread: Mapping[str, Value] = field(default_factory=dict)


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
        self.unread = list(experiment.unread)
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
        # Not from config.toml, which has what a strategy demands in place of what was given.
        self.unread = kept.get("unread-keys", self.unread)
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
        if self.strategy is not None and not self.strategy.has_rounds and self.engine != "deployment":
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
        if self.strategy is not None and not self.strategy.has_rounds:
            releases = max(1, self.strategy.most_tasks())
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
            "unread-keys": self.unread,
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
            "unread-keys": self.unread,
            "wall-seconds": self.clock.now(),
            "aggregations": 0,
            **{key: value for key, value in self.last.items() if key != "aggregation"},
        }
        summary["aggregations"] = self.last.get("aggregation", 0)
        self.directory.write_summary(summary)
        return summary
