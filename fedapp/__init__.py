"""Federated learning under heterogeneous data and heterogeneous speed: the Flower app.

From Python: ``fedapp.run``, ``fedapp.sweep``, ``fedapp.load`` and ``fedapp.compare``, and the errors that they raise
(docs/python.md). They are imported at their first use, as a process of a ClientApp needs none of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedapp.api.interface import (
        ComparedRuns,
        ConfigError,
        DataError,
        ModelError,
        OwnPartError,
        RunResult,
        SweepResult,
        compare,
        load,
        run,
        sweep,
    )

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
        from fedapp.api import interface

        return getattr(interface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
