"""Where data are, and the one error type for everything that a user can get wrong about data."""

from collections.abc import Sequence
from pathlib import Path

from fedapp.cache import default_cache_dir

PREFIX = "hf:"
"""What names of Hugging Face data begin with: hf:NAME, hf:NAME:CONFIG, or hf:PATH of a folder."""


def handed_over_dir() -> Path:
    """Return the folder of arrays that were handed over in Python."""
    return default_cache_dir() / "arrays"


class DataError(ValueError):
    """A dataset or a partition can't be had as configured.

    The message is one line: the run-config key, its value, and what is allowed.
    """


def path_error(path: str | Path, problem: str) -> DataError:
    """Return the error for a problem with the file or folder at `data-path`."""
    return DataError(f"{data_at(path)}: {problem}")


def data_at(path: str | Path) -> str:
    """Return what data at `data-path` are called in an error: arrays from Python, which are put there, `dataset`."""
    return "dataset" if Path(path).parent == handed_over_dir() else f"data-path = {str(path)!r}"


def expanded(path: str) -> Path:
    """Return the path at `data-path`, with a home folder in place of ~; DataError if there can't be such a path."""
    try:
        found = Path(path).expanduser()
        found.exists()  # a name may be too long
    except (OSError, RuntimeError, ValueError) as error:
        raise path_error(
            path[:200], f"can't be found ({getattr(error, 'strerror', None) or error})"
        ) from None
    return found


def one_line(error: BaseException) -> str:
    """Return the type and the first line of a foreign error, for quoting inside a message."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__


_NAMED = 8  # most names that a message lists


def brief(names: Sequence[str]) -> str:
    """Return names in quotes with commas between them: the first eight, and the number of all if there are more."""
    listed = ", ".join(repr(name) for name in names[:_NAMED])
    return listed if len(names) <= _NAMED else f"{listed}, … ({len(names)})"
