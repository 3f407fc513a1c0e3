"""The run config: one typed, validated schema for every key.

The defaults stand in ``pyproject.toml``, section ``[tool.flwr.app.config]``, where Flower reads them; what each key
accepts stands here. An error is one line that names the key, the value and what is allowed.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp.local_work import ALLOWED as STEP_HETEROGENEITIES
from fedapp.local_work import PATTERN as STEP_HETEROGENEITY
from fedapp.models import INITS, MODELS
from strategies import REGISTRY
from strategies.server_optimizer import OPTIMIZERS
from strategies.time_scenario import ALLOWED as TIME_SCENARIOS
from strategies.weights import Participation

Value = str | int | float | bool


class ConfigError(ValueError):
    """The run config, or what it asks for, isn't possible; the text is the message for the user."""


# What a message's integer holds.
LARGEST = 2**63 - 1

# The description of a type is what an error says is allowed.
Positive = Annotated[float, Field(description="a number > 0", gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(description="a number >= 0", ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(description="a number in (0, 1]", gt=0, le=1)]
UnitInterval = Annotated[float, Field(description="a number in [0, 1]", ge=0, le=1)]
Count = Annotated[int, Field(description="a whole number >= 0", ge=0, le=LARGEST)]
Counting = Annotated[int, Field(description="a whole number >= 1", ge=1, le=LARGEST)]
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str, Field(description="a text", pattern=r"^[^\x00]*$")]
Device = Literal["auto", "cpu", "cuda"]


def _pattern(allowed: str, regex: str) -> Any:
    return Field(description=allowed, pattern=regex)


LR_SCHEDULES = "constant, inverse, inverse-sqrt, cosine or exponential:RATE with RATE in (0, 1]"


class Schema(BaseModel):
    """A flat config with kebab-case keys: key ``num-server-rounds`` is attribute ``num_server_rounds``."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-")
    )

    @classmethod
    @cache
    def key_names(cls) -> tuple[str, ...]:
        """Return every key."""
        return tuple(name.replace("_", "-") for name in cls.model_fields)

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Self:
        """Check keys and values.

        Raises
        ------
        ConfigError
            One line for each unknown key, wrong type and value out of range.
        """
        if unknown := [key for key in values if key not in cls.key_names()]:
            raise ConfigError("\n".join(_unknown(key, cls.key_names()) for key in unknown))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            keys = dict.fromkeys(str(details["loc"][0]) for details in error.errors())
            raise ConfigError("\n".join(cls._invalid(key, values) for key in keys)) from None

    @classmethod
    def _invalid(cls, key: str, values: Mapping[str, Value]) -> str:
        field = cls.model_fields[key.replace("-", "_")]
        allowed = field.description
        if get_origin(field.annotation) is Literal:
            allowed = "one of " + ", ".join(get_args(field.annotation))
        return f"{key} = {values[key]!r}: must be {allowed}" if key in values else f"{key}: must be set"


class RunConfig(Schema):
    """Every key of a run."""

    # Users may add to the registry: what is in it when a run starts counts.
    strategy: Annotated[str, Field(description=f"one of {', '.join(REGISTRY)}")]
    num_server_rounds: Counting
    time_budget: NonNegative
    round_timeout: Positive
    min_clients: Counting
    client_weights: Literal["samples", "uniform", "adjacency"]
    participation: Text
    fraction_train: Share
    client_evaluation: Flag

    proximal_mu: NonNegative
    perturbation_beta: UnitInterval
    message_floor: Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]
    neighbours: Count
    neighbour_memory: NonNegative
    message_epsilon: NonNegative
    message_delta: Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]
    aggregation_weights: Literal["time-based", "identical"]
    fedfix_interval: Positive
    buffer_size: Counting
    server_lr: Positive
    server_optimizer: Annotated[
        str, _pattern(f"one of {', '.join(OPTIMIZERS)}", f"^({'|'.join(OPTIMIZERS)})$")
    ]
    clock: Literal["virtual", "wall"]
    time_scenario: Annotated[str, _pattern(TIME_SCENARIOS, r"^(F\d{1,2}|exponential(:F\d{1,2})?|trace:.+)$")]

    dataset: Literal[
        "digits",
        "synthetic",
        "mnist",
        "cifar10",
        "cifar100",
        "femnist",
        "femnist-digits",
        "shakespeare",
        "npz",
        "files",
    ]
    data_path: Text
    normalize: Annotated[bool | Literal["symmetric"], Field(description="true, false or symmetric")]
    test_fraction: Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]
    test_on: Literal["held-out", "unseen-clients"]
    partitioner: Literal["label-quantity-skew", "iid", "dirichlet", "shards", "natural"]
    class_imbalance: NonNegative
    data_imbalance: NonNegative
    min_samples: Counting
    dirichlet_alpha: Positive

    model: Annotated[str, _pattern(", ".join(MODELS), f"^({'|'.join(MODELS)})$")]
    init: Annotated[str, _pattern(", ".join(INITS), f"^({'|'.join(INITS)})$")]
    local_epochs: Count
    local_steps: Count
    step_heterogeneity: Annotated[str, _pattern(STEP_HETEROGENEITIES, STEP_HETEROGENEITY)]
    normalize_steps: Flag
    batch_size: Count
    lr: Positive
    lr_schedule: Annotated[
        str,
        _pattern(
            LR_SCHEDULES,
            r"^(constant|inverse|inverse-sqrt|cosine|exponential:\S+)$",
        ),
    ]
    momentum: Annotated[float, Field(description="a number in [0, 1)", ge=0, lt=1)]
    l2: NonNegative
    clip_norm: NonNegative
    update_norm_bound: NonNegative
    aggregation_rule: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"]
    faulty_clients: Count
    dp: Literal["none", "central", "local"]
    dp_clipping_norm: Positive
    dp_noise_multiplier: Positive
    dp_delta: Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]

    seed: Count
    eval_every: Counting
    checkpoint_every: Count
    resume: Text
    record_divergence: Flag
    server_device: Device
    client_device: Device
    client_threads: Count
    results_dir: Text
    tracker: Literal["none", "tensorboard", "wandb"]
    run_name: Annotated[
        str,
        _pattern(
            "a folder name without / or leading dot",
            r"^([^./\\\x00][^/\\\x00]*)?$",
        ),
    ]

    @classmethod
    def load(cls, overrides: Mapping[str, Value] | None = None) -> "RunConfig":
        """Return the defaults with ``overrides`` (kebab-case keys) in their place.

        With ``resume``, the config of that run takes the place of the defaults, and overrides must be as there.

        Raises
        ------
        ConfigError
            Unknown key, wrong type, value out of range, a combination that makes no sense, or one that isn't
            that of the run to resume.
        """
        config = cls.read({**defaults(), **(overrides or {})})
        if config.resume:
            config = cls.read({**defaults(), **_resumed(overrides or {})})
        config._check_combinations()
        return config

    @classmethod
    def received(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the config in a message, which the server has checked and which may hold more than its keys."""
        return cls.read({**defaults(), **{key: values[key] for key in cls.key_names() if key in values}})

    def flat(self) -> dict[str, Value]:
        """Return the config as Flower has it: one level, kebab-case keys."""
        return self.model_dump(by_alias=True)

    def _check_combinations(self) -> None:
        if self.strategy not in REGISTRY:
            raise ConfigError(f"strategy = {self.strategy!r}: must be one of {', '.join(REGISTRY)}")
        if (self.local_epochs == 0) == (self.local_steps == 0):
            raise ConfigError(
                f"local-epochs = {self.local_epochs}, local-steps = {self.local_steps}: "
                "one of the two must be 0 and the other 1 or more"
            )
        if not _sensible_schedule(self.lr_schedule):
            raise ConfigError(f"lr-schedule = {self.lr_schedule!r}: must be {LR_SCHEDULES}")
        try:
            Participation.parse(self.participation, self.fraction_train)
        except ValueError as error:
            raise ConfigError(in_keys(error)) from None
        if self.dataset in OWN_DATA and not self.data_path:
            raise ConfigError(
                f"data-path = '': dataset {self.dataset} needs the path of {OWN_DATA[self.dataset]}"
            )


def in_keys(error: ValueError) -> str:
    """Return the text of an error of the strategies, which name Python fields, with the keys of the run config."""
    fields = "|".join(name for name in RunConfig.model_fields if "_" in name)
    # Not in a path that is called like a field.
    return re.sub(rf"(?<![\w./-])({fields})(?![\w./-])", lambda field: field[1].replace("_", "-"), str(error))


# Datasets that are the user's own, and what their data-path must be.
OWN_DATA = {"npz": "an .npz file", "files": "a .npz, .csv or .parquet file or a folder of images by class"}


@cache
def defaults() -> dict[str, Value]:
    """Read ``[tool.flwr.app.config]`` from the app's pyproject.toml: beside the package, or inside a wheel's."""
    package = Path(__file__).parent
    for path in (package.parent / "pyproject.toml", package / "pyproject.toml"):
        if path.is_file():
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
            if (app := settings.get("tool", {}).get("flwr", {}).get("app")) is not None:
                values: dict[str, Value] = app["config"]
                return values
    raise ConfigError(f"no pyproject.toml with [tool.flwr.app.config] beside {package}")


# A resumed run may differ in these from what it was: they don't change what is computed.
FREE = ("checkpoint-every", "min-clients", "round-timeout")


def read_run(path: str) -> tuple[dict[str, Value], int]:
    """Return the config of an earlier run from its folder, and its number of clients.

    Raises
    ------
    ConfigError
        If no run is there.
    """
    file = Path(path).expanduser() / "config.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        num_clients = int(content.pop("num-clients"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"resume = {path!r}: no run is there, {file} can't be read ({error})") from None
    content.pop("versions", None)
    return content, num_clients


def _resumed(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the config of the run that ``given`` names under ``resume``, with what may change as given."""
    path = str(Path(str(given["resume"])).expanduser().absolute())
    earlier, _ = read_run(path)
    changed = []
    for key, value in given.items():
        before = earlier.get(key, defaults()[key])
        if key == "data-path" and value:
            value = str(Path(str(value)).expanduser().absolute())  # as it is in a run's config.toml
        if value != before and not _may_become(key, before, value):
            changed.append(f"{key} = {value!r} (it has {before!r})")
    if changed:
        raise ConfigError(
            f"resume = {path!r}: that run has another config than {', '.join(changed)}; num-server-rounds and "
            f"time-budget may be raised, {', '.join(FREE)} may change"
        )
    return {**earlier, **given, "data-path": earlier.get("data-path", ""), "resume": path}


def _may_become(key: str, before: Any, value: Any) -> bool:
    if key == "num-server-rounds":
        return bool(value > before)
    if key == "time-budget":
        return bool(value == 0 or 0 < before < value)
    return key in ("resume", *FREE)


def _unknown(key: str, keys: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    return f"unknown key {key!r}" + (
        f": did you mean {close[0]!r}?" if close else f": allowed are {', '.join(keys)}"
    )


def _sensible_schedule(schedule: str) -> bool:
    name, _, rate = schedule.partition(":")
    try:
        return name != "exponential" or 0 < float(rate) <= 1
    except ValueError:
        return False
