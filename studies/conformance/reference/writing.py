"""The problems' files, from the settings and the reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..problem import FOLDER, ROWS, Problem, built
from . import rows
from .settings import SECONDS, SETTINGS, Setting

LR, TOLERANCE = 0.2, 1e-7


def rows_file() -> dict[str, Any]:
    """Return the content of the file of rows."""
    return {
        "source": "60 rows of R. A. Fisher's irises (1936); inputs x are these whole numbers over the divisor, "
        "classes y are 0 to 2",
        "model": "softmax(A x + b), the mean cross-entropy over a client's rows; a model is A (3 × 4), row by row, "
        "and then b (3)",
        "divisor": rows.DIVISOR,
        "initial": rows.INITIAL,
        "clients": rows.CLIENTS,
    }


def importances(weights: str) -> list[float]:
    """Return p_i of the clients: ``samples``, ``uniform`` or ``adjacency``."""
    if weights == "samples":
        sizes = np.array([len(client["y"]) for client in rows.CLIENTS])  # type: ignore[arg-type]
        return (sizes / sizes.sum()).tolist()  # type: ignore[no-any-return]
    if weights == "uniform":
        return [1 / len(rows.CLIENTS)] * len(rows.CLIENTS)
    top = []
    for client in rows.CLIENTS:
        m = np.linalg.svd(np.array(client["x"], dtype=np.float64), full_matrices=False)[2][0]
        top.append(m * np.sign(m.sum()))
    squares = np.sum((np.array(top)[:, None] - np.array(top)[None]) ** 2, axis=2)
    adjacency = -np.log(squares / 4 + np.eye(len(top)))
    return (adjacency.sum(axis=1) / adjacency.sum()).tolist()  # type: ignore[no-any-return]


def problem_file(method: str) -> dict[str, Any]:
    """Return the content of a method's file."""
    setting = SETTINGS[method]
    told: dict[str, Any] = {
        "method": method,
        "number": list(SETTINGS).index(method) + 1,
        "source": setting.source,
        "formula": list(setting.formula),
        "reading": setting.reading,
        "lr": LR,
        "momentum": setting.momentum,
        "local-steps": list(setting.local_steps),
        "importance": importances(setting.weights),
        "parameters": dict(setting.parameters),
        **_who(setting),
        "returns": "global and personal" if setting.personal else "global",
        "tolerance": TOLERANCE,
        "models": [],
    }
    problem: Problem = built(told, rows_file())
    return {**told, "models": [model.tolist() for model in setting.rule(problem)]}


def _who(setting: Setting) -> dict[str, Any]:
    if not setting.asynchronous:
        return {"participants": [list(each) for each in setting.steps]}
    arrivals = [[list(each) for each in group] for group in setting.steps]
    steps = {"task-steps": [list(each) for each in setting.task_steps]} if setting.task_steps else {}
    return {"task-seconds": SECONDS, "arrivals": arrivals, **steps}


def text_of(told: dict[str, Any]) -> str:
    """Return a file's text: a line for each key; for models, clients and formula a line for each entry."""
    lines = []
    for key, value in told.items():
        if key in ("models", "clients", "formula"):
            entries = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in value)
            lines.append(f'"{key}": [\n{entries}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(folder: Path = FOLDER) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROWS).write_text(text_of(rows_file()), encoding="utf-8")
    for method in SETTINGS:
        (folder / f"{method}.json").write_text(text_of(problem_file(method)), encoding="utf-8")
