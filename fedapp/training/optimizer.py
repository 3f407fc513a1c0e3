"""How a local step moves the model along its direction: by SGD, Adam, or an optimizer of PyTorch's.

The direction is that of the method's rule (``fedapp.training.rule``), the λ of ``l2`` included; the optimizer's state
begins anew in each task, as the momentum does.
"""

import inspect
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedapp.names import OPTIMIZERS
from fedapp.own import OwnPartError, imported, is_own
from fedapp.training.rule import Tensors

# w, the step's direction v, the step size γ: moves w in place.
Move = Callable[[Tensors, Tensors, float | Tensor], None]

_GIVEN = {"params", "lr"}  # what local training gives an optimizer of PyTorch

TRIED = 20  # steps in which an optimizer must move a model


@dataclass(frozen=True)
class LocalOptimizer:
    """A kind of optimizer.

    Attributes
    ----------
    name : str
        ``sgd``, ``adam``, ``adamw``, the name of a class of torch.optim in lower case, or ``module:Class``.
    options : tuple of (str, value)
        Its keywords, but for the step size.
    """

    name: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def stacks(self) -> bool:
        """Whether it moves the models of many clients at once."""
        return self.name in OPTIMIZERS

    def begin(self) -> Move | None:
        """Return what moves the model in a task; None: w ← w − γ v."""
        if self.name == "sgd":
            return None
        if self.name in OPTIMIZERS:
            return LocalAdam(decoupled=self.name == "adamw", **dict(self.options))
        return _Torch(_torch_class(self.name), dict(self.options))


SGD = LocalOptimizer()


class LocalAdam:
    """Adam (Kingma & Ba 2015, algorithm 1); ``decoupled``: AdamW (Loshchilov & Hutter 2019, algorithm 2).

    Parameters
    ----------
    decoupled : bool
        Whether weights decay by themselves, rather than through the gradient.
    betas : two floats
        Decay rates of the moments, in [0, 1).
    eps : float
        ε > 0 of the denominator.
    weight_decay : float, optional
        As in PyTorch 0 for Adam and 0.01 for AdamW.

    Raises
    ------
    ValueError
        If one of them is out of range.
    """

    def __init__(
        self,
        *,
        decoupled: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        self.first, self.second = betas
        if not (0 <= self.first < 1 and 0 <= self.second < 1):
            raise ValueError(f"betas = {betas}: must be two numbers in [0, 1)")
        if not eps > 0:
            raise ValueError(f"eps = {eps}: must be > 0")
        self.eps, self.decoupled = eps, decoupled
        self.decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay
        if not self.decay >= 0:
            raise ValueError(f"weight_decay = {weight_decay}: must be >= 0")
        self.count = 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, w: Tensors, step_direction: Tensors, rate: float | Tensor) -> None:
        """Move a model, or a stack of models, of which later steps may only leave out the last."""
        self.count += 1
        first, second = 1 - self.first**self.count, 1 - self.second**self.count
        for name, value in w.named.items():
            g, each = step_direction.named[name], w.each(rate, value)
            if self.decay and self.decoupled:
                value *= 1 - each * self.decay
            elif self.decay:
                g = g + self.decay * value
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
            m, v = (one if one.shape == value.shape else one[: len(value)] for one in self.moments[name])
            m.mul_(self.first).add_(g, alpha=1 - self.first)
            v.mul_(self.second).add_(g.square(), alpha=1 - self.second)
            value -= each * (m / first) / ((v / second).sqrt() + self.eps)


class _Torch:
    """One of PyTorch's optimizers, on one client's model."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options
        self.optimizer: torch.optim.Optimizer | None = None
        self.leaves: dict[str, Tensor] = {}

    def __call__(self, w: Tensors, step_direction: Tensors, rate: float | Tensor) -> None:
        if self.optimizer is None:
            # In the same memory; an optimizer may pass over what doesn't take a gradient.
            self.leaves = {name: value.detach().requires_grad_() for name, value in w.named.items()}
            self.optimizer = self.kind(list(self.leaves.values()), **{"lr": float(rate), **self.options})
        for name, leaf in self.leaves.items():
            leaf.grad = step_direction.named[name]
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)
        with torch.no_grad():
            self.optimizer.step()
        for name, leaf in self.leaves.items():
            leaf.grad = None
            if leaf.data_ptr() != w.named[name].data_ptr():  # ``p.data = …`` has put it elsewhere
                w.named[name].copy_(leaf.detach())
                leaf.data = w.named[name]


@lru_cache(maxsize=8)
def optimizer_of(name: str, options: str = "") -> LocalOptimizer:
    """Return an optimizer by name, with options such as ``"betas=[0.9,0.95] eps=1e-6"``.

    Raises
    ------
    OwnPartError
        If there is none, it has no such option, or needs what local training can't give.
    """
    values = _options(options)
    if name == "sgd":
        if values:
            raise OwnPartError(
                f"optimizer-options = {options!r}: sgd has none; its momentum is the key momentum"
            )
        return SGD
    known = (
        set(inspect.signature(LocalAdam).parameters) - {"decoupled"}
        if name in OPTIMIZERS
        else _keywords(_torch_class(name))
    )
    for key in values:
        if key in _GIVEN or (known is not None and key not in known):
            allowed = "all others" if known is None else ", ".join(sorted(known))
            raise OwnPartError(
                f"optimizer-options = {options!r}: {name} has no {key!r}; allowed are {allowed}"
            )
    optimizer = LocalOptimizer(name, tuple((key, _frozen(value)) for key, value in values.items()))
    _try(optimizer, options)
    return optimizer


def _try(optimizer: LocalOptimizer, options: str) -> None:
    """Take some steps with a small model: the first few may be for warming up."""
    w = Tensors({"weight": torch.ones(2, 3), "bias": torch.ones(3)})
    try:
        move = optimizer.begin()
        assert move is not None
        for _ in range(TRIED):
            move(w, Tensors({name: torch.ones_like(value) for name, value in w.named.items()}), 0.1)
            if any(bool((value != 1).any()) for value in w.named.values()):
                return
        raise RuntimeError(f"they leave a model as it is in {TRIED} steps")
    except Exception as error:  # whatever a user's class raises, the cause is told
        raise OwnPartError(
            f"optimizer = {optimizer.name!r}, optimizer-options = {options!r}: can't take a step with them ({error})"
        ) from error


def _options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in re.findall(r"[^\s\[\]=]+=(?:\[[^\]]*\]|\S+)|\S+", text):
        key, sign, value = part.partition("=")
        try:
            if not sign or key in found:
                raise ValueError
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            raise OwnPartError(
                f"optimizer-options = {text!r}: must be KEY=VALUE …, each key once, e.g. betas=[0.9,0.95] eps=1e-6"
            ) from None
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _keywords(kind: type[torch.optim.Optimizer]) -> set[str] | None:
    """Return the options that a class takes; None if it takes any, maybe to hand them on."""
    parameters = inspect.signature(kind).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return set(parameters) - _GIVEN


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    if is_own(name):
        found: object = imported("optimizer", name)
    else:
        classes = {each.lower(): each for each in dir(torch.optim) if each[0].isupper()}
        found = getattr(torch.optim, classes.get(name, ""), None)
    if (
        not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer))
        or found is torch.optim.Optimizer
    ):
        raise OwnPartError(
            f"optimizer = {name!r}: must be one of {', '.join(OPTIMIZERS)}, the name of a class of torch.optim in "
            "lower case, or module:Class of your own, a torch.optim.Optimizer"
        )
    return found
