"""The methods to read: the table of `docs/methods.md`, and a text for the terminal."""

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import fields

from fedapp.config.strategy_keys import strategy_class
from strategies import REGISTRY, AsyncConfigBase, FederatedStrategy, SynchronousConfig
from strategies.core.about import About

BEGIN, END = "<!-- made by `fedapp methods --markdown` -->", "<!-- end -->"

_COLUMNS = ("`strategy`: method", "rule", "beside the model", "helps")


def table() -> str:
    """Return a row for each method of the registry, as Markdown between two comments: with rounds, then without."""
    with_rounds = [name for name, kind in REGISTRY.items() if issubclass(kind.Config, SynchronousConfig)]
    without = [name for name in REGISTRY if name not in with_rounds]
    lines = ["**In rounds.** A new model is made when all participants have answered.", *_rows(with_rounds)]
    lines += ["**Asynchronous.** Each rule begins with the time of a new model.", *_rows(without)]
    return "\n".join([BEGIN, "", *lines, END]) + "\n"


def words_of(name: str, *, full: bool) -> str:
    """Return a method as text of 80 columns, in short or in full.

    Raises
    ------
    ConfigError
        If there is no such strategy.
    """
    return _words(name, strategy_class(name), full=full)


def _rows(names: Sequence[str]) -> list[str]:
    """Return the lines of a table between two empty lines."""
    head, *rows = ["| " + " | ".join(row) + " |" for row in (_COLUMNS, *map(_row, names))]
    return ["", head, "|---" * len(_COLUMNS) + "|", *rows, ""]


def _row(name: str) -> tuple[str, ...]:
    kind = REGISTRY[name]
    about = About.of(kind)
    beside = {"needs": about.needs, "sent": about.sent, "kept": about.kept}
    said = (
        f"`{name}`: {about.source}",
        about.rule if issubclass(kind.Config, SynchronousConfig) else f"{about.new_model}: {about.rule}",
        "; ".join(f"{verb}: {what}" for verb, what in beside.items() if what),
        about.helps,
    )
    return tuple(text.replace("|", "\\|") for text in said)


def _words(name: str, kind: type[FederatedStrategy], *, full: bool) -> str:
    about = About.of(kind)
    said = {
        "a new model": about.new_model,
        "rule": about.rule,
        "needs": about.needs,
        "sent": about.sent and f"the model, and {about.sent}",
        "kept": about.kept and f"the model, and {about.kept}",
        "helps": about.helps,
        "own keys": ", ".join(_own_keys(kind)),
        "capabilities": _capabilities(kind) if full else "",
    }
    lines = [about.source, *(f"{label}: {text}" for label, text in said.items() if text)]
    wrapped = [textwrap.wrap(line, 76, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    paper = inspect.getdoc(inspect.getmodule(kind)) if full else None
    tail = ["", *(f"    {line}".rstrip() for line in paper.splitlines())] if paper else []
    return "\n".join([name, *(f"    {line}" for part in wrapped for line in part), *tail]) + "\n"


def _capabilities(kind: type[FederatedStrategy]) -> str:
    """Return what a method needs of its loop, by the names of ``strategies.core.capabilities.Capabilities``."""
    described = kind.capabilities.described().items()
    return ", ".join(name if value is True else f"{name} = {value!r}" for name, value in described)


def _own_keys(kind: type[FederatedStrategy]) -> list[str]:
    """Return the keys of a method beside those that all synchronous, or all asynchronous, methods have."""
    shared = {field.name for common in (SynchronousConfig, AsyncConfigBase) for field in fields(common)}
    return [field.name.replace("_", "-") for field in fields(kind.Config) if field.name not in shared]
