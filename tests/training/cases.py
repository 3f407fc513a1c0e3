"""Tasks to train, every way to train them, and training in float64 written anew, that they are compared with."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedapp.models import build_model
from fedapp.names import Way
from fedapp.training.autograd import train_single, train_vmapped
from fedapp.training.batches import Batches, plan_batches, task_rng
from fedapp.training.dense import train_dense
from fedapp.training.dual import train_dual
from fedapp.training.rule import LocalRule, Parameters
from fedapp.training.task import LocalTask, TaskStack

CLASSES = 3

RULES = {
    "plain": LocalRule(),
    "alpha": LocalRule(alpha=0.7),
    "beta": LocalRule(beta=0.4),
    "beta 0": LocalRule(beta=0.0),
    "momentum": LocalRule(momentum=0.9),
    "l2": LocalRule(l2=0.3),
    "clip": LocalRule(clip_norm=0.2),
    "clip that never cuts": LocalRule(clip_norm=1000.0),
    "clip and l2": LocalRule(clip_norm=0.2, l2=0.5),
    "alpha and clip": LocalRule(alpha=2.0, clip_norm=0.1),
    "alpha and momentum": LocalRule(alpha=0.7, momentum=0.5),
    "alpha and l2": LocalRule(alpha=0.7, l2=0.3),
    "beta and l2": LocalRule(beta=0.4, l2=0.3),
    "beta, alpha and l2": LocalRule(beta=0.4, alpha=0.7, l2=0.3),
    "all but clip": LocalRule(alpha=0.7, beta=0.4, momentum=0.5, l2=0.3),
    "all": LocalRule(alpha=0.7, beta=0.4, momentum=0.5, l2=0.3, clip_norm=0.3),
}


def plan(
    n: int, *, batch: int = 0, epochs: int = 0, steps: int = 0, key: tuple[int, int, int] = (0, 0, 0)
) -> Batches:
    return plan_batches(n, batch_size=batch, epochs=epochs, steps=steps, rng=task_rng(*key))


def rows_of(batches: Batches) -> list[list[int]]:
    """The rows each step sees, from `ragged` as training gets them."""
    return [torch.arange(10_000)[rows].tolist() for rows, _ in batches.ragged()]


@lru_cache
def model_of(name: str, shape: tuple[int, ...]) -> nn.Module:
    """A model on inputs of a shape."""
    features = math.prod(shape)
    if name == "three layers":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(features, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, CLASSES)
        )
    kind = "image" if len(shape) == 3 else "vector"
    return build_model(name, kind=kind, input_shape=shape, num_classes=CLASSES)


def parameters(model: nn.Module, generator: torch.Generator) -> Parameters:
    return {
        name: torch.randn(value.shape, generator=generator) / math.sqrt(value[0].numel())
        for name, value in model.named_parameters()
    }


def make_tasks(
    name: str,
    rule: LocalRule,
    plans: Sequence[Batches],
    rates: Sequence[float],
    *,
    shape: tuple[int, ...] = (1, 2, 3),
    one_start: bool = False,
    constant: bool = False,
    anchor: bool = False,
    seed: int = 0,
) -> list[LocalTask]:
    """A client for each plan, if asked with a constant vector of its own, and pulled to another model than its first.

    Rows between the clients' are NaN, so that touching one of them shows.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model_of(name, shape)
    pieces, labels, offsets = [torch.full((2, *shape), math.nan)], [torch.zeros(2, dtype=torch.long)], []
    for batches in plans:
        n = batches.num_examples
        offsets.append(sum(len(piece) for piece in pieces))
        pieces += [torch.randn(n, *shape, generator=generator), torch.full((2, *shape), math.nan)]
        labels += [
            torch.randint(CLASSES, (n,), generator=generator),
            torch.zeros(2, dtype=torch.long),
        ]
    x, y, common = torch.cat(pieces), torch.cat(labels), parameters(model, generator)
    return [
        LocalTask(
            model,
            common if one_start else parameters(model, generator),
            x,
            y,
            offset,
            batches,
            lr,
            rule,
            parameters(model, generator) if rule.beta != 1 else None,
            parameters(model, generator) if constant else None,
            anchor=parameters(model, generator) if anchor else None,
        )
        for batches, offset, lr in zip(plans, offsets, rates, strict=True)
    ]


def three_clients(
    name: str,
    rule: LocalRule,
    shape: tuple[int, ...] = (1, 2, 3),
    *,
    constant: bool = False,
    anchor: bool = False,
    **amount: int,
) -> list[LocalTask]:
    """Ragged clients with 3, 20 and 13 examples in batches of 6, each with a step size of its own."""
    amount = amount or {"batch": 6, "epochs": 2}
    plans = [plan(n, key=(0, n, 1), **amount) for n in (3, 20, 13)]
    return make_tasks(name, rule, plans, (0.2, 0.05, 0.1), shape=shape, constant=constant, anchor=anchor)


def by_way(way: Way, tasks: Sequence[LocalTask]) -> list[tuple[Parameters, float]]:
    """Train tasks in a way; return what comes of each, in their order."""
    if way in ("single", "dual"):
        one = train_single if way == "single" else train_dual
        return [(w, float(loss)) for w, loss in map(one, tasks)]
    order = sorted(range(len(tasks)), key=lambda k: -len(tasks[k].batches))
    ordered = [tasks[k] for k in order]
    stack, losses = train_dense(TaskStack.of(ordered)) if way == "stacked" else train_vmapped(ordered)
    assert losses.shape == (len(tasks),)
    place = {k: number for number, k in enumerate(order)}
    return [
        ({name: value[place[k]] for name, value in stack.items()}, float(losses[place[k]]))
        for k in range(len(tasks))
    ]


def reference(task: LocalTask, dtype: torch.dtype = torch.float64) -> tuple[Parameters, float]:
    """Train one client on one flat vector of parameters: the formulas of the local step, and nothing else."""
    names, shapes = list(task.start), [value.shape for value in task.start.values()]

    def flat(named: Parameters) -> Tensor:
        return torch.cat([named[name].flatten() for name in names]).to(dtype)

    def by_name(vector: Tensor) -> Parameters:
        parts = vector.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    rule, x, y = task.rule, task.x[task.rows], task.y[task.rows]
    x = x.to(dtype) if x.is_floating_point() else x
    buffers = {name: value.to(dtype) for name, value in task.model.named_buffers()}
    start = flat(task.start)
    sent = start if task.anchor is None else flat(task.anchor)
    constant = torch.zeros_like(sent) if task.constant is None else flat(task.constant)
    w, v, losses = start.clone(), torch.zeros_like(sent), []
    for rows, _ in task.batches.ragged():
        point = w if task.neighbours is None else rule.beta * w + (1 - rule.beta) * flat(task.neighbours)
        point = point.detach().requires_grad_()
        logits = torch.func.functional_call(task.model, {**buffers, **by_name(point)}, (x[rows],))
        loss = F.cross_entropy(logits, y[rows])
        (g,) = torch.autograd.grad(loss, point)
        g = g + rule.l2 * point.detach()
        if rule.clip_norm:
            g = g * min(1.0, rule.clip_norm / max(float(g.norm()), 1e-300))
        v = rule.momentum * v + g + rule.alpha * (w - sent) + constant
        w = w - task.lr * v
        losses.append(float(loss.detach()))
    return by_name(w), math.fsum(losses) / len(losses)


def assert_equals_reference(task: LocalTask, w: Parameters, loss: float) -> None:
    """Equal up to the rounding of float32."""
    expected, expected_loss = reference(task)
    rounded, rounded_loss = reference(task, torch.float32)
    assert list(w) == list(expected)
    for name, value in expected.items():
        assert w[name].dtype == torch.float32
        assert not w[name].requires_grad
        difference = (w[name].double() - value).norm()
        # Where a step grows rounding (a ReLU's kink, a diverging client), the reference's own has grown as well.
        allowed = 1e-5 * max(1.0, float(value.norm())) + 5 * (rounded[name].double() - value).norm()
        assert difference <= allowed, name
    allowed = 1e-5 * (1 + expected_loss) + 5 * abs(rounded_loss - expected_loss)
    assert abs(loss - expected_loss) <= allowed
