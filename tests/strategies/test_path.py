"""docs/architecture.md: the functions from a method's file to Σ d_i Δ_i are those that a round and an arrival run."""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import strategies
from strategies import AsynchronousStrategy, FedAvg, FedBuff

ROOT = Path(strategies.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
MOST_FUNCTIONS, MOST_FILES, MOST_LINES = 22, 11, 480
SUM = ("updates/aggregation.py", "WeightedSum._accumulate")

Function = tuple[str, str]  # file and qualified name


def listed() -> list[Function]:
    """Return the functions of the page's table; a name without a class has the class before it."""
    found = []
    for file, names in re.findall(r"^\| `(\w+/\w+\.py)` \| (`.*`) \|$", PAGE, re.M):
        kind = ""
        for name in re.findall(r"`([\w.]+)`", names):
            kind, _, method = name.rpartition(".") if "." in name else (kind, "", name)
            found.append((file, f"{kind}.{method}"))
    return found


def spans() -> dict[Function, int]:
    """Return the lines of each method of the library."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        for kind in ast.parse(path.read_text("utf-8")).body:
            for each in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef):
                    assert each.end_lineno is not None
                    found[name, f"{kind.name}.{each.name}"] = each.end_lineno - each.lineno + 1
    return found


def function_of(frame: FrameType) -> Function | None:
    path = Path(frame.f_code.co_filename)
    if ROOT not in path.parents or frame.f_code.co_name.startswith("<"):
        return None
    return path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname


@contextmanager
def traced(called: list[Function], stacks: dict[Function, list[Function]]) -> Iterator[None]:
    """Note the library's functions that are called, and the first stack of each, outermost first."""
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (function := function_of(frame)) is None:
            return
        called.append(function)
        if function not in stacks:
            stack, current = list[Function | None](), frame.f_back
            stack.append(function)
            while current is not None:
                stack.append(function_of(current))
                current = current.f_back
            stacks[function] = [each for each in reversed(stack) if each is not None]

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.fixture
def trace(
    federation, model, train_config
) -> Callable[..., tuple[set[Function], dict[Function, list[Function]]]]:
    def run(strategy: Any) -> tuple[set[Function], dict[Function, list[Function]]]:
        called, stacks = list[Function](), dict[Function, list[Function]]()
        grid = federation()
        with traced(called, stacks):
            strategy.start(grid, model(1.0), num_rounds=2, train_config=train_config())
        return set(called), stacks

    return run


def test_the_list_is_short():
    functions, lines = listed(), spans()
    assert len(functions) == len(set(functions)) <= MOST_FUNCTIONS
    assert len({file for file, _ in functions} | {"methods/fedavg.py"}) <= MOST_FILES
    own = len((ROOT / "methods" / "fedavg.py").read_text("utf-8").splitlines())
    assert own + sum(lines[function] for function in functions) <= MOST_LINES


def test_a_round_of_fedavg_runs_the_functions_of_the_list_and_no_others_lead_to_the_sum(trace):
    called, stacks = trace(FedAvg(fraction_evaluate=0.0))
    functions = listed()
    assert set(functions) <= called
    assert stacks[SUM][-1] == SUM
    assert set(stacks[SUM]) <= set(functions)
    assert set(stacks["rounds/selection.py", "Selection.draw"]) <= set(functions)


def test_an_arrival_takes_the_way_of_the_page(trace):
    chain = re.search(r"^`Asynch\S+` →[^\n]*\n?(?:`[^\n]*\n)*", PAGE, re.M)
    assert chain is not None
    _, stacks = trace(FedBuff(fraction_evaluate=0.0, buffer_size=2))
    assert [name for _, name in stacks[SUM]] == re.findall(r"`([\w.]+)`", chain.group())


def test_the_line_that_decides_a_late_clients_weight_is_the_pages():
    quoted = re.search(r"by `AsynchronousStrategy.weigh`:\n\n    (.*)\n", PAGE)
    assert quoted is not None
    assert quoted.group(1) in inspect.getsource(AsynchronousStrategy.weigh)


def test_the_page_and_the_method_name_functions_that_exist():
    known = {name for _, name in spans()}
    named = re.findall(r"`(?:strategies\.[a-z_.]+\.)?([A-Z]\w+\._?[a-z]\w+)`", PAGE)
    named += re.findall(
        r"``strategies\.[a-z_.]+\.([A-Z]\w+\._?[a-z]\w+)``", inspect.getsource(sys.modules[FedAvg.__module__])
    )
    assert SUM[1] in named
    assert set(named) <= known
