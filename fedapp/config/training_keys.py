"""Keys of the model and of local training."""

from typing import Annotated

from fedapp.config.key import (
    BelowOne,
    Count,
    Flag,
    Keys,
    NonNegative,
    Positive,
    Setting,
    Text,
    Thousands,
    if_,
    key,
    pattern,
    where,
)
from fedapp.names import ALLOWED_METRICS as METRICS
from fedapp.names import INITS, LOSSES, MODELS, OPTIMIZERS, Precision
from fedapp.training.work import ALLOWED as STEP_HETEROGENEITIES
from fedapp.training.work import PATTERN as STEP_HETEROGENEITY

LR_SCHEDULES = "constant, inverse, inverse-sqrt, cosine or exponential:RATE with RATE in (0, 1]"

_OWN = r"[\w.]+:[\w.]+"


def _epochs_are_counted(setting: Setting) -> bool:
    """Tell whether ``local-epochs`` gives the number of epochs, or is 0 as the work is in steps."""
    kind = setting.config.step_heterogeneity.partition(":")[0]
    return setting.config.local_epochs == 0 or kind not in ("list", "range", "uniform")


def _work_differs(setting: Setting) -> bool:
    """Tell whether clients can do different amounts of work; a single epoch or step can't be divided."""
    config = setting.config
    return bool(config.step_heterogeneity != "speed" or max(config.local_epochs, config.local_steps) > 1)


# The server of fedcompass sets the number of steps of each task.
_CLIENTS_SET_STEPS = if_("all but fedcompass", lambda setting: not setting.strategy.capabilities.sets_steps)


class TrainingKeys(Keys):
    """What a client does with a model that it was sent."""

    model: Annotated[
        str,
        pattern(f"one of {', '.join(MODELS)}, or module:name of your own", rf"^({'|'.join(MODELS)}|{_OWN})$"),
        key("what is trained; your own: a class or function that makes an nn.Module"),
    ]
    init: Annotated[str, pattern(", ".join(INITS), f"^({'|'.join(INITS)})$"), key("the model's first values")]
    loss: Annotated[
        str,
        pattern(f"one of {', '.join(LOSSES)}, or module:name of your own", rf"^({'|'.join(LOSSES)}|{_OWN})$"),
        key("what is minimised; your own: (outputs, targets) → the loss of each example or target"),
    ]
    metrics: Annotated[
        str,
        pattern(METRICS, r"^[\w.:-]+(\s*,\s*[\w.:-]+)*$"),
        key("what is measured beside the loss; auto: accuracy, of numbers rmse and r2"),
    ]
    local_epochs: Annotated[
        Thousands,
        key(
            "passes over a client's rows in a task; 0: local-steps counts",
            _CLIENTS_SET_STEPS & if_("step-heterogeneity without numbers of its own", _epochs_are_counted),
        ),
    ]
    local_steps: Annotated[
        Thousands, key("local steps of a task, where local-epochs = 0", _CLIENTS_SET_STEPS)
    ]
    step_heterogeneity: Annotated[
        str,
        pattern(STEP_HETEROGENEITIES, STEP_HETEROGENEITY),
        key(
            "how many local epochs (or local-steps) each client does",
            _CLIENTS_SET_STEPS & if_("with speed more than one local epoch or step", _work_differs),
        ),
    ]
    fine_tune_epochs: Annotated[
        Thousands, key("passes in which clients fit a copy of the model at evaluations; 0: none")
    ]
    personal: Annotated[
        Text, key("arrays that each client keeps for itself, as patterns of names such as head.*,norm.*")
    ]
    personal_epochs: Annotated[
        Thousands,
        key(
            "passes that train a client's own arrays before the others; 0: together",
            if_("personal", lambda setting: bool(setting.config.personal)),
        ),
    ]
    normalize_steps: Annotated[Flag, key("divide a client's step size by the number of its steps")]
    batch_size: Annotated[Count, key("rows of a local step; 0: all")]
    lr: Annotated[Positive, key("γ, the local step size (learning rate)")]
    lr_schedule: Annotated[
        str,
        pattern(LR_SCHEDULES, r"^(constant|inverse|inverse-sqrt|cosine|exponential:\S+)$"),
        key("how γ changes with the rounds"),
    ]
    optimizer: Annotated[
        str,
        pattern(
            f"one of {', '.join(OPTIMIZERS)}, the name of a class of torch.optim in lower case, or module:Class of "
            "your own",
            rf"^(\w+|{_OWN})$",
        ),
        key("what makes local steps, anew in each task"),
    ]
    optimizer_options: Annotated[
        Text,
        key(
            'the optimizer\'s options beside lr, such as "betas=[0.9,0.95] eps=1e-6"',
            if_("optimizer other than sgd", lambda setting: setting.config.optimizer != "sgd"),
        ),
    ]
    momentum: Annotated[BelowOne, key("heavy-ball momentum of local steps", where("optimizer", "sgd"))]
    l2: Annotated[NonNegative, key("λ of ½ λ ‖w‖² in the loss (weight decay)")]
    clip_norm: Annotated[NonNegative, key("G, the norm to which gradients are clipped; 0: none")]
    precision: Annotated[Precision, key("of local training; bf16 is torch.autocast's")]
