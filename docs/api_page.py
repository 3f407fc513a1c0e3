"""The tables of docs/api.md, made of the sources: ``python docs/api_page.py`` writes them anew.

The page's directives, from which the site has all details, stand in comments below the table of their names.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

# The table of some names, and the comment with their directives.
BLOCK = re.compile(r"(?:\| name \|(?:[^\n]+\n)+\n)?<!--\n(?P<directives>:::.*?)\n-->", re.S)
DIRECTIVE = re.compile(r"^::: (?P<name>\S+)(?P<options>(?:\n {4}.*)*)", re.M)
ATTRIBUTE = re.compile(r"^(\w+) : .*\n((?:[ ]+.*\n?)+)", re.M)
MEMBERS = re.compile(r"members: \[(.*)\]")

_LONGEST, _MOST = 24, 10  # characters of a default value, and parameters, that are shown; of more, …


def page(text: str) -> str:
    """Return the page with its tables as the sources have them."""
    return BLOCK.sub(lambda block: f"{_table(block['directives'])}<!--\n{block['directives']}\n-->", text)


def for_the_site(text: str) -> str:
    """Return the page with its directives out of their comments."""
    return BLOCK.sub(lambda block: block[0].replace("<!--\n", "").removesuffix("-->"), text)


def _table(directives: str) -> str:
    rows = [row for each in DIRECTIVE.finditer(directives) for row in _rows(each["name"], each["options"])]
    return "\n".join(["| name | what it is or does |", "|---|---|", *rows]) + "\n\n" if rows else ""


def _rows(name: str, options: str) -> Iterator[str]:
    if "show_root_heading: false" in options:
        return
    found = _found(name)
    yield _row(found.name, found)
    members = MEMBERS.search(options)
    for member in members[1].split(", ") if members else ():
        described = _attributes(found).get(member, "")
        yield _row(f"{found.name}.{member}", _aliased(found.all_members[member]), described)


@cache
def _sources() -> griffe.GriffeLoader:
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in ("strategies", "fedapp"):
        loader.load(package)
    loader.resolve_aliases()
    return loader


def _found(name: str) -> griffe.Object:
    package, _, rest = name.partition(".")
    return _aliased(_sources().modules_collection[package][rest])


def _aliased(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _attributes(found: griffe.Object) -> dict[str, str]:
    """Return what a class's docstring says of its attributes, by name."""
    text = found.docstring.value.partition("Attributes\n----------\n")[2] if found.docstring else ""
    return {name: " ".join(said.split()) for name, said in ATTRIBUTE.findall(text)}


def _row(name: str, found: griffe.Object, described: str = "") -> str:
    """Return a row of a table: a name with its signature, and the first sentence of its docstring."""
    text = found.docstring.value if found.docstring else described
    first = " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return f"| `{name}{_signature(found)}` | {re.split(r'(?<=[a-z0-9)`])[.] (?=[A-Z])', first)[0]} |"


def _signature(found: griffe.Object) -> str:
    """Return the parameters by name, with defaults; of a config those that it adds to its base classes'."""
    if not isinstance(found, griffe.Class | griffe.Function) or "property" in found.labels:
        return ""
    own = set(found.members) if found.name.endswith("Config") else None
    texts: list[str] = []
    for each in found.parameters:
        if each.name == "self" or (own is not None and each.name not in own):
            continue
        if (
            each.kind is griffe.ParameterKind.keyword_only
            and own is None
            and not any(t[0] == "*" for t in texts)
        ):
            texts.append("*")
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
        given = "" if each.default is None or each.kind in stars else f"={_default(str(each.default))}"
        texts.append(f"{stars.get(each.kind, '')}{each.name}{given}")
    of_method = len(texts) == 2 and texts[0] == "*arguments"  # the fields of its Config
    if of_method or (not texts and found.is_class):
        return ""
    return f"({', '.join(texts if len(texts) <= _MOST else [*texts[:_MOST], '…'])})"


def _default(value: str) -> str:
    """Return a default value; of a field made by ``parameter(…)`` its first argument."""
    value = re.sub(r"^parameter\(([^,)]+).*", r"\1", value, flags=re.S)
    return value if len(value) <= _LONGEST else "…"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
