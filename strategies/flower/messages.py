"""The record keys and message fields that server and clients share.

A training request carries two records, ``arrays`` (the model) and ``config`` (the fields below beside the
app's own); its reply carries ``arrays`` (the trained model) and ``metrics``. The keys are those of Flower's own
strategies, so a ClientApp written for them understands ours; keys that Flower doesn't define begin
with ``strategies.``, so that they don't collide with keys of the app.
"""

import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict

from strategies.flower.higher_is_better import PERSONAL as PERSONAL_PREFIX
from strategies.flower.internals import (
    MESSAGE_UNAVAILABLE,
    MOD_FAILED,
    NOBODY_ANSWERED,
    NODE_UNAVAILABLE,
    OBJECTS_MISSING,
    OLDER_API,
    SECURE_AGGREGATION,
    UNKNOWN,
)

# Records of a message.
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
METRICS: Final = "metrics"
NEIGHBOURS: Final = "neighbours"  # u, a second model beside w̄, in requests of the spectral method
CONSTANT: Final = "constant"  # h, of the model's layout: added to every gradient of the local step
PERSONAL_MODEL: Final = "personal"  # in requests to evaluate: the client's personal model
DIRECTION: Final = "direction"  # one array (d,): the direction of a client's data in the similarity graph
DEVICE: Final = "device"  # beside the metrics of a description: a ConfigRecord with the field below

# Message types.
TRAIN: Final = MessageType.TRAIN
EVALUATE: Final = MessageType.EVALUATE
DESCRIBE: Final = f"{MessageType.QUERY}.describe"
ASK_DIRECTION: Final = f"{MessageType.QUERY}.direction"
ASK_KEPT: Final = f"{MessageType.QUERY}.kept"  # a simulation's server asks for, or returns, a personal model

# Fields of `config`, from the server.
SERVER_ROUND: Final = "server-round"  # the round or aggregation the model belongs to, from 1
CLIENT: Final = "strategies.client"  # the client's index in the federation, 0..C-1
TASK: Final = "strategies.task"  # task number: seed, client and task fix the task's random stream
ALPHA: Final = "proximal-mu"  # α of the local step's pull α (w − w̄); the name is Flower's
BETA: Final = "strategies.beta"  # β of the point β w + (1−β) u the gradient is taken at
PART: Final = "strategies.part"  # the part, in (0, 1], of the client's usual local work; rounded up
STEPS: Final = "strategies.steps"  # local steps of the task, in place of the client's usual work
PATH: Final = "strategies.path"  # asks for the client's path (see APPLIED); its value says nothing
COMPRESSION: Final = "strategies.compression"  # compressor of the update (updates/compression.py)
SEED: Final = "strategies.seed"  # seed of the compressor's draws
RUN: Final = "strategies.run"  # number of the run, for which a client keeps its compression residual
MODEL: Final = "strategies.arrays"  # name of the record that holds the model, if it isn't `arrays`
UNTRAINED: Final = "strategies.untrained"  # patterns of names of buffers, which aren't compressed
FROZEN: Final = "strategies.frozen"  # digest of arrays that aren't sent; their record (flower/frozen.py)
TRAVELS: Final = "strategies.travels"  # names of the arrays of a full model that are sent (flower/frozen.py)
PERSONAL: Final = "strategies.personal"  # λ: the client keeps a model v beside w̄, moved by g(v) + λ (v − w̄)
UNDER_WAY: Final = "strategies.under-way"  # in requests to evaluate: the client's task that isn't over yet
EDGE_ROUNDS: Final = "strategies.edge-rounds"  # to relays: a region's rounds for each task (tiers/relay.py)
WEIGHTS: Final = "strategies.client-weights"  # to relays: how the devices of a region count
KEPT_FOR: Final = "strategies.kept-for"  # number of the run that a client keeps its personal model for

# Error code of a reply from a client that doesn't have the frozen arrays (Flower's codes are below 100).
NEEDS_FROZEN: Final = 105

# A ConfigRecord of replies: which fields of `config`, and which records beside the model, the local step went by.
# Its field PATH is how far the local steps go along a gradient that stays 1, γ_i ‖a_i‖₁: K_i γ_i for plain SGD.
APPLIED: Final = "strategies.applied"
RECORDS: Final = "records"

# Secure sums (strategies/secure): the stage's record of requests and replies, and the masked update of a reply.
SECURE: Final = "strategies.secure"
MASKED: Final = "strategies.masked"
# The stages of a secure sum beside training.
SECURE_STAGES: Final = tuple(f"{SECURE}.{stage}" for stage in ("keys", "shares", "masked", "unmask"))
KEEP: Final = "keep"  # without rounds: the client keeps its update, and masks it when the buffer is full

# Fields of `metrics`, from the client.
NUM_EXAMPLES: Final = "num-examples"
PARTITION_ID: Final = "partition-id"
NUM_PARTITIONS: Final = "num-partitions"
TRAIN_LOSS: Final = "train-loss"
NUM_STEPS: Final = "num-steps"

# Field of `device`, from the client: the operator's name of the device, an unverified claim for display only.
NAME: Final = "name"

# Results that an evaluation may return beside its metrics: f_i(w) of all clients, by index.
CLIENT_LOSSES: Final = "client-losses"
PER_CLIENT: Final = "per-client."  # before a metric's name: its values of all clients, by index
WITHOUT: Final = "without."  # before a metric's name: indices of clients without a value, in no mean

# Prefix of the names of metrics of clients' personal models.
OF_PERSONAL: Final = PERSONAL_PREFIX

# Metrics that a strategy reports about an aggregation.
PARTICIPANTS: Final = "participants"  # of a round
CONTRIBUTIONS: Final = "contributions"  # since the last evaluation, without rounds
FAILURES: Final = "failures"
BYTES_DOWN: Final = "bytes-down"
BYTES_UP: Final = "bytes-up"
BYTES_KEPT: Final = "bytes-kept"  # what the server keeps of clients from round to round, if a method does
BYTES_SERVER: Final = (
    "bytes-server"  # what stays between aggregations: model, optimizer's vectors, BYTES_KEPT
)
CLIPPED: Final = "clipped-updates"
CLIPPING_NORM: Final = "dp-clipping-norm"  # of a round, where it adapts
DISCARDED: Final = "discarded-updates"
LOST_TASKS: Final = "lost-tasks"  # of the failures, those whose clients went away while they worked
LATE_UPDATES: Final = "late-updates"  # of a round that closes early: those that weren't there when it did
DROPPED_UPDATES: Final = "dropped-updates"  # late updates that never count
DEVICE_SECONDS: Final = "device-seconds"  # seconds of the run's clock that the clients' ended tasks took
WASTED_SECONDS: Final = "wasted-seconds"  # device-seconds of tasks whose updates were not accepted
JOULES: Final = "joules"  # energy of the ended tasks, where a device profile has watts
BYTES_WASTED: Final = "bytes-wasted"  # sent for updates that were dropped, and by them
EVALUATED: Final = "client-evaluation"  # the aggregation that metrics `client-…` are of, if an earlier one

# Prefixes and names of what a strategy, its evaluations and the app report; a client's metric of such a name gets a
# prefix.
OUR_PREFIXES: Final = ("client-", "federated-loss", "surrogate-loss", "staleness-", "dp-", "bytes-")
OURS: Final = frozenset(
    {PARTICIPANTS, FAILURES, CLIPPED, DISCARDED, LOST_TASKS, LATE_UPDATES, DROPPED_UPDATES}
    | {DEVICE_SECONDS, WASTED_SECONDS, JOULES, "contributions", "weights-distance"}
    | {"aggregation", "time", "clock", "clients", "evaluation", "losses"}
)

# Reason why a client without a timely reply is excluded, found by the strategy or by the SuperLink.
NO_REPLY: Final = "no reply before the deadline"

UNREADABLE: Final = "its reply can't be read: the SuperLink lacks a part of it"

# Reasons why a client doesn't train whose app has a mod for secure aggregation, or is written for another API.
OLDER: Final = (
    "its app, or a mod of it, is of Flower's older API: handlers are @app.train and @app.evaluate, and mods those of "
    "flwr.clientapp.mod"
)
MASKS: Final = (
    "a mod for secure aggregation waits for SecAggPlusWorkflow, which takes strategies of flwr.server alone"
)

NOT_MASKED: Final = (
    "it takes no part in secure sums: strategies.secure.masks_updates isn't a mod of its ClientApp"
)

# Outcomes of tasks that don't count: the reply came late or never, the client reported a failure, the server refused
# the reply, the method discarded the update as too stale, or the client left while it worked.
LATE: Final = "late"
FAILED: Final = "failed"
REFUSED: Final = "refused"
TOO_OLD: Final = "discarded"
LOST: Final = "lost"

# Upper bounds of the texts and metrics of clients that are logged or stored.
LONGEST_TEXT: Final = 500  # characters
LONGEST_NAME: Final = 64  # characters of a metric's name
LONGEST_DEVICE: Final = 63  # characters of a device's name
MOST_METRICS: Final = 100
LONGEST_LIST: Final = 10_000  # numbers in a metric
MOST_BESIDE: Final = 1 << 20  # bytes of a reply beside the model and as many records as its client was sent

LARGEST: Final = 2**63 - 1  # largest integer of a message

RecordType = ArrayRecord | ConfigRecord | MetricRecord


def request(
    message_type: str,
    node_id: int,
    config: ConfigRecord,
    *,
    ttl: float,
    arrays: ArrayRecord | None = None,
    extra_records: Mapping[str, RecordType] = MappingProxyType({}),
    keys: tuple[str, str] = (ARRAYS, CONFIG),
) -> Message:
    """Build a message to one node; ``ttl`` in seconds, ``extra_vectors`` are records beside ``arrays``.

    ``keys`` are the names of the record of arrays and of the record of fields.
    """
    content = RecordDict({keys[1]: config})
    if arrays is not None:
        content[keys[0]] = arrays
    for name, record in extra_records.items():
        content[name] = record
    return Message(content=content, dst_node_id=node_id, message_type=message_type, ttl=ttl)


# By key and type: RecordDict's own views by type copy themselves at every look.
def arrays_of(message: Message, key: str = ARRAYS) -> ArrayRecord | None:
    """Return the arrays under ``key`` in a message; None if there are none."""
    record = message.content.get(key)
    return record if isinstance(record, ArrayRecord) else None


def array_records(message: Message) -> dict[str, ArrayRecord]:
    """Return all records of arrays of a message, by name."""
    return {name: record for name, record in message.content.items() if isinstance(record, ArrayRecord)}


def metrics_of(reply: Message) -> MetricRecord:
    """Return the ``metrics`` record of a reply, or its first MetricRecord under another name; maybe empty."""
    for record in (reply.content.get(METRICS), *reply.content.values()):
        if isinstance(record, MetricRecord):
            return record
    return MetricRecord()


def reason_of(reply: Message) -> str:
    """Return the last line of an error reply's reason: a traceback's message, without the traceback."""
    if reply.error.code == MESSAGE_UNAVAILABLE:
        if (reply.error.reason or "").startswith(OBJECTS_MISSING):
            return UNREADABLE
        return NO_REPLY  # the message's time to live is over
    if _misses_masks(reply):
        return MASKS
    if any(name in (reply.error.reason or "") for name in OLDER_API):
        return OLDER
    return last_line(reply.error.reason or "") or f"error code {reply.error.code}"


def last_line(reason: str) -> str:
    """Return the last line of a reason, cleaned for the log."""
    lines = reason.strip().splitlines()
    return clean(lines[-1]) if lines else ""


def refused_by_mod(reply: Message) -> bool:
    """Return True if a mod of the client's app refused a message."""
    return reply.has_error() and (reply.error.code == MOD_FAILED or _misses_masks(reply))


def _misses_masks(reply: Message) -> bool:
    return SECURE_AGGREGATION in (reply.error.reason or "")


def answer_to(message: Message, reply: Message) -> Message:
    """Return an app's reply to a message; an error that answers the app's own reply becomes an answer to the message.

    Flower's mods for differential privacy answer a reply that they refuse in place of the message. Flower's engines
    drop such an answer, and the server waits for one until its timeout.
    """
    if reply.metadata.reply_to_message_id == message.metadata.message_id:
        return reply
    error = reply.error if reply.has_error() else Error(UNKNOWN, "its reply answers another message")
    return Message(error, reply_to=message)


def fault_of(reply: Message | None) -> str:
    """Return the outcome of a task without a valid reply: ``LATE``, ``LOST``, ``FAILED`` or ``REFUSED``."""
    if reply is None or (reply.has_error() and reply.error.code in NOBODY_ANSWERED):
        return LOST if reply is not None and reply.error.code == NODE_UNAVAILABLE else LATE
    return FAILED if reply.has_error() else REFUSED


def name_of(reply: Message) -> str:
    """Return the device's name in a description, of letters, digits, ``_``, ``-`` and ``.``; "" if there is none."""
    record = reply.content.get(DEVICE)
    name = record.get(NAME) if isinstance(record, ConfigRecord) else None
    # Nothing else, so that no name looks like another part of a line.
    return re.sub(r"[^\w.-]", "_", clean(name, LONGEST_DEVICE)) if isinstance(name, str) else ""


def clean(text: str, most: int = LONGEST_TEXT) -> str:
    """Return a client's text for the log: at most ``most`` characters, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:most])


def whole_number(value: object) -> int | None:
    """Return a reported number of 0 or more as an int; None for anything else that a client may send."""
    if isinstance(value, int | float) and 0 <= value <= LARGEST:
        return int(value)
    return None


def weight_of(metrics: Mapping[str, Any] | MetricRecord, key: str, *, or_zero: bool = False) -> float | None:
    """Return how much a description or a reply says that its client counts, which is its size; None if it doesn't.

    ``or_zero``: whether the size may be 0, as that of a client that had nothing to train on in a round.

    Raises
    ------
    ValueError
        If it is no number that can be a weight.
    """
    if (value := metrics.get(key)) is None:
        return None
    if isinstance(value, list) or not (0 < value <= LARGEST or (or_zero and value == 0)):
        raise ValueError(
            f"{key} = {clean(str(value), 40)}: must be a positive number{', or 0' if or_zero else ''}"
        )
    return value


def values_of(metrics: MetricRecord) -> dict[str, float | list[float]]:
    """Return at most 100 metrics of a reply, without overlong lists and overlong or unprintable names."""
    return {
        key: value  # type: ignore[misc]
        for key, value in itertools.islice(metrics.items(), MOST_METRICS)
        if len(key) <= LONGEST_NAME
        and key.isprintable()
        and not (isinstance(value, list) and len(value) > LONGEST_LIST)
    }


def model_of(reply: Message, key: str = ARRAYS) -> ArrayRecord | None:
    """Return the arrays under ``key`` in a reply, or its only arrays under whatever name."""
    if (arrays := arrays_of(reply, key)) is not None:
        return arrays
    records = array_records(reply)
    return next(iter(records.values())) if len(records) == 1 else None


def extra_records_of(reply: Message, key: str) -> dict[str, RecordType]:
    """Return the records of a reply other than the model and its metrics, by name."""
    model, metrics = model_of(reply, key), metrics_of(reply)
    return {n: record for n, record in reply.content.items() if record is not model and record is not metrics}


def path_of(applied: object) -> float:
    """Return the path that the record ``APPLIED`` of a reply tells; NaN if it tells none that can be."""
    said = applied.get(PATH) if isinstance(applied, Mapping) else None
    return float(said) if isinstance(said, int | float) and 0 < said < float("inf") else float("nan")


def is_ours(name: str) -> bool:
    """Return True if a metric of this name is one that the server reports itself."""
    return name in OURS or name.startswith(OUR_PREFIXES)


class CompressedModel(ArrayRecord):
    """A model whose arrays hold what a client decodes from its compressed form, in which it travels.

    Attributes
    ----------
    travels : ArrayRecord
        The compressed form (``strategies/updates/compressed_models.py``).
    as_arrays : ArrayRecord
        The decoded arrays, as they travel to clients that can't decode.
    """

    def __init__(self, arrays: Mapping[str, Array], travels: ArrayRecord) -> None:
        super().__init__(dict(arrays))
        self.travels, self.as_arrays = travels, ArrayRecord(dict(arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the arrays alone."""
        return ArrayRecord, (dict(self.as_arrays),)


def num_bytes(arrays: ArrayRecord) -> int:
    """Return the size in bytes of the serialised arrays of a record, as they travel."""
    arrays = arrays.travels if isinstance(arrays, CompressedModel) else arrays
    return sum(len(array.data) for array in arrays.values())


def total_bytes(message: Message) -> int:
    """Return the size in bytes of all serialised arrays of a message."""
    return sum(map(num_bytes, array_records(message).values()))


def record_bytes(record: RecordType) -> int:
    """Return the size in bytes of a record; Flower's ``count_bytes`` raises on a text that is empty."""
    if isinstance(record, ArrayRecord):
        return num_bytes(record)
    return sum(len(name) + _value_bytes(value) for name, value in record.items())


def _value_bytes(value: Any) -> int:
    """Return the size in bytes of a value of a record: a bool is one byte, a number eight."""
    if isinstance(value, list):
        return sum(map(_value_bytes, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8


def size_of(message: Message) -> int:
    """Return the size in bytes of all records of a message, metrics and fields included."""
    return sum(map(record_bytes, message.content.values()))
