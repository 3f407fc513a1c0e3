"""What is shipped stays readable: no long file, no long function, and no two classes of one name."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("strategies", "custom", "fedapp", "research", "benchmarks")
SHIPPED = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")] + [
    ROOT / "run_simulation.py"
]
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 60


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in SHIPPED}


def test_no_file_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in SHIPPED}
    assert {path: number for path, number in lines.items() if number > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_long(modules: dict[str, ast.Module]) -> None:
    lines = {
        f"{path}: {node.name}": (node.end_lineno or 0) - node.lineno + 1  # its docstring counts
        for path, module in modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: number for name, number in lines.items() if number > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_class_has_a_name_of_its_own(modules: dict[str, ast.Module]) -> None:
    # A method's Config, and what begins with an underscore, belong to the class or the module around them.
    names = Counter(
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, number in names.items() if number > 1] == []
