"""Keys of the strategies: the method, what it weighs clients by, its own parameters, and time."""

from typing import Annotated, Literal

from fedapp.config.key import OWN, WITH_GRAPH, Setting, if_, key
from fedapp.config.values import (
    BelowOne,
    ConfigError,
    Count,
    Counting,
    Flag,
    Inside,
    Keys,
    Moderate,
    NonNegative,
    Positive,
    Share,
    Text,
    UnitInterval,
    UpToAHundred,
    UpToAMillion,
    ZeroOrModerate,
    choice,
    pattern,
)
from fedapp.own import OwnPartError, imported, is_own
from strategies import REGISTRY, FederatedStrategy
from strategies.methods.shared.staleness import ALLOWED as DISCOUNTS
from strategies.methods.shared.staleness import PATTERN as DISCOUNT_PATTERN
from strategies.timing.availability import ALLOWED as AVAILABILITIES
from strategies.timing.availability import PATTERN as AVAILABILITY
from strategies.timing.device_profile import is_profile
from strategies.timing.time_scenario import ALLOWED as TIME_SCENARIOS
from strategies.timing.time_scenario import PATTERN as TIME_SCENARIO
from strategies.updates.compressors import ALLOWED as CODES
from strategies.updates.compressors import PATTERN as CODE_PATTERN
from strategies.updates.server_optimizer import OPTIMIZERS

IN_VIRTUAL_TIME = if_("clock = virtual", lambda setting: setting.config.clock != "wall")

STRATEGIES = f"one of {', '.join(REGISTRY)}, or module:Class of your own"


def _weights_count(setting: Setting) -> bool:
    config, strategy = setting.config, setting.strategy
    if strategy.config.client_weights != config.client_weights:
        return False  # the strategy demands others
    evaluated = config.client_evaluation or config.record_divergence
    # A pair counts half each.
    return config.participation != "paired" or strategy.graph is not None or evaluated


def _optimizer_counts(setting: Setting) -> bool:
    return bool(setting.strategy.config.server_optimizer == setting.config.server_optimizer)


_EARLY = if_(
    "round-deadline or over-select > 0",
    lambda setting: bool(setting.config.round_deadline or setting.config.over_select),
)


def _can_straggle(setting: Setting) -> bool:
    """Tell whether there is work that some of may be missing."""
    config = setting.config
    alone = max(config.local_epochs, config.local_steps) == 1 and config.step_heterogeneity == "none"
    return config.drop_stragglers or not alone


class StrategyKeys(Keys):
    """What a strategy is told."""

    # Users may add to the registry: what is in it when a run starts counts.
    strategy: Annotated[str, pattern(STRATEGIES, r"^[^\x00]+$"), key("the method")]
    strategy_config: Annotated[
        Text,
        key(
            "keys of a strategy of your own in one text, such as half-life=2.0 tick=0.1: flwr run passes on no "
            "key that doesn't stand in pyproject.toml",
            if_("a strategy with keys of its own", lambda _: False),  # there each is in its own place by now
        ),
    ]
    client_weights: Annotated[
        Literal["samples", "uniform", "adjacency"],
        key(
            "importance of a client in the federated objective: by its samples, all alike, or by how alike its data "
            "are to the others'",
            if_("all but spectral, whose are adjacency; not where participation = paired", _weights_count),
        ),
    ]
    participation: Annotated[
        Text,
        key(
            "who takes part in a round (client sampling): full, uniform, md, paired, flower or fixed:I,J,…",
            OWN,
        ),
    ]
    fraction_train: Annotated[Share, key("share of the clients that uniform, md and flower draw", OWN)]
    stragglers: Annotated[
        UnitInterval,
        key(
            "share of a round's participants that get done only a part of their work, of E epochs 1 to E",
            OWN & if_("drop-stragglers, or more than one local epoch or step", _can_straggle),
        ),
    ]
    drop_stragglers: Annotated[
        Flag,
        key(
            "whether the round goes on without its stragglers",
            OWN & if_("stragglers > 0", lambda setting: setting.config.stragglers > 0),
        ),
    ]
    round_deadline: Annotated[
        NonNegative,
        key("seconds of the run's clock after which a round closes (docs/deadlines.md); 0: none", OWN),
    ]
    over_select: Annotated[
        UpToAHundred,
        key(
            "o: (1 + o) times as many clients are drawn, and a round closes with as many replies as without it",
            OWN,
        ),
    ]
    late: Annotated[
        Literal["drop", "next"],
        key("what comes after its round has closed is dropped, or counts in the next", OWN & _EARLY),
    ]
    server_lr: Annotated[
        ZeroOrModerate,
        key(
            "η_g, step size (learning rate) of the server's optimizer; 0: 0.01 with adagrad, adam, amsgrad (fadas) "
            "or yogi, else 1, but 1/C for async-fedavg, delay-adaptive, ringmaster and ace, which may diverge with 1"
        ),
    ]
    server_optimizer: Annotated[
        str,
        choice(OPTIMIZERS),
        key(
            "what the server does with the aggregated update (Reddi et al. 2021; amsgrad: Wang et al. 2024; "
            "fedexp, in rounds and of a sum: Jhunjhunwala et al. 2023)",
            if_("all; for fadas sgd stands for amsgrad", _optimizer_counts),
        ),
    ]
    compression: Annotated[
        str,
        pattern(CODES, CODE_PATTERN),
        key("how clients compress their updates (quantization, sparsification); what they are sent is whole"),
    ]
    proximal_mu: Annotated[
        NonNegative, key("α, the pull towards the model that a client was sent (Li et al. 2020)", OWN)
    ]
    perturbation_beta: Annotated[
        UnitInterval, key("β: the gradient is taken at β w + (1 − β) u, u the neighbours' average", OWN)
    ]
    feddyn_alpha: Annotated[
        Moderate,
        key("α of FedDyn's regularizer, and of its pull to the global model (Acar et al. 2021)", OWN),
    ]
    ditto_lambda: Annotated[
        ZeroOrModerate,
        key("λ, the pull of a client's own model towards the global one (Li et al. 2021)", OWN),
    ]
    fedamp_sigma: Annotated[
        Positive,
        key("σ, in squared distances of models: clients further apart hardly count for each other", OWN),
    ]
    fedamp_alpha: Annotated[
        UnitInterval,
        key(
            "how much a client takes of others' models, at most: the α_k of Huang et al. 2021 is this times σ / C",
            OWN,
        ),
    ]
    neighbour_memory: Annotated[
        NonNegative,
        key(
            "GiB that the clients' last models may take in memory; beyond, they go to a file",
            OWN & if_("perturbation-beta < 1", lambda setting: setting.config.perturbation_beta < 1),
        ),
    ]
    message_floor: Annotated[Inside, key("least misalignment of two clients in the graph", WITH_GRAPH)]
    neighbours: Annotated[
        Count, key("edges that the graph keeps to each client's most similar ones; 0: all", WITH_GRAPH)
    ]
    message_epsilon: Annotated[
        UpToAMillion,
        ZeroOrModerate,
        key("ε of the privacy of the direction that places a client in the graph; 0: none", WITH_GRAPH),
    ]
    message_delta: Annotated[
        Inside,
        key(
            "δ of that privacy",
            WITH_GRAPH & if_("message-epsilon > 0", lambda setting: setting.config.message_epsilon > 0),
        ),
    ]
    aggregation_weights: Annotated[
        Literal["time-based", "observed", "identical"],
        key(
            "weight of a contribution: unbiased whatever a client's speed, by what is known of its times or only by "
            "what is observed, or the same for all",
            OWN,
        ),
    ]
    fedfix_interval: Annotated[Positive, key("Δt, seconds between two aggregations", OWN)]
    concurrency: Annotated[
        Count, key("clients at work at once; whenever a place is free, one of the idle is drawn; 0: all", OWN)
    ]
    buffer_size: Annotated[Counting, key("m, contributions that make an aggregation", OWN)]
    staleness_discount: Annotated[
        str,
        pattern(DISCOUNTS, DISCOUNT_PATTERN),
        key(
            "s(δ), what work is worth that is δ aggregations old: 1, (δ + 1)^−A, or 1 up to B and beyond "
            "1/(A (δ − B) + 1)",
            OWN,
        ),
    ]
    mixing_alpha: Annotated[Share, key("α, share of an arriving model in the next global one", OWN)]
    delay_threshold: Annotated[
        Count, key("R: work that is so many aggregations old, or older, is thrown away; 0: none is", OWN)
    ]
    clock: Annotated[
        Literal["auto", "virtual", "wall"],
        key(
            "virtual: time follows from time-scenario; wall: the machine's; auto: wall on devices, else virtual"
        ),
    ]
    time_scenario: Annotated[
        str,
        pattern(TIME_SCENARIOS, TIME_SCENARIO),
        key(
            "how long the clients' tasks take in virtual time (Fraboni et al. 2023, section 5.1), or what devices "
            "can do: docs/fleet.md",
            if_(
                "clock = virtual, or step-heterogeneity = speed",
                lambda setting: (
                    setting.config.clock != "wall" or setting.config.step_heterogeneity == "speed"
                ),
            ),
        ),
    ]
    task_work: Annotated[
        Literal["examples", "flop"],
        key(
            "what the speed of a device profile counts in a second: examples, or floating-point operations",
            if_(
                "clock = virtual and time-scenario = profile:…, lognormal:…, zipf:… or pareto:…",
                lambda setting: setting.config.clock != "wall" and is_profile(setting.config.time_scenario),
            ),
        ),
    ]
    availability: Annotated[
        str, pattern(AVAILABILITIES, AVAILABILITY), key("who is there when, in virtual time", IN_VIRTUAL_TIME)
    ]
    task_failure: Annotated[
        BelowOne,
        key("probability that a client drops a task while it works, in virtual time", IN_VIRTUAL_TIME),
    ]


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
        raise ConfigError(f"strategy = {name!r}: must be {STRATEGIES}")
    try:
        found = imported("strategy", name)
    except OwnPartError as error:
        raise ConfigError(str(error)) from None
    if not (isinstance(found, type) and issubclass(found, FederatedStrategy)):
        raise ConfigError(f"strategy = {name!r}: must be a subclass of strategies.FederatedStrategy")
    return found
