"""tests/arrows.txt, which docs/architecture.md links to, is what the imports are."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("strategies", "custom", "fedapp", "studies")
MOST_FILES = 30  # in a folder
PAGE, WORDS = 65, 600  # lines and words of a page


@cache
def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def room_of(module: str) -> str | None:
    """Name a module's room: a package, or a folder or a file directly in the app or the studies."""
    first, *rest = module.split(".")
    if first == "run_simulation":
        return first
    if first not in PACKAGES:
        return None
    inside = ROOT / first / rest[0] if rest else ROOT
    if first in ("fedapp", "studies") and rest and (inside.is_dir() or inside.with_suffix(".py").is_file()):
        return f"{first}.{rest[0]}"
    return first


@cache
def imported() -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = defaultdict(set)
    files = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "tests" not in path.relative_to(ROOT).parts
    ]
    for path in [*files, ROOT / "run_simulation.py"]:
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert room
        for node in parsed(path):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                known = room_of(node.module) == node.module  # the room itself, or something in it
                modules = [f"{node.module}.{name.name}" for name in node.names] if known else [node.module]
            elif isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            arrows[room] |= {found for module in modules if (found := room_of(module)) and found != room}
    return arrows


def listed() -> dict[str, set[str]]:
    lines = [line.split("→") for line in (ROOT / "tests" / "arrows.txt").read_text("utf-8").splitlines()]
    return {room.strip(): {name.strip() for name in names.split(",")} for room, names in lines}


def test_every_arrow_is_listed_and_every_listed_one_is_there():
    arrows = imported()
    assert {room: names for room, names in arrows.items() if names} == listed()


def test_no_arrow_leads_back_up():
    up = {"strategies": PACKAGES[1:], "fedapp": ("studies",), "custom": PACKAGES[2:]}
    arrows = imported()
    for room, names in arrows.items():
        assert not {name.split(".")[0] for name in names} & set(up.get(room.split(".")[0], ()))
    TopologicalSorter(arrows).prepare()  # raises on a cycle


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_files(package):
    """Imports inside functions and for type checkers count, too."""
    paths = [path for path in (ROOT / package).rglob("*.py") if "tests" not in path.relative_to(ROOT).parts]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    arrows: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in parsed(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{each.name}" for each in node.names} & names.keys()
                found |= inside or ({node.module} & names.keys())
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names} & names.keys()
        arrows[name] = found - {name}
    TopologicalSorter(arrows).prepare()  # raises on a cycle


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_large(package):
    folders = [path for path in (ROOT / package).rglob("*") if path.is_dir()]
    files = {str(path): [each for each in path.glob("*.py") if each.stem != "__init__"] for path in folders}
    assert {path for path, inside in files.items() if len(inside) > MOST_FILES} == set()


def test_where_the_page_says_that_something_is_decided_it_is():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`(?:(\w+)\.)?(\w+)` \(`([\w/]+\.py)`\)", page)
    assert len(named) >= 10
    for owner, name, file in named:
        path = next(each / file for each in (ROOT, ROOT / "strategies") if (each / file).is_file())
        defined = {
            f"{node.name}.{each.name}" if isinstance(node, ast.ClassDef) else node.name
            for node in parsed(path)
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            for each in (node.body if isinstance(node, ast.ClassDef) else [node])
            if isinstance(each, ast.FunctionDef)
        }
        defined |= {node.name for node in parsed(path) if isinstance(node, ast.ClassDef)}
        defined |= {node.id for node in parsed(path) if isinstance(node, ast.Name)}
        assert (f"{owner}.{name}" if owner else name) in defined, f"{owner}.{name} in {file}"


def test_the_page_is_two_pages():
    lines = (ROOT / "docs" / "architecture.md").read_text("utf-8").splitlines()
    assert len(lines) <= 2 * PAGE
    assert len(" ".join(lines).split()) <= 2 * WORDS
