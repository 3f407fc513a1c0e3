"""The same app under ``flwr run`` and on real SuperNodes: same config keys, same result."""

import json

import safetensors.numpy

# Flower's mods are called in the clients, wherever these run; nodes with a partition draw noise from the seed.
CENTRAL = {"dp": "central", "client-weights": "uniform", "dp-noise-multiplier": 0.01}
LOCAL = {"dp": "local", "dp-noise-multiplier": 0.01}


def test_flwr_run_gives_the_same_bits_as_run_simulation(
    flower, flower_home, free_port, pairs, simulate, tmp_path
):
    config = {"num-server-rounds": 3, "strategy": "fedprox", **CENTRAL}
    config |= {"server-optimizer": "adam", "server-lr": 0.01, "fedfix-interval": 2.0}
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    federation = "num-supernodes=4 client-resources-num-cpus=1"
    done = flower(
        "flwr", "run", ".", "--stream", "--run-config", pairs(config | place), "--federation-config", federation,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(free_port),
    )  # fmt: skip
    assert f"Run directory: {tmp_path / 'run'}" in done.stdout, done.stdout
    said = "not read by fedprox: fedfix-interval = 2.0"
    assert done.stdout.count(said) == 1, done.stdout
    other = simulate(config, engine="sequential")
    assert other.output.count(said) == 1, other.output
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["unread-keys"]) == ("ray", ["fedfix-interval"])

    wrong = flower(
        "flwr", "run", ".", "--stream", "--run-config", "lr=-1", "--federation-config", federation,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(free_port),
    )  # fmt: skip
    assert "lr = -1: must be a number > 0" in wrong.stdout


def test_deployed_supernodes_give_the_same_bits_as_a_simulation(
    flower, start_flower, wait_for_superlink, flower_home, unused_ports, pairs, simulate, tmp_path
):
    superlink, *nodes = unused_ports(3)
    (flower_home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{superlink}"\ninsecure = true\n'
    )
    start_flower("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(superlink))
    wait_for_superlink(superlink)
    for partition, port in enumerate(nodes):
        start_flower(
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{superlink}", "--port", str(port),
            "--node-config", f"partition-id={partition} num-partitions=2",
        )  # fmt: skip
    config = {
        "num-server-rounds": 2, "min-clients": 2, "clock": "wall", "results-dir": str(tmp_path), "run-name": "run",
        **LOCAL,
    }  # fmt: skip
    done = flower("flwr", "run", ".", "here", "--stream", "--run-config", pairs(config))
    assert f"Run directory: {tmp_path / 'run'}" in done.stdout, done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == "deployment"
    other = simulate({"num-server-rounds": 2, **LOCAL}, federation="num-supernodes=2", engine="sequential")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    assert len(safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")) == 4
