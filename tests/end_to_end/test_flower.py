"""The same app under ``flwr run``: same config keys, same result."""

import pytest

from tests.runs import summary_of

# Flower's mods are called in the clients, wherever these run.
CENTRAL = {"dp": "central", "client-weights": "uniform", "dp-noise-multiplier": 0.01}


@pytest.fixture
def flwr_run(flower, free_port, pairs):
    """Run the app as ``flwr run . --stream`` does; return what it says."""

    def run(config, clients, resources="client-resources-num-cpus=1"):
        federation = f"num-supernodes={clients} {resources}"
        given = ("--run-config", pairs(config), "--federation-config", federation)
        port = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port)}
        return flower("flwr", "run", ".", "--stream", *given, **port).stdout

    return run


@pytest.mark.ci
@pytest.mark.thorough
def test_flwr_run_gives_the_same_bits_as_run_simulation(flwr_run, simulate, tmp_path):
    config = {"num-server-rounds": 3, "strategy": "fedprox", "figures": False, **CENTRAL}
    config |= {"server-optimizer": "adam", "server-lr": 0.01, "fedfix-interval": 2.0}
    output = flwr_run(config | {"engine": "ray", "results-dir": str(tmp_path), "run-name": "run"}, 4)
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    said = "not read by fedprox: fedfix-interval = 2.0"
    assert output.count(said) == 1, output
    other = simulate(config, engine="sequential")
    assert other.output.count(said) == 1, other.output
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    summary = summary_of(tmp_path / "run")
    assert (summary["engine"], summary["unread-keys"]) == ("ray", ["fedfix-interval"])


@pytest.mark.ci
@pytest.mark.thorough
def test_flwr_run_takes_the_engine_that_fits(flwr_run, simulate, tmp_path):
    config = {"num-server-rounds": 3, "strategy": "fedbuff", "buffer-size": 2, "figures": False}
    output = flwr_run(config | {"results-dir": str(tmp_path), "run-name": "run"}, 4)
    assert output.count("engine = auto: vectorized") == 1, output
    other = simulate(config, engine="vectorized")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    assert summary_of(tmp_path / "run")["engine"] == "vectorized"


@pytest.mark.ci
@pytest.mark.thorough
def test_flwr_run_says_what_is_wrong(flwr_run):
    assert "lr = -1: must be a number > 0" in flwr_run({"lr": -1}, 4)


@pytest.mark.thorough
def test_flwr_run_says_that_no_client_could_start(flwr_run, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    output = flwr_run({"results-dir": str(tmp_path / "runs")}, 4, "client-resources-num-gpus=0.1")
    assert "client-resources-num-gpus = 0.1: the simulation has no GPU, so no client could start" in output
    assert "ActorPool" not in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flwr_run_takes_the_keys_of_a_strategy_of_ones_own(flwr_run, simulate, tmp_path):
    own = {"strategy": "custom.half_life:HalfLife", "num-server-rounds": 3, "engine": "sequential"}
    given = {"strategy-config": "half-life=0.25 tick=0.3", "results-dir": str(tmp_path), "run-name": "run"}
    output = flwr_run(own | given, 3)
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    for half_life, same in ((0.25, True), (1.0, False)):
        config = own | {"half-life": half_life, "tick": 0.3}
        other = simulate(config, engine="sequential", federation="num-supernodes=3")
        assert (other.model == model) is same
    assert summary_of(tmp_path / "run")["unread-keys"] == []
