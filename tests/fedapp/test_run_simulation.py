"""The command line: what it reads, and that every mistake ends in one line before Ray is started."""

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedapp.api.command import _say_clock
from fedapp.cli import app
from fedapp.config import RunConfig
from fedapp.config.options import SimulationConfig, read_options, stated_options
from fedapp.engine import run as engine_run
from fedapp.engine.run import chosen_engine, fit_to_machine
from run_simulation import main

REPOSITORY = Path(__file__).resolve().parents[2]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def fails(monkeypatch, capsys, tmp_path):
    """Run main, which must return 1 with one `error:` line before an engine is started; return the line."""

    def no_engine(*_: object) -> None:
        pytest.fail("an engine would have been started")

    monkeypatch.setattr(engine_run, "simulate", no_engine)
    monkeypatch.setattr(engine_run, "make_grid", no_engine)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert not (tmp_path / "results").exists()
        return captured.err.removeprefix("error: ").strip()

    return run


# Mistakes, before Ray --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("batchsize=3", "unknown key 'batchsize': did you mean 'batch-size'?"),
        ("lr=nan", "lr = nan: must be a number > 0"),
        ("lr", "--run-config 'lr': 'lr' is not of the form key=value"),
        ("none.toml", "--run-config 'none.toml': no such file"),
        ("lr=0.1 lr=0.2", "--run-config 'lr=0.1 lr=0.2': lr is given twice, as 0.1 and 0.2"),
        ('strategy="fedbuff" buffer-size=21', "buffer-size = 21: there are 20 clients, must be at most that"),
        ('dataset="npz" data-path="/no/such.npz"', "data-path = '/no/such.npz': no such file"),
        ("num-clients=0", "num-clients = 0: must be a whole number from 1 to 1000000"),
    ],
)
def test_a_wrong_run_config_is_one_line(options, line, fails):
    assert fails("--run-config", options).startswith(line)
    assert fails("-c", options).startswith(line)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "num-supernodes=2000",
            "num-supernodes = 2000: 'digits' has 1438 training rows, at least min-samples = 2 per client are needed",
        ),
        ("num-supernodes=0", "num-supernodes = 0: must be a whole number from 1 to 1000000"),
        ("num-supernodes=2.5", "num-supernodes = 2.5: must be a whole number from 1 to 1000000"),
        ("num-supernode=3", "unknown key 'num-supernode': did you mean 'num-supernodes'?"),
        ("client-resources-num-gpus=-1", "client-resources-num-gpus = -1: must be a number >= 0"),
        ("client-resources-num-cpus=0", "client-resources-num-cpus = 0: must be a whole number >= 1"),
        ("init-args-num-cpus=0", "init-args-num-cpus = 0: must be a whole number >= 1"),
        ("verbose=1", "verbose = 1: must be true or false"),
        (
            "num-supernodes",
            "--federation-config 'num-supernodes': 'num-supernodes' is not of the form key=value",
        ),
        ("lr=0.1", "unknown key 'lr': "),
        ("num-clients=0", "num-clients = 0: must be a whole number from 1 to 1000000"),
        ("num-clients=3 num-supernodes=3", "num-clients and num-supernodes are one: give one of them"),
    ],
)
def test_a_wrong_federation_config_is_one_line(options, line, fails):
    assert fails("--federation-config", options).startswith(line)


@NO_GPU
@pytest.mark.parametrize("federation", ["client-resources-num-gpus=0.1", "num-supernodes=3"])
@pytest.mark.parametrize("engine", ["ray", "sequential", "vectorized"])
def test_clients_on_a_gpu_that_is_not_there(engine, federation, fails):
    line = fails("--engine", engine, "-c", 'client-device="cuda"', "--federation-config", federation)
    assert line == "client-device = 'cuda': this machine has no GPU; allowed are auto, cpu"


@pytest.mark.parametrize("engine", ["ray", "sequential", "vectorized"])
def test_a_name_that_is_taken(engine, fails, tmp_path):
    (tmp_path / "kept" / "run").mkdir(parents=True)
    line = fails("--engine", engine, "-c", f'results-dir="{tmp_path / "kept"}" run-name="run"')
    assert line.startswith("run-name = 'run': ")


def test_two_mistakes_are_two_lines(capsys):
    assert main(["-c", 'lr=-1 seed="x"']) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert sorted(line.removeprefix("error: ") for line in lines) == [
        "lr = -1: must be a number > 0",
        "seed = 'x': must be a whole number >= 0",
    ]


def test_an_unknown_option_is_argparses():
    with pytest.raises(SystemExit) as caught:
        main(["--engine", "mpi"])
    assert caught.value.code == 2


@pytest.mark.thorough
def test_as_a_command(tmp_path):
    before = os.times()
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "run_simulation.py"), "--federation-config", "num-supernodes=2000"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = os.times()
    assert done.returncode == 1
    assert re.fullmatch(r"error: num-supernodes = 2000: 'digits' has 1438 training rows, .*\n", done.stderr)
    assert done.stdout == ""
    assert sum(after[2:4]) - sum(before[2:4]) < 10  # seconds of the cores, as the machine may be busy
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_logs_in_json(tmp_path, capsys):
    config = f'results-dir="{tmp_path}" run-name="run" num-server-rounds=1 log-format="json" proximal-mu=2.0'
    federation = "num-supernodes=3"
    assert main(["--engine", "sequential", "-c", config, "--federation-config", federation]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert lines[-1]["message"] == f"finished: {tmp_path / 'run'}"
    assert "not read by fedavg: proximal-mu = 2.0" in [line["message"] for line in lines]
    assert captured.out == ""


# The simulation's config -----------------------------------------------------------------------------------


def test_the_backend_gets_what_was_set_and_ray_decides_the_rest():
    assert SimulationConfig.read({}).backend() == {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"logging_level": "error", "log_to_driver": False},
    }
    values = {
        "num-supernodes": 100,
        "client-resources-num-cpus": 2,
        "client-resources-num-gpus": 0.1,
        "init-args-num-cpus": 8,
        "init-args-num-gpus": 1,
        "verbose": True,
    }
    given = SimulationConfig.read(values)
    assert given.num_supernodes == 100
    assert given.backend() == {
        "client_resources": {"num_cpus": 2, "num_gpus": 0.1},
        "init_args": {"num_cpus": 8, "num_gpus": 1, "logging_level": "error", "log_to_driver": True},
    }


@NO_GPU
def test_without_a_gpu_the_fraction_is_dropped_and_that_is_said(configure, caplog):
    given = SimulationConfig.read({"client-resources-num-gpus": 0.1})
    fitted = fit_to_machine(given, configure())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("client-resources-num-gpus = 0.1: this machine has no GPU")
    assert fitted == SimulationConfig.read({"client-resources-num-gpus": 0.0})
    assert given.client_resources_num_gpus == 0.1


@NO_GPU
def test_a_gpu_that_the_user_vouches_for_is_kept(configure):
    given = SimulationConfig.read({"client-resources-num-gpus": 0.1, "init-args-num-gpus": 1})
    assert fit_to_machine(given, configure()) == given


def test_on_the_cpu_nothing_changes(configure):
    given = SimulationConfig.read({"num-supernodes": 3})
    assert fit_to_machine(given, configure(client_device="cpu")) == given


@pytest.mark.parametrize("way", [None, "single", "vmapped"])
def test_the_way_of_training_can_be_chosen(way, monkeypatch, tmp_path):
    grids = []

    def remember(*arguments: Any) -> Any:
        grids.append(make_grid(*arguments))
        return grids[-1]

    make_grid = engine_run.make_grid
    monkeypatch.setattr(engine_run, "make_grid", remember)
    config = f'results-dir="{tmp_path}" num-server-rounds=1'
    chosen = ["--way", way] if way else []
    assert main(["--engine", "vectorized", *chosen, "--run-config", config]) == 0
    assert [grid.trainer.way for grid in grids] == [way]


# What is given and not read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "way"), [("ray", "single"), ("sequential", "vmapped")])
def test_a_way_of_another_engine(engine, way, fails):
    line = fails("--engine", engine, "--way", way)
    assert line == f"--way {way}: is a way of engine vectorized; engine {engine} has one way"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "datset=1"],
        ["--federation-config", "num-supernodes=3"],
        ["--way", "single"],
        ["--engine", "ray"],
    ],
)
def test_what_a_comparison_does_not_read_is_refused(arguments, fails):
    assert "--compare" in fails("--compare", *arguments)


@pytest.mark.thorough
def test_a_comparison_makes_the_table_and_the_figure_of_the_readme(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
    command = [sys.executable, str(REPOSITORY / "run_simulation.py"), "--compare"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, figure = done.stdout.splitlines()
    methods = ("fedavg", "fedprox", "spectral", "async-fedavg", "fedfix", "fedbuff")
    for method in methods:
        (line,) = (line.split() for line in table if line.split()[:1] == [method])
        assert line.count("±") >= 3, "accuracy, averaged and at the end, and megabytes"
    assert Path(figure) == tmp_path / "results/compare/comparison.png"
    assert Path(figure).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("engine", "unread"),
    [
        ("sequential", "verbose = True, init-args-num-cpus = 1"),
        ("vectorized", "verbose = True"),
        ("ray", ""),
    ],
)
def test_an_engine_names_what_it_does_not_read_of_the_federation(engine, unread, caplog):
    SimulationConfig.read({"verbose": True, "init-args-num-cpus": 1, "num-supernodes": 3}).say_unread(engine)
    said = [record.getMessage() for record in caplog.records]
    assert [sorted(line.removeprefix(f"not read by the {engine} engine: ").split(", ")) for line in said] == (
        [sorted(unread.split(", "))] if unread else []
    )


def test_a_runs_config_repeats_it_with_its_clients(tmp_path):
    first = f"results-dir={tmp_path} run-name=run num-server-rounds=2 model=logistic"
    options = ["--engine", "sequential"]
    assert main([*options, "-c", first, "--federation-config", "num-supernodes=3"]) == 0
    assert main([*options, "-c", str(tmp_path / "run" / "config.toml")]) == 0
    again = tmp_path / "fedavg-digits-logistic-001"
    for name in ("metrics.jsonl", "model.safetensors", "partition.npz"):
        assert (again / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    changed = [*options, "-c", str(tmp_path / "run" / "config.toml"), "-c", "run-name=other seed=1"]
    assert main([*changed, "--federation-config", "num-supernodes=4"]) == 0
    assert json.loads((tmp_path / "other" / "summary.json").read_text())["num-clients"] == 4


@pytest.mark.thorough
def test_fedapp_run_is_the_same_command(tmp_path):
    config = f"num-server-rounds=1 model=logistic results-dir={tmp_path}"
    arguments = ["--engine", "sequential", "--federation-config", "num-supernodes=3", "-c"]
    done = CliRunner().invoke(app, ["run", *arguments, f"{config} run-name=a"])
    assert done.exit_code == 0
    assert main([*arguments, f"{config} run-name=b"]) == 0
    names = ("metrics.jsonl", "model.safetensors")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert CliRunner().invoke(app, ["run", "--engine", "mpi"]).exit_code == 2
    refused = subprocess.run(
        [sys.executable, "-m", "fedapp.cli", "run", "-c", "lr=-1"],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (refused.returncode, refused.stderr) == (1, "error: lr = -1: must be a number > 0\n")


def test_real_time_that_nobody_asked_for_is_said(tmp_path, caplog):
    device_run, own = tmp_path / "config.toml", tmp_path / "own.toml"
    device_run.write_text('clock = "wall"\nnum-clients = 2\n[versions]\nflwr = "1"\n')
    own.write_text('clock = "wall"\n')

    def said(*texts: str) -> list[str]:
        caplog.clear()
        given = read_options("--run-config", list(texts))
        _say_clock(RunConfig.load(given), stated_options("--run-config", list(texts)))
        return caplog.messages

    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        (line,) = said(str(device_run))
        assert line == (
            "clock = wall: is that of the run to repeat, so that this one is in real time, too; clock=virtual isn't"
        )
        assert said(str(device_run), "lr=0.1") == [line]
        for wanted in (
            [str(own)],
            ["clock=wall"],
            [str(device_run), "clock=wall"],
            [str(device_run), "clock=virtual"],
        ):
            assert said(*wanted) == []


@pytest.mark.parametrize(
    ("engine", "cluster", "gpu", "share", "expected"),
    [
        ("auto", False, False, 0.1, "vectorized"),
        ("auto", False, True, 0.1, "ray"),
        ("auto", False, True, 0.0, "vectorized"),
        ("auto", False, True, None, "ray"),  # under `flwr run` nobody knows the share
        ("auto", True, False, 0.0, "ray"),
        ("sequential", True, True, 0.1, "sequential"),
    ],
)
def test_the_engine_that_fits(engine, cluster, gpu, share, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if cluster:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    simulation = None if share is None else SimulationConfig.read({"client-resources-num-gpus": share})
    chosen, why = chosen_engine(engine, simulation)
    assert chosen == expected
    assert why.startswith(f"engine = auto: {expected}, ") == (engine == "auto")


def test_a_run_records_its_engine_and_may_go_on_with_another(tmp_path, no_figures):
    config = f"results-dir={tmp_path} run-name=run num-server-rounds=1 model=logistic"
    assert main(["-c", config, "--federation-config", "num-supernodes=3"]) == 0
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert recorded["engine"] == "vectorized"
    assert main(["-c", f"resume={tmp_path / 'run'} num-server-rounds=2 engine=sequential"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["aggregations"]) == ("sequential", 2)


def test_keys_as_words_are_keys_in_one_text(tmp_path, no_figures):
    """Quotes and hyphens are the shell's and Python's affair: both commands make one run."""
    words = [
        "model=logistic",
        "time_scenario=lognormal:0.5,20",
        "num-server-rounds=1",
        f"results-dir={tmp_path}",
    ]
    assert main([*words, "run-name=a", "num_clients=3"]) == 0
    text = " ".join(['time-scenario="lognormal:0.5,20"', words[0], *words[2:], "run-name=b num-clients=3"])
    assert main(["-c", text]) == 0
    recorded = [tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in "ab"]
    assert {**recorded[0], "run-name": "b"} == recorded[1]
    assert recorded[1]["num-clients"] == 3
    assert main([str(tmp_path / "a" / "config.toml"), "run-name=c", "lr=0.2"]) == 0
    assert tomllib.loads((tmp_path / "c" / "config.toml").read_text()) == recorded[0] | {
        "run-name": "c",
        "lr": 0.2,
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lr"], "'lr': is not of the form KEY=VALUE, and no .toml file"),
        (["lr="], "lr = '': must be a number > 0"),
        (["lr=1", "lr=2"], "'lr=2': lr is given twice, as 1 and 2"),
        (["lr=1", "-c", "lr=2"], "lr is given twice, as 2 and 1"),
        (["engine=ray", "--engine", "sequential"], "engine is given twice, as 'sequential' and 'ray'"),
        (
            ["num-clients=2", "--federation-config", "num-supernodes=3"],
            "num-clients and num-supernodes are one",
        ),
    ],
)
def test_wrong_words_are_one_line(words, line, fails):
    assert fails(*words).startswith(line)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("strategy=fedavgg", "fedavg"),
        ("strategy=FedAvg", "fedavg"),
        ("strategy=FedAdam", "strategy=fedavg server-optimizer=adam"),
        ("strategy=nets.Mine", "nets:Mine"),
        ("model=mpl", "mlp"),
        ("model=nets.UNet", "nets:UNet"),
        ("dataset=digit", "digits"),
        ("loss=ce", "cross-entropy"),
        ("partitioner=dirchlet", "dirichlet"),
        ("learning-rate=0.1", "lr"),
        ("epochs=2", "local-epochs"),
        ("rounds=2", "num-server-rounds"),
        ("clients=2", "num-clients"),
    ],
)
def test_what_was_meant_is_asked(word, meant, fails):
    assert fails(word).endswith(f"did you mean {meant!r}?")
