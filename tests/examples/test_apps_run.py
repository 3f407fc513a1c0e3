"""The apps of examples/ as users start them: ``flwr run`` on a simulation, and on a SuperLink with two SuperNodes."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import REGISTRY
from strategies.flower import messages
from tests.end_to_end.processes import (
    ROOT,
    command_of,
    environment_of,
    home_of_processes,
    processes_of,
    toml_pairs,
    wait_until,
)
from tests.examples import apps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = sorted(apps.LEAST)


def environment(home: Path) -> dict[str, str]:
    """Let the apps import the library of this tree, which they take as installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment_of(home) | {"PYTHONPATH": os.pathsep.join(paths)}


def flwr_run(app: Path, home: Path, *arguments: str, config: Mapping[str, Any] = {}, **more: str) -> str:
    """Run an app to its end; return what it printed."""
    command = command_of("flwr", "run", str(app), *arguments, "--stream")
    if config:
        command += ["--run-config", toml_pairs(config)]
    done = subprocess.run(
        command,
        cwd=home,
        env=environment(home) | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def statuses(home: Path, *where: str, **more: str) -> list[str]:
    """Return what Flower says of the runs of a SuperLink: all of this file's, not only the last twenty."""
    done = subprocess.run(
        command_of("flwr", "list", *where, "--limit", "100", "--format", "json"),
        cwd=home,
        env=environment(home) | more,
        text=True,
        capture_output=True,
        timeout=120,
    )
    return [run["status"] for run in json.loads(done.stdout)["runs"]]


class Link:
    """An insecure SuperLink on loopback and two SuperNodes, for run after run."""

    def __init__(self, home: Path, ports: list[int]) -> None:
        self.home, self.ports = home, ports
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{ports[0]}"\ninsecure = true\n'
        )
        self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(ports[0]))
        wait_until(self._answers, "the SuperLink didn't start")
        for partition in range(2):
            self._start(
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{ports[0]}",
                "--port",
                str(ports[1 + partition]),
                "--node-config",
                f"partition-id={partition} num-partitions=2",
            )

    def _start(self, *arguments: str) -> None:
        with (self.home / f"{arguments[0]}-{len(processes_of(self.home))}.log").open("wb") as log:
            subprocess.Popen(
                command_of(*arguments), cwd=self.home, env=environment(self.home), stdout=log, stderr=log
            )

    def run(self, app: Path) -> tuple[str, str]:
        """Run an app for three rounds; return what it printed and what Flower says of the run."""
        before = Counter(statuses(self.home, "here"))
        output = flwr_run(app, self.home, "here", config={"num-server-rounds": 3})
        (status,) = (Counter(statuses(self.home, "here")) - before).elements()
        return output, status

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[0]}/health").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def link(tmp_path_factory, unused_ports):
    with home_of_processes(tmp_path_factory.mktemp("link") / "flower") as home:
        yield Link(home, unused_ports(3))


@pytest.mark.parametrize("name", NAMES)
def test_in_a_simulation(name, tmp_path, free_port):
    apps.needs(name)
    port = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port)}
    with home_of_processes(tmp_path / "flower") as home:
        federation = "num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
        output = flwr_run(apps.EXAMPLES / name, home, "--federation-config", federation, **port)
        assert statuses(home, **port) == ["finished:completed"], output
    assert ("clock: virtual time, in a simulation" in output) == (name in apps.ASYNCHRONOUS)
    assert apps.accuracy_in(output) >= apps.LEAST[name]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_superlink(name, link):
    apps.needs(name)
    output, status = link.run(apps.EXAMPLES / name)
    assert status == "finished:completed", output
    assert ("clock: real time, on devices" in output) == (name in apps.ASYNCHRONOUS)
    assert "Accuracy on the clients" in output, output
    assert "can't take part" not in output


# Of docs/flower.md, apps with strategies that aren't their own: each strategy once.
CELLS = [
    ("own_scheme", "fedavg"),
    ("numpy_spectral", "fedprox"),
    ("own_scheme", "async-fedavg"),
    ("sklearn_fedprox", "fedfix"),
    ("sklearn_fedprox", "fednova"),
    ("own_scheme", "scaffold"),
    ("own_scheme", "feddyn"),
    ("own_scheme", "mifa"),
    ("sklearn_fedprox", "ditto"),
    ("pytorch_fedfix", "fedamp"),
    ("pytorch_fedfix", "fedbuff"),
    ("pytorch_fedfix", "spectral"),
    ("own_scheme", "fedasync"),
    ("own_scheme", "delay-adaptive"),
    ("pytorch_fedfix", "ringmaster"),
    ("sklearn_fedprox", "rennala"),
    ("own_scheme", "ca2fl"),
    ("numpy_spectral", "ace"),
    ("own_scheme", "fadas"),
]
CELLS += [("own_scheme", name) for name in REGISTRY if name not in {strategy for _, strategy in CELLS}]


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_another_strategy_on_a_superlink(name, strategy, link, tmp_path):
    output, status = link.run(apps.with_strategy(name, strategy, tmp_path))
    assert f"{REGISTRY[strategy].__name__}: " in output
    if strategy.endswith("spectral"):
        assert status == "finished:failed", output
        assert "RunError: no client sent a direction to place it in the graph" in output
        return
    assert status == "finished:completed", output
    assert "Accuracy on the clients" in output, output
    silent = strategy in ("fedprox", "feddyn", "fedamp")
    assert output.count("clients don't say that their local steps go by proximal-mu") == silent


MODS = "unpack_arrays, compresses, cache_frozen_parameters"
HEAD, BODY = (messages.num_bytes(ArrayRecord([np.zeros(size)])) for size in (5, 1000))


def bytes_in(output: str) -> list[list[int]]:
    """Return the bytes of each round, down and up, that an app has printed."""
    found = re.findall(r"Bytes (\[\[.*\]\])", output)
    assert found, output
    return json.loads(found[-1])


@pytest.mark.parametrize("mods", [MODS, ""], ids=["keeps", "stock"])
def test_what_is_trained_travels_on_a_superlink(mods, link, tmp_path):
    output, status = link.run(apps.with_frozen_body(tmp_path, mods))
    assert status == "finished:completed", output
    whole, kept = [2 * (HEAD + BODY)] * 2, [2 * HEAD] * 2
    assert bytes_in(output) == ([[whole[0], kept[1]], kept, kept] if mods else [whole] * 3)
    assert output.count("doesn't keep the arrays that aren't trained") == (not mods)


def test_what_is_trained_travels_in_a_simulation(tmp_path, free_port):
    port = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port)}
    app, config = apps.with_frozen_body(tmp_path, MODS), {"num-server-rounds": 3}
    with home_of_processes(tmp_path / "flower") as home:
        federation = "num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
        output = flwr_run(app, home, "--federation-config", federation, config=config, **port)
    assert bytes_in(output) == [[3 * (HEAD + BODY), 3 * HEAD], *[[3 * HEAD] * 2] * 2]


def test_the_cells_are_other_than_the_apps_own():
    own = {"pytorch_fedfix": "fedfix", "sklearn_fedprox": "fedprox"}
    own |= dict.fromkeys(("numpy_spectral", "pytorch_spectral"), "spectral")
    assert not set(CELLS) & set(own.items())
