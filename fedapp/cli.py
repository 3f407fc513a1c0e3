"""The command ``fedapp``: what one does around runs."""

import ast
import gc
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fedapp.cache import remembered
from fedapp.manual import keys_in_words, methods_in_words

# The groups of commands in help, in this order; commands of other distributions are RESEARCH.
RUN, LOOK, RESEARCH = "Run", "Look", "Research"
GROUPS = {
    RUN: ("run", "sweep", "deploy"),
    LOOK: ("look", "partition", "predict", "list", "compare", "report", "timeline", "keys", "methods"),
}

# Commands whose modules take seconds to import: ``module:function``, or the Typer of a group of commands.
IMPORTED_WHEN_CALLED = {
    "look": "fedapp.api.look:look",
    "partition": "fedapp.api.look:partition",
    "predict": "fedapp.api.predict:predict",
    "sweep": "fedapp.sweeps.command:sweep",
    "list": "fedapp.sweeps.looking:list_command",
    "compare": "fedapp.sweeps.looking:compare_command",
    "report": "fedapp.sweeps.looking:report_command",
    "timeline": "fedapp.sweeps.looking:timeline_command",
    "runs": "fedapp.sweeps.looking:list_command",  # the former name of list
    "deploy": "fedapp.deploy.cli:app",
}
HIDDEN = ("runs",)


class CommandOfModule(TyperCommand):
    """A command that is imported when it is called; its help in the list of commands is read from its source."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(
            name, help=_docstring(target), hidden=name in HIDDEN, rich_help_panel=_group_of(name)
        )
        self.target = target

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Import the command, and let it read its arguments."""
        return _imported(self.target).make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """The commands of this file, those that are imported when they are called, and those of other distributions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order in which help shows them."""
        grouped = [name for names in GROUPS.values() for name in names]
        return list(dict.fromkeys([*grouped, *IMPORTED_WHEN_CALLED, *_of_others()]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if (command := super().get_command(ctx, cmd_name)) is not None:
            return command
        if target := IMPORTED_WHEN_CALLED.get(cmd_name) or _of_others().get(cmd_name):
            return CommandOfModule(cmd_name, target)
        for name, each in {**IMPORTED_WHEN_CALLED, **_of_others()}.items():  # the nearest is suggested
            self.add_command(CommandOfModule(name, each))
        return None


def _group_of(name: str) -> str:
    return next((group for group, names in GROUPS.items() if name in names), RESEARCH)


@cache
def _of_others() -> dict[str, str]:
    """Return the commands that other distributions add, such as the studies that come with the app's source."""
    entries = sorted(entry_points(group="fedapp.commands"), key=lambda each: each.name)
    # An image may have a distribution's metadata without all of its packages.
    return {entry.name: entry.value for entry in entries if find_spec(entry.module.partition(".")[0])}


def _docstring(target: str) -> str:
    """Return the docstring of a module's function, without importing or parsing it, or else that of the module."""
    module, _, name = target.partition(":")
    source = _source_of(module)
    of_function = re.search(rf'^def {name}\(.*?^    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    found = of_function or re.search(r'^"""(.*?)"""', source, re.DOTALL)
    return inspect.cleandoc(found[1]) if found else ""


def _imported(target: str) -> click.Command:
    module, _, name = target.partition(":")
    found = getattr(import_module(module), name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command()(function)
    return typer.main.get_command(found)


app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_show_locals=False, cls=Commands)


@contextmanager
def _importing() -> Iterator[None]:
    """Keep the garbage collector away from modules, which stay until the end: it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def _config_errors() -> Iterator[None]:
    """End the program with one line after an error of the config."""
    from fedapp.config import ConfigError

    try:
        yield
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedapp {_own_version()}, flwr {version('flwr')}")
        raise typer.Exit


def _own_version() -> str:
    """Return the library's version from its source, as importing it, and Flower with it, takes a second."""
    return next(
        str(ast.literal_eval(each.value))
        for each in ast.parse(_source_of("strategies")).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__version__"
    )


def _source_of(module: str) -> str:
    """Return a module's source without importing it; empty if it has none."""
    spec = find_spec(module)
    return Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""


@app.callback()
def commands(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="say which version this is, and end"
        ),
    ] = False,
) -> None:
    """Federated runs, and the tools around them."""


@app.command(
    "run",
    rich_help_panel=RUN,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def run_command(context: typer.Context) -> None:
    """Simulate a federation: --run-config, --federation-config, --engine, --way; run --help says more."""
    description = "Simulate a federation, with the options of flwr run."

    def text() -> str:
        return str(_command().parser_of("fedapp run", description).format_help())

    if {"-h", "--help"} & set(context.args):
        width = shutil.get_terminal_size().columns
        print(remembered(text, "run", f"{width}"), end="")
        return
    command = _command()
    raise SystemExit(command.run(command.parser_of("fedapp run", description).parse_args(context.args)))


def _command() -> Any:
    """Return the module of ``fedapp run``, which takes a second to import."""
    with _importing():
        from fedapp.api import command
    return command


@app.command(rich_help_panel=LOOK)
def keys(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="keys, parts of names, or topics; none: everyday ones"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="all keys")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="all of them as docs/config.md has them")
    ] = False,
    strategy: Annotated[
        str, typer.Option(help="only the keys that this strategy of your own adds, module:Class")
    ] = "",
) -> None:
    """Every key of the run config, or some: meaning, default, what it accepts, who reads it."""
    if (markdown or strategy or every) and names:
        option = "--markdown" if markdown else "--strategy" if strategy else "--all"
        raise SystemExit(f"error: {option}: is of all its keys, not of {', '.join(names)}")

    if not (markdown or strategy):
        try:
            print(keys_in_words(names or [], every=every), end="")
        except LookupError as error:
            raise SystemExit(f"error: {error.args[0]}") from None
        return
    with _importing():
        from fedapp.config.document import document, document_of
    with _config_errors():
        print(document_of(strategy) if strategy else document(), end="")


@app.command(rich_help_panel=LOOK)
def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="strategies, each in full; none: all, in short"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="the table of docs/methods.md")] = False,
) -> None:
    """Every value of strategy, or some: source, rule, what it needs, sends and keeps, where it helps, own keys."""
    if markdown and names:
        raise SystemExit(f"error: --markdown: is of all methods, not of {', '.join(names)}")

    if not markdown and (known := methods_in_words(names or [])) is not None:
        print(known, end="")
        return
    with _importing():
        from fedapp.config.methods import table, words_of
    with _config_errors():  # an unknown strategy, or one of the user's own
        print(table() if markdown else "\n".join(words_of(name, full=True) for name in names or []), end="")


def main() -> None:
    """Run the command line."""
    if any("utf" not in (stream.encoding or "").lower() for stream in (sys.stdout, sys.stderr)):
        from fedapp.terminal import show_in_ascii

        show_in_ascii()
    app()


if __name__ == "__main__":
    main()
