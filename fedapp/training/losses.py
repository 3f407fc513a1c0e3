"""Losses of an example: what a model's outputs cost beside its targets.

Outputs are (B, K) logits or numbers; targets are labels (B,), int64, or numbers (B, M), float32. The loss of several
examples is the mean of theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedapp.own import OwnPartError, imported, is_own

Targets = Literal["classes", "numbers"]
RowLosses = Callable[[Tensor, Tensor], Tensor]
ErrorsAt = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Loss:
    """A loss, and its derivative where that has a closed form.

    Attributes
    ----------
    name : str
        Its value of the run-config key `loss`.
    rows : callable
        (outputs (B, ...), targets (B, ...)) → loss of each example, (B,).
    targets : str, optional
        ``classes`` or ``numbers``, if it takes nothing else.
    errors : callable, optional
        (outputs (..., K, B), targets (..., 1 or M, B)) → losses (..., 1, B), and their derivatives by the outputs,
        which may take the outputs' memory. With it models of dense layers need no automatic differentiation.
    """

    name: str
    rows: RowLosses
    targets: Targets | None = None
    errors: ErrorsAt | None = None

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of some examples, a scalar."""
        if self is CROSS_ENTROPY:
            return F.cross_entropy(outputs, targets)
        return self.rows(outputs, targets).mean()


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
    return F.cross_entropy(outputs, labels, reduction="none")


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
    return Loss(name, cast(RowLosses, found))
