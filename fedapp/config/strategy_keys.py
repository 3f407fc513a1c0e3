"""Keys of the strategies.

A key of a method is a field of its Config (`strategies.core.parameters`), which declares its type, default, range,
meaning and unit. Here stands what the app adds: the keys that aren't a strategy's own, where the app's default is
another one, and which runs read a key, where that is more than whether their strategy has it.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, Field, create_model

from fedapp.config.key import (
    EVERY_RUN,
    OWN,
    WITH_DIRECTIONS,
    WITH_GRAPH,
    ConfigError,
    Counting,
    Inside,
    Key,
    Keys,
    Readers,
    Setting,
    Text,
    Value,
    ZeroOrModerate,
    if_,
    key,
    pattern,
    where,
)
from fedapp.meant import value_meant
from fedapp.own import OwnPartError, imported, is_own
from strategies import REGISTRY, FederatedStrategy, StrategyConfig
from strategies.core.parameters import Parameter, Range, Topic, parameters_of
from strategies.timing.time_scenario import is_profile
from strategies.updates.aggregation import MEAN

STRATEGIES = f"one of {', '.join(REGISTRY)}, or module:Class of your own"


@dataclass(frozen=True)
class OtherDefault:
    """A default of the app that isn't the library's, and what is allowed in the app."""

    value: Value
    range: Range
    why: str


OTHER_DEFAULTS = {
    "eval_every": OtherDefault(1, Range(ge=1), "one round, or a contribution of each client"),
    "min_clients": OtherDefault(1, Range(ge=1), "what Flower's strategies wait for"),
}


def _weights_count(setting: Setting) -> bool:
    config, strategy = setting.config, setting.strategy
    if strategy.config.client_weights != config.client_weights and config.tiers == "none":
        return False  # the strategy demands others
    evaluated = config.client_evaluation or config.record_divergence
    # A pair counts half each.
    return config.participation != "paired" or strategy.session.graph is not None or evaluated


def _can_straggle(setting: Setting) -> bool:
    """Tell whether a task has work of which a part can be missing."""
    config = setting.config
    alike = config.step_heterogeneity in ("none", "speed")  # with speed nobody does more than the fastest
    alone = max(config.local_epochs, config.local_steps) == 1 and alike
    return config.drop_stragglers or not alone


def _speed_counts(setting: Setting) -> bool:
    """Tell whether task times say how much work clients do, by step-heterogeneity = speed, or pass on the clock."""
    config = setting.config
    differs = config.step_heterogeneity == "speed" and max(config.local_epochs, config.local_steps) > 1
    return config.clock != "wall" or (differs and not setting.strategy.capabilities.sets_steps)


PRIVATE = where("dp", "central", "local")
GUARDED = if_("active safeguards", lambda setting: setting.strategy.session.safeguards.active)
_BY_SIZE = if_(
    "client-weights = samples", lambda setting: setting.strategy.config.client_weights == "samples"
)
_IN_VIRTUAL_TIME = if_("clock = virtual", lambda setting: setting.config.clock != "wall")

# Which runs read a key, of those whose strategy has it.
READ_BY: dict[str, Readers] = {
    "client_weights": if_("all but spectral, async-spectral and participation = paired", _weights_count),
    "stragglers": if_("drop-stragglers, or more than one local epoch or step", _can_straggle),
    "drop_stragglers": if_("stragglers > 0", lambda setting: setting.config.stragglers > 0),
    "server_optimizer": if_(
        "all; for fadas sgd stands for amsgrad",
        lambda setting: setting.strategy.config.server_optimizer == setting.config.server_optimizer,
    ),
    "neighbour_memory": if_(
        "perturbation-beta < 1 or graph-source = updates",
        lambda setting: setting.config.perturbation_beta < 1 or setting.config.graph_source == "updates",
    ),
    "staleness_discount": if_(
        "not with perturbation-beta = 1",
        lambda setting: getattr(setting.strategy.config, "perturbation_beta", 0.0) < 1,
    ),
    "message_floor": WITH_GRAPH,
    "neighbours": WITH_GRAPH,
    "time_scenario": if_("clock = virtual, or step-heterogeneity = speed", _speed_counts),
    "availability": _IN_VIRTUAL_TIME,
    "task_failure": _IN_VIRTUAL_TIME,
    "size_ratio_bound": GUARDED & _BY_SIZE,
    "examples_bound": GUARDED & _BY_SIZE,
    "arrival_weight_bound": GUARDED & _IN_VIRTUAL_TIME,
    "rate_bound": GUARDED & where("clock", "wall"),
    "norm_ratio_bound": GUARDED
    & where("update-norm-bound", 0.0)
    & where("dp", "none", "local")
    & where("secure-sums", False),
    "registered_nodes": where("clock", "wall"),
    "dp_mechanism": where("dp", "central"),
    "dp_restart": where("dp", "central") & where("dp-mechanism", "tree"),
    "faulty_clients": if_(
        "an aggregation-rule other than mean", lambda setting: setting.config.aggregation_rule != MEAN
    ),
    "best_of": if_(
        "keep = best, or patience > 0", lambda setting: setting.strategy.config.compares_evaluations
    ),
    "dp_clipping_norm": PRIVATE,
    "dp_clipping_quantile": where("dp", "central") & where("dp-clipping-norm", 0.0),
    "dp_noise_multiplier": PRIVATE,
    "dp_max_contributions": where("dp", "central"),
    "secure_neighbours": where("secure-sums", True),
    "secure_threshold": where("secure-sums", True),
    "secure_clipping": where("secure-sums", True) & where("dp", "none", "local"),
    "secure_metrics": where("secure-sums", True)
    & if_(
        "not with dp-mechanism = distributed",
        lambda setting: not getattr(setting.strategy.config, "distributes_noise", False),
    ),
}
# Parameters of synchronous strategies that clients read, whatever the strategy: with dp = local the noise is theirs.
READ_BY_CLIENTS = ("dp", "dp_clipping_norm", "dp_noise_multiplier")


def declared(parameter: Parameter, readers: Readers) -> tuple[Any, Any]:
    """Return the type and default of a schema's field that accepts the values of a parameter."""

    def check(value: Any) -> Any:
        parameter.check(value)
        return value

    said = Key(parameter.meaning, readers, parameter.unit)
    described = Field(description=parameter.allowed)
    text = parameter.range.or_text
    kind: Any = parameter.kind | Literal[text] if text else parameter.kind
    return Annotated[kind, described, AfterValidator(check), said], parameter.default


def parameters_of_strategies() -> Mapping[str, Parameter]:
    """Return the parameters of all strategies of the registry by name, as they are in the app."""
    found: dict[str, Parameter] = {}
    for kind in REGISTRY.values():
        for name, parameter in parameters_of(kind.Config).items():
            inherited = parameters_of(StrategyConfig).get(name, parameter)
            found.setdefault(name, inherited)
    for name, other in OTHER_DEFAULTS.items():
        found[name] = replace(found[name], default=other.value, range=other.range)
    return found


def _readers(name: str) -> Readers:
    further = READ_BY.get(name, EVERY_RUN)
    if name in READ_BY_CLIENTS or name in {field.name for field in fields(StrategyConfig)}:
        return further
    return OWN if further is EVERY_RUN else OWN & further


K = TypeVar("K", bound=Keys)


def with_parameters(topic: Topic) -> Callable[[type[K]], type[K]]:
    """Return a decorator that adds a topic's parameters of the strategies to a section of the schema.

    They have no default there: a run's config is made from the defaults in pyproject.toml, as Flower's is.
    """
    found = {
        name: (declared(parameter, _readers(name))[0], ...)
        for name, parameter in parameters_of_strategies().items()
        if parameter.topic == topic
    }

    def add(section: type[K]) -> type[K]:
        made = create_model(  # type: ignore[call-overload]
            section.__name__,
            __base__=section,
            __doc__=section.__doc__,
            __module__=section.__module__,
            **found,
        )
        return cast(type[K], made)

    return add


@with_parameters("method")
class StrategyKeys(Keys):
    """What a strategy is told."""

    # Users may add to the registry: what is in it when a run starts counts.
    strategy: Annotated[str, pattern(STRATEGIES, r"^[^\x00]+$"), key("the method")]
    strategy_config: Annotated[
        Text,
        key(
            "keys of your own strategy for flwr run, such as half-life=2.0",
            if_("a strategy with keys of its own", lambda _: False),  # there each is in its own place by now
        ),
    ]
    message_epsilon: Annotated[
        ZeroOrModerate, key("ε of the direction that places a client in the graph; 0: none", WITH_DIRECTIONS)
    ]
    message_delta: Annotated[
        Inside,
        key(
            "δ of that direction",
            WITH_DIRECTIONS & if_("message-epsilon > 0", lambda setting: setting.config.message_epsilon > 0),
        ),
    ]
    clock: Annotated[
        Literal["auto", "virtual", "wall"],
        key("time: virtual, by time-scenario, or the machine's; auto: wall on devices, else virtual"),
    ]
    task_work: Annotated[
        Literal["examples", "flop"],
        key(
            "what a device profile's speed counts; flop: floating-point operations",
            if_(
                "clock = virtual; device profiles",
                lambda setting: setting.config.clock != "wall" and is_profile(setting.config.time_scenario),
            ),
        ),
    ]
    tiers: Annotated[
        str,
        pattern(
            "none, relays, or regions:R with a number R of regions", r"^(none|relays|regions:[1-9]\d{0,5})$"
        ),
        key(
            "the strategy's clients: clients themselves, or regions of clients: on devices relays of other "
            "SuperLinks, in a simulation R regions of consecutive clients each"
        ),
    ]
    edge_rounds: Annotated[
        Counting,
        key(
            "κ₂, rounds in a region for each of the strategy's tasks",
            if_("tiers other than none", lambda setting: setting.config.tiers != "none"),
        ),
    ]
    if TYPE_CHECKING:  # parameters of strategies that the app itself, or a study, reads
        aggregation_weights: str
        availability: str
        buffer_size: int
        client_weights: str
        compression_down: str
        concurrency: int
        drop_stragglers: bool
        fedfix_interval: float | Literal["auto"]
        fraction_train: float
        graph_source: str
        message_floor: float
        neighbours: int
        participation: str
        perturbation_beta: float
        proximal_mu: float
        server_lr: float
        time_scenario: str


@with_parameters("protection")
class ProtectionKeys(Keys):
    """Bounds, robust rules and differential privacy."""

    dp_noise: Annotated[
        Literal["auto", "seed", "system"],
        key(
            "where the noise comes from: the run's seed, which only a simulation may take, or the operating system; "
            "auto: system on devices, else seed",
            if_(
                "dp = central or local, or message-epsilon > 0",
                lambda setting: setting.config.dp != "none" or setting.config.message_epsilon > 0,
            ),
        ),
    ]
    dp_delta: Annotated[Inside, key("δ of dp-epsilon, the ε spent so far", PRIVATE)]
    dp_target_epsilon: Annotated[
        ZeroOrModerate, key("ε of the run for which dp-noise-multiplier is solved; 0: none", PRIVATE)
    ]
    dp_max_epsilon: Annotated[
        ZeroOrModerate, key("the run ends before dp-epsilon passes this; 0: none", PRIVATE)
    ]
    if TYPE_CHECKING:  # parameters of strategies that the app itself reads
        aggregation_rule: str
        dp: str
        dp_clipping_norm: float
        dp_max_contributions: int
        dp_mechanism: str
        dp_restart: int
        dp_noise_multiplier: float
        secure_sums: bool
        registered_nodes: str


def is_of_the_library(config: type) -> bool:
    """Return True if a strategy's Config is one of the library's, whose fields are keys of every run."""
    return config.__module__.partition(".")[0] == "strategies"


def other_defaults(strategy: type[FederatedStrategy]) -> dict[str, Any]:
    """Return the defaults that a user's own Config has for keys that are known without it, by field.

    They don't stand by themselves: a run's config says a value for every key that is known.
    """
    new, own = new_fields(strategy), fields(strategy.Config)
    usual = {field.name: field.default for kind in configs_of_the_library(strategy) for field in fields(kind)}
    return {
        field.name: field.default
        for field in own
        if field.name in StrategyKeys.model_fields.keys() | usual.keys()
        and field.default is not MISSING
        and (field.name in new or field.default != usual[field.name])
    }


def strategy_config(strategy: type[FederatedStrategy], value_of: Callable[[str], Any]) -> StrategyConfig:
    """Return a strategy's config; ``value_of`` returns the value that the run config has for a field."""
    values = {field.name: value_of(field.name) for field in fields(strategy.Config)}
    if values.get("buffer_size") == 0 and not is_of_the_library(strategy.Config):
        # 0 stands for the method's own number, which a user's own method declares.
        values["buffer_size"] = other_defaults(strategy).get("buffer_size", 0)
    return strategy.Config(**values)


def new_fields(strategy: type[FederatedStrategy]) -> set[str]:
    """Return the fields of a Config that none of the library's, which it is made from, has."""
    library = {field.name for kind in configs_of_the_library(strategy) for field in fields(kind)}
    return {field.name for field in fields(strategy.Config)} - library


def configs_of_the_library(strategy: type[FederatedStrategy]) -> list[type]:
    """Return the Configs of the library that a Config is made from, the nearest last."""
    bases = reversed(strategy.Config.__mro__)
    return [kind for kind in bases if is_dataclass(kind) and is_of_the_library(kind)]


def strategy_class(name: str) -> type[FederatedStrategy]:
    """Return the strategy of a name in the registry, or of ``module:Class``.

    Raises
    ------
    ConfigError
        If there is none, or the module can't be imported.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    if not is_own(name):
        meant = value_meant("strategy", name, STRATEGIES)
        raise ConfigError(f"strategy = {name!r}: must be {STRATEGIES}{meant}")
    try:
        found = imported("strategy", name)
    except OwnPartError as error:
        raise ConfigError(str(error)) from None
    if not (isinstance(found, type) and issubclass(found, FederatedStrategy)):
        raise ConfigError(f"strategy = {name!r}: must be a subclass of strategies.FederatedStrategy")
    return found
