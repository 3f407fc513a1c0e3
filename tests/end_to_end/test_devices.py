"""Asynchronous training on real SuperNodes, one of which dies and comes back."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_async_training_completes_although_a_supernode_is_killed_and_restarted(
    repository,
    start_flower,
    flower_environment,
    wait_for_superlink,
    flower_home,
    unused_ports,
    pairs,
    tmp_path,
):
    superlink, *nodes = unused_ports(4)
    (flower_home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{superlink}"\ninsecure = true\n'
    )
    start_flower("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(superlink))
    wait_for_superlink(superlink)

    def supernode(partition: int) -> subprocess.Popen[bytes]:
        return start_flower(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{superlink}",
            "--port", str(nodes[partition]), "--node-config", f"partition-id={partition} num-partitions=3",
        )  # fmt: skip

    processes = [supernode(partition) for partition in range(3)]
    # Data of very different sizes: devices of different real speeds.
    config = {
        "strategy": "async-fedavg", "clock": "wall", "server-lr": 0.3, "num-server-rounds": 14, "min-clients": 3,
        "data-imbalance": 2.0, "class-imbalance": 0.5, "local-epochs": 20, "round-timeout": 40.0,
        "results-dir": str(tmp_path), "run-name": "run",
    }  # fmt: skip
    command = [
        str(Path(sys.executable).parent / "flwr"),
        "run",
        ".",
        "here",
        "--stream",
        "--run-config",
        pairs(config),
    ]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=repository, env=flower_environment, stdout=log, stderr=log)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, 120)
    processes[1].kill()
    processes[1].wait(timeout=30)
    killed_at = len(metrics.read_text().splitlines())
    supernode(1)
    run.wait(timeout=300)

    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert [line["aggregation"] for line in lines] == list(range(15))
    # Each arrival was counted once, and the weights used the observed task times.
    assert sum(lines[-1]["clients"]["participation"]) == 14
    assert all(time > 0 for time in lines[-1]["clients"]["task-time"])
    assert lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.2
    # The killed one is counted again before the end, or the run ended before it was back.
    before, after = (lines[at]["clients"]["participation"][1] for at in (killed_at - 1, -1))
    assert after > before or "client 1" in output, output


def wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)
