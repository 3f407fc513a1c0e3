"""What every strategy can be told: its own frozen config, and the keywords of Flower's strategies."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_type_hints

from strategies.clients.graph import FLOOR
from strategies.clients.metrics import MetricsAggregation
from strategies.core.parameters import check_parameters, parameter
from strategies.flower import messages
from strategies.timing.availability import ALWAYS
from strategies.updates.buffers import UNTRAINED
from strategies.updates.compressors import code_of

TIME_BASED, OBSERVED, IDENTICAL = "time-based", "observed", "identical"
AGGREGATION_WEIGHTS = (TIME_BASED, OBSERVED, IDENTICAL)


@dataclass(frozen=True)
class StrategyConfig:
    """What every strategy can be told.

    Parameters
    ----------
    safeguards : str
        Bounds on what one device can do (``strategies.updates.safeguards``), of which 0 leaves one out. ``auto``: on
        in real time; ``on``; ``off``.
    size_ratio_bound, examples_bound : float, int
        n_i counts as at most so many times the median of all n_j that are told, and as at most so many.
    norm_ratio_bound : float
        ‖Δ_i‖ is at most so many times the median of the clients' last norms, unless ``update_norm_bound`` is given or
        ``dp`` is central.
    client_weights : str
        Importances p_i: ``samples``, ``uniform``, or ``adjacency``: how alike a client's data are to the others'.
    seed : int
        Fixes the draws of participants and of task times.
    eval_every : int
        Aggregations between two evaluations; the first and the last model are always evaluated. 0: a round, or as
        many contributions as there are clients.
    time_budget : float
        Stop before the clock passes this time (seconds); 0: no limit.
    time_scenario : str
        In virtual time, how long a client's task takes: see ``strategies.timing.time_scenario.TimeScenario``.
    availability, task_failure : str, float
        In virtual time, who is there when, and the probability that a client drops a task while it works: see
        ``strategies.timing.availability``.
    min_clients : int
        Clients to wait for before the first task.
    update_norm_bound : float
        S: a longer update Δ_i = w_i − w̄ is shortened to ‖Δ_i‖ = S and counted, and none moves the model further
        than S; 0: no bound.
    server_optimizer, server_lr : str, float
        How the global model moves by Σ d_i Δ_i, and η_g: see ``strategies.updates.server_optimizer``. 0: the
        method's own,
        which is 1; 1/C for asynchronous FedAvg, delay-adaptive SGD, Ringmaster and ACE; 0.01 where the optimizer is
        adaptive (Adagrad, Adam, AMSGrad, Yogi).
    compression : str
        How clients that can are to compress their updates: see ``strategies.updates.compressors``.
    message_floor, neighbours : float, int
        Of the graph behind ``adjacency``: see ``strategies.clients.client_graph.ClientGraph``.
    """

    safeguards: str = "auto"
    size_ratio_bound: float = parameter(5.0, ge=0)
    examples_bound: int = parameter(0, ge=0)
    norm_ratio_bound: float = parameter(5.0, ge=0)
    client_weights: str = "samples"
    seed: int = 0
    eval_every: int = 0
    time_budget: float = parameter(0.0, ge=0)
    time_scenario: str = "F80"
    availability: str = ALWAYS
    task_failure: float = 0.0
    min_clients: int = parameter(2, ge=0)
    update_norm_bound: float = parameter(0.0, ge=0)
    server_optimizer: str = "sgd"
    server_lr: float = 0.0
    compression: str = "none"
    message_floor: float = parameter(FLOOR, gt=0, lt=1)
    neighbours: int = parameter(0, ge=0)


@dataclass(frozen=True)
class SynchronousConfig(StrategyConfig):
    """What every synchronous strategy can be told.

    Parameters
    ----------
    participation, fraction_train : str, float
        Who takes part in a round: see ``strategies.clients.weights.Participation``.
    stragglers, drop_stragglers : float, bool
        Share of a round's participants that get only a part of their work done, and whether the round goes without
        them: see ``strategies.rounds.stragglers``.
    aggregation_rule, faulty_clients : str, int
        How updates are put together: Σ d_i Δ_i (``mean``), or a robust rule that bears so many clients which send
        anything: see ``strategies.updates.aggregation``.
    dp, dp_clipping_norm, dp_noise_multiplier : str, float, float
        ``central`` differential privacy: no update counts with a norm above S, and the sum gets Gaussian noise of
        deviation z S max d_i, for a client's update or zero in its place. ``local`` is the clients' own affair.
    round_deadline : float
        Seconds of the run's clock after which a round closes: see ``strategies.rounds.deadline``. 0: none.
    over_select : float
        o: where L clients are needed, ⌈(1 + o) L⌉ are asked, and the first L replies count. 0: L are asked.
    late : str
        What becomes of work that comes after its round has closed: ``drop`` it, or let it count in the ``next`` round
        that closes after it has come.
    """

    participation: str = "full"
    fraction_train: float = 1.0
    stragglers: float = 0.0
    drop_stragglers: bool = False
    aggregation_rule: str = "mean"
    faulty_clients: int = parameter(0, ge=0)
    dp: Literal["none", "central", "local"] = "none"
    dp_clipping_norm: float = parameter(1.0, gt=0)
    dp_noise_multiplier: float = parameter(1.0, ge=0)
    round_deadline: float = parameter(0.0, ge=0)
    over_select: float = parameter(0.0, ge=0, le=100)
    late: Literal["drop", "next"] = "drop"

    def refuse_protection(self, sent: str) -> None:
        """Raise ValueError if the global model is protected, of a method in which ``sent`` would go past it."""
        if self.dp == "central":
            said = f"dp = {self.dp!r}"
        elif self.aggregation_rule != "mean":
            said = f"aggregation_rule = {self.aggregation_rule!r}"
        else:
            return
        raise ValueError(
            f"{said}: {sent} as they came, past what protects the global one; allowed are mean, and dp none or local"
        )


@dataclass(frozen=True)
class EventsConfig(StrategyConfig):
    """What every asynchronous strategy can be told, also one whose paper says how contributions weigh.

    Parameters
    ----------
    concurrency : int
        M_c, clients at work at once: when one is free, whoever is idle is drawn for its place; 0: all of them.
        Task times then don't tell how often a client contributes, so that time-based weights are by what is observed.
    """

    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 0:
            raise ValueError(f"concurrency = {self.concurrency}: must be 0 (all) or more")


@dataclass(frozen=True)
class AsynchronousConfig(EventsConfig):
    """What an asynchronous strategy can be told that weighs contributions as one likes.

    Parameters
    ----------
    aggregation_weights : str
        ``time-based`` (unbiased): by the law of task times and availability where that is known, as in virtual time,
        else by what is observed. ``observed``: by that in any case, as a server has to that knows no law.
        ``identical``.
    arrival_weight_bound : float
        A safeguard: d_i is at most this, where the d_i of a synchronous round sum to 1; 0: no bound.
    """

    aggregation_weights: str = TIME_BASED
    arrival_weight_bound: float = parameter(2.0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation_weights not in AGGREGATION_WEIGHTS:
            raise ValueError(
                f"aggregation_weights = {self.aggregation_weights!r}: allowed are {', '.join(AGGREGATION_WEIGHTS)}"
            )


@dataclass(frozen=True)
class FlowerOptions:
    """Keywords of Flower's own strategies that mean here what they mean there, and what goes with them.

    One more is in a strategy's config: ``fraction_train``.

    Parameters
    ----------
    min_available_nodes : int
        Nodes that are waited for, each time for ``timeout`` seconds at most, where Flower waits without an end:
        before the first task, as ``min_clients``, and before every round. Without rounds, only before the first task.
    fraction_evaluate : float
        Share of the clients that evaluate the model; 0: none does.
    min_train_nodes, min_evaluate_nodes : int
        Clients that train in a round, and evaluate, at least, if so many are there.
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
    """

    min_available_nodes: int = 0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    weighted_by_key: str = messages.NUM_EXAMPLES
    arrayrecord_key: str = messages.ARRAYS
    configrecord_key: str = messages.CONFIG
    train_metrics_aggr_fn: MetricsAggregation | None = None
    evaluate_metrics_aggr_fn: MetricsAggregation | None = None
    untrained: tuple[str, ...] = UNTRAINED

    def __post_init__(self) -> None:
        if not 0 <= self.fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate = {self.fraction_evaluate}: must be 0 to 1")
        for name in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or more")

    @property
    def keys(self) -> tuple[str, str]:
        """The names of a message's records of arrays and of fields."""
        return self.arrayrecord_key, self.configrecord_key


# Flower's name of a field that has another one here: what is waited for at first.
ALIASES = {"min_available_nodes": "min_clients"}

# Keywords of rounds, which mean nothing where there are none.
OF_ROUNDS = ("fraction_train", "min_train_nodes")


def configured(
    name: str, kind: type[StrategyConfig], config: StrategyConfig | None, options: Mapping[str, Any]
) -> tuple[StrategyConfig, FlowerOptions]:
    """Return a strategy's config with what keywords change in it, and the other keywords.

    Parameters
    ----------
    name : str
        The strategy's.
    kind : type
        Its class of configs.
    config : StrategyConfig, optional
        By default ``kind()``.
    options : mapping
        Fields of either, by name.

    Raises
    ------
    TypeError
        If there is no such keyword, or its value is of another type.
    ValueError
        If a value isn't what its field allows (``strategies.core.parameters``).
    """
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{name}(config = {config!r}): must be a {kind.__name__}")
    given = {ALIASES.get(key, key): value for key, value in options.items()}
    said = {ALIASES[key]: key for key in options if key in ALIASES}
    own, flower = _types(kind), _types(FlowerOptions)
    for key, value in given.items():
        if key in OF_ROUNDS and "fraction_train" not in own:
            raise TypeError(
                f"{name}() has no keyword {key!r}: it has no rounds; `concurrency` says how many clients work at once"
            )
        if key not in own | flower:
            raise TypeError(_unknown(name, key, [*own, *flower, *ALIASES]))
        _check_type(name, said.get(key, key), value, (own | flower)[key])
    changes = {key: value for key, value in given.items() if key in own}
    if changes.get("fraction_train", 1.0) != 1 and config is None:
        changes.setdefault("participation", "flower")
    made = replace(config or kind(), **changes)
    check_parameters(made, said)
    code_of(made.compression)  # raises if there is none of this name
    if "min_train_nodes" in given and (scheme := getattr(made, "participation", "full")) not in (
        "full",
        "flower",
    ):
        raise ValueError(
            f"min_train_nodes = {given['min_train_nodes']}: goes with participation full or flower, not {scheme!r}"
        )
    # As in Flower, nothing begins before so many are there.
    least = max(made.min_clients, *(given.get(key, 0) for key in ("min_train_nodes", "min_evaluate_nodes")))
    others = {key: value for key, value in options.items() if key in flower}
    if "untrained" in others:
        patterns = others["untrained"]
        others["untrained"] = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return replace(made, min_clients=least), FlowerOptions(**others)


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
