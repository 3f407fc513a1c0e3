"""Names of models, losses, metrics, local optimizers and engines, as the run config and the commands have them.

Values are checked against these names without PyTorch and Ray, which take seconds to import. What a name stands for
is in ``fedapp.models``, ``fedapp.training`` and ``fedapp.engine``.
"""

from typing import Literal, get_args

MODELS = ("logistic", "perceptron", "mlp", "cnn", "lstm", "resnet18")
INITS = ("default", "zeros")
LOSSES = ("cross-entropy", "mse", "mae", "huber", "bce")
METRICS = ("accuracy", "top5", "perplexity", "f1-macro", "iou", "auroc", "rmse", "r2", "mae")
OPTIMIZERS = ("sgd", "adam", "adamw")

# The label of a position that doesn't count: PyTorch's ``ignore_index``.
IGNORED = -100

# Engines in the user's own process, of which the last is the quickest, and Flower's simulation on Ray.
VECTORIZED, RAY = "vectorized", "ray"
IN_PROCESS = ("sequential", VECTORIZED)
ENGINES = (*IN_PROCESS, RAY)
AUTO = "auto"
Engine = Literal["auto", "vectorized", "sequential", "ray"]

# How the vectorized engine trains: see ``fedapp.training.trainer``.
Way = Literal["stacked", "dual", "vmapped", "single"]
WAYS: tuple[Way, ...] = get_args(Way)

ALLOWED_METRICS = (
    f"auto, none, or some of {', '.join(METRICS)} and module:name of your own, with commas between them"
)
