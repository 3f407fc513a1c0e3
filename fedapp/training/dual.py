"""Local training of a linear model in its dual form: for few examples of many features, and many passes over them.

All gradients of a linear model are combinations of the client's rows, so that after any number of local steps ::

    W = a W̄ + c U + A X          the bias counts as the weights of a feature that is always 1

with the model sent W̄, the neighbour average U, the client's rows X (n, d) and dual coefficients A (K, n). Steps on
a, c and A need the rows' products with each other only, the Gram matrix X Xᵀ, and that stays the same from round to
round: a pass over the data costs n² K instead of 2 n d K, and X itself is read twice in a task instead of twice in a
pass. The local step is the one of ``fedapp.local_training.train``, with the same result to rounding.
"""

import weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedapp.training.layers import dense_layers
from fedapp.training.task import LocalTask
from fedapp.training.vectors import Parameters

# What training costs, in nanoseconds of a core: for each feature of an example in a step on W; and for each example
# in a step on A, each feature of an example once in a task, and each step. They are rough, but constants: a task must
# be trained in the same way in every process and every run.
PRIMAL = 1.6
DUAL, ONCE, STEP = 1.0, 1.5, 50_000.0

# How many times as fast the dual form must be, for the Gram matrix to be worth its making.
WORTH = 2


def has_dual(task: LocalTask) -> bool:
    """Say whether a task has a dual form: a linear model, and no norm taken of its gradient."""
    return len(dense_layers(task.model)) == 1 and not task.rule.clip_norm


def is_dual_faster(task: LocalTask) -> bool:
    """Say whether a CPU trains a task faster in its dual form; with n ≤ d, XXᵀ takes no more memory than X."""
    n, d = task.batches.num_examples, task.x.shape[1:].numel()
    seen = int(task.batches.sizes.sum())
    dual = DUAL * seen * n + ONCE * n * d + STEP * len(task.batches)
    return n <= d and WORTH * dual < PRIMAL * seen * d


def train_dual(task: LocalTask) -> tuple[Parameters, Tensor]:
    """Train one client.

    Parameters
    ----------
    task : LocalTask
        One that ``has_dual``.

    Returns
    -------
    dict of str to Tensor, Tensor
        The trained parameters, and the loss averaged over the steps.
    """
    ((weight, bias),) = dense_layers(task.model)
    batches, rule, start = task.batches, task.rule, task.start
    rows = slice(task.offset, task.offset + batches.num_examples)
    x, y = task.x[rows].flatten(1), task.y[rows]
    gram = _grams.of(task.x, rows)
    # Classes come first: with few of them products are several times as fast that way round.
    logits_sent = torch.addmm(start[bias].unsqueeze(1), start[weight], x.mT)
    neighbours = task.neighbours if rule.beta != 1 else None
    if neighbours is not None:
        logits_u = torch.addmm(neighbours[bias].unsqueeze(1), neighbours[weight], x.mT)
    sent, u = np.eye(2)  # W̄ and U themselves, as pairs (a, c)
    known, known_velocity = sent.copy(), np.zeros(2)
    dual, velocity = torch.zeros_like(logits_sent), torch.zeros_like(logits_sent)
    total = x.new_zeros(())
    memory = gram.new_empty(batches.indices.shape[1], len(gram))
    for indices, size in zip(torch.from_numpy(batches.indices.copy()), batches.sizes.tolist(), strict=True):
        batch = indices[:size].to(x.device)
        products = gram if batches.whole else torch.index_select(gram, 0, batch, out=memory[:size])
        point = rule.beta * known + (1 - rule.beta) * u
        logits = torch.addmm(
            logits_sent.index_select(1, batch), dual, products.mT, beta=float(point[0]), alpha=rule.beta
        )
        if neighbours is not None:
            logits.add_(logits_u.index_select(1, batch), alpha=float(point[1]))
        log_p, labels = F.log_softmax(logits, dim=0), y[batch].unsqueeze(0)
        total -= log_p.gather(0, labels).mean()
        error = log_p.exp_()
        error.scatter_add_(0, labels, error.new_full((1, 1), -1.0).expand_as(labels))
        # v ← momentum v + ∇f(w̃) + λ w̃ + α (w − w̄) and w ← w − γ v, in (a, c) and in A
        known_velocity = rule.momentum * known_velocity + rule.l2 * point + rule.alpha * (known - sent)
        known -= task.lr * known_velocity
        velocity.mul_(rule.momentum).add_(dual, alpha=rule.l2 * rule.beta + rule.alpha)
        velocity.index_add_(1, batch, error, alpha=1 / size)
        dual.sub_(velocity, alpha=task.lr)
    w = {name: float(known[0]) * start[name] for name in (weight, bias)}
    if neighbours is not None:
        for name, value in w.items():
            value.add_(neighbours[name], alpha=float(known[1]))
    w[weight].addmm_(dual, x)
    w[bias] += dual.sum(1)
    return w, total / max(len(batches), 1)


class _Grams:
    """Gram matrices of clients' rows, kept for as long as the tensor that the rows are in."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], Tensor]] = {}

    def of(self, x: Tensor, rows: slice) -> Tensor:
        """Return 1 + X Xᵀ, (n, n), of some rows of x: the 1 is the product of the feature that is always 1."""
        if id(x) not in self._kept:
            # Two threads may come here at once: the second finalizer finds it gone.
            weakref.finalize(x, self._kept.pop, id(x), None)
        kept = self._kept.setdefault(id(x), {})
        key = (rows.start, rows.stop)
        if key not in kept:
            own = x[rows].flatten(1)
            kept[key] = (own @ own.mT).add_(1.0)
        return kept[key]


_grams = _Grams()
