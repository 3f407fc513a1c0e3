"""The ClientApp: a message in, local work, a message out. The same on Ray, under ``flwr run`` and on a device.

Everything a client needs comes with the message, apart from what only the node knows: its partition
(``partition-id`` and ``num-partitions`` in the node config) or a ``data-path`` of its own.
"""

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedapp import federation
from fedapp.config import ConfigError, RunConfig
from fedapp.data import DataError, Dataset
from fedapp.data.message import client_message, private_message
from fedapp.models import ModelError
from fedapp.privacy import is_simulated, privately
from fedapp.training import work
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.evaluation import evaluate as score
from fedapp.training.rule import LocalRule
from fedapp.training.schedule import scheduled_lr
from fedapp.training.task import LocalTask
from fedapp.training.trainer import train_one
from fedapp.training.vectors import Parameters
from strategies import messages, streams
from strategies.arrays import pack, unpack

log = logging.getLogger("flwr.fedapp")

# Error code of a reply that says why a client can't take part (Flower's own codes are below 100).
CANNOT_TAKE_PART = 100

# What the user can mend; told to the server in an error reply.
USER_ERRORS = (ConfigError, DataError, ModelError)

# What torch would use by itself: on Ray, the worker's share of the cores.
ALL_THREADS = torch.get_num_threads()

Handler = Callable[[Message, Context], Message]

app = ClientApp()
_tensors = federation.TensorCache()


@dataclass(frozen=True)
class ClientData:
    """A client's rows of a dataset; ``partition_id`` is None where the node's own file is all its data."""

    dataset: Dataset
    rows: np.ndarray
    partition_id: int | None
    num_partitions: int | None
    key: tuple[object, ...]


def answers_errors(handler: Handler) -> Handler:
    """Turn an error that the user can mend into an error reply with its text, without a traceback."""

    @functools.wraps(handler)
    def wrapped(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except USER_ERRORS as error:
            log.warning("This client can't take part: %s", error)
            return Message(Error(CANNOT_TAKE_PART, str(error)), reply_to=message)

    return wrapped


@app.query("describe")
@answers_errors
def describe(message: Message, context: Context) -> Message:
    """Say who this client is: partition, number of examples, label histogram, GPU or not."""
    record, config = _read_config(message)
    data = _client_data(config, record, context)
    metrics = MetricRecord(
        {messages.NUM_EXAMPLES: len(data.rows), "gpu": int(_device(config).type == "cuda")}
    )
    if config.dp == "none":
        labels = data.dataset.y[data.rows]
        metrics["label-histogram"] = np.bincount(labels, minlength=data.dataset.num_classes).tolist()
    if data.partition_id is not None:
        metrics[messages.PARTITION_ID] = data.partition_id
    if (number := _node_number(context, "num-partitions")) is not None:
        metrics[messages.NUM_PARTITIONS] = number
    return Message(RecordDict({messages.METRICS: metrics}), reply_to=message)


@app.query("message")
@answers_errors
def graph_message(message: Message, context: Context) -> Message:
    """Send the principal direction of this client's data, which places it in the graph of clients.

    With ``message-epsilon`` > 0 it is made (ε, δ)-differentially private first. A node with data of its own draws
    the noise from the operating system; one of a simulation from the run's seed, so that the run can be repeated.
    """
    record, config = _read_config(message)
    data = _client_data(config, record, context)
    direction = client_message(data.dataset, data.rows, config.normalize)
    if config.message_epsilon:
        client = _integer(record, messages.CLIENT)
        rng = (
            streams.generator(config.seed, "message-noise", client)
            if is_simulated(context)
            else streams.unpredictable()
        )
        direction = private_message(direction, config.message_epsilon, config.message_delta, 1.0, rng)
    arrays = ArrayRecord({messages.MESSAGE_RECORD: Array(direction)})
    return Message(RecordDict({messages.MESSAGE_RECORD: arrays}), reply_to=message)


@app.train()
@answers_errors
def train_model(message: Message, context: Context) -> Message:
    """Train the model in the message on this client's data."""
    task = local_task(message, context)
    return trained_reply(message, context, task, *train_one(task))


def own_tensors(config: RunConfig, data: ClientData, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return a client's inputs, labels, and where its rows begin in them: tensors of its own."""
    return *_tensors.get(data.key, data.dataset, data.rows, config.normalize, device), 0


def to_state(arrays: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
    """Copy a record into tensors on ``device``.

    A copy, not a view: torch's own memory is aligned alike in every process, and sums depend on alignment.
    """
    return {name: torch.tensor(unpack(array), device=device) for name, array in arrays.items()}


def local_task(
    message: Message,
    context: Context,
    tensors: Callable[[RunConfig, ClientData, torch.device], tuple[Tensor, Tensor, int]] = own_tensors,
    state_of: Callable[[ArrayRecord, torch.device], dict[str, Tensor]] = to_state,
) -> LocalTask:
    """Read a training request; an engine brings its own way to the client's ``tensors`` and the model's state."""
    record, config = _read_config(message)
    data, device = _client_data(config, record, context), _device(config)
    client, task = _integer(record, messages.CLIENT), _integer(record, messages.TASK)
    epochs, steps = work.of_client(config.step_heterogeneity, config.local_epochs, config.local_steps, client)
    batches = plan_batches(
        len(data.rows),
        batch_size=config.batch_size,
        epochs=epochs,
        steps=steps,
        rng=task_rng(config.seed, client, task),
    )
    lr = scheduled_lr(
        config.lr, config.lr_schedule, _integer(record, messages.SERVER_ROUND), config.num_server_rounds
    )
    rule = LocalRule(
        alpha=float(record.get(messages.ALPHA, 0.0)),  # type: ignore[arg-type]
        beta=float(record.get(messages.BETA, 1.0)),  # type: ignore[arg-type]
        momentum=config.momentum,
        l2=config.l2,
        clip_norm=config.clip_norm,
    )
    x, y, offset = tensors(config, data, device)
    model = _model(record, config, data, device)

    def beside(name: str) -> Parameters | None:
        arrays = messages.arrays_of(message, name)
        return None if arrays is None else _parameters(model, state_of(arrays, device))

    return LocalTask(
        model,
        _parameters(model, state_of(_sent(message), device)),
        x,
        y,
        offset,
        batches,
        lr / len(batches) if config.normalize_steps else lr,
        rule,
        beside(messages.NEIGHBOURS),
        beside(messages.CONSTANT),
    )


def trained_reply(
    message: Message, context: Context, task: LocalTask, trained: dict[str, np.ndarray], loss: float
) -> Message:
    """Answer a training request with the trained model; what isn't trained goes back as it came."""
    metrics = MetricRecord(
        {
            messages.NUM_EXAMPLES: task.batches.num_examples,
            messages.NUM_STEPS: len(task.batches),
            messages.TRAIN_LOSS: loss,
        }
    )
    arrays = ArrayRecord(
        {name: pack(trained[name]) if name in trained else array for name, array in _sent(message).items()}
    )
    reply = Message(RecordDict({messages.ARRAYS: arrays, messages.METRICS: metrics}), reply_to=message)
    return privately(message, context, reply)


@app.evaluate()
@answers_errors
def evaluate_model(message: Message, context: Context) -> Message:
    """Score the model in the message on this client's data."""
    record, config = _read_config(message)
    data, device = _client_data(config, record, context), _device(config)
    x, y = _tensors.get(data.key, data.dataset, data.rows, config.normalize, device)
    state = to_state(_sent(message), device)
    result = score(_model(record, config, data, device), state, x, y)
    metrics = MetricRecord(
        {messages.NUM_EXAMPLES: len(data.rows), "loss": result.loss, "accuracy": result.accuracy}
    )
    return Message(RecordDict({messages.METRICS: metrics}), reply_to=message)


def _sent(message: Message) -> ArrayRecord:
    arrays: ArrayRecord = message.content[messages.ARRAYS]  # type: ignore[assignment]
    return arrays


def _parameters(model: nn.Module, state: dict[str, Tensor]) -> Parameters:
    """Return what is trained of a model's state."""
    return {name: state[name] for name in _parameter_names(model)}


@functools.lru_cache(maxsize=8)
def _parameter_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters())


def to_arrays(state: dict[str, Tensor]) -> ArrayRecord:
    """Turn tensors into a record by state-dict name."""
    return ArrayRecord({name: pack(value.detach().cpu().numpy()) for name, value in state.items()})


def _read_config(message: Message) -> tuple[ConfigRecord, RunConfig]:
    record: ConfigRecord = message.content[messages.CONFIG]  # type: ignore[assignment]
    values = dict(record.items())
    config = _config_of(tuple([values.get(key) for key in RunConfig.key_names()]))
    torch.set_num_threads(config.client_threads or ALL_THREADS)
    return record, config


@functools.lru_cache(maxsize=8)
def _config_of(values: tuple[object, ...]) -> RunConfig:
    """Check a config once, not with every message."""
    given = zip(RunConfig.key_names(), values, strict=True)
    return RunConfig.received({key: value for key, value in given if value is not None})


def _model(record: ConfigRecord, config: RunConfig, data: ClientData, device: torch.device) -> nn.Module:
    classes = _integer(record, federation.NUM_CLASSES)  # the server's: a device may lack the last ones
    return federation.model_of(config, data.dataset.kind, data.dataset.input_shape, classes, device)


def _client_data(config: RunConfig, record: ConfigRecord, context: Context) -> ClientData:
    """Find this client's rows: its share of a dataset that all know, or everything in a file of its own."""
    own_path = context.node_config.get("data-path")
    path = str(own_path) if own_path is not None else config.data_path
    partition_id, num_partitions = (
        _node_number(context, "partition-id"),
        _node_number(context, "num-partitions"),
    )
    dataset = federation.schema_of(record).fit(federation.dataset_of(config, num_partitions or 0, path))
    if partition_id is not None and num_partitions:
        partition = federation.partition_of(config, num_partitions, path)
        if not 0 <= partition_id < num_partitions:
            raise DataError(f"partition-id = {partition_id}: must be 0 to {num_partitions - 1}")
        rows = partition.client(partition_id)
    elif own_path is not None:
        rows = np.arange(dataset.num_train)
    else:
        raise DataError(
            "node-config: needs partition-id and num-partitions, or a data-path of the node's own"
        )
    if len(rows) == 0:
        raise DataError(f"client {partition_id}: it has no training examples")
    key = (config.dataset, path, partition_id, num_partitions, federation.division_of(config))
    return ClientData(dataset, rows, partition_id, num_partitions, key)


def _node_number(context: Context, key: str) -> int | None:
    value = context.node_config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DataError(f"{key} = {value!r} in the node config: must be a whole number")
    return value


def _integer(record: ConfigRecord, key: str) -> int:
    return int(record[key])  # type: ignore[arg-type]


@functools.cache
def _limit_gpu_share() -> None:
    """Keep to the fraction of the GPU's memory that Ray gave this worker."""
    if "ray" in sys.modules:
        import ray

        share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
        if 0 < share < 1:
            torch.cuda.set_per_process_memory_fraction(share)


def _device(config: RunConfig) -> torch.device:
    if config.client_device == "cpu" or (config.client_device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("client-device = 'cuda': this client has no GPU; allowed are auto, cpu")
    _limit_gpu_share()
    torch.backends.cudnn.deterministic = True
    return torch.device("cuda")
