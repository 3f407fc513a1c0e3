"""What watches a run: observers, one concern each, that are called at every aggregation; and when a run is saved."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedapp.config import RunConfig
from fedapp.server.run_directory import Checkpoint, RunDirectory
from strategies import FederatedStrategy, Progress
from strategies.clock import WallClock
from strategies.flower.arrays import Layout


@dataclass(frozen=True)
class Entry:
    """An aggregation in the run's record; ``metrics`` are those that the strategy reports and observers measure."""

    progress: Progress
    metrics: dict[str, Any]

    @classmethod
    def of(cls, progress: Progress) -> "Entry":
        """Return the entry with the metrics that the strategy reports."""
        return cls(progress, dict(progress.metrics))

    @classmethod
    def resumed(cls, line: Mapping[str, Any], arrays: ArrayRecord) -> "Entry":
        """Return the entry of an evaluation from what ``kept`` returned, and from its model."""
        rest = {key: line[key] for key in line if key not in ("aggregation", "time", "clock", "clients")}
        clients = dict(line.get("clients", {}))
        names = {index: name for index, name in enumerate(clients.pop("name", ())) if name}
        return cls(Progress(line["aggregation"], line["time"], arrays, rest, True, clients, names), rest)

    def line(self, clock: str) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        progress = self.progress
        head = {"aggregation": progress.aggregation, "time": progress.time, "clock": clock}
        return head | self.metrics

    def kept(self, clock: str) -> dict[str, Any]:
        """Return the content of the entry for ``resumed``: the line, and the clients' metrics."""
        return self.line(clock) | ({"clients": self._clients()} if self.progress.clients else {})

    def _clients(self) -> dict[str, list[Any]]:
        """Return the clients' metrics as columns, with a column of names if any client has a name."""
        clients, names = self.progress.clients, self.progress.names
        size = max(map(len, clients.values()))
        return {**({"name": [names.get(index, "") for index in range(size)]} if names else {}), **clients}


log = logging.getLogger("flwr.fedapp")


class Observer:
    """The base class of a run's observers; a hook that isn't overridden does nothing.

    Attributes
    ----------
    reason : str
        At the end, why a run failed or diverged, or finished before all its aggregations.
    complete : bool
        At the end, whether the run went through all its aggregations, and the last one had a contribution; a run that
        diverged may be complete.
    ended : str
        Why this observer ended the run before its last aggregation; "" if it didn't.
    """

    reason: str = ""
    complete: bool = False
    ended: str = ""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned in an earlier run; called before ``begin``."""

    def begin(self) -> None:
        """Get ready: the first round is about to begin."""

    def measure(self, entry: Entry) -> None:
        """Add to an aggregation's metrics."""

    def record(self, entry: Entry) -> None:
        """Take note of an aggregation, after all observers have measured and a due checkpoint is on the disk."""

    def state(self) -> dict[str, Any]:
        """Return what JSON holds and a resumed run needs, by keys that no other observer has."""
        return {}

    def judge(self) -> None:
        """Raise RunError if a run that went through all its aggregations came to nothing."""

    def end(self, status: str) -> None:
        """Finish: the run is ``finished``, ``interrupted``, ``stopped``, ``diverged`` or ``failed``."""


class Saving:
    """Says when a checkpoint is due, and writes it.

    Parameters
    ----------
    announces : callable
        Tells whether an aggregation will be reported to somebody who watches.

    Attributes
    ----------
    last : int
        The last aggregation in a checkpoint.
    """

    def __init__(
        self, config: RunConfig, directory: RunDirectory, watch: WallClock, announces: Callable[[int], bool]
    ) -> None:
        self.config = config
        self.directory = directory
        self.watch = watch
        self.announces = announces
        self.last = 0
        self._rest = 0.0  # wall seconds until which no other checkpoint is written

    def is_due(self, progress: Progress) -> bool:
        """Tell whether an aggregation is saved.

        In real time an aggregation is saved before its metrics are reported, so that no aggregation whose metrics
        were reported is ever lost; the log's line of progress (``Heartbeat``) may be ahead of the checkpoint. In
        virtual time lost aggregations come again, so checkpoints may take only a twentieth of the run's time. An
        evaluation that is made only because the run ends is no part of the checkpoint, unless the run came to its end
        there (``is_lacking``).
        """
        config, aggregation = self.config, progress.aggregation
        if config.checkpoint_every == 0 or aggregation == 0:
            return False
        due = aggregation >= self.last + config.checkpoint_every
        if config.clock == "wall":
            return due or progress.evaluated or self.announces(aggregation)
        on_schedule = not progress.evaluated or aggregation % config.eval_every == 0
        return due and on_schedule and self.watch.now() >= self._rest

    def is_lacking(self, aggregations: int) -> bool:
        """Tell whether the end of a run, after so many aggregations, isn't saved yet."""
        return self.config.checkpoint_every > 0 and aggregations > self.last

    def save(self, made: Callable[[], Checkpoint]) -> None:
        """Make a checkpoint, which may take asking clients, and write it."""
        began = self.watch.now()
        checkpoint = made()
        self.directory.write_checkpoint(checkpoint)
        self.last = checkpoint.strategy["aggregations"]
        self._rest = self.watch.now() + 20 * (self.watch.now() - began)


class Record:
    """Tells a run's observers, in their order, and has it saved in between."""

    def __init__(
        self, strategy: FederatedStrategy, clock: str, observers: Iterable[Observer], saving: Saving
    ) -> None:
        self.strategy = strategy
        self.clock = clock
        self.observers = tuple(observers)
        self.saving = saving
        self.noted = 0  # aggregations of this process
        self._begun: list[Observer] = []
        self._told: Entry | None = None  # the checkpoint's evaluation

    def restore(self, checkpoint: Checkpoint, layout: Layout) -> None:
        """Go on from a checkpoint; comes before ``begin``.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the checkpoint isn't what the run needs.
        """
        if (size := len(checkpoint.strategy["model"])) != layout.size:
            raise ValueError(f"the state is that of a model of {size} values, this one has {layout.size}")
        self.saving.last = checkpoint.strategy["aggregations"]
        if (line := checkpoint.observers["line"]) is not None:
            model = np.array(checkpoint.strategy["model"], dtype=np.float64)
            self._told = Entry.resumed(line, layout.to_record(self.strategy.session.optimizer.outcome(model)))
        for observer in self.observers:
            observer.restore(checkpoint.observers)

    def begin(self) -> None:
        """Begin a run; one of the observers may refuse."""
        for observer in self.observers:
            observer.begin()
            self._begun.append(observer)
        told, self._told = self._told, None
        if told is not None:
            self._note(told)

    def __call__(self, progress: Progress) -> None:
        """Take note of an aggregation."""
        self.noted += 1
        entry = Entry.of(progress)
        for observer in self.observers:
            observer.measure(entry)
        if self.saving.is_due(progress):
            self._save(entry.kept(self.clock) if progress.evaluated else None)
        self._note(entry)

    def save_end(self) -> None:
        """Save the last aggregation of a run that came to its end, for a longer run, unless it is saved already."""
        if self.saving.is_lacking(self.strategy.session.aggregations):
            self._save(None)

    def _save(self, line: Mapping[str, Any] | None) -> None:
        """Save the run with the line of an evaluation that isn't in metrics.jsonl yet, if there is one."""
        kept: dict[str, Any] = {"line": line}
        for observer in self.observers:
            kept |= observer.state()
        self.saving.save(lambda: Checkpoint(self.strategy.state(), kept))

    def _note(self, entry: Entry) -> None:
        for observer in self.observers:
            observer.record(entry)

    def ended(self) -> str:
        """Return why an observer ended the run before its last aggregation, which is logged; "" if none did."""
        said = next((observer.ended for observer in self.observers if observer.ended), "")
        if said:
            log.warning("the run ends after aggregation %d: %s", self.strategy.session.aggregations, said)
        return said

    def judge(self) -> None:
        """Let the observers judge a run that went through all its aggregations."""
        for observer in self.observers:
            observer.judge()

    def end(self, status: str, reason: str = "", *, complete: bool = False) -> None:
        """End the run for the observers that have begun."""
        for observer in self._begun:
            observer.reason, observer.complete = reason, complete
            observer.end(status)
