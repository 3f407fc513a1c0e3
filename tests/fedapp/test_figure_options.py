"""Every command that draws has the options of figures: commands that draw are found by their source."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import IMPORTED_WHEN_CALLED, _imported, _of_others, app
from fedapp.report.style import SCREEN, FigureStyle, current_style

SAVED = ("fedapp.report.figures", "save")  # the one place that writes a figure
RUNS_OWN = ("fedapp.server.journal", "draw_figures")  # a run's own figures, which are those of a screen
FLAGS = {"--format", "--width", "--font", "--font-size"}

ROOT = Path(__file__).parents[2]

Place = tuple[str, str]


def source_of(name: str) -> Path:
    """Return the file of a module of ours; its folder if there is none."""
    path = ROOT.joinpath(*name.split("."))
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), path)


@cache
def module(name: str) -> ast.Module:
    return ast.parse(source_of(name).read_text("utf-8"))


@cache
def is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("fedapp", "studies") and source_of(name).is_file()


def imports(node: ast.AST) -> dict[str, Place]:
    """Return what names that are imported anywhere in a piece of source stand for."""
    return {
        alias.asname or alias.name: (each.module, alias.name)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom) and each.module and is_ours(each.module)
        for alias in each.names
    }


@cache
def definitions(name: str) -> dict[str, ast.AST]:
    """Return functions, classes and values of a module, by name."""
    found: dict[str, ast.AST] = {}
    for node in module(name).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


@cache
def used_by(place: Place) -> frozenset[Place]:
    """Return what a function, class or value of ours names: functions of modules as ``module.name``, too."""
    own, name = place
    if name not in definitions(own):
        return frozenset({imports(module(own))[name]} if name in imports(module(own)) else ())
    node, known = definitions(own)[name], imports(module(own))
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found = {(own, each) for each in used & definitions(own).keys()}
    found |= {known[each] for each in used & known.keys()}
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):  # a module of a package, by its name
            found |= set(functions_of(str(getattr(each.values[0], "value", "")).rstrip(".")))
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in known:
            of = ".".join(known[each.value.id])
            found |= {(of, each.attr)} if is_ours(of) else set()
    return frozenset(found)


def functions_of(package: str) -> list[Place]:
    """Return all functions of the modules of a package of ours; [] if a text isn't the name of one."""
    if not re.fullmatch(r"(fedapp|studies)(\.\w+)+", package) or not is_ours(package):
        return []
    modules = [f"{package}.{path.stem}" for path in source_of(package).parent.glob("*.py")]
    return [(each, name) for each in modules for name in definitions(each)]


def draws(command: str) -> bool:
    own, name = command.split(":")
    # The commands of a group aren't named by its object.
    left = [(own, each) for each in definitions(own)] if name == "app" else [(own, name)]
    seen = {RUNS_OWN, *left}
    while left:
        new = used_by(left.pop()) - seen
        seen |= new
        left += new
    return SAVED in seen


OF_CLI = [str(getattr(each.callback, "__name__", "")) for each in app.registered_commands]
COMMANDS = {**IMPORTED_WHEN_CALLED, **_of_others(), **{name: f"fedapp.cli:{name}" for name in OF_CLI}}
DRAWING = [name for name, place in COMMANDS.items() if draws(place)]


def test_commands_that_draw_are_found_by_their_source():
    found = {"look", "partition", "sweep", "compare", "report", "timeline"}
    assert found <= set(DRAWING)
    assert set(_of_others()) & {"bounds", "graph", "map", "attacks", "reproduce"} <= set(DRAWING)
    assert not {"predict", "list", "runs", "deploy", "keys", "methods"} & set(DRAWING)


@pytest.mark.parametrize("name", DRAWING)
def test_a_command_that_draws_has_the_options_of_figures(name):
    options = {flag for each in _imported(COMMANDS[name]).params for flag in each.opts}
    assert options >= FLAGS


def test_a_partition_is_drawn_for_a_paper(tmp_path):
    path = tmp_path / "out.png"
    options = ["--format", "svg,pdf", "--width", "one-column", "--font", "serif", "--font-size", "7"]
    done = CliRunner().invoke(app, ["partition", "dataset=digits", "-o", str(path), *options])
    assert done.exit_code == 0, done.output
    assert done.output.split()[-3:] == [str(path.with_suffix(end)) for end in (".png", ".svg", ".pdf")]
    with Image.open(path) as image:
        assert image.width == round(300 * 3.5)
    drawn = path.with_suffix(".svg").read_text()
    assert "font-size: 7px; font-family: 'DejaVu Serif'" in drawn  # of ticks and title
    size = re.search(r"font-size: ([\d.]+)px[^>]*>digits, label-quantity-skew: 20 clients", drawn)
    assert size is not None
    assert float(size[1]) == pytest.approx(9 * 7 / 9, abs=0.01)
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_a_figure_that_is_not_drawn_has_no_style():
    done = CliRunner().invoke(app, ["look", "digits", "--format", "pdf"])
    assert done.output.strip() == "error: --format pdf: goes with --out, beside which the picture is"
    done = CliRunner().invoke(app, ["partition", "dataset=digits", "--format", "gif"])
    assert done.output.strip() == (
        "error: --format gif: 'gif' is no format of figures; allowed are pdf, svg, png"
    )


def test_the_style_of_figures_ends_with_the_command():
    style = FigureStyle.read("pdf", "one-column")
    with style.applied():
        assert current_style() == style
        with ThreadPoolExecutor() as pool:
            assert pool.submit(current_style).result() == SCREEN
    assert current_style() == SCREEN
