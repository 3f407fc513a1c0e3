"""Failure detection: whether a run that went through all its aggregations has failed, or has diverged.

A run whose clients all failed from some point on has failed, though it has a model. A run with rounds has failed if
none of its last rounds had a valid reply: a tenth of all rounds, three at least. A run without rounds has failed if
no client counts any more when the run's time is over.

A run has diverged, though every number in it is finite, by the last quarter of the evaluations after the first, one
evaluation at least, of which the medians count. With L the larger of the first loss and ln K, which guessing among K
classes costs, a run has diverged if

* its loss is above 2 L, and
* its accuracy has come less than a quarter of the way from guessing (1/K, or the first accuracy) to 1, and
* its clients don't learn either: their loss while they train is above ln K; or its own loss is above 10 L.

A run whose loss is between L and 2 L, with such an accuracy, has learnt nothing: it is finished, and a warning says
so. A run with another loss than cross-entropy has diverged if its loss is above 10 times the first. The rule doesn't
hit a run that learns: a run that overfits has a loss that rises, but clients that have learnt, and an accuracy.
"""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedapp.config import RunConfig
from fedapp.report import as_number
from fedapp.server.record import Entry, Observer
from fedapp.training.losses import CROSS_ENTROPY
from strategies import AsynchronousStrategy, DivergedError, FederatedStrategy
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")

# A run has failed if its last rounds had no valid reply: so many rounds, and such a share of all rounds.
LEAST, SHARE = 3, 0.1

# The loss at which a run has diverged, in multiples of L, if its clients learn or not; the share of the way to an
# accuracy of 1 that a run has learnt by; the share of the evaluations that the run is judged by.
TIMES, TIMES_WHATEVER, LEARNT, JUDGED = 2.0, 10.0, 0.25, 0.25

Evaluations = Sequence[Mapping[str, object]]


class RoundsWithoutReply(Observer):
    """Counts the last rounds in a row without a valid reply; rounds in which all clients are at work don't count."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy
        self.rounds = 0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the count of a checkpoint."""
        self.rounds = int(state["rounds-without-reply"])

    def measure(self, entry: Entry) -> None:
        """Count a round without a valid reply."""
        told = entry.progress.metrics
        if (participants := told.get(messages.PARTICIPANTS)) is None:
            return
        if participants:
            self.rounds = 0
        elif told.get(messages.FAILURES) or told.get(messages.DROPPED_UPDATES):
            self.rounds += 1  # else all clients are at work on tasks of earlier rounds

    def state(self) -> dict[str, Any]:
        """Return the count."""
        return {"rounds-without-reply": self.rounds}

    def judge(self) -> None:
        """Raise RunError, with the reason why the last client's work was refused, if the run has failed."""
        strategy = self.strategy
        if isinstance(strategy, AsynchronousStrategy):
            task_table = strategy.session.task_table
            if task_table.members and not task_table.active_clients and not task_table.all_reached_limit:
                raise strategy.session.run.no_progress_error(
                    f"every client was dropped before the end, after {strategy.session.aggregations} aggregations"
                )
        elif self.rounds >= max(LEAST, math.ceil(SHARE * strategy.session.aggregations)):
            raise strategy.session.run.no_progress_error(
                f"no reply was valid in the last {self.rounds} of {strategy.session.aggregations} rounds"
            )


class WorseThanGuessingError(DivergedError):
    """A run that went through all its rounds, to a model that is worse than guessing."""


def judge(evaluations: Evaluations, num_classes: int, config: RunConfig) -> None:
    """Raise ``WorseThanGuessingError`` if a run has diverged by the rule above, with the keys to change.

    Parameters
    ----------
    evaluations : sequence of mapping
        The lines of metrics.jsonl; null is infinity.
    """
    if len(evaluations) < 2:
        return
    if num_classes < 2 or config.loss != CROSS_ENTROPY.name:
        _judge_by_loss(evaluations, config)
        return
    losses, accuracies = _column(evaluations, "loss"), _column(evaluations, "accuracy")
    guessing = math.log(num_classes)
    base = max(losses[0], guessing) if math.isfinite(losses[0]) else guessing
    chance = max(1 / num_classes, accuracies[0] if math.isfinite(accuracies[0]) else 0.0)
    last = -math.ceil(JUDGED * (len(evaluations) - 1))
    loss, accuracy = statistics.median(losses[last:]), statistics.median(accuracies[last:])
    known = math.isfinite(accuracies[-1])
    told = any(line.get("train-loss") is not None for line in evaluations)
    train_loss = statistics.median(_column(evaluations, "train-loss")[last:]) if told else 0.0
    if loss <= base or accuracy >= chance + LEARNT * (1 - chance):
        return
    if loss <= TIMES * base:
        log.warning(
            "the model is no better than guessing: loss %.4g, where guessing costs %.2f%s; are the "
            "steps (lr = %g) too large?",
            losses[-1],
            guessing,
            f", accuracy {accuracies[-1]:.3f}" if known else "",
            config.lr,
        )
        return
    if train_loss > guessing or loss > TIMES_WHATEVER * base:
        raise WorseThanGuessingError(
            f"the loss came to {losses[-1]:.4g} from {losses[0]:.4g}, where guessing costs {guessing:.2f}"
            + (f", and the accuracy to {accuracies[-1]:.3f}" if known else "")
            + f": {cure(config)}"
        )


def _judge_by_loss(evaluations: Evaluations, config: RunConfig) -> None:
    losses = _column(evaluations, "loss")
    loss = statistics.median(losses[-math.ceil(JUDGED * (len(losses) - 1)) :])
    if 0 < losses[0] < math.inf and loss > TIMES_WHATEVER * losses[0]:
        raise WorseThanGuessingError(
            f"the loss came to {losses[-1]:.4g} from {losses[0]:.4g}: {cure(config)}"
        )


def cure(config: RunConfig) -> str:
    """Say which keys a run that diverged has to have smaller."""
    steps = [f"lr = {config.lr:g}"]
    if config.server_lr > 0:
        steps.insert(0, f"server-lr = {config.server_lr:g}")
    noise = f", or the noise is (dp-noise-multiplier = {config.dp_noise_multiplier:g})" * (
        config.dp != "none"
    )
    return f"the steps are too large ({', '.join(steps)}){noise}"


def _column(evaluations: Evaluations, key: str) -> list[float]:
    numbers = (as_number(line.get(key)) for line in evaluations)
    return [math.inf if math.isnan(number) and key != "accuracy" else number for number in numbers]
