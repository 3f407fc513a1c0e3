"""Whether model, loss, metrics and data go together, by trying them on a few rows before any client starts."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedapp.names import MODELS, Precision
from fedapp.own import OwnPartError, described, is_own
from fedapp.training.evaluation import METRICS, Metric
from fedapp.training.losses import CROSS_ENTROPY, LOSSES, OF_BATCH, Loss, class_axis
from fedapp.training.parts import inputs_of
from fedapp.training.precision import passed
from fedapp.training.state import copied_state, for_one_call, is_in_numpy, names_of
from fedapp.training.trainee import Trainee, draws_globally, global_stream
from fedapp.training.trial import Carried, carried, trial

log = logging.getLogger("flwr.fedapp")

ROWS = 8  # that are tried


# Metrics that read an output for each class.
BY_CLASS = {METRICS[name] for name in ("accuracy", "top5", "perplexity", "f1-macro", "iou", "auroc")}

# Metrics that read numbers as labels that hold or don't, and outputs as their logits.
BY_LABEL = {METRICS[name] for name in ("accuracy", "f1-macro", "iou", "auroc")}

# Of these, those that take a logit above 0 for a label that holds.
BY_SIGN = BY_LABEL - {METRICS["auroc"]}


def check_parts(
    model_name: str,
    model: nn.Module,
    loss: Loss,
    metrics: tuple[Metric, ...],
    x: Tensor,
    y: Tensor,
    *,
    num_classes: int = 0,
    targets: np.ndarray | None = None,
    precision: Precision = "fp32",
) -> None:
    """Let a model predict and learn from some rows, and judge it; PyTorch's random numbers stay as they are.

    Parameters
    ----------
    model_name : str
        Value of the run-config key `model`.
    x, y : Tensor
        Inputs (n, ...) and targets (n, ...) of at least one training row.
    num_classes : int
        Of the data, whatever there is of them in ``y``; 0: not known, or targets are numbers.
    targets : array (N, ...), optional
        All targets of the data.
    precision : str
        Of local training.

    Raises
    ------
    OwnPartError
        Naming the key whose part doesn't fit.
    """
    x, y = x[:ROWS], y[:ROWS]
    data = f"inputs {tuple(x.shape)} and targets {tuple(y.shape)}"
    names = names_of(model)
    if not names.trained:
        raise OwnPartError(f"model = {model_name!r}: has no parameter that takes a gradient")
    _check_parameters(model_name, model)
    state = copied_state(model)
    with global_stream(0, x.device):
        with _unchanged(f"model = {model_name!r}", inputs=x):
            outputs = _tried(
                f"model = {model_name!r}: can't predict {data}",
                lambda: _judged(_bounded(model_name, model, x), state, x),
            )
        _check_outputs(model_name, loss, metrics, outputs, data, len(x))
        _check_finite(model_name, outputs)
        _say_probabilities(model_name, model, loss, outputs)
        if not y.is_floating_point():
            _check_classes(model_name, loss, metrics, outputs, y, num_classes)
        targets = y.numpy(force=True) if targets is None else targets
        with _unchanged(f"loss = {loss.name!r}", inputs=x, targets=y):
            _check_targets(model_name, loss, outputs, y, targets, lambda: inputs_of(model, x))
        _check_labels(loss, metrics, targets)
        if len(x) > 1:
            alone = _one_row(model_name, model, state, x[:1], outputs)
            _check_losses(model_name, loss, alone, y[:1], lambda: inputs_of(model, x[:1]))
        for metric in metrics:
            _check_metric(metric, outputs, y)
        _check_learning(model_name, model, loss, x, y, precision)


@contextmanager
def _unchanged(part: str, **given: Tensor) -> Iterator[None]:
    """Refuse a part that changes what it is given, as ``x.mul_(2)`` does: these tensors are the data themselves."""
    before = {name: tensor._version for name, tensor in given.items()}
    yield
    if changed := [name for name, tensor in given.items() if tensor._version != before[name]]:
        raise OwnPartError(
            f"{part}: changes its {' and '.join(changed)} in place, and with them the data; a copy, such as "
            "x = x.clone(), is needed"
        )


# Rows of a forward pass of ``check_extremes``.
_AT_ONCE = 32


def check_extremes(
    model_name: str, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, quoted: bool = True
) -> None:
    """Let a model predict the rows with the largest tokens and labels, and take their loss.

    Parameters
    ----------
    x, y : Tensor
        Inputs (n, ...) and targets (n, ...) of these rows.
    quoted : bool
        Whether an error may tell values of inputs: those of a device stay there.

    Raises
    ------
    OwnPartError
        Naming the key whose part can't take them, the largest value, and what is allowed where that is known.
    """
    state = copied_state(model)
    own = _bounded(model_name, model, x, quoted=quoted)
    what = f"model = {model_name!r}: can't predict the rows with the largest inputs"
    what += f", {_largest(model, x)}" * quoted
    with global_stream(0, x.device):
        for inputs, targets in zip(torch.split(x, _AT_ONCE), torch.split(y, _AT_ONCE), strict=True):
            outputs = _tried(what, partial(_judged, own, state, inputs))
            _check_finite(model_name, outputs)
            labels = "" if y.is_floating_point() else f", whose largest label is {int(y.max())}"
            losses: Tensor = _tried(
                f"loss = {loss.name!r}: can't take outputs {_shape(outputs)} of model = {model_name!r} for targets "
                f"{tuple(targets.shape)}{labels}",
                partial(loss.of, outputs, targets, partial(inputs_of, model, inputs)),
            )
            if wrong := int((~losses.isfinite()).sum()):
                raise OwnPartError(
                    f"loss = {loss.name!r}: isn't finite at the start, before any training, of {wrong} of "
                    f"{losses.numel()} losses"
                )


def _bounded(model_name: str, model: nn.Module, x: Tensor, *, quoted: bool = True) -> nn.Module:
    """Return a copy of a model whose embeddings say which rows they have, where they are asked for another."""
    own, largest = copy.deepcopy(model), partial(_largest, model, x) if quoted else str
    for name, layer in own.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.register_forward_pre_hook(_Bound(model_name, name, layer.num_embeddings, largest))
    return own


def _largest(model: nn.Module, x: Tensor) -> str:
    """Say how large inputs are, of several each."""
    inputs = inputs_of(model, x)
    named = inputs if isinstance(inputs, dict) else {"x": inputs} if isinstance(inputs, Tensor) else None
    if named is None:
        named = {f"x.{place}": each for place, each in enumerate(inputs)}
    return ", ".join(
        f"{name} up to {float(each.max()):g}" for name, each in named.items() if each.dtype != torch.bool
    )


@dataclass(frozen=True)
class _Bound:
    """Says which rows an embedding has, where it is asked for another."""

    model_name: str
    name: str
    rows: int
    inputs: Callable[[], str]

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0].numel() and not 0 <= int(args[0].min()) <= int(args[0].max()) < self.rows:
            least, most = int(args[0].min()), int(args[0].max())
            inputs = self.inputs()
            asked = f"data ({inputs}) ask for {most if most >= self.rows else least}" if inputs else ""
            raise OwnPartError(
                f"model = {self.model_name!r}: its {type(layer).__name__} {self.name!r} has {self.rows} rows, 0 to "
                f"{self.rows - 1} are allowed; the {asked or 'data ask for others'}"
            )


def _check_finite(model_name: str, outputs: Any) -> None:
    """Refuse outputs that are no numbers before any step; −∞ is the logit of what can't be."""
    values = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
    wrong = sum(int((each.isnan() | each.isposinf()).sum()) for each in values)
    if wrong:
        raise OwnPartError(
            f"model = {model_name!r}: its outputs aren't finite at the start, before any training: {wrong} of "
            f"{sum(each.numel() for each in values)} are NaN or infinite"
        )


def _check_parameters(model_name: str, model: nn.Module) -> None:
    for name, value in model.named_parameters():
        if value.requires_grad and value.is_complex():
            raise OwnPartError(
                f"model = {model_name!r}: its parameter {name} is complex; real ones can be trained, as "
                "torch.view_as_real makes them"
            )
        if value.requires_grad and not is_in_numpy(value.dtype):
            raise OwnPartError(
                f"model = {model_name!r}: its parameter {name} is {value.dtype}, in which nothing can be sent; it "
                "must be float32, or frozen by requires_grad_(False) (precision = 'bf16' computes in bfloat16)"
            )
        if value.requires_grad and (value._backward_hooks or value._post_accumulate_grad_hooks):
            raise OwnPartError(
                f"model = {model_name!r}: its parameter {name} has a hook, which local training wouldn't call; what "
                "the hook does must be done in forward, or the parameter frozen by requires_grad_(False)"
            )


def _check_outputs(
    model_name: str, loss: Loss, metrics: tuple[Metric, ...], outputs: Any, data: str, rows: int
) -> None:
    """Refuse outputs that aren't tensors of B rows, and several tensors where the loss or a metric takes one."""
    leaves = tree_leaves(outputs)
    if not leaves or not all(
        isinstance(each, Tensor) and each.dim() and len(each) == rows for each in leaves
    ):
        raise OwnPartError(
            f"model = {model_name!r}: must return a tensor (B, ...) or several in a tuple or dict, for {data}, "
            f"returns {_shape(outputs)}"
        )
    if isinstance(outputs, Tensor):
        return
    built_in = [("loss", loss.name)] if loss.name in LOSSES else []
    for key, name in built_in + [("metrics", each.name) for each in metrics if each.name in METRICS]:
        raise OwnPartError(
            f"{key} = {name!r}: takes one tensor, model = {model_name!r} returns {_shape(outputs)}; one of your own "
            f"gets them as they are{', and metrics may be none' if key == 'metrics' else ''}"
        )


def _say_probabilities(model_name: str, model: nn.Module, loss: Loss, outputs: Any) -> None:
    """Warn of a softmax or sigmoid before a loss that takes one itself."""
    if loss is CROSS_ENTROPY:
        found = any(_are_probabilities(outputs, axis) for axis in {1, outputs.dim() - 1} if axis > 0)
    else:
        found = loss.name == "bce" and isinstance([*model.modules()][-1], nn.Sigmoid)
    if found:
        ending = "softmax" if loss is CROSS_ENTROPY else "sigmoid"
        log.warning(
            "model = %r: its outputs are probabilities, but loss = %r takes logits, of which it makes probabilities "
            "itself, so that the model learns little; leave the %s at the model's end out",
            model_name,
            loss.name,
            ending,
        )


def _are_probabilities(outputs: Tensor, axis: int) -> bool:
    """Tell whether numbers are at least 0 and sum to 1 along an axis that has several."""
    if outputs.shape[axis] < 2 or bool((outputs < 0).any()):
        return False
    return bool(((outputs.sum(axis) - 1).abs() < 1e-4).all())


def _one_row(model_name: str, model: nn.Module, state: dict[str, Tensor], x: Tensor, outputs: Any) -> Any:
    """Return a model's outputs for one row (1, ...); refuse others than for several, whose ``outputs`` these are."""
    what = f"model = {model_name!r}: can't predict one row, as the last batch of a client may be"
    alone = _tried(what, lambda: _judged(_bounded(model_name, model, x), state, x))
    axes = [
        each.dim() if isinstance(each, Tensor) and each.dim() and len(each) == 1 else 0
        for each in tree_leaves(alone)
    ]
    if axes != [each.dim() for each in tree_leaves(outputs)]:
        raise OwnPartError(
            f"model = {model_name!r}: returns {_shape(alone)} for one row, as the last batch of a client may be, and "
            f"{_shape(outputs)} for several; both need the same axes (squeeze() drops that of the rows)"
        )
    return alone


def _shape(outputs: Any) -> str:
    """Say what a model's outputs are like."""
    if isinstance(outputs, Tensor):
        return str(tuple(outputs.shape))
    shapes = [str(tuple(each.shape)) for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    return type(outputs).__name__ + (f" of {', '.join(shapes)}" if shapes else "")


def _check_classes(
    model_name: str, loss: Loss, metrics: tuple[Metric, ...], outputs: Tensor, y: Tensor, num_classes: int
) -> None:
    """Refuse outputs that don't fit labels, or are fewer than there are classes, where each has its own."""
    needs = [("loss", CROSS_ENTROPY.name)] if loss is CROSS_ENTROPY else []
    needs += [("metrics", metric.name) for metric in metrics if metric in BY_CLASS]
    if not needs:
        return
    key, name = needs[0]
    shape, width = tuple(outputs.shape), outputs.shape[1] if outputs.dim() > 1 else 1
    if y.dim() > 1:
        try:
            axis = class_axis(outputs, y)
        except ValueError:
            rows, *positions = (*map(str, y.shape),)
            at_end, second = (
                f"({', '.join(axes)})" for axes in ([rows, *positions, "K"], [rows, "K", *positions])
            )
            raise OwnPartError(
                f"{key} = {name!r}: can't take outputs {shape} of model = {model_name!r} for labels "
                f"{tuple(y.shape)}; allowed are {at_end} and {second} for K classes"
            ) from None
        width = shape[axis]
        if shape[:1] + shape[2:] == shape[:-1] == y.shape and outputs.dim() > 2:
            log.info(
                "model = %r: of its outputs %s the classes are in axis %d, which isn't the only one that fits",
                model_name,
                shape,
                axis,
            )
    if width < num_classes:
        raise OwnPartError(
            f"{key} = {name!r}: can't take outputs {shape} of model = {model_name!r}; one is needed "
            f"for each of the {num_classes} classes of the data"
        )


def _check_learning(
    model_name: str, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, precision: Precision
) -> None:
    names, trainee = names_of(model), Trainee(model)
    state = copied_state(model)
    leaves = [state[name].requires_grad_() for name in names.trained]
    what = (
        f"model = {model_name!r}: can't be trained with loss = {loss.name!r} on inputs {tuple(x.shape)} and"
    )
    what += f" targets {tuple(y.shape)}" + f" with precision = {precision!r}" * (precision != "fp32")
    drawn = _tried(what, lambda: draws_globally(model, trainee, state, x))

    def mean() -> Tensor:
        forward = partial(trainee, state, x)
        outputs = forward() if precision == "fp32" else passed(precision, x.device, forward)
        return loss.mean(outputs, y, inputs=lambda: inputs_of(model, x))

    def learn() -> list[str]:
        gradients = torch.autograd.grad(mean(), leaves, allow_unused=True)
        return [name for name, g in zip(names.trained, gradients, strict=True) if g is None]

    unmoved = _tried(what, learn)
    if len(unmoved) == len(leaves):
        raise OwnPartError(f"{what} (the loss depends on no parameter)")
    if unmoved and not drawn:
        log.warning(
            "model = %r: the loss of %d rows doesn't depend on %s; where it doesn't, they get no gradient",
            model_name,
            len(x),
            ", ".join(unmoved),
        )
    if drawn:
        log.warning(
            "model = %r: draws random numbers outside nn.Dropout; clients of one process train one after the other, "
            "so that the result stays the same",
            model_name,
        )
    if model_name not in MODELS and is_own(model_name):
        if found := _tried(what, lambda: trial(model, loss, x, y)):
            raise OwnPartError(f"model = {model_name!r}: {found}")
        _check_attributes(model_name, _tried(what, lambda: carried(model, x)))


def _check_attributes(model_name: str, found: Carried) -> None:
    """Refuse a model whose outputs depend on an attribute that earlier passes changed; warn of counters."""
    if found.read:
        raise OwnPartError(
            f"model = {model_name!r}: its outputs depend on its attribute {', '.join(found.read)}, which each "
            "forward pass changes and which would pass from client to client; what it keeps must be a buffer "
            "(register_buffer)"
        )
    if found.counters:
        log.warning(
            "model = %r: each forward pass changes its attribute %s, which passes from client to client; if outputs "
            "come to depend on it, it must be a buffer (register_buffer)",
            model_name,
            ", ".join(found.counters),
        )


def _judged(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> Any:
    with torch.no_grad():
        return torch.func.functional_call(model, for_one_call(model, state), (x,))


def _check_targets(
    model_name: str, loss: Loss, outputs: Any, y: Tensor, targets: np.ndarray, inputs: Callable[[], Any]
) -> None:
    kind = "numbers" if y.is_floating_point() else "classes"
    if loss.targets not in (None, kind):
        raise OwnPartError(
            f"loss = {loss.name!r}: is one of {loss.targets}, the targets of the data are {kind}"
        )
    if loss.targets == "numbers" and outputs.shape != y.shape:
        raise OwnPartError(
            f"model = {model_name!r}: returns {tuple(outputs.shape)} for targets {tuple(y.shape)}; loss = "
            f"{loss.name!r} needs them alike"
        )
    if loss.name == "bce" and not bool(((targets >= 0) & (targets <= 1)).all()):
        least, most = float(targets.min()), float(targets.max())
        raise OwnPartError(
            f"loss = 'bce': the targets of the data must lie in [0, 1], they lie in [{least:g}, {most:g}]"
        )
    _check_losses(model_name, loss, outputs, y, inputs)


def _check_losses(model_name: str, loss: Loss, outputs: Any, y: Tensor, inputs: Callable[[], Any]) -> None:
    losses = _tried(
        f"loss = {loss.name!r}: can't take outputs {_shape(outputs)} of model = {model_name!r}",
        lambda: loss.of(outputs, y, inputs),
    )
    allowed = ((),) if loss.of_batch else ((len(y),), y.shape)
    if not isinstance(losses, Tensor) or losses.shape not in allowed:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if loss.of_batch:
            raise OwnPartError(
                f"loss = {loss.name!r}: states {OF_BATCH} = True and must return one number, a tensor without axes, "
                f"returns {shape}"
            )
        or_each = f", or of each of its targets, {tuple(y.shape)}" if y.dim() > 1 else ""
        raise OwnPartError(
            f"loss = {loss.name!r}: must return the loss of each example, ({len(y)},){or_each}, returns {shape}; "
            f"in PyTorch that is reduction='none'; a loss of the whole batch states {OF_BATCH} = True"
        )


def _check_labels(loss: Loss, metrics: tuple[Metric, ...], targets: np.ndarray) -> None:
    """Refuse metrics of labels on numbers that are none; with bce they may be shares, and outputs are logits."""
    if targets.dtype.kind != "f" or loss.name == "bce":
        return
    if loss.name in LOSSES and (wrong := next((metric for metric in metrics if metric in BY_SIGN), None)):
        raise OwnPartError(
            f"metrics = {wrong.name!r}: takes outputs for logits, and loss = {loss.name!r} takes them for numbers; "
            "allowed are rmse, r2, mae and auroc, or loss = cross-entropy or bce"
        )
    if bool(((targets == 0) | (targets == 1)).all()):
        return
    if wrong := next((metric for metric in metrics if metric in BY_LABEL), None):
        raise OwnPartError(
            f"metrics = {wrong.name!r}: is one of classes, and of labels that are 0 or 1; the targets of the data "
            "are other numbers"
        )


def _check_metric(metric: Metric, outputs: Any, y: Tensor) -> None:
    kind = "numbers" if y.is_floating_point() else "classes"
    if metric.targets not in (None, kind):
        raise OwnPartError(
            f"metrics = {metric.name!r}: is one of {metric.targets}, the targets of the data are {kind}"
        )
    _tried(
        f"metrics = {metric.name!r}: can't take outputs {_shape(outputs)}, targets {tuple(y.shape)}",
        lambda: metric.whole(tree_map(Tensor.cpu, outputs), y.cpu()),
    )


def _tried(what: str, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except OwnPartError:
        raise
    except Exception as error:  # whatever a user's code raises, the cause is told
        reason = described(error)
        if "Long, Int" in reason:  # an embedding, which takes whole numbers
            reason += "; inputs are float32: begin with x.long()"
        raise OwnPartError(f"{what} ({reason})") from error
