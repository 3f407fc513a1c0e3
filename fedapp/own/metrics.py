"""A metric of the user's own: its name in a run's files, and the direction that its function states."""

import re
from typing import Any

from fedapp.own.parts import HERE, OwnPartError, imported, is_own
from strategies.flower.higher_is_better import split_direction

ATTRIBUTE = "higher_is_better"  # as torchmetrics' metrics have it

# What a run's files say beside its metrics; tests/fedapp/server/test_summary.py compares the names with the files.
_TAKEN = {
    # metrics.jsonl
    *("loss", "train-loss", "aggregation", "time", "clock", "evaluation", "clients", "losses"),
    *("participants", "contributions", "failures", "lost-tasks", "clipped-updates", "discarded-updates"),
    *("late-updates", "dropped-updates", "tasks-late", "tasks-dropped"),
    *("device-seconds", "wasted-seconds", "joules", "weights-distance", "divergence", "drift"),
    # runs.csv of a sweep, and summary.json
    *("run", "seed", "picked"),
    *("status", "reason", "complete", "process", "strategy", "engine", "num-clients", "aggregations"),
    *("unread-keys", "unstable", "warnings", "wall-seconds", "date", "machine"),
    # clients.parquet, also by the names that strategies have for its columns
    *(
        "client",
        "name",
        "rows",
        "tasks",
        "accepted",
        "late",
        "failed",
        "refused",
        "discarded",
        "clipped",
        "lost",
    ),
    *("bytes", "seconds", "wasted", "task-time", "participation", "work", "weight", "contribution-weight"),
    *("importance", "expected-share", "expected", "observed-share", "observed"),
}
_TAKEN_PREFIXES = (
    "best-",
    "client-",
    "personal-",
    "federated-loss",
    "surrogate-loss",
    "staleness-",
    "dp-",
    "bytes-",
)


def own_metric(name: str) -> tuple[str, Any]:
    """Return the name and the function of ``module:name``, (outputs, targets) → float.

    Raises
    ------
    OwnPartError
        If there is no such function, or a run's files have its name for something else.
    """
    function = imported("metrics", name)
    if not callable(function):
        raise OwnPartError(f"metrics = {name!r}: must be a function (outputs, targets) → float")
    called = _called(name)
    if is_taken(called):
        raise OwnPartError(
            f"metrics = {name!r}: a run's {called!r} is something else; the function needs another name"
        )
    return called, function


def with_directions(names: str) -> str:
    """Return a list of metrics in which functions that state their direction have the prefix ``min:`` or ``max:``.

    A function states it by its attribute ``higher_is_better``; a prefix that is there stands.

    Raises
    ------
    OwnPartError
        If a function's attribute is neither a truth value nor None, or the function isn't there.
    """
    return ",".join(map(_with_direction, names.split(",")))


def _with_direction(text: str) -> str:
    stated, name = split_direction(text)
    if stated is not None or not is_own(name):
        return text.strip()
    found = getattr(own_metric(name)[1], ATTRIBUTE, None)
    if found is not None and not isinstance(found, bool):
        raise OwnPartError(
            f"metrics = {name!r}: its attribute {ATTRIBUTE} is {found!r}; allowed are True, False"
        )
    return name if found is None else f"{'max' if found else 'min'}:{name}"


def is_taken(name: str) -> bool:
    """Return True if a run's files have something other than a metric of the user's own under a name."""
    return name in _TAKEN or name.startswith(_TAKEN_PREFIXES)


def _called(name: str) -> str:
    """Return the name of a metric of the user's own: its function's, without the digest of one in no module."""
    own = name.rpartition(":")[2].rpartition(".")[2]
    if name.startswith(f"{HERE}:"):
        own = re.sub(r"_[0-9a-f]{8}$", "", own)
    return own.replace("_", "-")
