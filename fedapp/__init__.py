"""Federated learning under heterogeneous data and heterogeneous speed: the Flower app.

From Python: ``fedapp.run``, ``fedapp.sweep``, ``fedapp.load`` and ``fedapp.compare``, and the errors that they raise
(docs/python.md). They are imported at their first use, as a process of a ClientApp needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedapp.api.interface import compare, load, run, sweep
    from fedapp.api.results import ComparedRuns, RunResult, SweepResult
    from fedapp.config import ConfigError
    from fedapp.data import DataError
    from fedapp.models import ModelError
    from fedapp.own import OwnPartError

__all__ = [
    "ComparedRuns",
    "ConfigError",
    "DataError",
    "ModelError",
    "OwnPartError",
    "RunResult",
    "SweepResult",
    "compare",
    "load",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        homes = ("api.interface", "api.results", "config", "data", "models", "own")
        modules = (import_module(f"fedapp.{home}") for home in homes)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
