"""Flower's command line, run as the owner of a deployment; what it prints is read back."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedapp.deploy.files import CONNECTION
from fedapp.deploy.plan import DeployError, environment
from fedapp.deploy.tunnel import way_in

# Flower starts its other commands by name.
BIN = Path(sys.executable).parent


def flwr(out: Path, *arguments: str, seconds: float | None = None) -> str:
    """Run Flower's command line as the owner of a deployment, and return what it prints.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    arguments : str
        The command and its options.
    seconds : float, optional
        Most seconds that the command may take; by default there is no limit.

    Raises
    ------
    DeployError
        If the command fails, or takes too long.
    """
    named = f"flwr {' '.join(arguments[:2])}"
    try:
        with connected(out) as environment:
            done = subprocess.run(
                [str(BIN / "flwr"), *arguments],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
    except subprocess.TimeoutExpired:
        raise DeployError(f"{named}: no answer within {seconds:.0f} s") from None
    if done.returncode:
        raise DeployError(f"{named}: {_one_line(done.stdout)}")
    return done.stdout


def run_flwr(out: Path, arguments: Sequence[str]) -> int:
    """Run Flower's command line as the owner of a deployment, on this terminal, and return its exit code."""
    with connected(out) as environment:
        process = subprocess.Popen([str(BIN / "flwr"), *arguments], env=environment)
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for Flower's process
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, former)


def ask(out: Path, *arguments: str) -> dict[str, Any]:
    """Run one of Flower's commands on the deployment's SuperLink, and return its answer.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached, or refuses, in which case Flower's exit code is 0, too.
    """
    printed = flwr(out, *arguments, CONNECTION, "--format", "json")
    named = f"flwr {' '.join(arguments[:2])}"
    try:
        answer = dict(json.loads(printed[printed.index("{") :]))  # a warning may come first
    except ValueError:
        raise DeployError(f"{named}: {_one_line(printed)}") from None
    if not answer.get("success", False):
        said = str(answer.get("error-message", "")).strip().splitlines()
        raise DeployError(f"{named}: {said[-1] if said else 'refused, and no reason given'}")
    return answer


@contextmanager
def connected(out: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which Flower's commands reach a deployment's SuperLink, within the block."""
    with way_in(out) as home:
        yield {**inherited(environment(str(out))), "FLWR_HOME": str(home)}


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``own`` variables in it, and Flower's commands on its PATH."""
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **own}


def _one_line(printed: str) -> str:
    return " ".join(re.sub("[─│╭╮╰╯]", " ", printed).split())[-500:]  # Flower draws frames around errors
