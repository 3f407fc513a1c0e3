"""The main job on real Ray."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version

import numpy as np
import pytest
from PIL import Image

from strategies import REGISTRY, AsynchronousStrategy
from tests.runs import arrays_of, count_of, lines_of, summary_of
from tests.waiting import wait_until

ROUNDS = 4


@pytest.fixture(scope="module")
def base(simulate):
    """FedAvg on four clients and two workers."""
    return simulate({"num-server-rounds": ROUNDS})


@pytest.mark.ci
@pytest.mark.thorough
def test_the_run_directory_is_complete_and_true(base):
    assert base.returncode == 0, base.output
    assert f"Run directory: {base.path}" in base.output
    names = {file.name for file in base.path.iterdir()}
    # Checkpoints take a twentieth of the time at most: a run as short as this may have none.
    assert names - {"checkpoint"} == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "partition.npz",
        "curves.png",
        "partition.png",
        "preparation.json",
        "log.txt",
        "clients.parquet",
        "tasks.parquet",
        "timeline.png",
    }
    config = tomllib.loads((base.path / "config.toml").read_text())
    assert (config["strategy"], config["num-server-rounds"], config["num-clients"]) == ("fedavg", ROUNDS, 4)
    assert config["versions"]["flwr"] == version("flwr")

    metrics = lines_of(base.path)
    assert [m["aggregation"] for m in metrics] == list(range(ROUNDS + 1))
    # F80, all take part: a round takes as long as the slowest client, 1 s.
    assert [m["time"] for m in metrics] == pytest.approx(range(ROUNDS + 1))
    assert {m["clock"] for m in metrics} == {"virtual"}
    assert metrics[-1]["accuracy"] > 0.6 > metrics[0]["accuracy"]
    assert all(np.isfinite(m["loss"]) for m in metrics)

    summary = summary_of(base.path)
    assert (summary["status"], summary["engine"], summary["aggregations"]) == ("finished", "ray", ROUNDS)
    assert (summary["accuracy"], summary["failures"]) == (metrics[-1]["accuracy"], 0)
    # 64·128 + 128 + 128·10 + 10 = 9,610 float32 parameters, four clients, each way, each round.
    assert 4 * ROUNDS * 9610 * 4 < summary["bytes-up"] < 4 * ROUNDS * (9610 * 4 + 1024)

    model = arrays_of(base.path)
    assert sum(array.size for array in model.values()) == 9610
    partition = np.load(base.path / "partition.npz")
    rows = np.concatenate([partition["client_indices"], partition["test_indices"]])
    assert np.array_equal(np.sort(rows), np.arange(1797))
    assert len(partition["client_offsets"]) == 5
    for figure in ("curves.png", "partition.png", "timeline.png"):
        assert Image.open(base.path / figure).width >= 1000


@pytest.mark.ci
@pytest.mark.thorough
def test_one_worker_gives_the_same_bits_as_two(base, simulate):
    one = simulate({"num-server-rounds": ROUNDS}, federation="num-supernodes=4 client-resources-num-cpus=2")
    assert one.returncode == 0, one.output
    assert one.model == base.model
    assert lines_of(one.path) == lines_of(base.path)


@pytest.mark.thorough
@pytest.mark.parametrize("federation", ["num-supernodes=4 init-args-num-cpus=1", "num-supernodes=4"])
def test_a_process_and_a_ray_of_its_own_give_the_same_bits(base, simulate_alone, federation):
    again = simulate_alone({"num-server-rounds": ROUNDS}, federation=federation)
    assert again.returncode == 0, again.output
    assert again.model == base.model
    assert lines_of(again.path) == lines_of(base.path)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [name for name in REGISTRY if name != "fedavg"])
def test_every_strategy_learns_on_ray(base, simulate, strategy):
    config = {"num-server-rounds": ROUNDS, "strategy": strategy}
    if issubclass(REGISTRY[strategy], AsynchronousStrategy):  # an aggregation takes in fewer clients
        config |= {"num-server-rounds": 10 * ROUNDS, "server-lr": 0.3, "buffer-size": 2, "eval-every": ROUNDS}
    run = simulate(config)
    assert run.returncode == 0, run.output
    assert lines_of(run.path)[-1]["accuracy"] > 0.5  # after 4 rounds; guessing gives 0.1
    # Where all clients take part, FedStale, FedAU and FedAWE are FedAvg; Ditto's own models are beside it.
    assert (run.model == base.model) is (strategy in ("ditto", "fedstale", "fedau", "fedawe"))
    assert run.model == simulate(config, engine="sequential").model


@pytest.mark.ci
@pytest.mark.thorough
def test_clients_own_models_are_those_of_the_sequential_engine_also_in_a_run_that_goes_on(simulate):
    # What clients keep is asked for when the checkpoint is written, and handed back to new ones.
    config = {"strategy": "ditto", "test-on": "own", "checkpoint-every": 1, "model": "logistic"}
    whole = simulate({**config, "num-server-rounds": 4}, engine="sequential")
    begun = simulate({**config, "num-server-rounds": 2})
    assert begun.returncode == 0, begun.output
    place = {"results-dir": str(begun.path.parent), "run-name": begun.path.name}
    resumed = simulate({"resume": str(begun.path), "num-server-rounds": 4, **place})
    assert resumed.returncode == 0, resumed.output
    assert lines_of(whole.path) == lines_of(begun.path)
    assert lines_of(whole.path)[-1]["personal-loss-mean"] != lines_of(whole.path)[-1]["client-loss-mean"]
    assert (begun.path / "model.safetensors").read_bytes() == whole.model


@pytest.mark.ci
@pytest.mark.thorough
def test_clients_whose_frozen_arrays_differ_are_sent_them_once(simulate):
    config = {"model": "tests.fedapp.own_parts:other_on_ray", "num-server-rounds": 3}
    alone, run = simulate(config, engine="sequential"), simulate(config)
    assert run.returncode == 0, run.output
    assert run.model == alone.model
    bytes_of = [summary_of(each.path)["bytes-down"] for each in (alone, run)]
    assert 4 * 4 * 65 * 8 < bytes_of[1] - bytes_of[0] < 2 * 4 * 4 * 65 * 8  # and the model beside them


@pytest.mark.thorough
def test_a_run_is_repeated_from_its_own_config(base, repository, tmp_path):
    command = [sys.executable, "run_simulation.py", "--engine", "sequential", "--run-config"]
    config = (base.path / "config.toml").read_text().replace(str(base.path.parent), str(tmp_path))
    (tmp_path / "again.toml").write_text(config)
    command += [str(tmp_path / "again.toml"), "--run-config", 'run-name="run"']  # with its number of clients
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == base.model


@pytest.mark.ci
@pytest.mark.thorough
def test_a_file_of_the_users_own_trains_a_cnn(simulate, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=240)
    images = rng.integers(60, size=(240, 12, 12))
    for k in range(3):  # class k: a bright bar in column block k
        images[labels == k, :, 4 * k : 4 * k + 4] += 180
    arrays = {
        "x_train": images[:200],
        "x_test": images[200:],
        "y_train": labels[:200],
        "y_test": labels[200:],
    }
    np.savez(tmp_path / "X.npz", **{k: v.astype(np.uint8) for k, v in arrays.items()})
    run = simulate(
        {
            "dataset": "npz",
            "data-path": str(tmp_path / "X.npz"),
            "model": "cnn",
            "num-server-rounds": 6,
            "lr": 0.05,
        }
    )
    assert run.returncode == 0, run.output
    assert lines_of(run.path)[-1]["accuracy"] > 0.9


@pytest.mark.thorough  # without Ray: tests/fedapp/test_run_simulation.py
def test_a_gpu_fraction_without_a_gpu_falls_back_and_says_so(simulate):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    fraction = "num-supernodes=4 client-resources-num-gpus=0.1"
    run = simulate({"num-server-rounds": 1}, federation=fraction)
    assert run.returncode == 0, run.output
    assert "client-resources-num-gpus = 0.1: this machine has no GPU, clients run on the CPU" in run.output
    strict = simulate({"num-server-rounds": 1, "client-device": "cuda"}, federation=fraction)
    assert strict.returncode == 1
    assert "client-device = 'cuda': this machine has no GPU" in strict.output


GPU_SCRIPT = """
import json, sys, time
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from fedapp.config.options import SimulationConfig
from fedapp.engine.ray import simulate
from strategies import messages
from strategies.flower.exchange import exchange
from strategies.flower.exchange import wait_for_nodes

client_app, server_app, folder = ClientApp(), ServerApp(), sys.argv[2]

@client_app.train()
def train(message, context):
    import os, ray, time
    begin, deadline = time.time(), time.monotonic() + 100
    open(f"{folder}/{message.metadata.message_id}", "w").close()
    while len(os.listdir(folder)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
    metrics = MetricRecord({"begin": begin, "end": time.time(), "share": share, "pid": os.getpid()})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)

@server_app.main()
def main(grid, context):
    nodes = wait_for_nodes(grid, 8, 60)
    requests = [messages.request(messages.TRAIN, n, ConfigRecord(), ttl=200) for n in nodes]
    replies = exchange(grid, requests, 200)
    print(json.dumps([dict(messages.metrics_of(r)) for r in replies.values()]))

simulate(server_app, client_app, SimulationConfig.read(json.loads(sys.argv[1])))
"""


@pytest.mark.thorough
def test_a_quarter_of_a_gpu_runs_four_clients_at_once(repository, tmp_path):
    """A logical GPU: Ray counts it, whether the machine has one or not; the first clients wait for the fourth."""
    federation = {
        "num-supernodes": 8,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": 0.25,
        "init-args-num-cpus": 8,
        "init-args-num-gpus": 1,
    }
    done = subprocess.run(
        [sys.executable, "-c", GPU_SCRIPT, json.dumps(federation), str(tmp_path)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(tasks) == 8
    assert {task["share"] for task in tasks} == {0.25}
    assert len({task["pid"] for task in tasks}) <= 4
    at_once = [sum(t["begin"] <= task["begin"] < t["end"] for t in tasks) for task in tasks]
    assert max(at_once) == 4


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("signal_number", "engine", "workers"),
    [
        (signal.SIGINT, "ray", 0),
        (signal.SIGTERM, "sequential", 0),
        pytest.param(signal.SIGTERM, "ray", 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "vectorized", 1, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_leaves_a_complete_run_directory(
    repository, tmp_path, pairs, signal_number, engine, workers
):
    config = {"num-server-rounds": 5000, "results-dir": str(tmp_path), "run-name": "run"}
    command = [sys.executable, "run_simulation.py", "--engine", engine, "--run-config", pairs(config)]
    process = subprocess.Popen(
        [*command, "--federation-config", f"num-supernodes=4 workers={workers}"],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: count_of(tmp_path / "run") >= 4)
        if signal_number == signal.SIGINT:
            os.killpg(process.pid, signal_number)  # as a terminal does: to Ray's workers too
        else:
            process.send_signal(signal_number)  # as a container's runtime does
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, output
    summary, metrics = summary_of(tmp_path / "run"), lines_of(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert summary["aggregations"] == metrics[-1]["aggregation"] >= 3
    assert summary["failures"] == 0
    assert (tmp_path / "run" / "curves.png").stat().st_size > 5000
    assert arrays_of(tmp_path / "run")


@pytest.mark.ci
@pytest.mark.thorough
def test_a_simulation_whose_ray_fails_ends(tmp_path):
    """Also its ServerApp's thread, which would wait for its clients for ever, and so keep the process."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedapp.cli",
            "run",
            "--engine",
            "ray",
            "-c",
            f"results-dir={tmp_path} run-name=run",
        ],
        env={**os.environ, "RAY_ADDRESS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert ended.returncode == 1
    assert "nowhere" in ended.stdout + ended.stderr
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
