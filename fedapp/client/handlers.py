"""What a client answers, by the type of the message: a message in, local work, a message out.

Everything a client needs comes with the message, apart from what only the node knows: its partition
(``partition-id`` and ``num-partitions`` in the node config) or a ``data-path`` of its own.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fedapp import federation
from fedapp.client.frozen import asking, take_kept, take_sent
from fedapp.client.kept import keep_model, kept_model
from fedapp.client.personal import (
    fine_tuning_task,
    keep_trained,
    own_arrays_task,
    personal_task,
    shared_arrays_task,
)
from fedapp.client.privacy import noise_from_seed
from fedapp.client.request import (
    device_of,
    integer,
    local_data,
    node_number,
    read_config,
    record_of,
    trains_own_first,
)
from fedapp.client.scoring import scored_reply
from fedapp.client.training import local_task, model_of, trained_reply
from fedapp.config import ConfigError
from fedapp.data import DataError
from fedapp.data.direction import client_direction, private_direction
from fedapp.data.extremes import extreme_rows
from fedapp.data.standardize import sums_of
from fedapp.federation.records import ASK_SUMS, COUNT, SQUARES, SUMS
from fedapp.models import ModelError
from fedapp.own import OwnPartError, is_own
from fedapp.training.check import check_extremes
from fedapp.training.losses import loss_of
from fedapp.training.precision import say_slow
from fedapp.training.trainer import train_one
from strategies import streams
from strategies.flower import messages
from strategies.flower.simulated import is_simulated

log = logging.getLogger("flwr.fedapp")

# Error code of a reply that says why a client can't take part (Flower's own codes are below 100).
CANNOT_TAKE_PART = 100

# What the user can mend; told to the server in an error reply.
USER_ERRORS = (ConfigError, DataError, ModelError, OwnPartError)


def reason_of(error: Exception) -> str:
    """Return the last line of why a task can't be done, of what the user can't mend with the error's kind."""
    text = str(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"
    return messages.last_line(text)


Handler = Callable[[Message, Context], Message]


def describe(message: Message, context: Context) -> Message:
    """Say who this client is: partition, number of examples, GPU or not, and the device's name if it has one."""
    record, config = read_config(message)
    if messages.EDGE_ROUNDS in record:
        raise ConfigError("tiers = 'relays': this client is a device and no relay; allowed is tiers = none")
    data = local_data(config, record, context)
    if "data-path" in context.node_config and (is_own(config.model) or is_own(config.loss)):
        model = model_of(record, config, data.dataset, federation.CPU)
        rows = data.rows if data.test_rows is None else np.concatenate([data.rows, data.test_rows])
        tried = federation.tried_tensors(config, data.dataset, extreme_rows(data.dataset, rows))
        check_extremes(config.model, model, loss_of(config.loss), *tried, quoted=False)
    number, device = node_number(context, "num-partitions"), device_of(config)
    if not is_simulated(context):
        say_slow(config.precision, device)
        for remark in data.dataset.remarks:
            log.warning("data: %s", remark)
    metrics = MetricRecord(description(len(data.rows), device, data.partition_id, number))
    content = RecordDict({messages.METRICS: metrics})
    if (name := context.node_config.get("name")) is not None:
        content[messages.DEVICE] = ConfigRecord({messages.NAME: str(name)})
    return Message(content, reply_to=message)


def description(
    num_examples: int, device: torch.device, partition_id: int | None, num_partitions: int | None
) -> dict[str, Any]:
    """Return what a client says of itself, in numbers."""
    places = {messages.PARTITION_ID: partition_id, messages.NUM_PARTITIONS: num_partitions}
    known = {key: place for key, place in places.items() if place is not None}
    return {messages.NUM_EXAMPLES: num_examples, "gpu": int(device.type == "cuda"), **known}


def graph_direction(message: Message, context: Context) -> Message:
    """Send the principal direction of this client's data, which places it in the graph of clients.

    With ``message-epsilon`` > 0 it is made (ε, δ)-differentially private first. A node with data of its own draws
    the noise from the operating system, once for as long as Flower keeps its state of the run: whoever asks again
    gets the same answer. One of a simulation draws it from the run's seed, so that the run can be repeated.
    """
    record, config = read_config(message)
    kept = context.state.get(messages.DIRECTION)
    if config.message_epsilon and isinstance(kept, ArrayRecord):
        return Message(RecordDict({messages.DIRECTION: kept}), reply_to=message)
    data = local_data(config, record, context)
    direction = client_direction(data.dataset, data.rows, config.normalize)
    if config.message_epsilon:
        client = integer(record, messages.CLIENT)
        rng = (
            streams.generator(config.seed, "message-noise", client)  # the name is in the numbers, and stays
            if noise_from_seed(record, context)
            else streams.unpredictable()
        )
        direction = private_direction(direction, config.message_epsilon, config.message_delta, 1.0, rng)
    arrays = ArrayRecord({messages.DIRECTION: Array(direction)})
    if config.message_epsilon and not noise_from_seed(record, context):
        context.state[messages.DIRECTION] = arrays
    return Message(RecordDict({messages.DIRECTION: arrays}), reply_to=message)


def input_sums(message: Message, context: Context) -> Message:
    """Send the number, the sums and the squares of this client's inputs, for mean and deviation over all clients."""
    record, config = read_config(message)
    data = local_data(config, record, context)
    sums = sums_of(data.dataset, data.rows)
    found = {COUNT: sums.count, SUMS: sums.total, SQUARES: sums.squares}
    arrays = ArrayRecord({name: Array(values) for name, values in found.items()})
    return Message(RecordDict({messages.ARRAYS: arrays}), reply_to=message)


def train_model(message: Message, context: Context) -> Message:
    """Train the model in the message on this client's data."""
    task = local_task(message, context)
    asks_for_own = messages.PERSONAL in record_of(message)
    own = personal_task(message, context, task) if asks_for_own else None
    trained: dict[str, Any] = {}
    config = read_config(message)[1]
    if trains_own_first(config):
        trained = train_one(own_arrays_task(task, config))[0]
        task = shared_arrays_task(message, task, trained)
    found, loss = train_one(task)
    reply = trained_reply(message, context, task, {**trained, **found}, loss)
    if own is not None:
        keep_trained(message, context, train_one(own)[0])
    return reply


def evaluate_model(message: Message, context: Context) -> Message:
    """Score the model in the message on this client's data, and the client's own model if it has one."""
    task = fine_tuning_task(message, context)
    return scored_reply(message, context, None if task is None else train_one(task)[0])


def tell_kept(message: Message, context: Context) -> Message:
    """Send the model that this client keeps, or keep the one in the message, for a checkpoint of a simulation.

    Raises
    ------
    DataError
        On a device with data of its own, whose model doesn't leave it.
    """
    record = record_of(message)
    content = RecordDict()
    if not is_simulated(context):
        raise DataError("this device's own model doesn't leave it")
    if (arrays := messages.arrays_of(message)) is not None:
        keep_model(context, record, arrays)
    elif (kept := kept_model(context, record)) is not None:
        content[messages.ARRAYS] = kept
    return Message(content, reply_to=message)


HANDLERS: dict[str, Handler] = {
    messages.DESCRIBE: describe,
    messages.ASK_DIRECTION: graph_direction,
    ASK_SUMS: input_sums,
    messages.TRAIN: train_model,
    messages.EVALUATE: evaluate_model,
    messages.ASK_KEPT: tell_kept,
}


def handle(message: Message, context: Context) -> Message:
    """Return the reply to a message of a type in ``HANDLERS``: an error reply where the user can mend the error."""
    answer = HANDLERS[message.metadata.message_type]
    try:
        try:
            return answer(message, context)
        except federation.FrozenMissingError as missing:
            return _with_frozen(answer, message, context, missing)
    except USER_ERRORS as error:
        log.warning("This client can't take part: %s", error)
        return Message(Error(CANNOT_TAKE_PART, str(error)), reply_to=message)


def _with_frozen(
    answer: Handler, message: Message, context: Context, missing: federation.FrozenMissingError
) -> Message:
    """Answer with the frozen arrays that were sent or that this client has kept; else ask for them."""
    if take_sent(message, context):
        return answer(message, context)
    if take_kept(message, context):
        with suppress(federation.OtherModelError):  # what was kept is damaged
            return answer(message, context)
    return asking(message, missing)
