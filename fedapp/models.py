"""Models by name, which map inputs (B, ...) to outputs (B, K), and a user's own by ``module:name``."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedapp.names import MODELS, Form, Part
from fedapp.own import described, imported, is_own
from strategies import streams

# Dtypes of inputs by kind; other kinds are float32.
_DTYPES = {"text": torch.int64}

# The slope that Dhasade et al. froze (section 3.1).
PERCEPTRON_SLOPE = (2.700213, 0.7134238)


class ModelError(ValueError):
    """A model that doesn't fit the data; the text names the key, the value and what is allowed."""


class Perceptron(nn.Module):
    """logit = v·x + b with v frozen and b trained from 0 (Dhasade, Kremer & Renard, section 3.1).

    Its logits are (0, v·x + b): cross-entropy on them is binary cross-entropy on v·x + b.
    """

    slope: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(PERCEPTRON_SLOPE))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2) → (B, 2)."""
        logit = x @ self.slope + self.bias
        return torch.stack([torch.zeros_like(logit), logit], dim=-1)


class CharLSTM(nn.Module):
    """Two-layer LSTM over characters: embedding 8, 100 hidden (Fraboni et al. 2023, section 5.1)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 8)
        self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.output = nn.Linear(100, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 80) token ids → (B, K) logits of the next character."""
        hidden, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.output(hidden[:, -1])
        return logits


def build_model(
    name: str, *, kind: str, input_shape: Form, num_classes: int, init: str = "default", seed: int = 0
) -> nn.Module:
    """Build a model, in evaluation mode; the same arguments give the same parameters, whatever was drawn before.

    Parameters
    ----------
    name : str
        One of ``MODELS``, or ``module:name`` of a class or function of the user's own: see ``own_model``.
    kind : str
        Kind of the inputs: ``image`` (C, H, W), ``vector`` (d,), ``series`` (T, F), ``text`` (80,), or ``parts``:
        several inputs a row.
    input_shape : tuple of int, or of Part
        Shape of one input, or name, type and shape of each of several.
    num_classes : int
        K, the number of outputs: classes, or numbers in a target.
    init : str
        ``default`` (PyTorch's) or ``zeros``.

    Raises
    ------
    ModelError
        If the model doesn't fit the inputs.
    OwnPartError
        If a user's own can't be imported.
    """
    check_model(name, kind=kind, input_shape=input_shape, num_classes=num_classes)
    if name not in MODELS:
        # A module that draws when it is first imported does so before the seed is set.
        imported("model", name)
    with torch.random.fork_rng(devices=[]):
        # PyTorch's layers draw from its global stream and no other.
        torch.manual_seed(streams.whole_number(seed, "initial-model"))  # noqa: TID251
        if name not in MODELS:
            model = own_model(name, input_shape, num_classes)
            _initialise_lazy(name, model, kind, input_shape)
            _copy_frozen(model)
        else:
            model = _build(name, cast(tuple[int, ...], input_shape), num_classes)
    if init == "zeros":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return model.eval()


def check_model(name: str, *, kind: str, input_shape: Form, num_classes: int) -> None:
    """Raise ModelError if the model doesn't fit the inputs."""
    if name not in MODELS and is_own(name):
        return
    if name in MODELS and kind == "parts":
        raise ModelError(
            f"model = {name!r}: takes one input; the data have several ({', '.join(map(str, input_shape))}), which a "
            "model of your own takes"
        )
    data = f"the data are {kind} {list(input_shape)} with {num_classes} classes"
    if name not in MODELS:
        raise ModelError(f"model = {name!r}: allowed are {', '.join(MODELS)}, or module:name of your own")
    if (name == "lstm") != (kind == "text"):
        raise ModelError(f"model = {name!r}: lstm goes with text and text with lstm; {data}")
    if name == "perceptron" and (input_shape != (2,) or num_classes != 2):
        raise ModelError(
            f"model = 'perceptron': needs two features and two classes (dataset synthetic); {data}"
        )
    if name in ("cnn", "resnet18") and (
        kind not in ("image", "series") or min(cast(tuple[int, ...], input_shape)[-2:]) < 4
    ):
        raise ModelError(f"model = {name!r}: needs images of 4x4 or more; {data}")


def own_model(name: str, input_shape: Form, num_outputs: int) -> nn.Module:
    """Call a user's class or function with what it takes of ``input_shape``, ``num_outputs`` and ``num_classes``.

    Of several inputs ``input_shape`` is a dict, or a tuple, of the shapes.

    Raises
    ------
    ModelError
        If it needs other arguments, raises an error, or returns no nn.Module.
    OwnPartError
        If it can't be imported.
    """
    found = imported("model", name)
    if isinstance(found, nn.Module):
        raise ModelError(
            f"model = {name!r}: is an instance of {type(found).__name__}; a class, or a function that makes a new "
            "one, is needed, as each process makes its own from the run's seed"
        )
    if not callable(found):
        raise ModelError(
            f"model = {name!r}: must be a class or function that makes an nn.Module, is {found!r}"
        )
    given = {
        "input_shape": _of_each(input_shape, lambda part: part.shape),
        "num_outputs": num_outputs,
        "num_classes": num_outputs,
    }
    try:
        model = found(**_taken(name, found, given))
    except ModelError:
        raise
    except Exception as error:  # whatever a user's code raises, the cause is told
        raise ModelError(f"model = {name!r}: {described(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model = {name!r}: must make an nn.Module, makes {type(model).__name__}")
    return model


def _of_each(form: Form, of: Callable[[Part], Any]) -> Any:
    """Return something of each of several inputs, in a dict or a tuple as the inputs are; of one input its shape."""
    parts = [part for part in form if isinstance(part, Part)]
    if not parts:
        return form
    return {part.name: of(part) for part in parts} if parts[0].name else tuple(map(of, parts))


def _initialise_lazy(name: str, model: nn.Module, kind: str, form: Form) -> None:
    """Let layers that learn their shapes from inputs do so."""
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        try:
            inputs = _of_each(
                form, lambda part: torch.zeros(2, *part.shape, dtype=getattr(torch, part.dtype))
            )
            if kind != "parts":
                inputs = (torch.zeros(2, *inputs, dtype=_DTYPES.get(kind)),)
            model.eval()(**inputs) if isinstance(inputs, dict) else model.eval()(*inputs)
        except Exception as error:  # whatever a user's code raises, the cause is told
            raise ModelError(f"model = {name!r}: {described(error)}") from error
        if left := next(
            (
                each
                for each, value in model.named_parameters()
                if isinstance(value, nn.UninitializedParameter)
            ),
            None,
        ):
            raise ModelError(
                f"model = {name!r}: its parameter {left} is of a lazy layer that forward doesn't use, and so has no "
                "shape; a layer that isn't lazy is needed there, or none"
            )


def _copy_frozen(model: nn.Module) -> None:
    """Put what isn't trained into memory of PyTorch's, which is aligned alike in every process: sums depend on it."""
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, Tensor) and not value.requires_grad:
            value.data = value.detach().clone(memory_format=torch.contiguous_format)


def _taken(name: str, make: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments among ``given`` that a callable takes."""
    parameters = inspect.signature(make).parameters.values()
    wanted = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    for each in wanted:
        if each.name not in given and each.default is each.empty:
            raise ModelError(
                f"model = {name!r}: needs {each.name!r}; it is called with those of {', '.join(given)} that it takes"
            )
    return {each.name: given[each.name] for each in wanted if each.name in given}


def _build(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    num_features = int(torch.Size(input_shape).numel())
    if name in ("cnn", "resnet18") and len(input_shape) == 2:  # numbers (N, H, W) are grey images to these
        return nn.Sequential(
            nn.Unflatten(1, (1, input_shape[0])), _build(name, (1, *input_shape), num_classes)
        )
    if name == "perceptron":
        return Perceptron()
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(num_features, num_classes))
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(num_features, 128), nn.ReLU(), nn.Linear(128, num_classes)
        )
    if name == "cnn":
        return _cnn(input_shape, num_classes)
    if name == "lstm":
        return CharLSTM(num_classes)
    return _resnet18(input_shape[0], num_classes)


def _cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions, each with 2x2 pooling, then one hidden layer of 512 for grey images (MNIST, FEMNIST:
    Dhasade, Kremer & Renard, section 3.2), none for colour (CIFAR: Fraboni et al. 2023, 5.1).
    """
    channels, height, width = input_shape
    features = 64 * (height // 4) * (width // 4)
    head = [nn.Linear(features, num_classes)]
    if channels == 1:
        head = [nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, num_classes)]  # type: ignore[list-item]
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *head,
    )


def _resnet18(channels: int, num_classes: int) -> nn.Module:
    """torchvision's ResNet-18 with GroupNorm: batch statistics don't survive averaging over unlike clients."""
    from torchvision.models import resnet18  # slow to import

    model: nn.Module = resnet18(norm_layer=lambda width: nn.GroupNorm(32, width), num_classes=num_classes)
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model
