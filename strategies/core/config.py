"""What every strategy can be told: its own frozen config, and the keywords of Flower's strategies."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, get_type_hints

import numpy as np

from strategies.clients import registered
from strategies.clients.client_metrics import MetricsAggregation
from strategies.clients.graph import FLOOR
from strategies.core.parameters import check_parameters, parameter, parameters_of
from strategies.flower import messages
from strategies.flower.frozen import Trained
from strategies.timing import availability, time_scenario
from strategies.timing.availability import ALWAYS
from strategies.updates import compressors
from strategies.updates.aggregation import MEAN, RULES, Rule, robust_rule
from strategies.updates.buffers import UNTRAINED
from strategies.updates.server_optimizer import OPTIMIZERS, ServerOptimizer, make_optimizer

TIME_BASED: Final = "time-based"
OBSERVED: Final = "observed"
IDENTICAL: Final = "identical"
LAST: Final = "last"
BEST: Final = "best"

# A metric and the bound that it is to reach; "" for none.
TARGET = r"^( *[\w.:-]+ *[<>]= *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? *)?$"


@dataclass(frozen=True)
class StrategyConfig:
    """What every strategy can be told.

    With ``eval_every = 0`` the model is evaluated after every round, or, without rounds, after as many contributions
    as there are clients.

    Parameters
    ----------
    client_weights : str
        p_i, a client's weight in the federated objective: by its examples, equal, or by how alike its data are to
        others'
    server_lr : float
        η_g, the server's learning rate; 0: 0.01 with adaptive optimizers, else 1 in rounds and, without rounds, what
        staleness allows
    server_optimizer : str
        what the server does with the aggregated update
    compression : str
        how clients compress their updates
    compression_down : str
        how the server compresses the model that it sends to train from
    message_floor : float
        least misalignment of two clients in the graph
    neighbours : int
        edges of each client to its most similar ones; 0: all
    time_scenario : str
        duration of tasks in virtual time, or what devices can do
    participation : str
        who takes part: full, on devices also tag:TAG,… or name:NAME,…, in rounds also uniform, md, poisson, turns,
        paired, flower or fixed:I,J,…
    availability : str
        when clients are available
    task_failure : float
        probability that a client drops a task
    safeguards : str
        bounds on what one device can do to the model; auto: in real time
    size_ratio_bound : float
        a client's examples count as at most this times the median; 0: none
    examples_bound : int
        a client's examples count as at most this; 0: none
    norm_ratio_bound : float
        largest norm of an update, over the median of the clients' last norms, less for clients above the median size;
        0: none
    update_norm_bound : float
        largest norm of an update, of the change of running statistics, and of a move of the model; 0: none
    registered_nodes : str
        the nodes and partitions of devices; a device that says otherwise doesn't take part. Empty: of two devices
        with one partition neither does
    seed : int
        fixes every random number of the run
    eval_every : int
        aggregations between two evaluations, beside those of the first and last model
    time_budget : float
        time on the run's clock after which it ends; 0: none
    keep : str
        the model that a run leaves: the last, or the best beside it
    best_of : str
        the metric of the best evaluation; min:METRIC or max:METRIC states which values are better, where the metric's
        name doesn't say it
    stop_at : str
        bound of a metric at which the run ends
    patience : int
        evaluations in a row without a better one after which the run ends; 0: none
    min_clients : int
        clients to wait for before the first task
    """

    client_weights: Literal["samples", "uniform", "adjacency"] = "samples"
    server_lr: float = parameter(0.0, or_zero=True, ge=1e-6, le=1e6)
    server_optimizer: str = parameter("sgd", choices=tuple(OPTIMIZERS))
    compression: str = parameter("none", pattern=compressors.PATTERN, words=compressors.ALLOWED)
    compression_down: str = parameter(compressors.NONE, choices=(compressors.NONE, *compressors.OF_MODELS))
    message_floor: float = parameter(FLOOR, gt=0, lt=1)
    neighbours: int = parameter(0, ge=0)
    time_scenario: str = parameter("F80", pattern=time_scenario.PATTERN, words=time_scenario.ALLOWED)
    participation: str = parameter("full")
    availability: str = parameter(ALWAYS, pattern=availability.PATTERN, words=availability.ALLOWED)
    task_failure: float = parameter(0.0, ge=0, lt=1)
    safeguards: Literal["auto", "on", "off"] = parameter("auto", topic="protection")
    size_ratio_bound: float = parameter(2.0, ge=0, topic="protection")
    examples_bound: int = parameter(0, ge=0, topic="protection")
    norm_ratio_bound: float = parameter(1.5, ge=0, topic="protection")
    update_norm_bound: float = parameter(0.0, ge=0, topic="protection")
    registered_nodes: str = parameter(
        "", pattern=registered.PATTERN, words=registered.ALLOWED, topic="protection"
    )
    seed: int = parameter(0, ge=0, topic="run")
    eval_every: int = parameter(0, ge=0, topic="run")
    time_budget: float = parameter(0.0, ge=0, unit="seconds", topic="run")
    keep: Literal["last", "best"] = parameter(LAST, topic="run")
    best_of: str = parameter("loss", pattern=r"^[\w.:-]+$", words="the name of a metric", topic="run")
    stop_at: str = parameter(
        "", pattern=TARGET, words="METRIC>=NUMBER or METRIC<=NUMBER, such as accuracy>=0.9", topic="run"
    )
    patience: int = parameter(0, ge=0, topic="run")
    min_clients: int = parameter(2, ge=0, topic="run")

    #: The names of a strategy's positional arguments.
    positional: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), np.generic):
                object.__setattr__(self, item.name, value.item())
        self.check_values()

    def check_values(self) -> None:
        """Raise ValueError if a value isn't what its field allows."""
        check_parameters(self)
        compressors.code_of(self.compression)  # raises if the pattern allows a number that the code doesn't

    @property
    def uses_secure_sums(self) -> bool:
        """Whether clients mask their updates, so that the server learns sums alone."""
        return False

    def rule(self) -> Rule | None:
        """Return the robust rule; None: the weighted mean."""
        return None

    def new_optimizer(self) -> ServerOptimizer:
        """Return a new server optimizer; a method with one of its own replaces this."""
        return make_optimizer(self.server_optimizer, self.server_lr or 1.0)

    @property
    def why_not_wrappable(self) -> str:
        """Reason why a wrapper can't see all uses of client updates with these settings; "" if it can."""
        return ""

    def updates_memory(self) -> float | None:
        """Return the GiB of last updates that may be in memory, where the graph of clients is made of them.

        None where the graph is made of directions that clients send.
        """
        return None

    @property
    def compares_evaluations(self) -> bool:
        """Whether the best evaluation counts: its model is kept, or the run ends without progress."""
        return self.keep == BEST or self.patience > 0


# The order of the positional arguments of Flower's FedAvg.
FLOWERS_ORDER = (
    "fraction_train",
    "fraction_evaluate",
    "min_train_nodes",
    "min_evaluate_nodes",
    "min_available_nodes",
    "weighted_by_key",
    "arrayrecord_key",
    "configrecord_key",
    "train_metrics_aggr_fn",
    "evaluate_metrics_aggr_fn",
)


@dataclass(frozen=True)
class RobustConfig(StrategyConfig):
    """Parameters of the strategies whose updates may be aggregated by a robust rule.

    Parameters
    ----------
    aggregation_rule : str
        how updates become one: the weighted mean, or a rule for faulty (Byzantine) clients
    faulty_clients : int
        f, faulty clients of an aggregation that the robust rule tolerates
    """

    aggregation_rule: str = parameter(MEAN, choices=tuple(RULES), topic="protection")
    faulty_clients: int = parameter(0, ge=0, topic="protection")

    def rule(self) -> Rule | None:
        """Return the robust rule, or None for the weighted mean; a method with one of its own replaces this."""
        return robust_rule(self.aggregation_rule, self.faulty_clients)


@dataclass(frozen=True)
class PrivateConfig(StrategyConfig):
    """What every strategy can be told that may add noise for central differential privacy.

    Parameters
    ----------
    dp : str
        differential privacy, with noise of the server (central) or each client (local)
    dp_clipping_norm : float
        S, the norm to which updates are clipped; 0: with central noise a quantile of the norms
    dp_noise_multiplier : float
        z, the noise's standard deviation over its sensitivity S max d_i
    """

    dp: Literal["none", "central", "local"] = parameter("none", topic="protection")
    dp_clipping_norm: float = parameter(0.0, ge=0, topic="protection")
    dp_noise_multiplier: float = parameter(1.0, ge=0, le=1e6, topic="protection")


@dataclass(frozen=True)
class SecureConfig(StrategyConfig):
    """Parameters of the strategies that need only sums of updates, so that clients may mask their updates.

    Parameters
    ----------
    secure_sums : bool
        mask updates, so that the server learns the sum of a round, or of a full buffer, alone
    secure_neighbours : int
        k, clients that each client masks with; 0: the fewest of which a third may go away
    secure_threshold : int
        t, neighbours that take a client's masks off the sum; 0: ⌊k/2⌋ + 1
    secure_clipping : float
        C, to which the values of a masked update times d_i / max d are cut
    secure_metrics : str
        training metrics that are masked and summed; no others leave a client
    """

    secure_sums: bool = parameter(False, topic="protection")
    secure_neighbours: int = parameter(0, ge=0, topic="protection")
    secure_threshold: int = parameter(0, ge=0, topic="protection")
    secure_clipping: float = parameter(1.0, ge=1e-6, le=1e6, topic="protection")
    secure_metrics: str = parameter(
        messages.TRAIN_LOSS,
        pattern=r"^([\w.:-]+(,[\w.:-]+)*)?$",
        words="METRIC,METRIC,… or nothing",
        topic="protection",
    )

    @property
    def uses_secure_sums(self) -> bool:
        """Whether ``secure_sums`` is set."""
        return self.secure_sums

    @property
    def summed_metrics(self) -> tuple[str, ...]:
        """The names of ``secure_metrics``."""
        return tuple(filter(None, self.secure_metrics.split(",")))


@dataclass(frozen=True)
class SynchronousConfig(PrivateConfig, RobustConfig, SecureConfig):
    """What every synchronous strategy can be told.

    Parameters
    ----------
    fraction_train : float
        share of the clients in a round; with poisson each one's probability
    stragglers : float
        share of participants that do only a part of their work
    drop_stragglers : bool
        leave stragglers out of the round
    round_deadline : float
        time on the run's clock after which a round closes; 0: none
    over_select : float
        o: 1 + o times as many clients are drawn for the same number of replies; with full participation all n are
        asked, and a round goes on with n / (1 + o) replies
    dp_mechanism : str
        noise of each round (gaussian), of sums over rounds without a draw (tree, DP-FTRL), or of the clients, in
        their masked updates (distributed)
    dp_restart : int
        rounds after which a new tree of noise begins; 0: never
    dp_clipping_quantile : float
        γ, the share of the updates that an adaptive S doesn't shorten
    """

    positional: ClassVar[tuple[str, ...]] = FLOWERS_ORDER

    fraction_train: float = parameter(1.0, gt=0, le=1)
    stragglers: float = parameter(0.0, ge=0, le=1)
    drop_stragglers: bool = False
    round_deadline: float = parameter(0.0, ge=0, unit="seconds")
    over_select: float = parameter(0.0, ge=0, le=100)
    dp_mechanism: Literal["gaussian", "tree", "distributed"] = parameter("gaussian", topic="protection")
    dp_restart: int = parameter(0, ge=0, topic="protection")
    dp_clipping_quantile: float = parameter(0.5, gt=0, lt=1, topic="protection")

    @property
    def closes_early(self) -> bool:
        """Whether a round may close before all replies are there."""
        return bool(self.round_deadline or self.over_select)

    @property
    def distributes_noise(self) -> bool:
        """Whether clients add the noise of central differential privacy, each a part of it."""
        return self.dp == "central" and self.dp_mechanism == "distributed"


@dataclass(frozen=True)
class AsyncConfigBase(StrategyConfig):
    """Parameters of every asynchronous strategy, including those whose paper says how contributions weigh.

    Where ``concurrency`` is above 0, task times don't tell how often a client contributes: time-based weights then
    follow from the observed periods.

    Parameters
    ----------
    concurrency : int
        M_c, clients at work at once, drawn among the idle; 0: all
    rate_bound : float
        how many times as often as the median of the others a device's contributions count at most; 0: no bound
    """

    concurrency: int = parameter(0, ge=0)
    rate_bound: float = parameter(4.0, ge=0, topic="protection")


@dataclass(frozen=True)
class AsynchronousConfig(AsyncConfigBase, RobustConfig):
    """Parameters of the asynchronous strategies whose weights of contributions are free to choose.

    Parameters
    ----------
    aggregation_weights : str
        d_i, the weight of a contribution: unbiased, by the law of task times where known (time-based) or as observed
        (observed), or equal (identical)
    arrival_weight_bound : float
        largest weight of a contribution in virtual time, where a round's sum to 1; 0: none
    """

    aggregation_weights: Literal["time-based", "observed", "identical"] = TIME_BASED
    arrival_weight_bound: float = parameter(2.0, ge=0, topic="protection")


@dataclass(frozen=True)
class PrivateAsyncConfig(PrivateConfig, AsynchronousConfig):
    """What an asynchronous strategy can be told in which a client counts once in an aggregation at most.

    Parameters
    ----------
    dp_max_contributions : int
        how often a client is asked at most; 0: none
    """

    dp_max_contributions: int = parameter(0, ge=0, topic="protection")


@dataclass(frozen=True)
class FlowerOptions:
    """Keywords of Flower's own strategies, with the same meaning here, and values that go with them.

    Parameters
    ----------
    fraction_train : float
        Share of the clients that train in a round, which is in the config of a synchronous strategy. Without rounds:
        share of the clients at work at once, in place of ``concurrency``.
    min_available_nodes : int
        Nodes that are waited for, each time for ``timeout`` seconds at most, where Flower waits without an end:
        before the first task, as ``min_clients``, and before every round. Without rounds, only before the first task.
    fraction_evaluate : float
        Share of the clients that evaluate the model; 0: none does.
    min_train_nodes, min_evaluate_nodes : int
        Clients that train in a round (without rounds: at once), and evaluate, at least, if so many are there.
    weighted_by_key : str
        The metric of replies that says how much a client counts: a positive number.
    arrayrecord_key, configrecord_key : str
        Names of the records of a message.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        Make one MetricRecord of the contents of the valid replies; by default a mean by the clients' weights. Without
        rounds, training's is the plain mean of all contributions since the last evaluation, and the function is given
        contents without their arrays; in a run that goes on, at first only what has come since.
    untrained : str, or sequence of str
        Patterns of the names of arrays that aren't trained, beside all that hold whole numbers: they are averaged,
        whatever the method does with the others.
    trained : str, or sequence of str, or callable, optional
        Patterns of the names of the arrays that are trained, or a function that returns True for such a name. Only
        these travel, and buffers whose name matches ``untrained``; each client is sent the others once, and keeps
        them by the mod ``cache_frozen_parameters``. By default all arrays are trained.
    describe : bool
        Whether clients are asked to describe themselves (``query.describe``), which gives them fixed indices and a
        seed that repeats the run. By default they are asked where the strategy needs it, or where their app is known
        to have the handler.
    """

    min_available_nodes: int = 0
    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    weighted_by_key: str = messages.NUM_EXAMPLES
    arrayrecord_key: str = messages.ARRAYS
    configrecord_key: str = messages.CONFIG
    train_metrics_aggr_fn: MetricsAggregation | None = None
    evaluate_metrics_aggr_fn: MetricsAggregation | None = None
    untrained: tuple[str, ...] = UNTRAINED
    trained: Trained | None = None
    describe: bool = False

    def __post_init__(self) -> None:
        for name in ("untrained", "trained"):
            patterns = getattr(self, name)
            if patterns is not None and not callable(patterns):
                as_tuple = (patterns,) if isinstance(patterns, str) else tuple(patterns)
                object.__setattr__(self, name, as_tuple)
        if not 0 <= self.fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate = {self.fraction_evaluate}: must be 0 to 1")
        if not 0 < self.fraction_train <= 1:
            raise ValueError(f"fraction_train = {self.fraction_train}: must be above 0, at most 1")
        for name in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")

    @property
    def keys(self) -> tuple[str, str]:
        """The names of a message's records of arrays and of fields."""
        return self.arrayrecord_key, self.configrecord_key


# Flower's name of a field that has another one here: what is waited for at first.
ALIASES = {"min_available_nodes": "min_clients"}


def configured(
    name: str, kind: type[StrategyConfig], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[StrategyConfig, FlowerOptions]:
    """Return a strategy's config with what its arguments change in it, and the keywords of Flower's strategies.

    Parameters
    ----------
    name : str
        The strategy's.
    kind : type
        Its class of configs.
    arguments : sequence
        A config, or values of the config's ``positional`` names.
    options : mapping
        ``config``, and fields of either, by name.

    Raises
    ------
    TypeError
        If there is no such keyword, or its value is of another type.
    ValueError
        If a value isn't what its field allows (``strategies.core.parameters``).
    """
    options = dict(options)
    if len(arguments) == 1 and (arguments[0] is None or isinstance(arguments[0], StrategyConfig)):
        options, arguments = {"config": arguments[0], **options}, ()
    config = options.pop("config", None)
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{name}(config = {config!r}): must be a {kind.__name__}")
    options |= _by_name(name, kind.positional, arguments, options)
    return _changed(name, kind, config or kind(), FlowerOptions(), options, draws=config is None)


def _by_name(
    name: str, positional: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return positional arguments by name; TypeError if they are too many, or one is among the options, too."""
    if len(arguments) > len(positional):
        allowed = ", ".join(positional) or "keywords, and a config"
        raise TypeError(f"{name}() was given {len(arguments)} positional arguments: allowed are {allowed}")
    given = dict(zip(positional, arguments, strict=False))
    if twice := [key for key in given if key in options]:
        raise TypeError(f"{name}() was given {twice[0]} twice")
    return given


def changed(
    name: str, config: StrategyConfig, flower: FlowerOptions, keyword: str, value: Any
) -> tuple[StrategyConfig, FlowerOptions]:
    """Return a strategy's config and keywords with another value of one keyword; raise what ``configured`` raises."""
    return _changed(name, type(config), config, flower, {keyword: value}, draws=True)


def _changed(
    name: str,
    kind: type[StrategyConfig],
    config: StrategyConfig,
    keywords: FlowerOptions,
    options: Mapping[str, Any],
    *,
    draws: bool,
) -> tuple[StrategyConfig, FlowerOptions]:
    """Return config and keywords with changes; ``draws``: fraction_train below 1 makes full participation a draw."""
    options = {
        key: value.item() if isinstance(value, np.generic) else value for key, value in options.items()
    }
    _check_options(name, kind, options)
    own, flower = _types(kind), _types(FlowerOptions)
    changes = {field: value for key, value in options.items() if (field := ALIASES.get(key, key)) in own}
    if changes.get("fraction_train", 1.0) != 1 and draws and config.participation == "full":
        changes.setdefault("participation", "flower")
    made = replace(config, **changes)
    made.check_values()  # a Config with a __post_init__ of its own may have left it out
    # As in Flower, nothing begins before so many are there.
    least = max(made.min_clients, *(options.get(key, 0) for key in ("min_train_nodes", "min_evaluate_nodes")))
    others = {key: value for key, value in options.items() if key in flower}
    return replace(made, min_clients=least), replace(keywords, **others)


def _check_options(name: str, kind: type[StrategyConfig], options: Mapping[str, Any]) -> None:
    """Refuse unknown keywords, and values of another type or that their fields don't allow."""
    declared, types = parameters_of(kind), _types(kind) | _types(FlowerOptions)
    for key, value in options.items():
        field = ALIASES.get(key, key)
        if field not in types:
            raise TypeError(_unknown(name, key, [*types, *ALIASES]))
        _check_type(name, key, value, types[field])
        if field in declared:
            replace(declared[field], name=key).check(value)


def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _unknown(name: str, key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(sorted(known))}"
    return f"{name}() has no keyword {key!r}: {hint}"


def _check_type(name: str, key: str, value: object, kind: Any) -> None:
    """Refuse a value that isn't of a simple type; others say themselves what is wrong with them."""
    if kind not in (bool, int, float, str):
        return
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{name}({key} = {value!r}): must be of type {kind.__name__}")
