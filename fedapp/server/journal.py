"""The observers that write the run directory as the run goes.

``Journal`` writes the config, the partition, the metrics, what is known of clients, the model, the graph and, in the
end, the figures; ``Totals`` adds up what the run has cost; ``Summary`` writes summary.json: how the run stands, how
it ended, and which machine made it.
"""

import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fedapp import federation
from fedapp.config import ConfigError
from fedapp.data.loading import is_generated
from fedapp.data.partition import OWN
from fedapp.own import PARTS, sources_of
from fedapp.report.client_tables import WALL, ClientsFile, TasksFile, last_away, write_away
from fedapp.report.files import RUNNING, is_of_model, read_metrics, rows_of, this_process
from fedapp.server.experiment import Experiment
from fedapp.server.privacy import SYSTEM, neighbours
from fedapp.server.record import Entry, Observer
from fedapp.server.run_directory import LAST_MODEL, MODEL, RunDirectory
from fedapp.server.run_folder import said_of_the_same
from fedapp.training.state import completed, names_of
from strategies import FederatedStrategy
from strategies.clock import WallClock
from strategies.core.best_model import BestModel
from strategies.core.config import BEST
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")


class Journal(Observer):
    """Writes the run directory as the run goes."""

    def __init__(
        self, experiment: Experiment, strategy: FederatedStrategy, directory: RunDirectory, watch: WallClock
    ) -> None:
        self.experiment = experiment
        self.strategy = strategy
        self.directory = directory
        self._graph_of: tuple[tuple[int, ...], int] = ((), 0)  # the version of the graph that is written
        rows = rows_of(experiment.config.flat())
        self._clients, self._tasks = ClientsFile(directory.path, rows), TasksFile(directory.path)
        self._watch = strategy.session.timeline.watch = watch
        self._publish_at = 0.0
        values = experiment.config.flat()
        # A run without parts of the user's own doesn't enter what reads them.
        self._sources = sources_of(values) if any(":" in str(values[key]) for key in PARTS) else {}
        # Generated values may differ in the last bit from machine to machine.
        generated = is_generated(experiment.config.dataset) and not experiment.config.data_path
        self._data = "generated" if generated else experiment.dataset.digest

    def restore(self, state: Mapping[str, Any]) -> None:
        """Drop the evaluations after the checkpoint, which come again.

        Raises
        ------
        ConfigError
            If the data or the source of a part of the user's own aren't what they were.
        """
        self._check_unchanged(state["sources"], state["data"])
        self.directory.cut_metrics(state["metrics-size"])
        self._clients.cut(state["clients-rows"])
        self._tasks.cut(state["tasks-ended"])

    def begin(self) -> None:
        """Write what is known before the first round."""
        self.directory.write_config(self.experiment.num_clients)
        new = not (self.experiment.config.resume or self.experiment.config.run_name)
        if new and (said := said_of_the_same(self.directory.path)):
            log.info("%s", said)
        dataset, clients = self.experiment.dataset, self.strategy.run_options.client_names
        self.directory.write_partition(
            self.experiment.partition,
            dataset.strata,
            dataset.num_strata,
            list(clients.values()),
            dataset.names_of_strata,
            self.experiment.unseen_names,
        )
        if self.experiment.config.resume and self.directory.checkpoint is None:
            self.directory.cut_metrics(0)
            self._clients.cut(0)
            self._tasks.cut(0)

    def _check_unchanged(self, before: Mapping[str, str], data: str) -> None:
        """Refuse data of another digest, and other sources by key: what went before would be another run's."""
        config, dataset = self.experiment.config, self.experiment.dataset
        changed = [
            f"the source of {key} = {config.flat()[key]!r}"
            for key, digests in self._sources.items()
            if before.get(key, digests) != digests
        ]
        same = not data or data == self._data
        if not (
            same
            and self.directory.has_partition(self.experiment.partition, dataset.strata, dataset.num_strata)
        ):
            changed.append(f"the rows of dataset = {config.dataset!r}")
        if changed:
            raise ConfigError(
                f"resume = {config.resume!r}: {' and '.join(changed)} changed since; allowed is what the run began "
                f"with, and a new run: -c {self.directory.path / 'config.toml'}"
            )

    def record(self, entry: Entry) -> None:
        """Write what an evaluation changes."""
        if not entry.progress.evaluated:
            return
        progress = entry.progress
        # Before the line, so that a line never is without them.
        clients = progress.clients
        if clients:
            clients = {**clients, WALL: [self._watch.now()] * max(map(len, clients.values()))}
        self._tasks.add(self.strategy.session.timeline.take())
        self._clients.append(progress.aggregation, progress.time, clients, progress.names)
        self.directory.append_metrics(entry.line(self.experiment.config.clock))
        self._publish()
        state = federation.to_state(entry.progress.arrays, torch.device("cpu"))
        name, model = LAST_MODEL if self.experiment.config.keep == BEST else MODEL, self.experiment.model
        self.directory.write_model(names_of(model).whole(completed(model, state)), name)
        graph = self.strategy.session.graph
        if graph is not None and graph.clients != self._graph_of[0]:
            self._write_graph()

    def state(self) -> dict[str, Any]:
        """Return the sizes of metrics.jsonl and the tables of clients and tasks, and digests of data and sources."""
        self._tasks.add(self.strategy.session.timeline.take())
        return {
            "sources": self._sources,
            "data": self._data,
            "metrics-size": self.directory.metrics_size(),
            "clients-rows": self._clients.sync(),
            "tasks-ended": self._tasks.sync(),
        }

    def _publish(self) -> None:
        """Bring clients.parquet, tasks.parquet and away.parquet up to date, in a hundredth of the time."""
        if (began := self._watch.now()) >= self._publish_at:
            self._clients.publish()
            self._tasks.publish()
            self._write_graph()  # one of last updates changes all the time
            self._write_away()
            now = self._watch.now()
            self._publish_at = now + 100 * (now - began)

    def _write_graph(self) -> None:
        """Write graph.npz anew if the graph has changed."""
        graph = self.strategy.session.graph
        if graph is not None and graph.clients and graph.version != self._graph_of:
            self._graph_of = graph.version
            self.directory.write_graph(graph.snapshot())

    def _write_away(self) -> None:
        """Write away.parquet, the times at which clients were away, if the clock knows them."""
        scheduler = self.strategy.session.scheduler
        if scheduler.comes_and_goes:
            write_away(self.directory.path, last_away(scheduler.absences, scheduler.now()))

    def end(self, status: str) -> None:
        """Finish clients.parquet, tasks.parquet and away.parquet, and draw the figures."""
        timeline = self.strategy.session.timeline
        self._tasks.add([*timeline.take(), *timeline.under_way(self.strategy.session.scheduler.now())])
        self._tasks.publish(last=True)
        self._clients.publish(last=True)
        self._write_graph()
        self._write_away()
        if self.experiment.config.figures and (self.directory.path / "model.safetensors").exists():
            draw_figures(self.directory.path, self.experiment)


class KeptModel(Observer):
    """Writes the model of the best evaluation beside that of the last one."""

    def __init__(self, experiment: Experiment, best: BestModel, directory: RunDirectory) -> None:
        self.experiment, self.best, self.directory = experiment, best, directory
        self._written: int | None = None  # the aggregation whose model is on the disk

    def record(self, entry: Entry) -> None:
        """Write the best model if it is a new one."""
        self._write()

    def end(self, status: str) -> None:
        """Write the best model, if ``note`` has not; the last model if no evaluation counted."""
        self._write()
        last = self.directory.path / LAST_MODEL
        if self.best.aggregation is None and last.exists():
            shutil.copyfile(last, self.directory.path / MODEL)

    def _write(self) -> None:
        best = self.best
        if best.arrays is not None and best.aggregation != self._written:
            state = federation.to_state(best.arrays, torch.device("cpu"))
            model = self.experiment.model
            self.directory.write_model(names_of(model).whole(completed(model, state)))
            self._written = best.aggregation


def draw_figures(path: Path, experiment: Experiment) -> None:
    """Draw the figures of the run in a run directory."""
    from fedapp.report.figures import draw_curves, draw_partition  # matplotlib is slow to import
    from fedapp.report.gantt import draw_timeline
    from fedapp.report.style import SCREEN

    with SCREEN.applied():  # options of the command that makes the run are those of its own figures
        draw_curves(path)
        draw_timeline(path)
        if experiment.config.test_on == OWN:
            from fedapp.report.by_client import draw_by_client

            draw_by_client(path)
        dataset = experiment.dataset
        draw_partition(path, dataset.strata, dataset.num_strata, strata=dataset.strata_are)


# What sums are called, and what of an aggregation they add up.
_ALWAYS = {key: key for key in (messages.FAILURES, messages.BYTES_UP, messages.BYTES_DOWN)}
_CLOSING_EARLY = {
    "tasks-late": messages.LATE_UPDATES,
    "tasks-dropped": messages.DROPPED_UPDATES,
    messages.BYTES_WASTED: messages.BYTES_WASTED,
}


class Totals(Observer):
    """Puts sums over the run in place of what an aggregation alone had."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(_ALWAYS, 0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = dict(state["totals"])

    def measure(self, entry: Entry) -> None:
        """Add an aggregation's."""
        told = entry.progress.metrics
        for total, key in (_ALWAYS | _CLOSING_EARLY).items():
            if key in told or total in self.totals:
                self.totals[total] = self.totals.get(total, 0) + int(told.get(key, 0))
        entry.metrics.update(self.totals)

    def state(self) -> dict[str, Any]:
        """Return the sums."""
        return {"totals": dict(self.totals)}


def machine() -> str:
    """Return the processor, its cores and the GPU, in words.

    A GPU that this process hasn't used, but maybe its clients' have, isn't named: to ask it for its name takes a part
    of its memory.
    """
    return f"{_processor()}, {os.cpu_count()} cores, {_gpu()}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name(0) if used else "a GPU"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


class Summary(Observer):
    """Writes the summary with every evaluation and at the end.

    Parameters
    ----------
    unstable : callable
        Returns the warning of the stability monitor; "" if there was none.
    best : BestModel, optional
        The best evaluation, where it counts.

    Attributes
    ----------
    content : dict
        What was written last.
    """

    def __init__(
        self,
        experiment: Experiment,
        engine: str,
        directory: RunDirectory,
        watch: WallClock,
        unstable: Callable[[], str],
        best: BestModel | None = None,
    ) -> None:
        self.experiment = experiment
        self.best = best
        self.unstable = unstable
        self.engine = engine
        self.directory = directory
        self.watch = watch
        self.unread = list(experiment.unread)
        self.content: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._kept: Mapping[str, Any] = {}  # the evaluation of the model that is kept
        self._earlier: list[str] = []  # the machines that made the rounds before the run was resumed

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the last aggregation and its wall seconds."""
        self._last = dict(state["last"])
        # Not from config.toml, which has what a strategy demands in place of what was given.
        self.unread = state.get("unread-keys", self.unread)
        self._earlier = state.get("machines", [])
        self.watch.resume(state["wall-seconds"])

    def begin(self) -> None:
        """Write summary.json: the run is under way."""
        self._write(RUNNING)

    def measure(self, entry: Entry) -> None:
        """Remember the metrics of the aggregation; the observers that measure have come before."""
        self._last = {**entry.metrics, "aggregation": entry.progress.aggregation}

    def record(self, entry: Entry) -> None:
        """Write how it stands."""
        if entry.progress.evaluated:
            self._note_kept(entry.line(""))
            self._write(RUNNING)

    def _note_kept(self, evaluation: Mapping[str, Any]) -> None:
        """Note the metrics of the model that is kept, which is that of this evaluation or of an earlier one."""
        best = self.best
        if best is None or not best.keeps or best.aggregation in (None, self._kept.get("aggregation")):
            return
        records: Sequence[Mapping[str, Any]] = [evaluation]
        if evaluation["aggregation"] != best.aggregation:  # its metrics came late, or the run is resumed
            records = read_metrics(self.directory.path)
        kept = (record for record in records if record["aggregation"] == best.aggregation)
        self._kept = dict(next(kept, {}))

    def state(self) -> dict[str, Any]:
        """Return the last aggregation, the wall seconds, and the machines so far."""
        return {
            "last": self._last,
            "unread-keys": self.unread,
            "wall-seconds": self.watch.now(),
            "machines": self._machines(),
        }

    def end(self, status: str) -> None:
        """Write how it ended."""
        self._write(status)

    def _write(self, status: str) -> None:
        config = self.experiment.config
        self.content = {
            "status": status,
            **({"reason": self.reason, "complete": self.complete} if self.reason else {}),
            **({"process": this_process()} if status == RUNNING else {}),
            "strategy": config.strategy,
            "engine": self.engine,
            "num-clients": self.experiment.num_clients,
            "unread-keys": self.unread,
            **({"unstable": warning} if (warning := self.unstable()) else {}),
            "wall-seconds": self.watch.now(),
            **(
                {"dp-neighbours": neighbours(config), "dp-noise-from-seed": config.dp_noise != SYSTEM}
                if "dp-epsilon" in self._last
                else {}
            ),
            **(
                {}
                if status == RUNNING
                else {"date": date.today().isoformat(), "machine": ", then ".join(self._machines())}
            ),
            "aggregations": self._last.get("aggregation", 0),
            **{key: value for key, value in self._last.items() if key != "aggregation"},
            **{key: value for key, value in self._kept.items() if is_of_model(key, config.metrics)},
            **self._best_evaluation(),
        }
        self.directory.write_summary(self.content)

    def _machines(self) -> list[str]:
        """Return the machines that made the run, each once, in the order in which it went on on them."""
        return list(dict.fromkeys([*self._earlier, machine()]))

    def _best_evaluation(self) -> dict[str, Any]:
        """Return which evaluation is the best so far, and its value of the metric that says so."""
        best = self.best
        if best is None or best.by is None or best.aggregation is None:
            return {}
        return {"best-aggregation": best.aggregation, f"best-{best.by}": best.value}
