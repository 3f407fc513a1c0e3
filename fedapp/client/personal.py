"""A client's own model beside the global one: trained as the fields of a request say, and kept."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from flwr.app import Context, Message

from fedapp import federation
from fedapp.client.kept import keep_model, kept_model
from fedapp.client.request import device_of, integer, local_data, read_config, record_of, sent_model
from fedapp.client.training import (
    StateOf,
    TensorsOf,
    augmentation_of,
    batches_of,
    model_of,
    own_tensors,
    part_of,
    parts_of,
    rule_of,
    trained_model,
)
from fedapp.config import RunConfig
from fedapp.training.batches import FINE_TUNING, PERSONAL
from fedapp.training.losses import loss_of
from fedapp.training.optimizer import optimizer_of
from fedapp.training.personal import own_arrays
from fedapp.training.task import LocalTask
from fedapp.training.work import scheduled_lr
from strategies.flower import messages


def personal_task(message: Message, context: Context, task: LocalTask) -> LocalTask:
    """Return the task of the client's own model v, beside ``task``, of a request that has the field ``PERSONAL``.

    From v as many steps of the same size, with the pull λ (v − w̄) to the model that was sent. Without a v yet, it
    starts as that model.
    """
    record, config = read_config(message)
    _, client, number = task.ids
    start, fixed = task.start, task.fixed
    if (kept := kept_model(context, record)) is not None:
        start, fixed = parts_of(task.model, federation.to_state(kept, task.x.device))
    batches = batches_of(config, task.batches.num_examples, client, number, PERSONAL, part=part_of(record))
    return replace(
        task,
        start=start,
        fixed=fixed,
        batches=batches,
        rule=replace(task.rule, alpha=float(record[messages.PERSONAL]), beta=1.0),  # type: ignore[arg-type]
        neighbours=None,
        constant=None,
        anchor=task.start,
        augmentation=augmentation_of(config, batches, client, number, PERSONAL),
        draws=PERSONAL,
    )


def own_arrays_task(task: LocalTask, config: RunConfig) -> LocalTask:
    """Return the task that trains this client's own arrays first, all others fixed.

    FedRep (Collins et al. 2021, algorithm 1): ``personal-epochs`` by batches of their own, from where ``task``
    starts.
    """
    own = own_arrays(task.model, config.personal)
    _, client, number = task.ids
    batches = batches_of(
        config, task.batches.num_examples, client, number, PERSONAL, epochs=config.personal_epochs
    )
    lr = task.lr * len(task.batches) / len(batches) if config.normalize_steps else task.lr
    return replace(
        _of(task, own.trained, {}),
        batches=batches,
        lr=lr,
        augmentation=augmentation_of(config, batches, client, number, PERSONAL),
        draws=PERSONAL,
    )


def shared_arrays_task(message: Message, task: LocalTask, trained: Mapping[str, np.ndarray]) -> LocalTask:
    """Return the task that trains the other arrays, with this client's own as they have been ``trained``."""
    shared = own_arrays(task.model, read_config(message)[1].personal).shared
    return _of(task, shared, trained)


def _of(task: LocalTask, names: Collection[str], trained: Mapping[str, np.ndarray]) -> LocalTask:
    """Return a task that trains these parameters alone."""
    device = task.x.device
    state = {**task.fixed, **task.start, **{k: torch.from_numpy(v).to(device) for k, v in trained.items()}}
    start = {name: state.pop(name) for name in names}
    return replace(task, start=start, fixed=state)


def keep_trained(message: Message, context: Context, trained: Mapping[str, np.ndarray]) -> None:
    """Keep what has become of the client's own model."""
    keep_model(context, record_of(message), trained_model(message, trained))


def fine_tuning_task(
    message: Message,
    context: Context,
    tensors: TensorsOf = own_tensors,
    state_of: StateOf = federation.to_state,
) -> LocalTask | None:
    """Return the task that fits the model in a request to evaluate to this client's rows; None if none is asked for.

    Plain steps by the run's optimizer, for ``fine-tune-epochs``, with no pull; γ isn't divided by their number.
    """
    record, config = read_config(message)
    if not config.fine_tune_epochs:
        return None
    data, device = local_data(config, record, context), device_of(config)
    client, number = integer(record, messages.CLIENT), integer(record, messages.SERVER_ROUND)
    batches = batches_of(config, len(data.rows), client, number, FINE_TUNING, epochs=config.fine_tune_epochs)
    state = state_of(sent_model(message), device)
    model = model_of(record, config, data.dataset, device, state)
    start, fixed = parts_of(model, state)
    x, y, offset = tensors(config, data, device)
    return LocalTask(
        model,
        start,
        x,
        y,
        offset,
        batches,
        scheduled_lr(config.lr, config.lr_schedule, number, config.num_server_rounds),
        rule_of(config),
        fixed=fixed,
        loss=loss_of(config.loss),
        optimizer=optimizer_of(config.optimizer, config.optimizer_options),
        ids=(config.seed, client, number),
        augmentation=augmentation_of(config, batches, client, number, FINE_TUNING),
        draws=FINE_TUNING,
        precision=config.precision,
    )
