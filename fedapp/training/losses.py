"""Losses of an example: what a model's outputs cost beside its targets.

Outputs are (B, K) logits or numbers; targets are labels (B,), int64, or numbers (B, M), float32. The loss of several
examples is the mean of theirs.

Labels of each position of an example are (B, T), of a picture's pixels (B, H, W); the logits then have one axis more,
the last one or axis 1 (``class_axis``). A position with the label ``IGNORED`` doesn't count, and the loss of several
examples is the mean over the positions that do, as PyTorch's is.

A loss of a whole batch, such as Cox's partial likelihood, isn't a mean over examples: it states ``of_batch = True``.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.names import IGNORED
from fedapp.own import OwnPartError, imported, is_own

OF_BATCH = "of_batch"  # the attribute of a loss of the user's own that isn't a mean over examples

Targets = Literal["classes", "numbers"]
RowLosses = Callable[..., Tensor]
Inputs = Callable[[], Any]
ErrorsAt = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _not_given() -> Any:
    raise TypeError("this loss takes inputs")


@dataclass(frozen=True)
class Loss:
    """A loss, and its derivative where that has a closed form.

    Attributes
    ----------
    name : str
        Its value of the run-config key `loss`.
    rows : callable
        (outputs (B, ...), targets (B, ...)) → loss of each example, (B,), or of each position, (B, ...). A loss of
        the user's own gets outputs as the model returns them, also several.
    targets : str, optional
        ``classes`` or ``numbers``, if it takes nothing else.
    takes_inputs : bool
        Whether ``rows`` takes the inputs, as the model gets them, too.
    errors : callable, optional
        (outputs (..., K, B), targets (..., 1 or M, B)) → losses (..., 1, B), and their derivatives by the outputs,
        which may take the outputs' memory. With it models of dense layers need no automatic differentiation.
    of_batch : bool
        Whether ``rows`` returns the loss of the whole batch, a scalar, which isn't a mean over its examples.
    """

    name: str
    rows: RowLosses
    targets: Targets | None = None
    errors: ErrorsAt | None = None
    takes_inputs: bool = False
    of_batch: bool = False

    def of(self, outputs: Any, targets: Tensor, inputs: Inputs = _not_given) -> Tensor:
        """Return the loss of each example, (B,), of each position, or of the batch; ``inputs()`` are the model's."""
        return self.rows(outputs, targets, inputs()) if self.takes_inputs else self.rows(outputs, targets)

    def each(
        self, outputs: Any, targets: Tensor, inputs: Inputs = _not_given
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each example, (B,), and the number of positions that it sums; None if it is a mean."""
        return by_example(self.of(outputs, targets, inputs), targets)

    def mean(
        self, outputs: Any, targets: Tensor, mask: Tensor | None = None, inputs: Inputs = _not_given
    ) -> Tensor:
        """Return the mean loss of some examples, or of their positions that count, a scalar.

        ``mask`` (B,) weighs the examples of a padded batch. Where nothing counts it is NaN, with gradient 0.
        """
        if self is CROSS_ENTROPY and targets.dim() == 1 and mask is None:
            return F.cross_entropy(outputs, targets)
        if self.of_batch:
            assert mask is None  # such a loss is never padded: ``trainer.can``
            return self.of(outputs, targets, inputs)
        losses, counts = self.each(outputs, targets, inputs)
        if mask is not None:
            losses = losses * mask
            counts = mask if counts is None else counts * mask
        if counts is None:
            return losses.mean()
        number = counts.sum()
        return (losses.sum() / number.clamp(min=1)).masked_fill(number == 0, math.nan)


def by_example(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the value of each example, (B,), and the number of positions that it sums; None if it is a mean.

    Parameters
    ----------
    values : Tensor
        Of each example, (B,), or of each value of ``targets``, (B, ...), where those of the label ``IGNORED`` don't
        count.
    """
    if values.dim() < 2:
        return values, None
    if targets.is_floating_point():
        return values.flatten(1).mean(1), None
    counted = targets != IGNORED
    return torch.where(counted, values, 0).flatten(1).sum(1), counted.flatten(1).sum(1)


def class_axis(outputs: Tensor, targets: Tensor) -> int:
    """Return the axis of logits that has the classes: without it they have the shape of the labels.

    That is the last one, as of sequences (B, T, K), or axis 1, as of PyTorch's pictures (B, K, H, W). Where both fit,
    it is the last one of three axes and axis 1 of more.

    Raises
    ------
    ValueError
        If there is none.
    """
    shape, last = tuple(outputs.shape), outputs.dim() - 1
    for axis in (last, 1) if last < 3 else (1, last):
        if 0 < axis <= last and shape[:axis] + shape[axis + 1 :] == targets.shape:
            return axis
    raise ValueError(
        f"outputs {shape} don't fit labels {tuple(targets.shape)}: they need one axis more, for the classes, at the "
        "end or after the first"
    )


def classes_first(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return logits with the classes in axis 1, (B, K, ...)."""
    return outputs.movedim(class_axis(outputs, targets), 1)


def columns(targets: Tensor) -> Tensor:
    """Lay targets out for ``Loss.errors``: labels (..., B) as (..., 1, B), numbers (..., B, M) as (..., M, B)."""
    return targets.mT if targets.is_floating_point() else targets.unsqueeze(-2)


def _mean_of_columns(of: RowLosses) -> RowLosses:
    return lambda outputs, targets: of(outputs, targets).flatten(1).mean(1)


def _cross_entropy_errors(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(outputs, dim=-2)
    losses = -log_p.gather(-2, labels)
    error = log_p.exp_()
    error.scatter_add_(-2, labels, error.new_full((1,) * error.dim(), -1.0).expand_as(labels))
    return losses, error


def _mean_errors(of: RowLosses, slope: Callable[[Tensor, Tensor], Tensor]) -> ErrorsAt:
    """Return ``Loss.errors`` of a loss that is a mean over M columns, from that of a column and its derivative."""

    def errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = of(outputs, targets).mean(-2, keepdim=True)
        return losses, slope(outputs, targets) / outputs.shape[-2]

    return errors


def _of_numbers(name: str, of: RowLosses, slope: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return Loss(name, _mean_of_columns(of), "numbers", _mean_errors(of, slope))


def _entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    logits = outputs if labels.dim() == 1 else classes_first(outputs, labels)
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def _size(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


def _huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs, targets, reduction="none")


def _binary_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


CROSS_ENTROPY = Loss("cross-entropy", _entropy, "classes", _cross_entropy_errors)
LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        CROSS_ENTROPY,
        _of_numbers("mse", _square, lambda o, t: 2 * (o - t)),
        _of_numbers("mae", _size, lambda o, t: torch.sign(o - t)),
        _of_numbers("huber", _huber, lambda o, t: (o - t).clamp(-1, 1)),
        _of_numbers("bce", _binary_entropy, lambda o, t: torch.sigmoid(o) - t),
    )
}


@lru_cache(maxsize=8)
def loss_of(name: str) -> Loss:
    """Return a loss by its name, or a function of the user's own, (outputs, targets) → (B,), by ``module:name``.

    One that takes three arguments, or one of the name ``inputs``, gets the inputs, too. One whose attribute
    ``of_batch`` is True returns the loss of the whole batch, a scalar.

    Raises
    ------
    OwnPartError
        If there is none.
    """
    if name in LOSSES:
        return LOSSES[name]
    if not is_own(name):
        raise OwnPartError(f"loss = {name!r}: must be one of {', '.join(LOSSES)}, or module:name of your own")
    found = imported("loss", name)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:  # whatever a user's code raises, the cause is told
            raise OwnPartError(
                f"loss = {name!r}: a class is called without arguments ({type(error).__name__}: {error})"
            ) from error
    if not callable(found):
        raise OwnPartError(f"loss = {name!r}: must be a function (outputs, targets) → (B,), is {found!r}")
    of_batch = getattr(found, OF_BATCH, False)
    if not isinstance(of_batch, bool):
        raise OwnPartError(f"loss = {name!r}: its {OF_BATCH} must be True or False, is {of_batch!r}")
    rows, takes_inputs = _with_inputs(found)
    if of_batch and takes_inputs:
        raise OwnPartError(f"loss = {name!r}: a loss of the whole batch takes outputs and targets alone")
    return Loss(name, rows, takes_inputs=takes_inputs, of_batch=of_batch)


def _with_inputs(found: Callable[..., Any]) -> tuple[RowLosses, bool]:
    """Return a loss as it is called, and whether that is with inputs: its signature takes three, or names them."""
    try:
        parameters = inspect.signature(found.forward if isinstance(found, nn.Module) else found).parameters
    except (TypeError, ValueError):  # a function of C has none
        return found, False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters.values() if each.default is each.empty and each.kind in by_place]
    if "inputs" in list(parameters)[2:]:  # the first are outputs and targets, whatever they are called
        return lambda outputs, targets, inputs: found(outputs, targets, inputs=inputs), True
    return found, len(needed) == 3
