"""What a message asks of a client."""

import functools

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedapp.config import RunConfig
from strategies.flower import messages

# What torch would use by itself: on Ray, the worker's share of the cores.
ALL_THREADS = torch.get_num_threads()


def read_config(message: Message) -> tuple[ConfigRecord, RunConfig]:
    """Return a message's config record and the run config in it, and let torch use the threads it says."""
    record = record_of(message)
    config = config_of(record)
    use_threads(config)
    return record, config


def record_of(message: Message) -> ConfigRecord:
    """Return a message's config record."""
    record: ConfigRecord = message.content[messages.CONFIG]  # type: ignore[assignment]
    return record


def use_threads(config: RunConfig) -> None:
    """Let torch use the threads that a run's config gives its clients."""
    torch.set_num_threads(config.client_threads or ALL_THREADS)


def config_of(record: ConfigRecord) -> RunConfig:
    """Return the run config in a config record."""
    values = dict(record.items())
    return _config_of(tuple([values.get(key) for key in RunConfig.key_names()]))


@functools.lru_cache(maxsize=8)
def _config_of(values: tuple[object, ...]) -> RunConfig:
    """Check a config once, not with every message."""
    given = zip(RunConfig.key_names(), values, strict=True)
    return RunConfig.received({key: value for key, value in given if value is not None})


def sent_model(message: Message) -> ArrayRecord:
    """Return the model in a message."""
    arrays: ArrayRecord = message.content[messages.ARRAYS]  # type: ignore[assignment]
    return arrays


def integer(record: ConfigRecord, key: str) -> int:
    """Return a whole number of a config record."""
    return int(record[key])  # type: ignore[arg-type]
