"""Whether numbers of runs can stand beside each other: measured on the same rows, and by the same function."""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedapp.report.differences import DATA_PATH, descriptions, differing, has_own_data
from fedapp.report.files import LOSS, functions_of
from fedapp.report.recorded import RecordedRun
from strategies.flower.higher_is_better import measured_name

# Keys that decide on which rows a run is tested, those that most often differ first.
_KEYS = (
    *(
        "dataset",
        DATA_PATH,
        "test-on",
        "test-fraction",
        "missing",
        "partitioner",
        "num-clients",
        "min-samples",
    ),
    *(
        "class-imbalance",
        "data-imbalance",
        "dirichlet-alpha",
        "classes-per-client",
        "similarity",
        "group-column",
    ),
    "seed",
)
_NAMED = 2  # keys that are named where runs were tested on different rows


def unlike_runs(settings: Sequence[Sequence[RecordedRun]], key: str) -> str:
    """Return why a metric of some settings, each one run or several, can't be compared; "" if it can.

    They were tested on different rows, or the metric is another function in each. Settings are compared by the runs
    that have a seed in common, as the seed may decide on the rows.
    """
    runs = [run for setting in settings for run in setting]
    if not all(_tested_alike(*pair) for pair in pairwise(settings)):
        varied = [name for name in _KEYS if name in differing([run.config for run in runs])]
        told = [_values(name, runs) for name in varied if name != "seed" or len(varied) == 1]
        return f"tested on different rows{': ' * bool(told)}{'; '.join(told[:_NAMED])}"
    functions = {_function(key, run) for run in runs}
    if len(functions) > 1:
        return f"{key} is not one function: {', '.join(sorted(functions))}"
    return ""


def num_shared_rows(runs: Sequence[RecordedRun]) -> int:
    """Return how many test rows all runs share; 0 if runs have others, or theirs aren't on record."""
    if len({_rows(run) for run in runs}) != 1:
        return 0
    numbers = _test_indices(runs[0])
    return 0 if numbers is None else len(numbers)


def _values(key: str, runs: Iterable[RecordedRun]) -> str:
    texts = dict.fromkeys(descriptions([run.config for run in runs], [key]))
    return " and ".join(text if "=" in text else f"{key}={text}" for text in texts)


def _function(key: str, run: RecordedRun) -> str:
    """Return the name of the function of a metric in a run's config; the metric's own name for one of no config."""
    name = measured_name(key)
    if name == LOSS:
        return str(run.config.get(LOSS, LOSS))
    return functions_of(run.config.get("metrics", "")).get(name, name)


def _tested_alike(one: Sequence[RecordedRun], other: Sequence[RecordedRun]) -> bool:
    """Return True if the runs of two settings were tested on the same rows, seed by seed where they share seeds."""
    first, second = ({run.config.get("seed"): _rows(run) for run in setting} for setting in (one, other))
    shared = first.keys() & second.keys()
    if shared:
        return all(_same(first[seed], second[seed]) for seed in shared)
    return _same(next(iter(first.values())), next(iter(second.values())))


def _same(one: tuple[Hashable, Hashable, str], other: tuple[Hashable, Hashable, str]) -> bool:
    if one[2] and other[2]:
        return (one[0], one[2]) == (other[0], other[2])
    return one[:2] == other[:2]  # the rows of one aren't on record


def _rows(run: RecordedRun) -> tuple[Hashable, Hashable, str]:
    """Return the name of a run's data, the keys of its test rows, and a digest of their numbers, "" if unknown."""
    config = run.config
    dataset = str(config.get("dataset", ""))
    data = (dataset, config.get(DATA_PATH) if has_own_data(dataset) else "")
    numbers = _test_indices(run)
    digest = "" if numbers is None else hashlib.sha256(numbers.tobytes()).hexdigest()
    return data, (config.get("test-on"), config.get("test-fraction")), digest


def _test_indices(run: RecordedRun) -> NDArray[np.int64] | None:
    """Return the numbers of a run's test rows, in order; None if they aren't on record."""
    try:
        with np.load(run.path / "partition.npz", allow_pickle=False) as stored:
            return np.sort(stored["test_indices"]).astype(np.int64)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
