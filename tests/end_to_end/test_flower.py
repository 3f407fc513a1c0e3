"""The same app under ``flwr run``: same config keys, same result."""

import json

import pytest

# Flower's mods are called in the clients, wherever these run.
CENTRAL = {"dp": "central", "client-weights": "uniform", "dp-noise-multiplier": 0.01}


def test_flwr_run_gives_the_same_bits_as_run_simulation(
    flower, flower_home, free_port, pairs, simulate, tmp_path
):
    config = {"num-server-rounds": 3, "strategy": "fedprox", **CENTRAL}
    config |= {"server-optimizer": "adam", "server-lr": 0.01, "fedfix-interval": 2.0}
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    federation = "num-supernodes=4 client-resources-num-cpus=1"
    done = flower(
        "flwr",
        "run",
        ".",
        "--stream",
        "--run-config",
        pairs(config | place),
        "--federation-config",
        federation,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(free_port),
    )
    assert f"Run directory: {tmp_path / 'run'}" in done.stdout, done.stdout
    said = "not read by fedprox: fedfix-interval = 2.0"
    assert done.stdout.count(said) == 1, done.stdout
    other = simulate(config, engine="sequential")
    assert other.output.count(said) == 1, other.output
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["unread-keys"]) == ("ray", ["fedfix-interval"])

    wrong = flower(
        "flwr",
        "run",
        ".",
        "--stream",
        "--run-config",
        "lr=-1",
        "--federation-config",
        federation,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(free_port),
    )
    assert "lr = -1: must be a number > 0" in wrong.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flwr_run_takes_the_keys_of_a_strategy_of_ones_own(
    flower, flower_home, free_port, pairs, simulate, tmp_path
):
    own = {"strategy": "custom.half_life:HalfLife", "num-server-rounds": 3}
    config = own | {"strategy-config": "half-life=0.25 tick=0.3"}
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    federation = "num-supernodes=3 client-resources-num-cpus=1"
    done = flower(
        "flwr",
        "run",
        ".",
        "--stream",
        "--run-config",
        pairs(config | place),
        "--federation-config",
        federation,
        FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(free_port),
    )
    assert f"Run directory: {tmp_path / 'run'}" in done.stdout, done.stdout
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    same, other = own | {"half-life": 0.25, "tick": 0.3}, own | {"half-life": 1.0, "tick": 0.3}
    assert simulate(same, engine="sequential", federation=federation).model == model
    assert simulate(other, engine="sequential", federation=federation).model != model
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["unread-keys"] == []
