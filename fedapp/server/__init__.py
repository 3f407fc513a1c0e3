"""The server's side: from a config to a run, and what watches it."""

from fedapp.config import ConfigError
from fedapp.data import DataError
from fedapp.models import ModelError
from fedapp.server.experiment import Experiment, build_strategy, prepare, task_config
from fedapp.server.record import Entry, Observer
from fedapp.server.run import run
from fedapp.server.run_directory import RunDirectory
from strategies import RunError

# What the user can mend by changing the config or the data.
USER_ERRORS = (ConfigError, DataError, ModelError, RunError)

__all__ = [
    "USER_ERRORS",
    "Entry",
    "Experiment",
    "Observer",
    "RunDirectory",
    "build_strategy",
    "prepare",
    "run",
    "task_config",
]
