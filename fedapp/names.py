"""Names of models, losses, metrics, local optimizers and engines, as the run config and the commands have them.

Values are checked against these names without PyTorch and Ray, which take seconds to import. What a name stands for
is in ``fedapp.models``, ``fedapp.training`` and ``fedapp.engine``.
"""

import re
from typing import Literal, NamedTuple, get_args

MODELS = ("logistic", "perceptron", "mlp", "cnn", "lstm", "resnet18")
INITS = ("default", "zeros")
LOSSES = ("cross-entropy", "mse", "mae", "huber", "bce")
METRICS = ("accuracy", "top5", "perplexity", "f1-macro", "iou", "auroc", "rmse", "r2", "mae")
OPTIMIZERS = ("sgd", "adam", "adamw")
Precision = Literal["fp32", "bf16"]
Partitioner = Literal[
    "label-quantity-skew",
    "iid",
    "dirichlet",
    "class-dirichlet",
    "pathological",
    "similarity",
    "shards",
    "natural",
]  # fedapp.data.partition says what each does

# The label of a position that doesn't count: PyTorch's ``ignore_index``.
IGNORED = -100


Dtype = Literal["float32", "int64", "bool"]

_PART = re.compile(r"(?:(\w+) )?(float32|int64|bool)(?: ([\dx]+))?")


class Part(NamedTuple):
    """One of several inputs of a row: its name (empty where inputs are told by their place), type and shape."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Say it, as a message between server and clients does."""
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.shape))}".strip()

    @classmethod
    def read(cls, text: str) -> "Part":
        """Read one from what it says."""
        name, dtype, shape = _PART.fullmatch(text).groups("")  # type: ignore[union-attr]
        return cls(name, dtype, tuple(map(int, shape.split("x"))) if shape else ())  # type: ignore[arg-type]


# What a model is made for: the shape of one input, or what the several inputs of a row are.
Form = tuple[int, ...] | tuple[Part, ...]

# Engines in the user's own process, of which the last is the quickest, and Flower's simulation on Ray.
SEQUENTIAL, VECTORIZED, RAY = "sequential", "vectorized", "ray"
IN_PROCESS = (SEQUENTIAL, VECTORIZED)
ENGINES = (*IN_PROCESS, RAY)
AUTO = "auto"
Engine = Literal["auto", "vectorized", "sequential", "ray"]

# How the vectorized engine trains: see ``fedapp.training.trainer``.
Way = Literal["stacked", "dual", "vmapped", "single"]
WAYS: tuple[Way, ...] = get_args(Way)

ALLOWED_METRICS = (
    f"auto, none, or some of {', '.join(METRICS)} and module:name of your own, with commas between them; "
    "min: or max: before your own says which values are better"
)
