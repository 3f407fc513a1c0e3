"""A training request as a task for ``fedapp.training``, and its answer."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedapp import federation
from fedapp.client.own_layers import initial_own, keep_own, own_names, own_state
from fedapp.client.privacy import privately
from fedapp.client.request import (
    LocalData,
    device_of,
    integer,
    local_data,
    read_config,
    record_of,
    sent_model,
)
from fedapp.config import RunConfig
from fedapp.data import Dataset
from fedapp.training import work
from fedapp.training.augment import Augmentation
from fedapp.training.batches import SENT, Batches, Draws, batches_of_many, plan_batches, plan_many
from fedapp.training.layers import dense_layers
from fedapp.training.losses import loss_of
from fedapp.training.optimizer import SGD, optimizer_of
from fedapp.training.rule import LocalRule, Parameters, path
from fedapp.training.state import names_of
from fedapp.training.task import LocalTask, TaskBlock
from fedapp.training.work import scheduled_lr
from strategies.flower import messages
from strategies.flower.arrays import pack

# Inputs (n, ...), labels (n,), and where a client's rows begin in them.
ClientTensors = tuple[Tensor, Tensor, int]
TensorsOf = Callable[[RunConfig, LocalData, torch.device], ClientTensors]
TestsOf = Callable[[RunConfig, LocalData, torch.device], tuple[Tensor, Tensor]]
DataOf = Callable[[RunConfig, ConfigRecord, Context], LocalData]
StateOf = Callable[[ArrayRecord, torch.device], dict[str, Tensor]]


_tensors = federation.TensorCache()


def forget() -> None:
    """Drop the data and models that this process has kept for its clients."""
    _tensors.clear()
    for cached in (names_of, dense_layers):
        cached.cache_clear()
    federation.forget()


def own_tensors(config: RunConfig, data: LocalData, device: torch.device) -> ClientTensors:
    """Return a client's inputs and labels, in tensors of its own."""
    return *_tensors.get(data.key, data.dataset, data.rows, config.normalize, device), 0


def tested_tensors(config: RunConfig, data: LocalData, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of the rows that a client is tested on."""
    assert data.test_rows is not None
    return _tensors.get((*data.key, "test"), data.dataset, data.test_rows, config.normalize, device)


def model_of(
    record: ConfigRecord,
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    sent: Collection[str] | None = None,
) -> nn.Module:
    """Return the model that a client trains; the arrays that aren't sent are the same as the server's.

    Raises
    ------
    FrozenMissingError
        If this process's are others, and the server's aren't here.
    """
    outputs = federation.schema_of(record).num_outputs  # the server's: a device may lack the last classes
    model = federation.model_of(config, dataset.kind, dataset.form, outputs, device)
    if sent is None or (digest := record.get(messages.FROZEN)) is None:
        return model
    return federation.agreeing(config.model, model, sent, str(digest))


def local_task(
    message: Message,
    context: Context,
    tensors: TensorsOf = own_tensors,
    state_of: StateOf = federation.to_state,
    data_of: DataOf = local_data,
) -> LocalTask:
    """Read a training request; an engine brings its own ways to the client's data, tensors and the model's state."""
    record, config = read_config(message)
    data, device = data_of(config, record, context), device_of(config)
    client, task = integer(record, messages.CLIENT), integer(record, messages.TASK)
    state = state_of(sent_model(message), device)
    own = own_state(context, record, device, task) if config.personal else {}
    terms = TaskTerms.of(record, config, data.dataset, state, device, own)

    def beside(name: str) -> Parameters | None:
        if (arrays := messages.arrays_of(message, name)) is None:
            return None
        # A method that the server puts together has nothing for the arrays of a client's own.
        nothing = {
            each: torch.zeros_like(terms.start[each]) for each in own_names(record) if each in terms.start
        }
        return parts_of(terms.model, {**nothing, **state_of(arrays, device)})[0]

    return terms.task(
        tensors(config, data, device),
        len(data.rows),
        client,
        task,
        part=part_of(record),
        steps=int(record.get(messages.STEPS, 0)),  # type: ignore[arg-type]
        neighbours=beside(messages.NEIGHBOURS),
        constant=beside(messages.CONSTANT),
    )


@dataclass(frozen=True, eq=False)
class TaskTerms:
    """What the tasks of clients have in common that are sent the same model.

    Attributes
    ----------
    start, fixed : mapping of str to Tensor
        What is trained of the model that is sent, and what isn't.
    lr : float
        γ of the round.
    """

    config: RunConfig
    model: nn.Module
    start: Parameters
    fixed: Parameters
    lr: float
    rule: LocalRule

    @classmethod
    def of(
        cls,
        record: ConfigRecord,
        config: RunConfig,
        dataset: Dataset,
        state: Mapping[str, Tensor],
        device: torch.device,
        own: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> "TaskTerms":
        """Return the terms of a request with its model and dataset; ``own`` are the arrays that the client keeps."""
        server_round = integer(record, messages.SERVER_ROUND)
        lr = config.lr
        if config.lr_schedule != "constant":
            lr = scheduled_lr(lr, config.lr_schedule, server_round, config.num_server_rounds)
        rule = rule_of(
            config,
            alpha=float(record.get(messages.ALPHA, 0.0)),  # type: ignore[arg-type]
            beta=float(record.get(messages.BETA, 1.0)),  # type: ignore[arg-type]
        )
        model = model_of(record, config, dataset, device, state)
        if config.personal:
            state = {**state, **initial_own(record, model, device), **own}
        return cls(config, model, *parts_of(model, state), lr, rule)

    def task(
        self,
        tensors: ClientTensors,
        rows: int,
        client: int,
        task: int,
        *,
        part: float = 1.0,
        steps: int = 0,
        neighbours: Parameters | None = None,
        constant: Parameters | None = None,
    ) -> LocalTask:
        """Return a client's task, with so many rows."""
        batches = batches_of(self.config, rows, client, task, part=part, steps=steps)
        return self._with(batches, tensors, client, task, neighbours, constant)

    def block(
        self,
        tensors: tuple[Tensor, Tensor],
        offsets: NDArray[np.int64],
        rows: NDArray[np.int64],
        clients: Sequence[int],
        task: int,
        fractions: NDArray[np.float64],
    ) -> TaskBlock:
        """Return the tasks of some clients, who have nothing beside the model: each ``task``'s, by column, (G,)."""
        config, rngs = self.config, batches_of_many(self.config.seed, clients, task)
        usual = config.step_heterogeneity, config.local_epochs, config.local_steps
        epochs, steps = work.of_clients(*usual, clients, fractions)
        batches = plan_many(rows, batch_size=config.batch_size, epochs=epochs, steps=steps, rngs=rngs)
        lr = self.lr / batches.steps if config.normalize_steps else np.full(len(rows), self.lr)

        def one(place: int) -> LocalTask:
            where = *tensors, int(offsets[place])
            return self._with(batches.of(place), where, clients[place], task)

        return TaskBlock(one, batches, offsets, lr)

    def _with(
        self,
        batches: Batches,
        tensors: ClientTensors,
        client: int,
        task: int,
        neighbours: Parameters | None = None,
        constant: Parameters | None = None,
    ) -> LocalTask:
        config, (x, y, offset) = self.config, tensors
        return LocalTask(
            self.model,
            self.start,
            x,
            y,
            offset,
            batches,
            self.lr / len(batches) if config.normalize_steps else self.lr,
            self.rule,
            neighbours,
            constant,
            self.fixed,
            loss_of(config.loss),
            optimizer_of(config.optimizer, config.optimizer_options),
            (config.seed, client, task),
            augmentation_of(config, batches, client, task),
            precision=config.precision,
        )


def part_of(record: ConfigRecord) -> float:
    """Return the part, in (0, 1], of the client's usual work that a request asks for."""
    return float(record.get(messages.PART, 1.0))  # type: ignore[arg-type]


def batches_of(
    config: RunConfig,
    rows: int,
    client: int,
    task: int,
    draws: Draws = SENT,
    *,
    epochs: int = 0,
    part: float = 1.0,
    steps: int = 0,
) -> Batches:
    """Draw a task's batches: for ``epochs`` or ``steps`` if given, else for ``part`` of the config's local work."""
    if not epochs and not steps:
        epochs, steps = config.local_epochs, config.local_steps
        if config.step_heterogeneity != "none":
            epochs, steps = work.of_client(config.step_heterogeneity, epochs, steps, client)
        if part != 1:
            epochs, steps = work.in_part(epochs, part), work.in_part(steps, part)
    rng = draws.batches(config.seed, client, task)
    return plan_batches(rows, batch_size=config.batch_size, epochs=epochs, steps=steps, rng=rng)


def augmentation_of(
    config: RunConfig, batches: Batches, client: int, task: int, draws: Draws = SENT
) -> Augmentation | None:
    """Draw how the images of a task's batches are changed; None if they aren't."""
    if config.augment == "none":
        return None
    ids = config.seed, client, task
    return Augmentation.drawn(config.augment, len(batches), batches.indices.shape[1], *ids, draws)


def rule_of(config: RunConfig, alpha: float = 0.0, beta: float = 1.0) -> LocalRule:
    """Return the rule of the local step, with the momentum, L2 and clipping norm of the run's config."""
    return LocalRule(alpha, beta, momentum=config.momentum, l2=config.l2, clip_norm=config.clip_norm)


def trained_reply(
    message: Message, context: Context, task: LocalTask, trained: dict[str, np.ndarray], loss: float
) -> Message:
    """Answer a training request with the trained model; arrays that aren't trained go back unchanged.

    The arrays that this client keeps for itself aren't sent.
    """
    record, config = read_config(message)
    if config.personal:
        keep_own(context, record, task.model, trained)
    names = names_of(task.model)
    arrays = trained_model(message, trained)
    content = RecordDict({messages.ARRAYS: arrays, messages.METRICS: task_metrics(task, loss)})
    if applied := _applied(message, task):
        content[messages.APPLIED] = ConfigRecord(applied)
    reply = Message(content, reply_to=message)
    if record.get("dp", "none") == "none":
        return reply
    stays = tuple(escape(name) for name in names.fixed if name in arrays)
    return privately(message, context, reply, stays)


def trained_model(message: Message, trained: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return the model in a message with its trained arrays replaced; the rest, like frozen weights, as it came."""
    arrays = ArrayRecord()
    for name, sent in sent_model(message).items():
        own = trained.get(name)
        arrays[name] = sent if own is None else pack(own)
    return arrays


def task_metrics(task: LocalTask, loss: float) -> MetricRecord:
    """Return the metrics of a task: its numbers of examples and steps, and the training loss if an example counts."""
    metrics = MetricRecord(
        {messages.NUM_EXAMPLES: task.batches.num_examples, messages.NUM_STEPS: len(task.batches)}
    )
    if not math.isnan(loss):
        metrics[messages.TRAIN_LOSS] = loss
    return metrics


def _applied(message: Message, task: LocalTask) -> dict[str, Any]:
    """Return the fields and records of a request that the local step used, other than those of every task."""
    record = record_of(message)
    known = (messages.ALPHA, messages.BETA, messages.PERSONAL, messages.PART, messages.STEPS)
    applied = {key: record[key] for key in known if key in record}
    if messages.PATH in record and task.optimizer == SGD:
        applied[messages.PATH] = path(task.rule, task.lr, len(task.batches))
    beside = [key for key in (messages.NEIGHBOURS, messages.CONSTANT) if key in message.content]
    return {**applied, **({messages.RECORDS: beside} if beside else {})}


def parts_of(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[Parameters, Parameters]:
    """Return the parts of the state that was sent: the trained arrays, and the fixed ones."""
    names = names_of(model)
    fixed = {name: state[name] for name in names.fixed if name in state}
    return {name: state[name] for name in names.trained}, fixed
