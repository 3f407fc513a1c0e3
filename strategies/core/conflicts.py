"""Settings that exclude each other: one table, from which the checks, the errors and the documentation follow.

``CONFLICTS`` lists every combination of settings that a strategy refuses, if the settings and the method's
capabilities tell. An entry names the keys and for each key the values that don't go together; "strategy" stands for
the method. A strategy is checked when it is made and when one of its attributes is set. The first entry that holds
raises a ``ConflictError``.

What also depends on the number of clients, their data or the engine is checked where these are known.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from strategies.clients.registered import addresses
from strategies.core.capabilities import Capabilities
from strategies.core.config import FlowerOptions, RobustConfig, SecureConfig, StrategyConfig
from strategies.timing.availability import ALWAYS
from strategies.updates.aggregation import MEAN
from strategies.updates.compressors import NONE
from strategies.updates.server_optimizer import FEDEXP, OPTIMIZERS

STRATEGY = "strategy"  # the key that stands for the method

# Participation schemes that draw a share of the clients.
BY_SHARE = ("uniform", "md", "poisson", "turns", "flower")
# Participation schemes that say beforehand which client takes part in which round.
IN_ORDER = ("full", "turns", "fixed")

_ROUNDING = 1e-6  # largest difference of 1 / fraction_train from a whole number


# ---- The record of a conflict ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """The values of a key that a conflict is about.

    Attributes
    ----------
    words : str
        The values in words that follow the key, such as ``> 0``; of "strategy" the methods.
    hold : callable
        Returns True for such a value. Of "strategy" it is given a ``Method``.
    """

    words: str
    hold: Callable[[Any], bool]


@dataclass(frozen=True)
class Conflict:
    """Values of two or more keys that exclude each other.

    Attributes
    ----------
    values : mapping of str to Values
        The values that don't go together, by key.
    reason : str
        Why they don't.
    allowed : str
        What is allowed instead, with its key.
    when : callable, optional
        Given the values of all keys in order, returns True if they don't go together; by default they never do.
    """

    values: Mapping[str, Values]
    reason: str
    allowed: str
    when: Callable[..., bool] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that exclude each other."""
        return tuple(self.values)

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Return True if every key has one of the values; a key of value None has none."""
        found = [value_of(key) for key in self.keys]
        each = zip(self.values.values(), found, strict=True)
        if not all(value is not None and values.hold(value) for values, value in each):
            return False
        return self.when is None or self.when(*found)

    def sentence(self, shown: Callable[[str], str]) -> str:
        """Return the error in one line; ``shown`` returns a key with its value, such as ``dp = 'local'``."""
        first, *others = map(shown, self.keys)
        return f"{first} with {' and '.join(others)}: {self.reason}; allowed is {self.allowed}"


class ConflictError(ValueError):
    """A strategy was given settings that exclude each other.

    Attributes
    ----------
    keys : tuple of str
        The keys that exclude each other, "strategy" for the method.
    allowed : str
        What is allowed instead.
    """

    def __init__(self, text: str, keys: tuple[str, ...] = (), allowed: str = "") -> None:
        super().__init__(text)
        self.keys, self.allowed = keys, allowed


@dataclass(frozen=True)
class Method:
    """A method, as conflicts judge it.

    Attributes
    ----------
    name : str
        The name in errors.
    able : Capabilities
        What it needs of its loop.
    keys : frozenset of str
        The fields of its config.
    """

    name: str
    able: Capabilities
    keys: frozenset[str]


class Chosen(NamedTuple):
    """The robust rule or server optimizer of a strategy, as conflicts judge it.

    Attributes
    ----------
    name : str
        The value of ``aggregation_rule`` or ``server_optimizer``.
    made : Rule or ServerOptimizer, optional
        What the config makes of it, which a class of configs may replace; None for the weighted mean.
    """

    name: str
    made: Any


def first_conflict(conflicts: Iterable[Conflict], value_of: Callable[[str], Any]) -> Conflict | None:
    """Return the first conflict that holds for the values of keys; None if there is none."""
    return next((conflict for conflict in conflicts if conflict.holds(value_of)), None)


# ---- Values, by which a conflict says what it is about -----------------------------------------------------------


def one_of(*names: object) -> Values:
    """Return the values that are among these."""
    return Values(f"= {' or '.join(map(str, names))}", lambda value: value in names)


def other_than(name: object) -> Values:
    """Return all values but this."""
    return Values(f"other than {name}", lambda value: value != name)


def scheme_of(participation: str) -> str:
    """Return the name of a participation scheme; devices by tag or name all take part, as with ``full``."""
    return "full" if addresses(participation) else participation.partition(":")[0]


def scheme(*names: str) -> Values:
    """Return the participation schemes of these names."""
    return Values(f"= {' or '.join(names)}", lambda value: scheme_of(value) in names)


def other_scheme(*names: str) -> Values:
    """Return all participation schemes but those of these names."""
    return Values(f"other than {', '.join(names)}", lambda value: scheme_of(value) not in names)


def methods(words: str, hold: Callable[[Capabilities], bool]) -> Values:
    """Return the methods with such capabilities."""
    return Values(words, lambda method: hold(method.able))


ABOVE_0 = Values("> 0", lambda value: value > 0)
ZERO = Values("= 0", lambda value: value == 0)
BELOW_1 = Values("< 1", lambda value: value < 1)
SET = Values("= true", bool)
UNSET = Values("= false", lambda value: not value)
EMPTY = Values('= ""', lambda value: value == "")
GIVEN = Values("of any value", lambda value: True)

A_RULE = Values("other than mean", lambda rule: rule.made is not None)
AN_EQUAL_RULE = Values("other than mean", lambda rule: rule.made is not None and rule.made.equal)
A_NAMED_RULE = Values("other than mean", lambda rule: rule.name != MEAN)
BY_LENGTHS = Values(f"= {FEDEXP}", lambda optimizer: optimizer.made.reads_squares)

WITH_ROUNDS = methods("strategies with rounds", lambda able: able.has_rounds)
WITHOUT_ROUNDS = methods("strategies without rounds", lambda able: not able.has_rounds)
BY_ROUNDS = (WITH_ROUNDS, WITHOUT_ROUNDS)
CHOOSING = methods(
    "strategies that choose or ask clients by themselves (select, configure_train, aggregate_train)",
    lambda able: able.chooses_clients or bool(able.round_hooks),
)
WITH_OWN_RULE = methods(
    "FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan (own_rule)", lambda able: able.own_rule
)
WITH_OWN_OPTIMIZER = methods(
    "FedAdagrad, FedAdam, FedYogi, FedAvgM (own_optimizer)", lambda able: able.own_optimizer
)
PUTTING_TOGETHER = methods(
    "strategies that put updates together by themselves (weigh, aggregate)",
    lambda able: able.needs_all_updates,
)
SENDING_MODELS = methods("strategies that send clients models of others", lambda able: able.leaks_models)
CENTRAL, TREE, DISTRIBUTED = one_of("central"), one_of("tree"), one_of("distributed")


def _reads_single_updates(able: Capabilities) -> bool:
    return able.reads_updates or able.own_start or (not able.has_rounds and able.trains_while_waiting)


_OTHER_OPTIMIZERS = f"server_optimizer = {', '.join(name for name in OPTIMIZERS if name != FEDEXP)}"
_SUMS_ALONE = "a method that needs sums alone, such as fedavg, fedprox, fednova, or fedbuff"

CONFLICTS: tuple[Conflict, ...] = (
    # ---- Who takes part ----
    Conflict(
        {"participation": other_scheme("full"), STRATEGY: WITHOUT_ROUNDS},
        "without rounds every client works",
        "participation = full, and on devices tag:TAG,… or name:NAME,…",
    ),
    Conflict(
        {"participation": Values("= tag:… or name:…", addresses), "registered_nodes": EMPTY},
        "the participation addresses registered devices, and there are none",
        "a registered_nodes that names them, or participation = full",
    ),
    Conflict(
        {"fraction_train": BELOW_1, "participation": other_scheme(*BY_SHARE), STRATEGY: WITH_ROUNDS},
        "the scheme draws no share of the clients",
        f"fraction_train = 1, or participation = {', '.join(BY_SHARE)}",
    ),
    Conflict(
        {
            "fraction_train": Values("not 1/B with a whole number B", lambda share: not _is_one_over(share)),
            "participation": scheme("turns"),
        },
        "each client has one turn in a whole number of rounds, B",
        "fraction_train = 1/B, such as 0.05",
    ),
    Conflict(
        {"fraction_train": BELOW_1, "concurrency": ABOVE_0},
        "each says how many clients work at once",
        "fraction_train = 1, or concurrency = 0",
    ),
    Conflict(
        {
            "min_train_nodes": other_than(FlowerOptions.min_train_nodes),
            "participation": other_scheme("full", "flower"),
        },
        "the scheme alone says how many clients train",
        "participation = full, flower",
    ),
    Conflict(
        {"participation": scheme("turns", "paired"), "availability": other_than(ALWAYS)},
        "the scheme says which client takes part in which round, and a client that comes and goes can't",
        "participation = full, uniform, md, flower, fixed:…, or availability = always",
    ),
    Conflict(
        {"participation": scheme("turns", "paired"), "task_failure": ABOVE_0},
        "the scheme says which client takes part in which round, and a client that drops its task can't",
        "participation = full, uniform, md, flower, fixed:…, or task_failure = 0",
    ),
    # ---- When a round closes ----
    Conflict(
        {"stragglers": one_of(1), "drop_stragglers": SET},
        "no work would ever count",
        "stragglers < 1, or drop_stragglers = false",
    ),
    *(
        Conflict(
            {"stragglers": ABOVE_0, closing: ABOVE_0},
            "each says whose work isn't done when a round closes",
            f"stragglers = 0, or {closing} = 0",
        )
        for closing in ("round_deadline", "over_select")
    ),
    Conflict(
        {"round_deadline": ABOVE_0, "participation": scheme("turns", "paired")},
        "the scheme says which client takes part in which round, and a client that is late can be at work still",
        "round_deadline = 0, or participation = full, uniform, md, flower, fixed:…",
    ),
    Conflict(
        {"over_select": ABOVE_0, "participation": other_scheme("full", "uniform", "md", "flower")},
        "the scheme draws no number of clients that could be larger",
        "over_select = 0, or participation = full, uniform, md, flower",
    ),
    Conflict(
        {
            "over_select": ABOVE_0,
            STRATEGY: methods(
                "strategies that choose clients by themselves (select)", lambda able: able.chooses_clients
            ),
        },
        "the method chooses clients by itself (select)",
        "over_select = 0",
    ),
    # ---- Robust rules ----
    Conflict(
        {"aggregation_rule": A_NAMED_RULE, STRATEGY: WITH_OWN_RULE},
        "the method is a robust rule itself",
        "aggregation_rule = mean",
    ),
    Conflict(
        {"faulty_clients": ABOVE_0, STRATEGY: WITH_OWN_RULE},
        "the method is a robust rule itself, with keywords of its own",
        "faulty_clients = 0",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, STRATEGY: SENDING_MODELS},
        "clients receive unprotected models of other clients",
        "aggregation_rule = mean",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, STRATEGY: PUTTING_TOGETHER},
        "the method puts updates together by itself (weigh, aggregate)",
        "aggregation_rule = mean",
    ),
    Conflict(
        {
            "aggregation_rule": A_RULE,
            STRATEGY: methods(
                "strategies whose contributions never count as equals", lambda able: able.unequal_weights
            ),
        },
        "a robust rule takes contributions as equals, and the method weighs them by time",
        "aggregation_rule = mean",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, "dp": CENTRAL},
        "the noise of dp = central is that of a mean",
        "aggregation_rule = mean, or dp = none, local",
    ),
    Conflict(
        {"aggregation_rule": AN_EQUAL_RULE, "client_weights": other_than("uniform")},
        "a robust rule takes clients as equals",
        "client_weights = uniform, or aggregation_rule = mean",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, "participation": scheme("md", "paired")},
        "a robust rule takes clients as equals",
        "participation = full, uniform, turns, fixed:…",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, "participation": scheme("poisson")},
        "a robust rule takes a number of clients that is known",
        "participation = full, uniform, turns, fixed:…",
    ),
    Conflict(
        {
            "aggregation_rule": A_RULE,
            "aggregation_weights": other_than("identical"),
            STRATEGY: WITHOUT_ROUNDS,
        },
        "a robust rule takes contributions as equals",
        "aggregation_weights = identical, or aggregation_rule = mean",
    ),
    Conflict(
        {"aggregation_rule": A_RULE, "staleness_discount": other_than("constant")},
        "a robust rule takes contributions as equals",
        "staleness_discount = constant, or aggregation_rule = mean",
    ),
    Conflict(
        {
            "aggregation_rule": A_RULE,
            STRATEGY: Values(
                "strategies without rounds whose code discounts stale contributions (discount)",
                lambda method: (
                    not method.able.has_rounds
                    and method.able.discounts_staleness
                    and "staleness_discount" not in method.keys
                ),
            ),
        },
        "a robust rule takes contributions as equals, and the method weighs them by their staleness",
        "aggregation_rule = mean",
    ),
    # ---- Differential privacy with noise of the server ----
    Conflict(
        {"dp": CENTRAL, STRATEGY: SENDING_MODELS},
        "clients receive unprotected models of other clients",
        "dp = none, local",
    ),
    Conflict(
        {
            "dp": CENTRAL,
            STRATEGY: methods(
                "strategies with rounds that put updates together by themselves (weigh, aggregate)",
                lambda able: able.has_rounds and able.needs_all_updates,
            ),
        },
        "the method puts updates together by itself (weigh, aggregate)",
        "dp = none, local",
    ),
    Conflict(
        {
            "dp": CENTRAL,
            STRATEGY: methods(
                "strategies without rounds that put updates together by themselves, or let clients work on while "
                "theirs wait (aggregate, trains_while_waiting)",
                lambda able: not able.has_rounds and (able.aggregates or able.trains_while_waiting),
            ),
        },
        "the method puts updates together by itself, or lets clients work on while theirs wait (aggregate, "
        "trains_while_waiting)",
        "dp = none, local",
    ),
    Conflict(
        {"dp": CENTRAL, "client_weights": other_than("uniform")},
        "the noise takes clients as equals",
        "client_weights = uniform, or dp = none, local",
    ),
    Conflict(
        {"dp": CENTRAL, "participation": scheme("md", "paired")},
        "the noise takes clients as equals",
        "participation = full, uniform, poisson, turns, fixed:…",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_clipping_norm": ZERO, STRATEGY: WITHOUT_ROUNDS},
        "a norm adapts from round to round alone",
        "dp_clipping_norm > 0",
    ),
    Conflict(
        {"dp": CENTRAL, "participation": scheme("poisson"), STRATEGY: CHOOSING},
        "the account is of a coin for each client, and the method chooses or asks clients by itself",
        "participation = full, uniform, fixed:…",
    ),
    Conflict(
        {"dp": CENTRAL, "participation": scheme("poisson"), "round_deadline": ABOVE_0},
        "each client counts by its own coin alone, whoever is late",
        "round_deadline = 0",
    ),
    # Which participants are stragglers, and how much the others do, depends on who else is drawn.
    Conflict(
        {"dp": CENTRAL, "participation": scheme("poisson"), "stragglers": ABOVE_0},
        "each client counts by its own coin alone, whoever is late",
        "stragglers = 0",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": TREE, "participation": other_scheme(*IN_ORDER)},
        "the account of tree noise is of rounds in an order that is known, without a draw",
        "participation = full, turns, fixed:…, or dp_mechanism = gaussian",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": TREE, STRATEGY: CHOOSING},
        "the account of tree noise is of rounds in an order that is known, and the method chooses or asks clients by "
        "itself",
        "dp_mechanism = gaussian",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": TREE, "dp_clipping_norm": ZERO},
        "tree noise is of sums over many rounds, which have one norm",
        "dp_clipping_norm > 0",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": TREE, "round_deadline": ABOVE_0},
        "tree noise counts each client in the round that asks it",
        "round_deadline = 0",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": DISTRIBUTED, "secure_sums": UNSET},
        "the noise of one client is a part of a sum's, and hides no update alone",
        "secure_sums = true",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": DISTRIBUTED, "dp_clipping_norm": ZERO},
        "the count by which a norm adapts would have no noise",
        "dp_clipping_norm > 0",
    ),
    Conflict(
        {"dp": CENTRAL, "dp_mechanism": DISTRIBUTED, "dp_noise_multiplier": ZERO},
        "clients would add no noise",
        "dp_noise_multiplier > 0",
    ),
    # ---- Server optimizers ----
    Conflict(
        {
            "server_optimizer": Values("other than sgd", lambda optimizer: optimizer.name != "sgd"),
            STRATEGY: WITH_OWN_OPTIMIZER,
        },
        "the method has its own server optimizer",
        "server_optimizer = sgd",
    ),
    Conflict(
        {"server_lr": ABOVE_0, STRATEGY: WITH_OWN_OPTIMIZER},
        "the method has its own keyword of the server's learning rate, eta or server_learning_rate",
        "server_lr = 0",
    ),
    Conflict(
        {"server_optimizer": BY_LENGTHS, "aggregation_rule": A_RULE},
        "the step size is by the lengths of the updates and of their sum, and a robust rule has no sum",
        f"{_OTHER_OPTIMIZERS}, or aggregation_rule = mean",
    ),
    Conflict(
        {"server_optimizer": BY_LENGTHS, "dp": CENTRAL},
        "the step size is by the lengths of the updates, which would tell of the data",
        _OTHER_OPTIMIZERS,
    ),
    Conflict(
        {
            "server_optimizer": BY_LENGTHS,
            STRATEGY: methods(
                "strategies whose updates aren't those of one round, summed by their weights",
                lambda able: not (able.has_rounds and able.steps_by_plain_sum),
            ),
        },
        "the step size is by the lengths of the updates and of their sum in one round, which the method doesn't have",
        _OTHER_OPTIMIZERS,
    ),
    # ---- Secure sums ----
    Conflict(
        {
            "secure_sums": SET,
            STRATEGY: methods(
                "strategies that keep a vector of each client on the server",
                lambda able: not able.aggregates_on_arrival,
            ),
        },
        "the method keeps a vector of each client on the server, which follows from the client's own update",
        _SUMS_ALONE,
    ),
    Conflict(
        {"secure_sums": SET, STRATEGY: methods("strategies that read single updates", _reads_single_updates)},
        "the method reads single updates",
        _SUMS_ALONE,
    ),
    Conflict(
        {"secure_sums": SET, "aggregation_rule": A_RULE},
        "a robust rule compares single updates",
        "aggregation_rule = mean, or secure_sums = false",
    ),
    *(
        Conflict(
            {"secure_sums": SET, closing: ABOVE_0},
            "replies that are late are left out one by one",
            f"{closing} = 0",
        )
        for closing in ("round_deadline", "over_select")
    ),
    Conflict(
        {"secure_sums": SET, "server_optimizer": BY_LENGTHS},
        "the step size is by the lengths of single updates",
        _OTHER_OPTIMIZERS,
    ),
    Conflict(
        {"secure_sums": SET, "compression": other_than(NONE)},
        "compressed updates can't be masked",
        "compression = none",
    ),
    Conflict(
        {"secure_sums": SET, "update_norm_bound": ABOVE_0},
        "nobody sees how long a single update is",
        "update_norm_bound = 0",
    ),
    Conflict(
        {"secure_sums": SET, "safeguards": one_of("on"), "norm_ratio_bound": ABOVE_0},
        "nobody sees how long a single update is",
        "norm_ratio_bound = 0, or safeguards = auto, off",
    ),
    Conflict(
        {"secure_sums": SET, "train_metrics_aggr_fn": GIVEN},
        "the function reads the metrics of single clients",
        "train_metrics_aggr_fn = None",
    ),
    # ---- Keys of one method ----
    Conflict(
        {"aggregation_weights": one_of("identical"), "fedfix_interval": GIVEN},
        "FedFix weighs contributions by time",
        "aggregation_weights = time-based, observed",
    ),
    Conflict(
        {"min_local_steps": Values("> max_local_steps", lambda steps: True), "max_local_steps": GIVEN},
        "clients have min_local_steps at least and max_local_steps at most",
        "min_local_steps <= max_local_steps",
        when=lambda least, most: least > most,
    ),
)


def _is_one_over(share: float) -> bool:
    return abs(1 / share - round(1 / share)) <= _ROUNDING


# ---- The check of a strategy -------------------------------------------------------------------------------------


def check_conflicts(
    name: str,
    capabilities: Capabilities,
    config: StrategyConfig,
    flower: FlowerOptions | None = None,
    *,
    real_time: bool = False,
    write: Callable[[object], str] = repr,
) -> None:
    """Raise ConflictError if a method, its config and the keywords of Flower's strategies exclude each other.

    Parameters
    ----------
    name : str
        The method's.
    real_time : bool
        Whether the clock is that of the machine: no availability is simulated then.
    write : callable
        Writes a value in the error.
    """
    method = Method(name, capabilities, keys_of(type(config)))
    judged: dict[str, Any] = {STRATEGY: method}
    judged["server_optimizer"] = Chosen(config.server_optimizer, config.new_optimizer())
    if isinstance(config, RobustConfig):
        judged["aggregation_rule"] = Chosen(config.aggregation_rule, config.rule())
    if "aggregation_weights" not in method.keys:
        judged["aggregation_weights"] = capabilities.default_aggregation_weights
    if real_time:
        judged |= dict.fromkeys(("availability", "task_failure"))

    def value_of(key: str) -> Any:
        return judged[key] if key in judged else getattr(config, key, getattr(flower, key, None))

    def shown(key: str) -> str:
        if key == STRATEGY:
            return name
        if key == "aggregation_rule" and (rule := value_of(key)).name == MEAN:
            return str(rule.made.text)
        value = getattr(config, key, value_of(key))
        return f"{key} = {getattr(value, '__name__', None) or write(value)}"

    if (conflict := first_conflict(CONFLICTS, value_of)) is not None:
        raise ConflictError(conflict.sentence(shown), conflict.keys, conflict.allowed)


def keys_of(config: type[StrategyConfig]) -> frozenset[str]:
    """Return the names of the fields of a class of configs."""
    return frozenset(field.name for field in fields(config))


# The fields of robust rules alone, and those of secure sums, by the key on which they depend.
_GROUPS = {"aggregation_rule": keys_of(RobustConfig), "secure_sums": keys_of(SecureConfig)}


def may_set(config: type[StrategyConfig], capabilities: Capabilities, name: str) -> bool:
    """Return True if a method's config has the field ``name``, and no conflict with the method keeps its default."""
    method = Method("", capabilities, keys_of(config))
    excluded = {
        conflict.keys[0]
        for conflict in CONFLICTS
        if conflict.keys[1:] == (STRATEGY,) and conflict.values[STRATEGY].hold(method)
    }
    groups = (key for key, names in _GROUPS.items() if name in names - keys_of(StrategyConfig))
    return name in method.keys and excluded.isdisjoint(groups)
