"""The site's page of errors, made of the places in the sources where errors are made: it can't say what isn't so.

A message names a key or a file, then what is wrong with it, then, after its last semicolon, what is allowed or helps.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "errors.md"

# What raises, and which of its arguments is the message; path_error puts the path before it, problem the data's name.
RAISE = {
    "ConfigError": (0, ""),
    "DataError": (0, ""),
    "ModelError": (0, ""),
    "OwnPartError": (0, ""),
    "RunError": (0, ""),
    "DivergedError": (0, ""),
    "DeployError": (0, ""),
    "SystemExit": (0, ""),
    "path_error": (1, "data-path = …: "),
    "problem": (0, "… "),
}
ROOMS = {
    "config": "Keys of the run config",
    "data": "Data",
    "federation": "Data",
    "own": "Parts of your own",
    "training": "Parts of your own",
    "models.py": "Parts of your own",
    "server": "Runs",
    "client": "Runs",
    "engine": "Runs",
    "worker": "Runs",
    "api": "Python",
    "sweeps": "Sweeps and comparisons",
    "report": "Sweeps and comparisons",
    "deploy": "Devices",
}
INTRODUCTION = """# Errors

Each message of the app, by where it comes from; `…` stands for your values. An error in the config or the data stops
a run before any client starts, with exit code 1. [config.md](config.md) has what each key accepts, and
[runs.md](runs.md#how-it-ends) how runs end. One table has all
[values that exclude each other](config.md#values-that-exclude-each-other).
This page is made of the sources, where the messages are.
"""


def messages(path: Path) -> Iterator[str]:
    """Yield the messages that a module's errors have, with … for what is only known when they are raised."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "Conflict" and isinstance(values := node.args[0], ast.Dict):
            keys = (
                f"{each.value if isinstance(each, ast.Constant) else 'strategy'} = …" for each in values.keys
            )
            yield f"{' with '.join(keys)}: {_text(node.args[1])}; allowed is {_text(node.args[2])}"
        if node.func.id in RAISE:
            at, before = RAISE[node.func.id]
            if len(node.args) > at and len(text := before + _text(node.args[at])) > len(before) + 12:
                yield re.sub(r"(… ?)+$", "…", text.removeprefix("error: "))


def _text(node: ast.expr) -> str:
    """Return a text that the source has, as far as it stands there."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def parts(message: str) -> tuple[str, str]:
    """Return what is wrong, and what is allowed or helps: what is after the last semicolon, or after "must"."""
    for pattern in (r"^(.*); ([^;]+)$", r"^(.*?)(?:,)? ((?:must|needs|allowed) .*)$"):
        if found := re.match(pattern, message, re.S):
            return found[1], found[2]
    return message, "what the message names"


def page() -> str:
    """Return the page, as Markdown."""
    found: dict[str, set[str]] = {name: set() for name in dict.fromkeys(ROOMS.values())}
    for path in sorted((ROOT / "fedapp").rglob("*.py")):
        room = path.relative_to(ROOT / "fedapp").parts[0]
        found.setdefault(ROOMS.get(room, "Commands"), set()).update(messages(path))
    return "\n".join([INTRODUCTION, *(_section(name, found[name]) for name in found if found[name])])


def _section(name: str, listed: set[str]) -> str:
    rows = [f"| {' | '.join(map(_cell, parts(each)))} |" for each in sorted(listed, key=str.lower)]
    return "\n".join(
        [f"## {name}", "", "| message, and what is wrong | what helps |", "|---|---|", *rows, ""]
    )


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([|*_\[\]`\\])", r"\\\1", plain)
