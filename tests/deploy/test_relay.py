"""Two regions of real SuperLinks and devices below a root: the flat run's model, and relays that die."""

import os
import signal
import socket
import struct
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message

from fedapp import server
from fedapp.config import RunConfig
from fedapp.deploy import runs
from fedapp.deploy.local import LocalDeployment
from fedapp.engine.run import make_grid
from strategies.flower import messages
from strategies.flower.grids import GridAround
from tests.deploy.command import deploy
from tests.runs import count_of, lines_of, vector_of
from tests.waiting import wait_until

DEVICES = 2  # of each region
CONFIG = {"safeguards": "off", "model": "logistic", "strategy": "fedprox", "min-clients": 2, "figures": False}


class WithoutSouth(GridAround):
    """A simulation in which the devices of the second region fail in some rounds."""

    engine = "sequential"

    def __init__(self, rounds) -> None:
        self.grid, self.rounds, self.lost = make_grid("sequential", 2 * DEVICES), rounds, {}

    def push_messages(self, requests):
        ids = []
        for request in requests:
            (number,) = self.grid.push_messages([request])
            config = request.content[messages.CONFIG]
            is_lost = request.metadata.message_type == messages.TRAIN and config[messages.CLIENT] >= DEVICES
            if is_lost and config[messages.SERVER_ROUND] in self.rounds:
                self.lost[number] = Message(Error(0, "lost"), reply_to=request)
            ids.append(number)
        return ids

    def pull_messages(self, message_ids=None, *, reply_to_message_ids=None):
        replies = self.grid.pull_messages(message_ids or reply_to_message_ids)
        return [self.lost.get(reply.metadata.reply_to_message_id, reply) for reply in replies]


def flat(folder, name, rounds, lost=()):
    """Return the model of a run of all devices without tiers, whose second half fails in some rounds."""
    place = {"results-dir": str(folder), "run-name": name, "num-server-rounds": rounds}
    experiment = server.prepare(RunConfig.load(CONFIG | place), 2 * DEVICES)
    return vector_of(server.run(WithoutSouth(lost), experiment).path)


class Region:
    """A region's deployment, and the command that keeps its run going."""

    def __init__(self, folder: Path, number: int, app: Path) -> None:
        parts = range(number * DEVICES, (number + 1) * DEVICES)
        configs = [{"partition-id": part, "num-partitions": 2 * DEVICES} for part in parts]
        self.deployment = LocalDeployment(folder, configs, workers=True)
        self.socket, self.app = folder / "superlink" / "superexec" / "relay.sock", app
        self.log, self.command = folder / "relay.log", None

    def start(self) -> None:
        self.deployment.start()
        self.keep()

    def keep(self) -> None:
        """Start the command."""
        arguments = ["deploy", "relay", str(self.deployment.folder), "--app", str(self.app)]
        arguments += ["-c", 'safeguards="off" round-timeout=240.0']
        with self.log.open("ab") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "fedapp.cli", *arguments], stdout=log, stderr=log, cwd=self.app
            )

    def end(self) -> None:
        """End the command, which stops the run, and everything else."""
        if self.command is not None and self.command.poll() is None:
            self.command.terminate()
            self.command.wait(60)
        self.deployment.stop()

    @property
    def process(self) -> int:
        """The number of the process that the region's run is in: of who listens on its socket."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


@pytest.fixture
def made(tmp_path):
    """The folder of a deployment for two relays; nobody listens on its server's port."""
    out = tmp_path / "root"
    relays = ("--relay", "north", "--relay", "south=/srv/s.sock")
    assert deploy("init", out, "--host", "127.0.0.1", "--port", 1, *relays).exit_code == 0
    return out


def test_a_relay_is_a_supernode_that_knows_the_socket_of_its_region(made) -> None:
    assert deploy("add", made, "west", "--relay").exit_code == 0
    for name, path in (
        ("north", "/opt/fedapp/superlink/superexec/relay.sock"),
        ("south", "/srv/s.sock"),
        ("west", "/opt/fedapp/superlink/superexec/relay.sock"),
    ):
        assert tomllib.loads((made / name / "node.toml").read_text())["relay"] == path
        units = {path.name for path in (made / name).glob("*.service")}
        assert units == {f"fedapp-{name}.service", f"fedapp-{name}-superexec.service"}  # no worker
        assert "worker" not in (made / name / f"fedapp-{name}-superexec.service").read_text()
        assert "worker" not in (made / name / "start.sh").read_text().lower()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("add", "oslo=/a"),
            "--relay and --device: a deployment has relays alone or devices alone",
        ),
        (
            ("relay", "-c", 'tiers="regions:2"'),
            "tiers = 'regions:2': the clients of a region (relay) are SuperNodes; allowed are none, and relays",
        ),
        (
            ("run", "-c", 'strategy="scaffold"'),
            "tiers = 'relays' with strategy = 'scaffold': the method asks single clients for more than a model",
        ),
        (
            ("run", "-c", 'aggregation-rule="median"'),
            "a region answers with a mean, in which single updates can't be told apart",
        ),
        (
            ("run", "-c", 'normalize="standardize"'),
            "a relay isn't asked for the sums of single devices' inputs",
        ),
    ],
)
def test_what_relays_cannot_do_is_one_line_before_anything_starts(arguments, text, made) -> None:
    command, *others = arguments
    result = deploy(command, made, *others)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert text in result.output
    assert result.output.count("\n") == 1


def test_a_region_may_have_relays_of_smaller_regions(made) -> None:
    config = runs.region_config(made, ["edge-rounds=2"])
    assert config == {
        "relay": "/opt/fedapp/superlink/superexec/relay.sock",
        "min-clients": 2,
        "tiers": "relays",
        "edge-rounds": 2,
    }


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ("num-server-rounds=3", "num-server-rounds = 3: the run of a region (relay) doesn't read it"),
        ('participation="uniform"', "participation = 'uniform': the run of a region (relay) doesn't read it"),
        ('relay=""', "relay = '': must be the path of a socket on the region's server"),
    ],
)
def test_a_regions_run_takes_the_keys_that_it_reads(pairs, text, tmp_path) -> None:
    out = tmp_path / "north"
    assert deploy("init", out, "--host", "127.0.0.1", "--port", 1, "--device", "oslo=/a").exit_code == 0
    result = deploy("relay", out, "-c", pairs)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {text}")


def test_an_orchestrator_has_no_files_for_relays(tmp_path) -> None:
    result = deploy("init", tmp_path / "d", "--host", "h", "--relay", "north", "--for", "kubernetes")
    assert "--for kubernetes and --relay: relays have files for systemd, and start.sh, alone" in result.output


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_two_regions_make_the_flat_runs_model_and_a_relay_that_dies_counts_once(repository, tmp_path):
    with ExitStack() as stack:
        regions = [
            Region(tmp_path / name, number, repository) for number, name in enumerate(("north", "south"))
        ]
        root = LocalDeployment(tmp_path / "root", [{"relay": str(region.socket)} for region in regions])
        for region in regions:
            stack.callback(region.end)
            region.start()
        stack.callback(root.stop)
        root.start()
        wait_until(lambda: all(region.socket.exists() for region in regions), "no run of a region", 900)

        def run(name, rounds):
            place = {"results-dir": str(tmp_path), "run-name": name, "num-server-rounds": rounds}
            own = {"tiers": "relays", "round-timeout": 300.0, "clock": "wall"}
            with (tmp_path / f"{name}.log").open("wb") as log:
                return root.start_run(repository, CONFIG | own | place, stdout=log, stderr=log)

        def participants():
            return [line["participants"] for line in lines_of(tmp_path / "killed")[1:]]

        def wait_for(number, since, otherwise):
            wait_until(lambda: number in participants()[since:], otherwise, 900)
            return len(participants())

        assert run("tiered", 2).wait(900) == 0
        np.testing.assert_allclose(
            vector_of(tmp_path / "tiered"), flat(tmp_path, "flat", 2), rtol=0, atol=1e-6
        )
        assert [line["participants"] for line in lines_of(tmp_path / "tiered")[1:]] == [2, 2]

        # The command that keeps a region's run dies: the run goes on, and the next command keeps it.
        regions[0].command.kill()
        regions[0].command.wait()
        regions[0].keep()
        wait_until(lambda: "of the region goes already" in regions[0].log.read_text(), "another run", 300)

        stopped = run("killed", 500)
        wait_until(lambda: count_of(tmp_path / "killed") > 2, "no progress", 900)
        # The region's run dies: its relay fails, until the run is started again.
        os.kill(regions[1].process, signal.SIGKILL)
        lost = wait_for(1, 2, "the killed region takes part")
        back = wait_for(2, lost, "the region doesn't come back")
        assert regions[1].log.read_text().count("of the region is started") == 2
        # The relay's SuperNode dies, perhaps in the middle of a task, which its region gives up.
        root.kill("device-1")
        lost = wait_for(1, back, "the killed relay takes part")

        def again():
            if root.processes["device-1"].poll() is not None:
                root.start_supernode("device-1")  # as its unit does; a key is refused for up to 60 s
            return 2 in participants()[lost:]

        wait_until(again, "the relay doesn't come back", 900)
        runs.stop(root.folder)
        stopped.wait(120)
        took_part = participants()
        missing = [number for number, count in enumerate(took_part, 1) if count == 1]
        assert set(took_part) == {1, 2}
        expected = flat(tmp_path, "lost", len(took_part), missing)
        np.testing.assert_allclose(vector_of(tmp_path / "killed"), expected, rtol=0, atol=1e-6)
