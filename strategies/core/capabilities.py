"""What a method needs of its loop: declared by its class and by the hooks that it implements, worked out once.

A hook's default is marked by ``hook``; a class fills in a hook where its function has no such mark. This is the one
place that looks at which hooks a class fills in: loops, engines, reports and errors ask its ``Capabilities``.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import isfunction, signature
from typing import Any, TypeVar

from flwr.serverapp.strategy import FedAvg

Function = TypeVar("Function", bound=Callable[..., Any])

_DEFAULT = "is_the_default_of_a_hook"
_FROM_SUMS = "follows_from_sums"

ROUND_HOOKS = ("configure_train", "aggregate_train")  # Flower's, of a round


def hook(function: Function) -> Function:
    """Mark a method of a loop as the default of a hook, which a subclass may replace."""
    setattr(function, _DEFAULT, True)
    return function


def from_sums(function: Function) -> Function:
    """Mark a hook that reads single updates, but isn't needed where the loop has sums of what clients mask."""
    setattr(function, _FROM_SUMS, True)
    return function


def fills_in(kind: type, *names: str, but: str = "") -> bool:
    """Return True if a class overrides one of the hooks with a function that lacks the mark ``but``."""
    found = (getattr(kind, name, None) for name in names)
    return any(
        function is not None and not hasattr(function, _DEFAULT) and not (but and hasattr(function, but))
        for function in found
    )


def check_hooks(kind: type) -> None:
    """Raise TypeError if a class redefines a hook of this library with a signature that the loops' calls don't fit.

    Flower's own hooks are as in Flower, which doesn't look.
    """
    for name, function in vars(kind).items():
        former = next((vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)), None)
        if name.startswith("_") or hasattr(FedAvg, name) or not (isfunction(function) and isfunction(former)):
            continue
        wanted, given = signature(former), signature(function)
        positional = [each for each in wanted.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        try:
            given.bind(*positional)
        except TypeError as error:
            raise TypeError(
                f"{kind.__name__}.{name}{given}: {name} is a hook of this library, which calls it as "
                f"{name}({', '.join(each.name for each in positional[1:])}) ({error})"
            ) from None


@dataclass(frozen=True)
class Capabilities:
    """What a strategy's class needs of its loop.

    A class declares the capabilities from ``divides_by_path`` on as attributes of the same name; the others, which
    have no default, are found by the hooks that it overrides. They are many arguments, as each is a fact by itself;
    ``of`` alone passes them.

    Attributes
    ----------
    has_rounds : bool
        Whether it goes round by round, or takes work as it comes.
    sees_single_updates : bool
        Whether a hook sees single updates or messages: then an engine's sums of updates won't do.
    reads_updates : bool
        Whether a hook reads single updates that isn't marked ``from_sums``: then sums of what clients mask won't do
        either.
    needs_all_updates : bool
        Whether a hook wants all contributions of a round at once (``weigh``, ``aggregate``).
    aggregates : bool
        Whether it puts contributions together by itself (``aggregate``).
    steps_by_plain_sum : bool
        Whether the server optimizer is given Σ d_i × what ``transform_update`` returns, of one round.
    writes_requests : bool
        Whether it puts something of its own into a training request.
    sets_steps : bool
        Without rounds: whether it sets the number of local steps of each task (``task_steps``).
    round_hooks : tuple of str
        Flower's hooks of a round that it fills in: ``configure_train``, ``aggregate_train``.
    own_start : bool
        Whether it has a ``start`` of its own, in place of the loop's.
    chooses_clients : bool
        Whether it draws a round's participants by itself (``select``).
    makes_models : bool
        Without rounds: whether ``ready`` or ``interval`` says when there is a new model.
    discounts_staleness : bool
        Without rounds: whether d_i is known only when a contribution comes (``discount``, ``weigh``).
    knows_periods : bool
        Without rounds: whether ``contribution_periods`` says how often clients contribute.
    drops_stale : bool
        Without rounds: whether ``is_fresh_enough`` says that work is too old to count.
    filters_contributions : bool
        Without rounds: whether ``accept`` says by itself which contributions count.
    clients_keep_models : bool
        Whether clients keep models of their own, which the server doesn't send.
    divides_by_path : bool
        Whether an update counts over the length of its client's path (strategies/methods/shared/local_path.py): with
        secure sums each client divides its own, and the paths are summed, too.
    uses_given_weights : bool
        Whether an ``aggregate`` of its own counts clients by the weights d_i that it is given.
    logs_own_weights : bool
        Whether it enters in client_stats by itself how much each client counted.
    personal : bool
        Whether clients have models of their own, which they evaluate beside the global one.
    aggregates_on_arrival : bool
        Whether each reply is aggregated when it arrives, so that memory is constant. False of a method that keeps
        state of each client, which a cancelled round must not change.
    corrects_participation : bool
        Whether it corrects who takes part more often than others: all clients count, also those that are away.
    side_channel : str
        Reason why a wrapper around the strategy can't see all uses of client updates; "" if it can.
    payload_off_hint : str
        The parameter and value with which no vector is sent beside the model; "" if there is none.
    leaks_models : bool
        Whether clients receive unprotected models of other clients, which no robust rule or central noise has passed.
    unequal_weights : bool
        Whether contributions can't be weighted equally, which robust rules need.
    own_rule, own_optimizer : bool
        Whether a robust rule, or a server optimizer with its learning rate, is the method itself.
    reuses_last_update : bool
        Whether a client's last update counts in every round, whoever is in time.
    aggregates_each_arrival : bool
        Without rounds: whether each model is of one contribution: a robust rule then takes those of several models.
    trains_while_waiting : bool
        Without rounds: whether a client goes on working while its work waits for the next aggregation.
    extra_reply_bytes : int
        Bytes of the records that clients add to their replies on their own, beside the model: 1 MiB of records,
        and as many bytes as clients were sent beside the model, are allowed anyway.
    default_aggregation_weights : str
        Without rounds: how contributions weigh where the config has no ``aggregation_weights``.
    """

    has_rounds: bool
    sees_single_updates: bool
    reads_updates: bool
    needs_all_updates: bool
    aggregates: bool
    steps_by_plain_sum: bool
    writes_requests: bool
    sets_steps: bool
    round_hooks: tuple[str, ...]
    own_start: bool
    chooses_clients: bool
    makes_models: bool
    discounts_staleness: bool
    knows_periods: bool
    drops_stale: bool
    filters_contributions: bool
    clients_keep_models: bool
    divides_by_path: bool = False
    uses_given_weights: bool = False
    logs_own_weights: bool = False
    personal: bool = False
    aggregates_on_arrival: bool = True
    corrects_participation: bool = False
    side_channel: str = ""
    payload_off_hint: str = ""
    leaks_models: bool = False
    unequal_weights: bool = False
    own_rule: bool = False
    own_optimizer: bool = False
    reuses_last_update: bool = False
    aggregates_each_arrival: bool = False
    trains_while_waiting: bool = False
    extra_reply_bytes: int = 0
    default_aggregation_weights: str = "time-based"

    @classmethod
    def of(cls, kind: type) -> "Capabilities":
        """Work out the capabilities of a strategy's class."""
        defaults: dict[str, Any] = {item.name: item.default for item in fields(cls)}
        declared: dict[str, Any] = {name: getattr(kind, name, defaults[name]) for name in DECLARED}
        sends_extra = fills_in(kind, "extra_records", "extra_vectors")
        aggregates = fills_in(kind, "aggregate")
        readers = "aggregate", "weigh", "on_local_model", "transform_update", *ROUND_HOOKS
        return cls(
            has_rounds=bool(getattr(kind, "has_rounds", True)),
            sees_single_updates=sends_extra or fills_in(kind, *readers, "task_fields"),
            reads_updates=fills_in(kind, *readers, but=_FROM_SUMS),
            needs_all_updates=aggregates or fills_in(kind, "weigh"),
            aggregates=aggregates,
            steps_by_plain_sum=(not aggregates or bool(declared["uses_given_weights"]))
            and not fills_in(kind, "server_update"),
            writes_requests=sends_extra or fills_in(kind, "task_fields", "task_steps"),
            sets_steps=fills_in(kind, "task_steps"),
            round_hooks=tuple(name for name in ROUND_HOOKS if fills_in(kind, name)),
            own_start=fills_in(kind, "start"),
            chooses_clients=fills_in(kind, "select"),
            makes_models=fills_in(kind, "ready") or getattr(kind, "interval", None) is not None,
            discounts_staleness=fills_in(kind, "discount", "weigh"),
            knows_periods=fills_in(kind, "contribution_periods"),
            drops_stale=fills_in(kind, "is_fresh_enough"),
            filters_contributions=fills_in(kind, "accept"),
            clients_keep_models=bool(declared["personal"]) and not fills_in(kind, "personal_model"),
            **declared,
        )

    def described(self) -> dict[str, Any]:
        """Return the capabilities that differ from those of a method without hooks, by name."""
        plain = {item.name: item.default for item in fields(self) if item.name in DECLARED}
        return {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) != plain.get(item.name, type(value)())
        }


# What a class declares, by attributes of these names.
DECLARED = tuple(item.name for item in fields(Capabilities) if item.default is not MISSING)
