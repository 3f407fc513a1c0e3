"""The shell completes commands, options and what follows them."""

import os
import subprocess
import sys

import pytest
import typer.main
from click.shell_completion import ShellComplete

from fedapp.cli import app
from fedapp.sweeps.axes import completed_axis
from tests.selection import only


def completed(words: str) -> list[str]:
    """Return what may follow some words of the command line, of which the last is incomplete."""
    _, *before, last = words.split(" ")
    command = typer.main.get_command(app)
    return [item.value for item in ShellComplete(command, {}, "fedapp", "").get_completions(before, last)]


@pytest.mark.parametrize("shell", only(["bash", "zsh", "fish"], 1))
def test_commands_are_completed_as_a_shell_asks(shell):
    words = "fedapp sw"
    variables = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    code = "import sys; sys.argv = ['fedapp']; from fedapp.cli import app; app(prog_name='fedapp')"
    environment = {**os.environ, "_FEDAPP_COMPLETE": f"complete_{shell}", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "sweep" in done.stdout
    assert "compare" not in done.stdout


def test_options_are_completed():
    assert {"--tune", "--tuning-seeds"} <= set(completed("fedapp sweep --tu"))


def test_a_hidden_command_is_not_offered():
    assert "runs" not in completed("fedapp ru")
    assert "run" in completed("fedapp ru")


def test_keys_and_their_values_are_completed_as_axes():
    assert {"lr=", "lr-schedule="} <= set(completed("fedapp sweep lr"))
    assert completed_axis("num-c") == ["num-clients="]
    assert {"strategy=fedavg", "strategy=fedprox"} <= set(completed_axis("strategy=fed"))
    assert completed_axis("strategy=fedavg,fedp") == ["strategy=fedavg,fedprox"]
    assert completed_axis("clock=") == ["clock=auto", "clock=virtual", "clock=wall"]
    assert completed_axis("lr=") == completed_axis("unknown=") == []


def test_engines_are_completed():
    assert completed("fedapp sweep lr=1 --engine vec") == ["vectorized"]
