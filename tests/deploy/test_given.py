"""What a run on devices takes from a simulation's config.toml: all but its clock, which it says."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import fuse_dicts

from fedapp.client_app import app
from fedapp.config import ConfigError, Keys, RunConfig, defaults
from fedapp.config.own_keys import folded, unfolded
from fedapp.deploy.given import read_given
from fedapp.deploy.nodes import NodeRecord, NodeRecords
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import prepare, run
from tests.deploy.command import deploy

HALF_LIFE = "custom.half_life:HalfLife"
LINE = "clock = virtual: was the simulation's, and isn't taken over; devices have real time"


def test_a_simulations_clock_stays_with_it(tmp_path):
    given = {"model": "logistic", "num-server-rounds": 1, "lr": 0.3, "results-dir": str(tmp_path)}
    recorded = run(SequentialGrid(app, 2), prepare(RunConfig.load(given), 2)).path / "config.toml"
    assert 'clock = "virtual"' in recorded.read_text()
    values, *rest = read_given([str(recorded)])
    assert (values["lr"], *rest) == (0.3, None, 2, [LINE])
    assert "clock" not in values
    assert RunConfig.load(values).clock == "auto"
    assert prepare(RunConfig.load(values), 2, on_devices=True).config.clock == "wall"


def test_what_is_counted_in_its_seconds_is_named(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        'clock = "virtual"\ntime-budget = 30.0\nround-deadline = 0.0\nfedfix-interval = 0.5\nnum-clients = 2\n'
        '[versions]\nflwr = "1"\n'
    )
    said = f"{LINE}, in seconds of which time-budget = 30"
    assert read_given([str(file), "strategy=fedavg"]).lines == [f"{said} count now"]
    assert read_given([str(file), "strategy=fedfix"]).lines == [f"{said} and fedfix-interval = 0.5 count now"]
    by_task_times = [str(file), "strategy=fedfix fedfix-interval=auto"]
    assert read_given(by_task_times).lines == [f"{said} count now"]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_clock_that_somebody_wants_is_taken(by_file, tmp_path):
    recorded, own = tmp_path / "config.toml", tmp_path / "own.toml"
    recorded.write_text('clock = "virtual"\nnum-clients = 2\n[versions]\nflwr = "1"\n')
    own.write_text('clock = "virtual"\n')
    given = read_given([str(recorded), str(own) if by_file else "clock=virtual"])
    assert (given.values, given.lines) == ({"clock": "virtual"}, [])
    assert read_given(None) == ({}, None, None, [])


def test_devices_in_virtual_time_are_a_warning(caplog):
    config = RunConfig.load({"clock": "virtual", "model": "logistic"})
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        prepare(config, 2)
        assert "clock = virtual" not in caplog.text
        prepare(config, 2, on_devices=True)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("clock = virtual")]
    assert "safeguards = auto bounds nothing" in line


def test_a_run_of_a_strategy_of_ones_own_goes_to_devices(tmp_path):
    given = {
        "strategy": HALF_LIFE,
        "half-life": 2.5,
        "model": "logistic",
        "num-server-rounds": 1,
        "results-dir": str(tmp_path),
        "loss": "custom.losses:focal",
    }
    recorded = run(SequentialGrid(app, 2), prepare(RunConfig.load(given), 2)).path / "config.toml"
    assert "half-life = 2.5" in recorded.read_text()
    values, *_ = read_given([str(recorded)])
    fuse_dicts(defaults(), values)  # as flwr run does, which refuses any other key
    flat, wanted = RunConfig.load(values).flat(), RunConfig.load(given).flat()
    assert {key: flat[key] for key in ("strategy", "half-life", "tick", "loss")} == {
        key: wanted[key] for key in ("strategy", "half-life", "tick", "loss")
    }


def test_keys_of_a_strategy_alone_go_into_one_text():
    def text(*texts: str) -> str:
        values, *_ = read_given([f"strategy={HALF_LIFE}", *texts])
        fuse_dicts(defaults(), values)
        return str(values["strategy-config"])

    assert text("half-life=2.0") == "half-life=2.0"
    assert text("half-life=2 lr=0.1", 'strategy-config="tick=0.5"') == "tick=0.5 half-life=2"
    assert text("half-life=2.0", 'strategy-config="half-life=2.0"') == "half-life=2.0"
    wrong, *_ = read_given([f"strategy={HALF_LIFE}", "half-life=2.0", 'strategy-config="half-life=3.0"'])
    with pytest.raises(ConfigError, match=r"half-life is given twice"):
        RunConfig.load(wrong)
    other = {"strategy": "fedavg", "half-life": 2.0}
    assert (
        read_given(["strategy=fedavg half-life=2.0"])[0] == other
    )  # what isn't its own is refused by its name


def test_a_run_that_goes_on_has_the_keys_of_its_own_strategy(tmp_path):
    earlier = tmp_path / "run"
    earlier.mkdir()
    (earlier / "config.toml").write_text(f'strategy = "{HALF_LIFE}"\nhalf-life = 2.5\nnum-clients = 2\n')
    values, *_ = read_given([f"resume='{earlier}' half-life=2.5"])
    assert values == {"resume": str(earlier), "strategy-config": "half-life=2.5"}
    fuse_dicts(defaults(), values)
    assert RunConfig.recorded(values).strategy_config == "half-life=2.5"
    assert read_given([f"resume='{earlier}' half-lief=2.5"])[0]["half-lief"] == 2.5  # is refused by its name
    with pytest.raises(ConfigError) as caught:
        read_given(["resume='/no/such' half-life=2.5"])
    assert str(caught.value) == (
        "half-life = 2.5: no key of every run, and resume = '/no/such', whose strategy may have it, isn't here: give "
        "strategy=… too, or strategy-config"
    )
    elsewhere, *_ = read_given([f"resume='/no/such' strategy={HALF_LIFE} half-life=2.5"])
    assert elsewhere["strategy-config"] == "half-life=2.5"


@pytest.mark.parametrize(
    ("arguments", "devices", "said"),
    [
        ([], 2, ""),
        (["-n", "3"], 3, "num-clients = 2: isn't read, here are 3 devices"),
        (["--data-path", "a"], 1, "num-clients = 2: isn't read, here are 1 devices"),
    ],
)
def test_num_clients_is_the_number_of_local_devices_where_no_option_says_another(
    arguments: list[str], devices: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def deployment(folder: Path, nodes: list[Any], workers: bool) -> None:
        started.append(len(nodes))
        raise InterruptedError

    monkeypatch.setattr("fedapp.deploy.cli.LocalDeployment", deployment)
    own = tmp_path / "own.toml"
    own.write_text("num-clients = 2\nlr = 0.1\n")
    result = deploy("local", "-c", own, *arguments)
    assert isinstance(result.exception, InterruptedError)
    assert (started, result.output.strip()) == ([devices], said)
    wrong = deploy("local", "-c", "num-clients=0").output
    assert wrong.startswith("error: num-clients = 0: must be a whole number from 1")


class OneKey(Keys):
    key: Any = None


@pytest.mark.parametrize("value", [True, -3, 1e-6, 1e22, "a b", "it's", '"', 'a\\"\\', "tab\tß"])
def test_any_value_goes_into_the_text_and_comes_back(value):
    given = folded({"strategy": "mine", "key": value}, ["key"], ["strategy"])
    assert given.keys() == {"strategy", "strategy-config"}
    assert unfolded(given, str(given["strategy-config"]), OneKey, ["strategy"])["key"] == value


def test_what_does_not_go_together_is_refused_before_flower_is_asked(tmp_path, monkeypatch):
    started: list[Mapping[str, Any]] = []

    def start(out: Path, source: Path, given: Mapping[str, Any]) -> str:
        started.append(given)
        return "7"

    monkeypatch.setattr("fedapp.deploy.runs.start", start)
    out = tmp_path / "d"
    deploy("init", out, "--host", "127.0.0.1", "--device", "oslo=/a")
    refused = deploy("run", out, "-c", "local-steps=3").output
    assert refused.startswith("error: local-epochs = 1 with local-steps = 3: ")
    own = f"strategy='{HALF_LIFE}' strategy-config='half-lief=2.0'"
    assert "unknown key 'half-lief'" in deploy("run", out, "-c", own).output
    assert started == []
    # The server's own files, which this machine needn't have.
    for config in ("dataset='files' data-path='/no/such.npz'", "resume='/no/such' round-timeout=9.0"):
        assert "run 7 started" in deploy("run", out, "-c", config).output


def test_a_run_is_told_which_node_is_which_device(tmp_path, monkeypatch):
    started: list[Mapping[str, Any]] = []
    monkeypatch.setattr("fedapp.deploy.runs.start", lambda out, app, given: started.append(given) or "7")
    out = tmp_path / "d"
    deploy("init", out, "--host", "127.0.0.1", "--partitions", "3")
    deploy("add", out, "oslo=/data")
    records = NodeRecords.read(out)
    for node in [
        NodeRecord("device-0", "4710", "a", "then", "unregistered since"),
        NodeRecord("device-0", "4711", "b", "now"),
        NodeRecord("device-2", "18446744073709551615", "c", "now"),
        NodeRecord("oslo", "5", "d", "now"),
        NodeRecord("removed", "6", "e", "now"),
    ]:
        records.add(node)
    before = tmp_path / "config.toml"
    before.write_text(
        'registered-nodes = "device-0:1:0"\nlr = 0.5\nnum-clients = 2\n[versions]\nflwr = "1"\n'
    )
    for arguments in ([], ["-c", str(before)], ["-c", "registered-nodes=''"]):
        assert "run 7 started" in deploy("run", out, *arguments).output
    told = "device-0:4711:0, device-2:18446744073709551615:2, oslo:5"
    assert [given["registered-nodes"] for given in started] == [told, told, ""]
    assert [given.get("lr") for given in started] == [None, 0.5, None]
