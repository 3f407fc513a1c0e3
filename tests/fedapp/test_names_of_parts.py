"""Names of what is handed over in Python: no two parts that do something else have the same, and equal ones do."""

import functools
import hashlib
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedapp.api.values import as_values
from fedapp.config import RunConfig
from fedapp.data import load_dataset
from fedapp.federation import model_of
from fedapp.own import file_digest, imported, register
from fedapp.training.losses import loss_of

LEVEL = 1


def closing_over(value: Any) -> Callable[[], Any]:
    def part() -> Any:
        return value

    return part


def by_default(value: Any) -> Callable[..., Any]:
    def part(value: Any = value) -> Any:
        return value

    return part


def by_keyword(value: Any) -> Callable[..., Any]:
    def part(*, value: Any = value) -> Any:
        return value

    return part


def through_another(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    def part() -> Any:
        return inner()

    return part


def of_a_class(value: Any) -> type:
    class Part:
        def method(self) -> Any:
            return value

    return Part


def with_an_attribute(value: Any) -> type:
    class Part:
        attribute = value

    return Part


def wrapped(value: Any) -> Callable[[], Any]:
    return functools.lru_cache(closing_over(value))


def long(at: int) -> np.ndarray:
    array = np.zeros((2000, 8))  # of which repr shows a few corners
    array[at] = 1
    return array


WAYS = (closing_over, by_default, by_keyword, through_another, of_a_class, with_an_attribute, wrapped)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "value",
    [
        lambda one: one,
        lambda one: 1.0 if one else True,  # equal, but not the same
        lambda one: long(1000 if one else 1001),
        lambda one: torch.tensor([1.0, float(one)], dtype=torch.bfloat16),
        lambda one: pd.DataFrame({"a": [1, int(one)]}),
        lambda one: {"a": [1, {2, int(one)}]},
        lambda one: functools.partial(max, int(one)),
        lambda one: np.array(["a", int(one)], dtype=object),
    ],
)
def test_what_a_part_knows_is_in_its_name(way, value):
    name, other, again = (register(way(value(one))) for one in (True, False, True))
    assert name != other
    assert name == again
    assert name.startswith("python:")


def test_lambdas_of_one_line_and_globals(monkeypatch):
    pair = [lambda o, t: (o - t).square().mean(1), lambda o, t: (o - t).abs().mean(1)]
    outputs, targets = torch.tensor([[3.0]]), torch.tensor([[0.0]])
    assert [loss_of(register(each)).rows(outputs, targets).item() for each in pair] == [9.0, 3.0]

    names = []
    for level in (1, 2, 1):
        monkeypatch.setitem(globals(), "LEVEL", level)
        names.append(register(lambda: [LEVEL for _ in range(2)]))
    assert names[0] == names[2] != names[1]


def test_what_is_set_in_a_module_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "settings_of_mine.py").write_text("width, depth = 16, 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = importlib.import_module("settings_of_mine")
    monkeypatch.setitem(globals(), "SETTINGS", settings)
    parts = lambda: settings.width, lambda: [SETTINGS.width for _ in range(2)]  # type: ignore[name-defined]  # noqa: F821
    names = []
    for width, depth in ((16, 2), (64, 2), (16, 3)):
        settings.width, settings.depth = width, depth  # type: ignore[attr-defined]
        names.append([register(part) for part in parts])
    del sys.modules["settings_of_mine"]
    assert names[0] == names[2]  # they don't read the depth
    assert all(one != other for one, other in zip(names[0], names[1], strict=True))


def test_a_script_may_have_any_globals(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("")
    main = ModuleType("script_of_mine")
    main.__dict__.update(__file__=str(script), __spec__=None, cached={"a": 1})
    monkeypatch.setitem(sys.modules, "script_of_mine", main)
    assert file_digest(script) == hashlib.sha256(b"").hexdigest()


def test_a_class_of_a_notebook_is_data(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)

    class Rows:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
            return np.full(3, row, np.float32), row % 2

    Rows.__module__ = "__main__"
    assert len(load_dataset(register(Rows)).y) == 10


def test_two_models_of_one_text_are_two():
    widths = []
    for width in (16, 64):

        def net(num_outputs: int, width: int = width) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.Linear(width, num_outputs))

        config = RunConfig.load(as_values({"model": net}))
        widths.append(len(next(model_of(config, "vector", (3,), 2).parameters())))
    assert widths == [16, 64]


def test_two_functions_of_data_of_one_text_are_two_on_disk():
    sizes = []
    for size in (10, 50):

        def load(size: int = size) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((size, 3)), np.arange(size) % 2

        sizes.append(len(load_dataset(register(load)).y))
    assert sizes == [10, 50]


def test_what_cant_be_compared_has_a_name_of_its_own():
    one, other = (closing_over(threading.Lock()) for _ in range(2))
    name = register(one)
    assert register(one) == name != register(other)
    assert imported("dataset", name) is one


@pytest.mark.thorough
def test_another_process_gives_the_same_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
from dataclasses import dataclass
import numpy as np, torch
from torch import nn
from fedapp.own import register
from strategies import FedAvg, parameter

WORDS, ROWS = {"a", "b", "c"}, np.arange(5)

class Net(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.layer = nn.LazyLinear(len(WORDS))

class Mine(FedAvg):
    @dataclass(frozen=True)
    class Config(FedAvg.Config):
        half: float = parameter(0.5, gt=0)

def load():
    return torch.tensor(ROWS), [word in ("x", "y") or word in {"v", "w"} for word in WORDS]

print(*map(register, (Net, Mine, load)))
""")
    found = [
        subprocess.run(
            [sys.executable, str(script)],
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert [name.rpartition("_")[0] for name in found[0]] == ["python:Net", "python:Mine", "python:load"]
