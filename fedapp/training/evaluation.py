"""What a model scores on rows of data: its loss, and the metrics beside the loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedapp.names import ALLOWED_METRICS, IGNORED
from fedapp.own import OwnPartError, higher_is_better, is_own, split_direction
from fedapp.own.metrics import own_metric
from fedapp.training.layers import dense_layers
from fedapp.training.losses import CROSS_ENTROPY, Loss, Targets, by_example, classes_first
from fedapp.training.parts import inputs_of
from fedapp.training.rule import Parameters
from fedapp.training.state import completed, for_one_call
from fedapp.training.trainee import as_it_is, by_channel, takes_by_channel

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Metric:
    """A number that is made of all outputs and targets of a set of examples.

    Attributes
    ----------
    name : str
    whole : callable
        (outputs (N, ...), targets (N, ...)) → the metric; NaN where it isn't defined.
    rows : callable, optional
        (outputs, targets) → what each example adds, (N,), or each position, (N, ...): then the mean of those that
        count is the metric, and outputs aren't kept.
    targets : str, optional
        ``classes`` or ``numbers``, if it takes nothing else.
    of_mean : callable
        What becomes of the mean of ``rows``.
    of_counts : callable, optional
        (Σ of ``counts_of`` over rows (3, K), whether each of the K is a label) → the metric; outputs aren't kept.
    """

    name: str
    whole: Callable[[Tensor, Tensor], float]
    rows: Callable[[Tensor, Tensor], Tensor] | None = None
    targets: Targets | None = None
    of_mean: Callable[[float], float] = float
    of_counts: Callable[[NDArray[np.int64], bool], float] | None = None


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return which examples' largest logit is of their class; with float targets, the share of labels predicted."""
    if targets.is_floating_point():
        return ((outputs > 0) == (targets > 0.5)).double().flatten(1).mean(1)
    return classes_first(outputs, targets).argmax(dim=1) == targets


def _among_five(outputs: Tensor, labels: Tensor) -> Tensor:
    logits = classes_first(outputs, labels)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).any(dim=1)


def _surprise(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        classes_first(outputs, labels).double(), labels, reduction="none", ignore_index=IGNORED
    )


def _exp(mean: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(mean))


def _one_by_one(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that count as examples: logits (P, K) with labels (P,), or numbers (P, M).

    Numbers of more than two axes are one column.
    """
    if targets.is_floating_point():
        return (outputs, targets) if targets.dim() < 3 else (outputs.reshape(-1, 1), targets.reshape(-1, 1))
    logits, labels = classes_first(outputs, targets).movedim(1, -1), targets
    if labels.dim() > 1:
        counted = labels != IGNORED
        logits, labels = logits[counted], labels[counted]
    return logits, labels


def _sizes(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().double().flatten(1).mean(1)


def _mean(
    of: Callable[[Tensor, Tensor], Tensor], of_mean: Callable[[float], float] = float
) -> Callable[[Tensor, Tensor], float]:
    def mean(outputs: Tensor, targets: Tensor) -> float:
        values, counts = by_example(of(outputs, targets), targets)
        found = values.double().mean() if counts is None else values.double().sum() / counts.sum()
        return of_mean(float(found))

    return mean


def _rmse(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs - targets).double().square().mean().sqrt())


def _r2(outputs: Tensor, targets: Tensor) -> float:
    """1 − Σ (y − ŷ)² / Σ (y − ȳ)², the mean over columns; a column that doesn't vary has none."""
    outputs, targets = _one_by_one(outputs, targets)
    y = targets.double()
    rest = (y - outputs.double()).square().sum(0)
    spread = (y - y.mean(0)).square().sum(0)
    defined = spread > 0
    return float((1 - rest[defined] / spread[defined]).mean()) if bool(defined.any()) else float("nan")


def _several_labels(targets: Tensor) -> bool:
    """Return True for several labels of each row, (N, K): not for one column of yes and no, which are two classes."""
    return targets.is_floating_point() and targets.dim() == 2 and targets.shape[1] > 1


def counts_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each row and class the true positives, the predictions and the labels, (N, 3, K).

    The counts are of a type of 1 byte, or of 4 bytes for rows of 256 positions or more.
    """
    if targets.is_floating_point():
        guess, truth = outputs > 0, targets > 0.5
        if _several_labels(targets):
            return torch.stack([guess & truth, guess, truth], dim=1).to(torch.uint8)
        guess, truth, size = guess.long(), truth.long(), 2
    else:
        logits = classes_first(outputs, targets)
        guess, truth, size = logits.argmax(dim=1), targets, logits.shape[1]
    rows = len(truth)
    guess, truth = guess.reshape(rows, -1), truth.reshape(rows, -1)
    counted = truth != IGNORED
    begin = torch.arange(rows, device=truth.device).unsqueeze(1) * size

    def number(classes: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((begin + classes)[where], minlength=rows * size).view(rows, size)

    found = [number(truth, counted & (guess == truth)), number(guess, counted), number(truth, counted)]
    return torch.stack(found, dim=1).to(torch.uint8 if truth.shape[1] < 256 else torch.int32)


def _f1_macro(counts: NDArray[np.int64], every: bool) -> float:
    both, guessed, true = counts
    return _mean_of_classes(2 * both, guessed + true, every)


def _iou(counts: NDArray[np.int64], every: bool) -> float:
    """Return the intersection over union of a class's labels and predictions, the mean over classes."""
    both, guessed, true = counts
    return _mean_of_classes(both, guessed + true - both, every)


def _mean_of_classes(part: NDArray[np.int64], whole: NDArray[np.int64], every: bool) -> float:
    """Return the mean of the ratios over the classes that occur, or over every label: 0 for one that doesn't."""
    occurs = whole > 0
    ratios = part[occurs] / whole[occurs]
    number = len(whole) if every else len(ratios)
    return float(ratios.sum() / number) if number else float("nan")


def _from_counts(of_counts: Callable[[NDArray[np.int64], bool], float]) -> Callable[[Tensor, Tensor], float]:
    def whole(outputs: Tensor, targets: Tensor) -> float:
        counts = counts_of(outputs, targets).sum(0, dtype=torch.int64)
        return of_counts(counts.cpu().numpy(), _several_labels(targets))

    return whole


def _auroc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve; of several classes or labels the mean of each against the rest, where it has both.

    NaN where a score is none, as in a run that diverges.
    """
    from sklearn.metrics import roc_auc_score

    outputs, targets = _one_by_one(outputs, targets)
    if targets.is_floating_point():
        truth, scores = targets.numpy() > 0.5, outputs.double().numpy()
    else:
        p = torch.softmax(outputs.double(), dim=1).numpy()
        truth = targets.numpy()[:, None] == np.arange(p.shape[1])
        truth, scores = (truth[:, 1:], p[:, 1:]) if p.shape[1] == 2 else (truth, p)
    if not np.isfinite(scores).all():
        return float("nan")
    both = truth.any(axis=0) & ~truth.all(axis=0)
    areas = [roc_auc_score(truth[:, k], scores[:, k]) for k in np.flatnonzero(both)]
    return float(np.mean(areas)) if areas else float("nan")


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _mean(_hits), _hits),
        Metric("top5", _mean(_among_five), _among_five, "classes"),
        Metric("perplexity", _mean(_surprise, _exp), _surprise, "classes", _exp),
        Metric("f1-macro", _from_counts(_f1_macro), of_counts=_f1_macro),
        Metric("iou", _from_counts(_iou), of_counts=_iou),
        Metric("auroc", _auroc),
        Metric("rmse", _rmse, None, "numbers"),
        Metric("r2", _r2, None, "numbers"),
        Metric("mae", _mean(_sizes), _sizes, "numbers"),
    )
}


def chosen_metrics(names: str, loss: str, targets: Tensor) -> tuple[Metric, ...]:
    """Return the metrics of a list of names, or for ``auto`` what suits the loss and the targets.

    That is accuracy for classes and for several labels, rmse and r2 for numbers.
    """
    if names == AUTO:
        names = "rmse,r2" if targets.is_floating_point() and loss != "bce" else "accuracy"
    return metrics_of(names)


@lru_cache(maxsize=8)
def metrics_of(names: str) -> tuple[Metric, ...]:
    """Return the metrics of a list of names; one of the user's own is a function (outputs, targets) → float.

    A name may state the metric's direction: ``min:NAME`` or ``max:NAME``.

    Raises
    ------
    OwnPartError
        If there is none of a name, two are called alike, one as something else that a run tells, or a built-in metric
        has the other direction.
    """
    listed = [] if names == NONE else [name.strip() for name in names.split(",")]
    found = tuple(_metric(name) for name in listed)
    called = [metric.name for metric in found]
    if twice := [name for name in called if called.count(name) > 1]:
        what = "names one twice" if len(set(listed)) < len(listed) else f"two are called {twice[0]!r}"
        raise OwnPartError(f"metrics = {names!r}: {what}")
    return found


def _metric(text: str) -> Metric:
    stated, name = split_direction(text)
    if name in METRICS:
        if stated not in (None, known := higher_is_better(name)):
            raise OwnPartError(f"metrics = {text!r}: a {'higher' if known else 'lower'} {name} is better")
        return METRICS[name]
    if not is_own(name):
        raise OwnPartError(f"metrics = {name!r}: must be {ALLOWED_METRICS}")
    called, function = own_metric(name)

    def whole(outputs: Any, targets: Tensor) -> float:
        # Of copies: a function that changes what it gets would change the labels of all that follows.
        return float(function(*tree_map(_copy, (outputs, targets))))

    return Metric(called, whole)


def _metric_of(loss: Loss) -> Metric:
    """Return the loss of a whole batch as a metric of outputs and targets."""
    return Metric("loss", lambda outputs, targets: float(loss.rows(outputs, targets)))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# Rows per forward pass: bounds the memory of a large test set. What convolutions and recurrent layers make of a few
# rows stays in a processor's cache, of many it doesn't.
CHUNK, FEW = 2048, 128

ACCURACY = (METRICS["accuracy"],)


@dataclass(frozen=True, eq=False)
class Score:
    """What a model scores on N examples.

    Attributes
    ----------
    losses : array (N,), float64, optional
        Loss of every example.
    rows : mapping of str to array (N,)
        What every example adds to those metrics that are means.
    outputs, targets : Tensor (N, ...), optional
        What the other metrics are made of; outputs may be several, in a tuple or dict.
    metrics : tuple of Metric
    counts : mapping of str to array (N,)
        Of the loss and of metrics that are means over positions: how many of every example count. What an example
        adds is then a sum.
    by_class : array (N, 3, K), optional
        The counts of ``counts_of``, where a metric is made of them.
    several_labels : bool
        Whether each of the K is a label that every example has or hasn't.
    of_batch : Metric, optional
        A loss of a whole batch, in place of ``losses``: the examples, or those of a client, are one batch.
    """

    losses: np.ndarray | None
    rows: Mapping[str, np.ndarray]
    outputs: Any
    targets: Tensor | None
    metrics: tuple[Metric, ...]
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    by_class: np.ndarray | None = None
    several_labels: bool = False
    of_batch: Metric | None = None

    @property
    def loss(self) -> float:
        """Mean loss, or the loss of all examples as one batch."""
        if self.of_batch is not None:
            return self._value(self.of_batch, slice(None))
        assert self.losses is not None
        return self._mean("loss", self.losses)

    def values(self, among: slice = slice(None)) -> dict[str, float]:
        """Return every metric, of all examples or of some."""
        return {metric.name: self._value(metric, among) for metric in self.metrics}

    def by_client(self, offsets: np.ndarray) -> dict[str, np.ndarray]:
        """Return loss and metrics of every client (C,); i owns ``offsets[i:i+2]``.

        NaN for one without examples, or without a position that counts.
        """
        sizes = np.diff(offsets)
        owned = sizes > 0
        found = {
            name: np.full(len(sizes), np.nan) for name in ("loss", *(each.name for each in self.metrics))
        }
        starts = offsets[:-1][owned]
        means = self.rows if self.losses is None else {"loss": self.losses, **self.rows}
        for name, values in means.items():
            counts = self.counts.get(name)
            number = sizes[owned] if counts is None else np.add.reduceat(counts, starts)
            with np.errstate(invalid="ignore"):  # 0 of 0
                found[name][owned] = np.add.reduceat(values.astype(np.float64), starts) / number
        for metric in (*self.metrics, *([] if self.of_batch is None else [self.of_batch])):
            if metric.name in self.rows:
                found[metric.name] = np.array([metric.of_mean(mean) for mean in found[metric.name].tolist()])
            else:
                for client in np.flatnonzero(owned):
                    found[metric.name][client] = self._value(metric, slice(*offsets[client : client + 2]))
        return found

    def uncounted(self, name: str, offsets: np.ndarray) -> list[int]:
        """Return the clients of whose positions none counts in the loss or a metric, whatever the model."""
        counts = (
            self.counts.get(name) if name in ("loss", *self.rows) else next(iter(self.counts.values()), None)
        )
        if counts is None:
            return []
        sums = np.concatenate([[0], np.cumsum(counts)])[offsets]
        return np.flatnonzero((np.diff(sums) == 0) & (np.diff(offsets) > 0)).tolist()

    def undefined(self, name: str, by_client: Mapping[str, np.ndarray], offsets: np.ndarray) -> list[int]:
        """Return the clients on whose rows the loss or a metric isn't defined, whatever the model.

        No position of theirs counts, or the metric is no number though the loss is finite, as an AUROC of one class.
        """
        of_targets = np.isnan(by_client[name]) & np.isfinite(by_client["loss"])
        return sorted({*self.uncounted(name, offsets), *np.flatnonzero(of_targets).tolist()})

    def _value(self, metric: Metric, among: slice) -> float:
        if metric.name in self.rows:
            return metric.of_mean(self._mean(metric.name, self.rows[metric.name], among))
        if metric.of_counts is not None and self.by_class is not None:
            return metric.of_counts(self.by_class[among].sum(0, dtype=np.int64), self.several_labels)
        assert self.outputs is not None
        assert self.targets is not None
        return metric.whole(tree_map(lambda each: each[among], self.outputs), self.targets[among])

    def _mean(self, name: str, values: np.ndarray, among: slice = slice(None)) -> float:
        counts = self.counts.get(name)
        if counts is None:
            return float(values[among].mean())
        counted = counts[among].sum()
        return float(values[among].sum() / counted) if counted else float("nan")


def evaluate(
    model: nn.Module,
    state: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss = CROSS_ENTROPY,
    metrics: tuple[Metric, ...] = ACCURACY,
) -> Score:
    """Score ``model``, in evaluation mode, with a ``state`` on inputs (N, ...) and targets, on their device.

    Arrays that the state doesn't have are the model's own.
    """
    state = completed(model, state)
    few = x.device.type == "cpu" and not dense_layers(model)
    chunk = FEW if few else CHUNK

    def outputs_of(state: Parameters, inputs: Tensor) -> Any:
        return torch.func.functional_call(model, for_one_call(model, state), (inputs,))

    images = few and x.dim() == 4 and len(x) > 0
    lay_out = by_channel if images and takes_by_channel(model, outputs_of, state, x) else as_it_is
    state = {name: lay_out(value) for name, value in state.items()}
    found = _Found(metrics, loss)
    with torch.no_grad():
        for inputs, targets in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
            outputs = outputs_of(state, lay_out(inputs))
            if not loss.of_batch:
                found.add("loss", *loss.each(outputs, targets, partial(inputs_of, model, inputs)))
            found.add_metrics(outputs, targets)
    return found.score(y)


class _Found:
    """What the chunks of a set of examples add to its ``Score``."""

    def __init__(self, metrics: tuple[Metric, ...], loss: Loss) -> None:
        self.metrics = metrics
        self.of_batch = _metric_of(loss) if loss.of_batch else None
        self.rows: dict[str, list[Tensor]] = {} if loss.of_batch else {"loss": []}
        self.rows |= {metric.name: [] for metric in metrics if metric.rows is not None}
        self.counts: dict[str, list[Tensor]] = {}
        self.outputs: list[Any] = []
        self.by_class: list[Tensor] = []
        self.keeps_outputs = loss.of_batch or any(
            metric.rows is None and metric.of_counts is None for metric in metrics
        )
        self.keeps_counts = any(metric.of_counts is not None for metric in metrics)

    def add(self, name: str, values: Tensor, row_counts: Tensor | None) -> None:
        """Add what the examples of a chunk add to the loss or a metric, and how many of each example count."""
        in_double = name == "loss" or row_counts is not None
        self.rows[name].append(values.double().cpu() if in_double else values.cpu())
        if row_counts is not None:
            self.counts.setdefault(name, []).append(row_counts.cpu())

    def add_metrics(self, outputs: Any, targets: Tensor) -> None:
        """Add what the metrics are made of in a chunk."""
        if self.keeps_outputs:
            self.outputs.append(tree_map(Tensor.cpu, outputs))
        if self.keeps_counts:
            self.by_class.append(counts_of(outputs, targets).cpu())
        for metric in self.metrics:
            if metric.rows is not None:
                self.add(metric.name, *by_example(metric.rows(outputs, targets), targets))

    def score(self, targets: Tensor) -> Score:
        """Return the score of all chunks."""
        rows = {name: torch.cat(each).numpy() for name, each in self.rows.items()}
        return Score(
            losses=rows.pop("loss", None),
            rows=rows,
            outputs=tree_map(lambda *chunks: torch.cat(chunks), *self.outputs)
            if self.keeps_outputs
            else None,
            targets=targets.cpu() if self.keeps_outputs else None,
            metrics=self.metrics,
            counts={name: torch.cat(each).numpy() for name, each in self.counts.items()},
            by_class=torch.cat(self.by_class).numpy() if self.keeps_counts else None,
            several_labels=_several_labels(targets),
            of_batch=self.of_batch,
        )
