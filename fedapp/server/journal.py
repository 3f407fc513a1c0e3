"""The run directory's settings, curves, model and graph."""

from collections.abc import Mapping
from typing import Any

import torch

from fedapp import federation
from fedapp.data.partition import OWN
from fedapp.report.away import last_away, write_away
from fedapp.report.clients import WALL, ClientsFile
from fedapp.report.tasks import TasksFile
from fedapp.server.experiment import Experiment
from fedapp.server.record import Entry, Observer
from fedapp.server.run_directory import RunDirectory
from fedapp.training.state import names_of
from strategies import FederatedStrategy
from strategies.clock import WallClock


class Journal(Observer):
    """Writes the run directory as the run goes."""

    def __init__(
        self,
        experiment: Experiment,
        strategy: FederatedStrategy,
        directory: RunDirectory,
        watch: WallClock | None = None,
    ) -> None:
        self.experiment = experiment
        self.strategy = strategy
        self.directory = directory
        self._graph_of: tuple[int, ...] = ()
        self._clients, self._tasks = ClientsFile(directory.path), TasksFile(directory.path)
        self._watch = strategy.timeline.watch = watch or WallClock()
        self._publish_at = 0.0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Drop the evaluations after the checkpoint, which come again."""
        self.directory.cut_metrics(state["metrics-size"])
        # A checkpoint of an earlier version has no rows of clients.
        self._clients.cut(state.get("clients-rows", 0))
        self._tasks.cut(state.get("tasks-ended", 0))

    def begin(self) -> None:
        """Write what is known before the first round."""
        self.directory.write_config(self.experiment.num_clients)
        dataset = self.experiment.dataset
        self.directory.write_partition(self.experiment.partition, dataset.strata, dataset.num_strata)
        if self.experiment.config.resume and self.directory.checkpoint is None:
            self.directory.cut_metrics(0)
            self._clients.cut(0)
            self._tasks.cut(0)

    def note(self, entry: Entry) -> None:
        """Write what an evaluation changes."""
        if not entry.progress.evaluated:
            return
        progress = entry.progress
        # Before the line, so that a line never is without them.
        clients = progress.clients
        if clients:
            clients = {**clients, WALL: [self._watch.now()] * max(map(len, clients.values()))}
        self._tasks.add(self.strategy.timeline.take())
        self._clients.append(progress.aggregation, progress.time, clients, progress.names)
        self.directory.append_metrics(entry.line(self.experiment.config.clock))
        self._publish()
        state = federation.to_state(entry.progress.arrays, torch.device("cpu"))
        self.directory.write_model(names_of(self.experiment.model).whole(state))
        graph = self.strategy.graph
        if graph is not None and graph.clients != self._graph_of:
            self.directory.write_graph(graph.snapshot())
            self._graph_of = graph.clients

    def state(self) -> dict[str, Any]:
        """Return how long metrics.jsonl is, how many rows there are of clients, and how many tasks have ended."""
        self._tasks.add(self.strategy.timeline.take())
        return {
            "metrics-size": self.directory.metrics_size(),
            "clients-rows": self._clients.sync(),
            "tasks-ended": self._tasks.sync(),
        }

    def _publish(self) -> None:
        """Bring clients.parquet, tasks.parquet and away.parquet up to date, in a hundredth of the time."""
        if (began := self._watch.now()) >= self._publish_at:
            self._clients.publish()
            self._tasks.publish()
            self._write_away()
            now = self._watch.now()
            self._publish_at = now + 100 * (now - began)

    def _write_away(self) -> None:
        """Write when clients weren't there, where that is known: it follows from the clock alone."""
        pace = self.strategy.pace
        if pace.comes_and_goes:
            write_away(self.directory.path, last_away(pace.away, pace.now()))

    def end(self, status: str) -> None:
        """Finish clients.parquet, tasks.parquet and away.parquet, and draw the figures."""
        timeline = self.strategy.timeline
        self._tasks.add([*timeline.take(), *timeline.under_way(self.strategy.pace.now())])
        self._tasks.publish(last=True)
        self._clients.publish(last=True)
        self._write_away()
        if self.experiment.config.figures and (self.directory.path / "model.safetensors").exists():
            from fedapp.report.figures import draw_curves, draw_partition  # matplotlib is slow to import
            from fedapp.report.gantt import draw_timeline

            draw_curves(self.directory.path, type(self.experiment.config).defaults())
            draw_timeline(self.directory.path)
            if self.experiment.config.test_on == OWN:
                from fedapp.report.by_client import draw_by_client

                draw_by_client(self.directory.path)
            dataset = self.experiment.dataset
            numbers = dataset.targets == "numbers"
            draw_partition(self.directory.path, dataset.strata, dataset.num_strata, numbers=numbers)
