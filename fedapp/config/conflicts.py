"""Keys of the run config that exclude each other, beside those of the strategies: one table.

``CONFLICTS`` lists what the app refuses, in the records of `strategies.core.conflicts`, whose table has what the
strategies refuse. The checks, the errors and the table of `docs/config.md` follow from both. A config is checked when
it is loaded, and again with the strategy that is made of it, which may demand other values.

What also depends on the data, the model, the number of clients or the engine is checked where these are known.
"""

from dataclasses import dataclass
from typing import Any

from fedapp.config.key import KeyConflictError
from fedapp.config.strategy_keys import strategy_class, strategy_config
from fedapp.data.loading import is_generated
from strategies import FederatedStrategy
from strategies.core import conflicts
from strategies.core.conflicts import (
    ABOVE_0,
    EMPTY,
    SET,
    STRATEGY,
    WITHOUT_ROUNDS,
    ZERO,
    Conflict,
    Values,
    first_conflict,
    methods,
    one_of,
    other_than,
)
from strategies.flower import messages
from strategies.timing.availability import ALWAYS
from strategies.timing.time_scenario import is_profile
from strategies.updates.aggregation import MEAN
from strategies.updates.compressors import NONE
from strategies.updates.server_optimizer import FEDEXP

LEAST_NOISE = 1e-6  # smallest noise multiplier of a run with differential privacy


@dataclass(frozen=True)
class Method(conflicts.Method):
    """A strategy, as the app's conflicts judge it.

    Attributes
    ----------
    local_rule : frozenset of str
        The fields of training messages that define its local step, once the strategy is made.
    asks_directions : bool
        Whether the strategy that is made asks each client for the direction of its data.
    """

    local_rule: frozenset[str] = frozenset()
    asks_directions: bool = False


def _lacking(key: str, words: str) -> Values:
    """Return the strategies whose config has no such field."""
    return Values(words, lambda method: key not in method.keys)


FILLED = Values("not empty", bool)
GENERATED = Values("generated", is_generated)
PERSONAL = methods("strategies with models of clients' own", lambda able: able.personal)
BY_PATH = Values(
    "strategies that ask for the length of local paths (fednova, scaffold)",
    lambda method: messages.PATH in method.local_rule,
)
PERTURBED = Values(
    "strategies with perturbation-beta < 1 (spectral, async-spectral)",
    lambda method: messages.BETA in method.local_rule,
)
WITH_DIRECTIONS = Values(
    "strategies with a graph of clients by data (adjacency weights, spectral, async-spectral)",
    lambda method: method.asks_directions,
)

TIERED = other_than("none")
SIMULATED_TIERS = Values("regions:R", lambda tiers: tiers.startswith("regions:"))
FOR_SINGLE_CLIENTS = Values(
    "strategies that ask single clients for more than a model (records, steps, lengths of paths)",
    lambda method: (
        method.able.writes_requests
        or method.able.divides_by_path
        or method.able.chooses_clients
        or bool(method.able.round_hooks)
        or method.able.own_start
    ),
)
PROFILE = Values("a profile of devices", is_profile)
_A_MEAN = "a region answers with a mean, in which single updates can't be told apart"

CONFLICTS: tuple[Conflict, ...] = (
    # ---- Data ----
    Conflict(
        {"dataset": one_of("npz"), "data-path": EMPTY},
        "the data are those of a file",
        "data-path = the path of an .npz file",
    ),
    Conflict(
        {"dataset": one_of("files"), "data-path": EMPTY},
        "the data are those of a file or folder",
        "data-path = the path of a .npz, .csv, .tsv or .parquet file or a folder of images by class",
    ),
    Conflict(
        {
            "test-on": one_of("unseen-clients"),
            "partitioner": one_of("natural"),
            "dataset": GENERATED,
            "data-path": EMPTY,
        },
        "the data are generated for as many clients as train, and there are no others to test on",
        "another test-on, or another partitioner",
    ),
    Conflict(
        {"hold-out": one_of("last"), "test-on": one_of("unseen-clients")},
        "test rows are those of other clients, and no client's last rows",
        "hold-out = random, or another test-on",
    ),
    Conflict(
        {"missing": one_of("mean"), "dataset": one_of("files"), "normalize": other_than("standardize")},
        "the mean of all clients' training rows is known with normalize = standardize alone",
        "normalize = standardize, or another missing",
    ),
    # ---- Local training ----
    Conflict(
        {"local-epochs": ZERO, "local-steps": ZERO},
        "clients would do no work",
        "local-epochs > 0, or local-steps > 0",
    ),
    Conflict(
        {"local-epochs": ABOVE_0, "local-steps": ABOVE_0},
        "each says how much work clients do",
        "local-epochs = 0, or local-steps = 0",
    ),
    Conflict(
        {"momentum": Values("other than 0", bool), "optimizer": other_than("sgd")},
        "momentum is an option of optimizer sgd",
        "momentum = 0, and optimizer-options with what the optimizer takes",
    ),
    Conflict(
        {"optimizer": other_than("sgd"), STRATEGY: BY_PATH},
        "the method divides an update by how far steps of sgd go along a steady gradient",
        "optimizer = sgd",
    ),
    # ---- Strategies without a key ----
    Conflict(
        {"secure-sums": SET, STRATEGY: _lacking("secure_sums", "strategies that have no secure sums")},
        "the method has no rounds, and counts each update by itself",
        "secure-sums = false, or a strategy with rounds, or fedbuff",
    ),
    Conflict(
        {
            "aggregation-rule": other_than(MEAN),
            STRATEGY: _lacking("aggregation_rule", "strategies that have no robust rules"),
        },
        "no robust rule fits how the method puts updates together",
        "aggregation-rule = mean",
    ),
    Conflict(
        {"dp": one_of("central"), STRATEGY: _lacking("dp", "strategies that have no central noise")},
        "the account is of aggregations in which each client counts once at most, and the method has others",
        "dp = none, local",
    ),
    Conflict(
        {"dp": one_of("central"), "dp-mechanism": other_than("gaussian"), STRATEGY: WITHOUT_ROUNDS},
        "the account of this noise is of rounds",
        "dp-mechanism = gaussian",
    ),
    # ---- Differential privacy ----
    Conflict(
        {"dp": other_than("none"), "dp-noise-multiplier": Values("< 1e-6", lambda z: z < LEAST_NOISE)},
        "less noise keeps nothing private",
        f"dp-noise-multiplier >= {LEAST_NOISE:g}, or dp = none",
    ),
    Conflict(
        {"dp": other_than("none"), "client-evaluation": SET},
        "clients' losses would be sent as they are",
        "client-evaluation = false",
    ),
    Conflict(
        {"dp": one_of("local"), "normalize": one_of("standardize")},
        "sums of a device's inputs leave it, and dp = local lets nothing leave without noise",
        "normalize = false, true, symmetric",
    ),
    Conflict(
        {"dp": one_of("local"), "message-epsilon": ZERO, STRATEGY: WITH_DIRECTIONS},
        "the direction of a client's data, which places the client in the graph, would be sent as it is",
        "message-epsilon > 0, or graph-source = updates with spectral and async-spectral",
    ),
    Conflict(
        {"dp": one_of("local"), "dp-target-epsilon": ABOVE_0, STRATEGY: WITHOUT_ROUNDS},
        "how often a client sends isn't known beforehand",
        "dp-target-epsilon = 0, with dp-noise-multiplier, and dp-max-epsilon to end the run in time",
    ),
    Conflict(
        {
            "dp": one_of("central"),
            "dp-target-epsilon": ABOVE_0,
            "dp-max-contributions": ZERO,
            STRATEGY: WITHOUT_ROUNDS,
        },
        "how often a client sends isn't known beforehand",
        "dp-max-contributions > 0, or dp-target-epsilon = 0 with dp-noise-multiplier, and dp-max-epsilon to end the "
        "run in time",
    ),
    # ---- Models of clients' own ----
    Conflict(
        {"fine-tune-epochs": ABOVE_0, STRATEGY: PERSONAL},
        "clients have models of their own",
        "fine-tune-epochs = 0",
    ),
    Conflict(
        {"fine-tune-epochs": ABOVE_0, "test-on": other_than("own")},
        "a model that is fitted to a client's rows is scored on other rows of the client",
        "test-on = own, or fine-tune-epochs = 0",
    ),
    Conflict(
        {"fine-tune-epochs": ABOVE_0, "dp": other_than("none")},
        "clients' scores would be sent as they are",
        "fine-tune-epochs = 0, or dp = none",
    ),
    Conflict(
        {"personal": FILLED, STRATEGY: PERSONAL},
        "clients have whole models of their own",
        "an empty personal",
    ),
    Conflict(
        {"personal": FILLED, "fine-tune-epochs": ABOVE_0},
        "clients' own arrays are fitted to their rows as they train",
        "fine-tune-epochs = 0, or an empty personal",
    ),
    Conflict(
        {"personal": FILLED, "record-divergence": SET},
        "the divergence is that of whole models, and some arrays stay with the clients",
        "record-divergence = false, or an empty personal",
    ),
    Conflict(
        {"personal": FILLED, STRATEGY: PERTURBED},
        "the method takes gradients between a client's model and those of its neighbours, who don't send such arrays",
        "perturbation-beta = 1, or an empty personal",
    ),
    Conflict(
        {"secure-sums": SET, "record-divergence": SET},
        "the divergence needs single models, which nobody sees",
        "record-divergence = false",
    ),
    # ---- Tiers: the strategy's clients are regions ----
    Conflict(
        {"tiers": TIERED, STRATEGY: FOR_SINGLE_CLIENTS},
        "the method asks single clients for more than a model, and its clients are regions",
        "a method that sends a model alone, such as fedavg, fedprox, fedfix, fedbuff, or tiers = none",
    ),
    *(
        Conflict({"tiers": TIERED, key: values}, why, f"{allowed}, or tiers = none")
        for key, values, why, allowed in (
            (
                "client-weights",
                one_of("adjacency"),
                "the graph is of single clients",
                "client-weights = samples, uniform",
            ),
            ("aggregation-rule", other_than(MEAN), _A_MEAN, "aggregation-rule = mean"),
            (
                "server-optimizer",
                one_of(FEDEXP),
                "the step size is by the lengths of single updates",
                "another server-optimizer",
            ),
            ("secure-sums", SET, _A_MEAN, "secure-sums = false"),
            ("dp", other_than("none"), "the account is of single clients in single rounds", "dp = none"),
            (
                "compression",
                other_than(NONE),
                "a region would compress a mean of updates",
                "compression = none",
            ),
            ("update-norm-bound", ABOVE_0, _A_MEAN, "update-norm-bound = 0"),
            ("stragglers", ABOVE_0, "a region does no part of a task", "stragglers = 0"),
            ("availability", other_than(ALWAYS), "a region doesn't come and go", "availability = always"),
            ("task-failure", ABOVE_0, "a region doesn't come and go", "task-failure = 0"),
            (
                "time-scenario",
                PROFILE,
                "a region's time has no device profile",
                "times of F0 to F99, trace:…",
            ),
            ("fine-tune-epochs", ABOVE_0, "the scores are of single clients", "fine-tune-epochs = 0"),
            ("personal", FILLED, "arrays of their own are those of single clients", "an empty personal"),
            ("record-divergence", SET, "the drift is that of single clients", "record-divergence = false"),
            ("test-on", one_of("own"), "the scores are of single clients", "another test-on"),
        )
    ),
    Conflict(
        {"tiers": SIMULATED_TIERS, "safeguards": one_of("on")},
        _A_MEAN,
        "safeguards = auto, off, or tiers = none",
    ),
    Conflict(
        {"tiers": one_of("relays"), "normalize": one_of("standardize")},
        "a relay isn't asked for the sums of single devices' inputs",
        "another normalize, or tiers = none",
    ),
)


def check_conflicts(config: Any, made: FederatedStrategy | None = None) -> None:
    """Raise KeyConflictError if keys exclude each other, for the app or for the strategy.

    Parameters
    ----------
    config : RunConfig
        Its type can't be named here, as its file needs this one.
    made : FederatedStrategy, optional
        The strategy, once it is made of the config: what its local rule and its graph need is checked as well.
    """
    strategy = strategy_class(config.strategy)
    name, able, keys = (
        f"strategy = {config.strategy!r}",
        strategy.capabilities,
        conflicts.keys_of(strategy.Config),
    )
    method = Method(name, able, keys)
    if made is not None:
        graph = made.session.graph
        by_data = graph is not None and graph.by_data
        method = Method(name, able, keys, frozenset(made.local_rule()), by_data)

    def value_of(key: str) -> Any:
        return method if key == STRATEGY else getattr(config, key.replace("-", "_"))

    def shown(key: str) -> str:
        return name if key == STRATEGY else f"{key} = {_written(value_of(key))}"

    if (conflict := first_conflict(CONFLICTS, value_of)) is not None:
        raise KeyConflictError(conflict.sentence(shown), conflict.keys, conflict.allowed)
    if made is None:  # a strategy checks itself when it is made
        conflicts.check_conflicts(
            name,
            able,
            strategy_config(strategy, lambda field: getattr(config, field)),
            real_time=config.clock != "virtual",
            write=_written,
        )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
