"""Local training: the only training maths of the project, one pure function over a model's parameters.

Every method's local rule fits one form (papers/003_4ba4febf91704f25.txt, algorithm 2;
papers/000_eaef941d18240f45.txt, eq. 4)::

    w̃ = at(w, u)          = β w + (1−β) u        β = 1: w itself
    g = ∇f_i(w̃) + λ w̃                            clipped to norm G, if asked
    w ← w − γ [ g + pull(w, w̄) ],  pull = α (w − w̄)

so a client needs no branch per method. ``train`` works on one client or, under ``torch.func.vmap``, on a batch of
clients: ragged ones are padded, and a mask says which examples are real. Models of dense layers have a faster way,
``fedapp.dense_training``, with the same result to rounding.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies import streams

Parameters = dict[str, Tensor]
# Rows of a batch: an index into the client's data, or everything; and the mask of a padded batch.
Batch = tuple[Tensor | slice, Tensor | None]


class Loss(Protocol):
    """Mean loss of a batch, a scalar; ``mask`` (B,) weighs the examples of a padded batch."""

    def __call__(self, parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor: ...


Gradient = Callable[[Loss, Parameters, Tensor, Tensor, Tensor | None], tuple[Parameters, Tensor]]


@dataclass(frozen=True)
class LocalRule:
    """The symbols of the local step.

    Parameters
    ----------
    alpha : float
        α ≥ 0, the pull towards the model that was sent; 0: none.
    beta : float
        β in [0, 1]: the gradient is taken at β w + (1−β) u; 1: at w.
    momentum : float
        Heavy-ball momentum on the whole step, in [0, 1).
    l2 : float
        λ of ½ λ ‖w‖², all parameters; its gradient is taken at w̃ too.
    clip_norm : float
        G: the gradient's norm is cut to G; 0: not.
    """

    alpha: float = 0.0
    beta: float = 1.0
    momentum: float = 0.0
    l2: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True)
class Batches:
    """Which examples each local step sees.

    Attributes
    ----------
    indices : np.ndarray
        Shape (S, B), int64: rows of the client's data; entries past ``sizes`` are padding (0).
    sizes : np.ndarray
        Shape (S,): real examples of each step.
    num_examples : int
        n_i: the rows are 0 to n_i − 1.
    whole : bool
        Every step sees all examples, in order.
    """

    indices: np.ndarray
    sizes: np.ndarray
    num_examples: int
    whole: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    def ragged(self, device: torch.device | str = "cpu") -> list[Batch]:
        """Batches for one client, each as long as it is."""
        if self.whole:
            return [(slice(None), None)] * len(self)
        indices = torch.from_numpy(self.indices).to(device)
        return [(indices[step, :size], None) for step, size in enumerate(self.sizes.tolist())]

    def padded(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return indices and mask, each (steps, width), for training as one of a batch of clients."""
        indices = np.zeros((steps, width), dtype=np.int64)
        mask = np.zeros((steps, width), dtype=np.float32)
        indices[: len(self), : self.indices.shape[1]] = self.indices
        mask[: len(self), : self.indices.shape[1]] = np.arange(self.indices.shape[1]) < self.sizes[:, None]
        return indices, mask


def plan_batches(
    num_examples: int, *, batch_size: int, epochs: int, steps: int, rng: np.random.Generator
) -> Batches:
    """Draw the batches of one task.

    Parameters
    ----------
    num_examples : int
        n_i ≥ 1.
    batch_size : int
        B; 0, or more than n_i: all examples.
    epochs, steps : int
        One of the two is 0. Epochs pass over a fresh permutation each, the last batch of an epoch may be smaller;
        a step draws B different examples at random.
    rng : np.random.Generator
        The task's own random stream.
    """
    width = num_examples if batch_size == 0 else min(batch_size, num_examples)
    if batch_size == 0:
        count = epochs or steps
        everything = np.broadcast_to(np.arange(num_examples), (count, num_examples))
        return Batches(everything, np.full(count, num_examples), num_examples, whole=True)
    if steps:
        drawn = [rng.choice(num_examples, width, replace=False, shuffle=False) for _ in range(steps)]
        return Batches(np.stack(drawn), np.full(steps, width), num_examples)
    per_epoch = -(-num_examples // width)
    indices = np.zeros((epochs, per_epoch * width), dtype=np.int64)
    for epoch in range(epochs):
        indices[epoch, :num_examples] = rng.permutation(num_examples)
    sizes = np.full((epochs, per_epoch), width)
    sizes[:, -1] = num_examples - (per_epoch - 1) * width
    return Batches(indices.reshape(-1, width), sizes.ravel(), num_examples)


def task_rng(seed: int, client: int, task: int) -> np.random.Generator:
    """Return the random stream of a client's task: the same whichever engine or worker runs it."""
    return streams.generator(seed, "batches", client, task)


@dataclass(frozen=True, eq=False)
class LocalTask:
    """All that a client's local training needs.

    Attributes
    ----------
    model : nn.Module
        Says what the parameters mean; its own values aren't used.
    start : dict of str to Tensor
        w̄, the parameters sent to the client, on the data's device.
    x, y : Tensor
        Inputs (N, ...) and labels (N,): the client's own rows are those from ``offset`` on.
    offset : int
        0, or where the client's rows begin in data that are shared by many.
    batches : Batches
        What each local step sees of the client's rows.
    lr : float
        γ, the step size.
    rule : LocalRule
        The method's local step.
    neighbours : dict of str to Tensor, optional
        u, the neighbour average; needed if ``rule.beta`` < 1.
    """

    model: nn.Module
    start: Parameters
    x: Tensor
    y: Tensor
    offset: int
    batches: Batches
    lr: float
    rule: LocalRule
    neighbours: Parameters | None = None

    def __post_init__(self) -> None:
        if self.rule.beta != 1 and self.neighbours is None:
            raise ValueError(f"beta = {self.rule.beta}: needs the neighbour average u")


def cross_entropy(model: nn.Module) -> Loss:
    """Return the mean cross-entropy of ``model`` as a function of its parameters."""

    def loss(parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (x,))
        if mask is None:
            return F.cross_entropy(logits, y)
        return (F.cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    return loss


def plain_gradient(
    loss: Loss, parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None
) -> tuple[Parameters, Tensor]:
    """Gradient and value by torch.autograd: the fastest for one client."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    value = loss(leaves, x, y, mask)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True)), value.detach()


def functional_gradient(
    loss: Loss, parameters: Parameters, x: Tensor, y: Tensor, mask: Tensor | None
) -> tuple[Parameters, Tensor]:
    """Gradient and value by torch.func: works under vmap over clients."""
    gradients, value = torch.func.grad_and_value(loss)(parameters, x, y, mask)
    return gradients, value


def train(
    loss: Loss,
    start: Parameters,
    x: Tensor,
    y: Tensor,
    batches: Iterable[Batch],
    lr: float | Tensor,
    rule: LocalRule,
    *,
    neighbours: Parameters | None = None,
    gradient: Gradient = plain_gradient,
) -> tuple[Parameters, Tensor]:
    """Train a model on one client's data; ``start`` is left as it is.

    Parameters
    ----------
    loss : Loss
        Mean loss of a batch.
    start : dict of str to Tensor
        w̄, the model sent to the client: where training starts, and what ``alpha`` pulls towards.
    x, y : Tensor
        The client's inputs (n, ...) and labels (n,).
    batches : iterable of Batch
        One per local step; a batch whose mask is all zero leaves the model as it is.
    lr : float or Tensor
        γ, the step size.
    rule : LocalRule
        The method's local step.
    neighbours : dict of str to Tensor, optional
        u, the neighbour average; needed if ``rule.beta`` < 1.
    gradient : Gradient
        ``plain_gradient``, or ``functional_gradient`` under vmap.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, and the loss averaged over the steps (without the λ and α terms).

    Raises
    ------
    ValueError
        If ``rule.beta`` < 1 and no ``neighbours`` are given.
    """
    if rule.beta != 1 and neighbours is None:
        raise ValueError(f"beta = {rule.beta}: needs the neighbour average u")
    w = {name: value.clone() for name, value in start.items()}
    velocity: Parameters = {}
    total, count = x.new_zeros((), dtype=torch.float32), x.new_zeros((), dtype=torch.float32)
    for rows, mask in batches:
        point = w if rule.beta == 1 else _mix(rule.beta, w, neighbours or {})
        g, value = gradient(loss, point, x[rows], y[rows], mask)
        g = velocity = direction(g, w, point, start, velocity, rule)
        # A step that is all padding must not move the model by momentum, λ or α either.
        active = torch.ones_like(value) if mask is None else (mask.sum() > 0).to(value.dtype)
        rate = lr if mask is None else lr * active
        for name, parameter in w.items():  # in place: new memory at every step costs more than the sum
            parameter -= rate * g[name]
        total, count = total + value * active, count + active
    return w, total / count.clamp(min=1)


def _mix(beta: float, w: Parameters, u: Parameters) -> Parameters:
    return {name: beta * w[name] + (1 - beta) * u[name] for name in w}


def direction(
    g: Parameters, w: Parameters, point: Parameters, start: Parameters, velocity: Parameters, rule: LocalRule
) -> Parameters:
    """Return what the step size multiplies: the gradient ``g`` at ``point`` with λ, G, α and momentum.

    ``velocity`` is the step before's direction, empty at the first.
    """
    if rule.l2:
        g = {name: g[name] + rule.l2 * point[name] for name in g}
    if rule.clip_norm:
        g = _clip(g, rule.clip_norm)
    if rule.alpha:
        g = {name: g[name] + rule.alpha * (w[name] - start[name]) for name in g}
    if rule.momentum and velocity:
        g = {name: rule.momentum * velocity[name] + g[name] for name in g}
    return g


def _clip(g: Parameters, norm: float) -> Parameters:
    length = torch.sqrt(sum((value.square().sum() for value in g.values()), start=torch.zeros(())))
    scale = (norm / length.clamp(min=1e-12)).clamp(max=1.0)
    return {name: scale * value for name, value in g.items()}


def scheduled_lr(lr: float, schedule: str, server_round: int, num_rounds: int) -> float:
    """Return the learning rate γ_t of a round.

    Parameters
    ----------
    lr : float
        γ, the rate of the first round.
    schedule : str
        ``constant``, ``inverse`` (γ/t), ``inverse-sqrt`` (γ/√t), ``cosine`` (to 0 after the last round) or
        ``exponential:R`` (γ R^(t−1)).
    server_round : int
        t, from 1.
    num_rounds : int
        T, for ``cosine``.
    """
    name, _, rate = schedule.partition(":")
    if name == "inverse":
        return lr / server_round
    if name == "inverse-sqrt":
        return lr / float(np.sqrt(server_round))
    if name == "cosine":
        return lr * 0.5 * (1 + float(np.cos(np.pi * (server_round - 1) / num_rounds)))
    if name == "exponential":
        return lr * float(rate) ** (server_round - 1)
    return lr
