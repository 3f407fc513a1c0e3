"""The server's side: from a config to a run, and what watches it."""

from fedapp.server.ending import USER_ERRORS
from fedapp.server.experiment import Experiment, build_strategy, prepare, task_config
from fedapp.server.failure import WorseThanGuessingError
from fedapp.server.personal import check_engine
from fedapp.server.record import Entry, Observer
from fedapp.server.run import run
from fedapp.server.run_directory import RunDirectory
from fedapp.server.run_folder import StillGoingOnError

__all__ = [
    "USER_ERRORS",
    "Entry",
    "Experiment",
    "Observer",
    "RunDirectory",
    "StillGoingOnError",
    "WorseThanGuessingError",
    "build_strategy",
    "check_engine",
    "prepare",
    "run",
    "task_config",
]
