"""A site's own rules on real SuperNodes: what is asked for against them is refused with one line on both sides."""

import json
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedapp.deploy.flower import BIN
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.supernode import keep_rules
from tests.deploy.conftest import Trial

RULES = {
    "device-1": f'allow-apps = "theirs/app, {"0" * 64}"',
    "device-2": "max-contributions = 1",
}
SAID = {
    "device-1": "allow-apps: fedapp/fedapp with SHA-256 ",
    "device-2": "max-contributions = 1: so many updates have left this device",
}


@pytest.fixture
def bundle_hash(faulty_app: Path, tmp_path: Path) -> str:
    """SHA-256 of the bundle that Flower builds of the app, as a site computes it."""
    subprocess.run(
        [BIN / "flwr", "build", "--app", faulty_app], cwd=tmp_path, check=True, capture_output=True
    )
    (bundle,) = tmp_path.glob("*.fab")
    return sha256(bundle.read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_devices_keep_their_sites_rules(make_trial: Any, bundle_hash: str) -> None:
    trial: Trial = make_trial({}, {}, {})
    folder = trial.deployment.folder
    for name, rules in {"device-0": f'allow-apps = "{bundle_hash}"', **RULES}.items():
        (folder / name / "site.toml").write_text(rules)
    trial.begin({"num-server-rounds": 2, "round-timeout": 300.0})
    output = trial.end(1200)
    assert trial.summary["status"] == "finished", output
    # device-0 takes part in both rounds, and device-2 in one.
    assert [line["participants"] for line in trial.metrics[1:]] == [2, 1]
    for name, said in SAID.items():
        reason = f"against this site's rules: {said}"
        on_device = [line for line in trial.device_log(name).splitlines() if reason in line]
        assert on_device, trial.device_log(name)
        assert "refused (1 s" in on_device[0]
        node = trial.node_ids(name)[0]
        on_server = [line for line in output.splitlines() if reason in line]
        assert on_server, output
        assert all(node in line for line in on_server), output
    state = folder / "device-2" / "superexec" / "state" / "site.json"
    assert json.loads(state.read_text())["contributions"] == 1
    # No code of the run was started where its app isn't allowed.
    assert "flwr-clientapp" not in trial.device_log("device-1")
    warning = "the site has rules but no allow-apps"
    assert [name for name in SAID if warning in trial.device_log(name)] == ["device-2"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supernode_with_a_wrong_rule_doesnt_start(tmp_path: Path) -> None:
    with LocalDeployment(tmp_path / "d", [{"partition-id": 0, "num-partitions": 1}]) as deployment:
        (deployment.folder / "device-0" / "site.toml").write_text("max-bites = 3")
        assert deployment.start_supernode("device-0").wait(120) == 1
        last = deployment.log("device-0").read_text().splitlines()
    assert any(
        line.startswith("error: this site's rules: ")
        and "max-bites is no rule; allowed are require-dp" in line
        for line in last
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hours = 8", "hours = 8: must be a text"),
        ("hours", "site.toml: can't be read"),
        ("data-path = '/d'", "data-path is no rule; allowed are require-dp, "),
    ],
)
def test_a_wrong_rule_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('name = "oslo"')
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(SystemExit) as raised:
        keep_rules(["--node-config", str(tmp_path / "node.toml")])
    assert said in str(raised.value)
    assert str(raised.value).startswith("error: this site's rules: ")
