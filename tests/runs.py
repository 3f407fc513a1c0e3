"""What a run of the app leaves in its folder, read without the app."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

# Metrics that depend on the model's values, and so on the rounding; the others are the same to the last bit.
ROUNDED = (
    "loss",
    "accuracy",
    "train-loss",
    "federated-loss",
    "federated-loss-std",
    "surrogate-loss",
    "surrogate-loss-std",
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]


def count_of(path: Path) -> int:
    """Return how many evaluations a run has written by now."""
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def summary_of(path: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    return dict(json.loads((path / "summary.json").read_text("utf-8")))


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Return the model of a run by the names of its arrays."""
    return safetensors.numpy.load_file(path / "model.safetensors")


def vector_of(path: Path) -> np.ndarray:
    """Return the model of a run as one vector of float64."""
    model = arrays_of(path)
    return np.concatenate([model[name].ravel() for name in sorted(model)]).astype(np.float64)


def close(one: Path, other: Path) -> bool:
    """Tell whether the models of two runs are equal up to rounding: 1e-5 of their norm, −∞ in the same places."""
    found, expected = vector_of(one), vector_of(other)
    finite = np.isfinite(expected)
    difference = np.linalg.norm(found[finite] - expected[finite])
    return bool(
        np.array_equal(found[~finite], expected[~finite])
        and difference <= 1e-5 * np.linalg.norm(expected[finite])
    )


def same_files(one: Path, other: Path, *names: str) -> bool:
    """Tell whether two runs have the same model and the same evaluations (or these files), byte for byte."""
    names = names or ("model.safetensors", "metrics.jsonl")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
