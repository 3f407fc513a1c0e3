import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_simulation
from fedapp.config import RunConfig
from fedapp.config.resume import FREE
from fedapp.data.loading import load_dataset
from fedapp.deploy.local import LocalDeployment
from fedapp.report.client_tables import last_clients
from fedapp.server.run_directory import RunDirectory
from tests.end_to_end.processes import server_apps
from tests.runs import arrays_of, count_of, lines_of, same_files, summary_of
from tests.waiting import wait_until

CLIENTS, ROUNDS = 4, 24
BASE: dict[str, Any] = {
    "model": "logistic",
    "local-epochs": 0,
    "local-steps": 2,
    "num-server-rounds": ROUNDS,
    "checkpoint-every": 3,
}
HALF = {"participation": "uniform", "fraction-train": 0.5}
KILLED = """
import os, signal, sys, run_simulation
from fedapp.server import Observer

class Kills(Observer):
    def record(self, entry):
        if entry.progress.aggregation >= int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

run_simulation.main(sys.argv[2:], [Kills()])
"""


def arguments_of(pairs: Any, config: dict[str, Any]) -> list[str]:
    arguments = ["--engine", "sequential", "--run-config", pairs(config)]
    clients = ["--federation-config", f"num-supernodes={CLIENTS}"]
    return arguments if "resume" in config else arguments + clients


@pytest.fixture
def run(pairs, tmp_path, capsys):
    """Run in this process, on the sequential engine; return the exit code and what an error said."""

    def run(**config: Any) -> tuple[int, str]:
        given = config if "resume" in config else {**BASE, "results-dir": str(tmp_path), **config}
        return run_simulation.main(arguments_of(pairs, given)), capsys.readouterr().err

    return run


@pytest.fixture
def run_and_kill(pairs, tmp_path, repository):
    """Run in a process that kills itself at an aggregation; return the run directory."""

    def run(aggregation: int, **config: Any) -> Path:
        path = Path(config.get("resume", tmp_path / "killed"))
        place = {**BASE, "results-dir": str(tmp_path), "run-name": "killed"}
        given = arguments_of(pairs, config if "resume" in config else place | config)
        command = [sys.executable, "-c", KILLED, str(aggregation), *given]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return path

    return run


def assert_same(one: Path, other: Path) -> None:
    assert same_files(one, other)
    first, second = (summary_of(path) for path in (one, other))
    apart = {"wall-seconds": 0, "date": ""}  # one may end after midnight
    assert {**first, **apart} == {**second, **apart}
    assert first["status"] == "finished"
    before, after = ((path / "config.toml").read_text().splitlines() for path in (one, other))
    different = [line for line in before if line not in after]
    assert [line.partition(" ")[0] for line in different] == ["run-name"]


# A strategy's own state: tests/strategies/core/test_resume.py, for all of them.
@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("fedavg", {**HALF, "server-optimizer": "yogi", "server-lr": 0.01}),
        pytest.param("spectral", HALF, marks=pytest.mark.thorough),
        pytest.param("ditto", {**HALF, "test-on": "own"}, marks=pytest.mark.thorough),
        pytest.param("fedfix", {"time-scenario": "exponential", "eval-every": 2}, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_resumed_equals_one_that_was_not(run, run_and_kill, tmp_path, strategy, own):
    assert run(strategy=strategy, **own, **{"run-name": "whole"})[0] == 0
    path = run_and_kill(10, strategy=strategy, **own)
    assert summary_of(path)["status"] == "running"
    assert arrays_of(path)
    assert tomllib.loads((path / "config.toml").read_text())["num-server-rounds"] == ROUNDS
    assert lines_of(path)[-1]["aggregation"] in (9, 10)
    assert len(list((path / "checkpoint").glob("[0-9]*"))) == 1
    assert run(resume=str(path))[0] == 0
    assert_same(tmp_path / "whole", path)


@pytest.mark.ci
@pytest.mark.thorough
def test_a_run_that_is_killed_again_and_again_still_ends_the_same(run, run_and_kill, tmp_path):
    config = {"strategy": "fedbuff", "buffer-size": 2, "client-weights": "adjacency"}
    run(**config, **{"run-name": "whole"})
    path = run_and_kill(1, **config)  # before there is a checkpoint
    for aggregation in (7, 16):
        run_and_kill(aggregation, resume=str(path))
    assert run(resume=str(path))[0] == 0
    assert_same(tmp_path / "whole", path)


def test_a_finished_run_says_so_and_goes_on_when_rounds_are_added(run, tmp_path):
    run(strategy="async-fedavg", **{"run-name": "whole", "num-server-rounds": 12, "server-lr": 0.2})
    run(strategy="async-fedavg", **{"run-name": "run", "num-server-rounds": 6, "server-lr": 0.2})
    path = tmp_path / "run"
    before = (path / "metrics.jsonl").read_bytes()
    code, error = run(resume=str(path))
    assert code == 1
    assert error == (
        f"error: resume = {str(path)!r}: that run is finished; it goes on if num-server-rounds or time-budget is "
        "raised, from 6 and 0\n"
    )
    assert (path / "metrics.jsonl").read_bytes() == before
    assert run(resume=str(path), **{"num-server-rounds": 12})[0] == 0
    assert [line["aggregation"] for line in lines_of(path)] == list(range(13))
    assert same_files(path, tmp_path / "whole", "model.safetensors")
    assert summary_of(path)["aggregations"] == 12
    assert "num-server-rounds = 12\n" in (path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("strategy", "first", "more"),
    [
        ("fedavg", {"num-server-rounds": 5}, {"num-server-rounds": 8}),
        ("fedavg", {"num-server-rounds": 8, "stop-at": "loss<=2.29"}, {"stop-at": ""}),
        ("fedavg", {"num-server-rounds": 8, "time-budget": 5.5}, {"time-budget": 0.0}),
        ("async-fedavg", {"num-server-rounds": 5}, {"num-server-rounds": 8}),
        ("async-fedavg", {"num-server-rounds": 8, "time-budget": 0.9}, {"time-budget": 0.0}),
    ],
)
def test_a_run_goes_on_from_its_end_though_no_checkpoint_was_due(run, tmp_path, strategy, first, more):
    own = {"strategy": strategy, "checkpoint-every": 100, "server-lr": 0.2, "eval-every": 1}
    run(**own, **{"run-name": "whole", "num-server-rounds": 8})
    path = tmp_path / "run"
    assert run(**own, **first, **{"run-name": "run"})[0] == 0
    before = (path / "metrics.jsonl").read_bytes()
    assert 1 < before.count(b"\n") < 9
    assert run(resume=str(path), **more)[0] == 0
    assert (path / "metrics.jsonl").read_bytes().startswith(before)
    assert same_files(path, tmp_path / "whole", "model.safetensors")
    # What tasks at the end of the first run would have been sent counts a line later.
    apart = {"bytes-down": 0} if strategy == "async-fedavg" and "num-server-rounds" in more else {}
    ended, whole = ([{**line, **apart} for line in lines_of(each)] for each in (path, tmp_path / "whole"))
    assert ended == whole


def test_a_finished_run_without_a_checkpoint_stays_as_it_is(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    shutil.rmtree(path / "checkpoint")
    before = (path / "metrics.jsonl").read_bytes()
    code, error = run(resume=str(path), **{"num-server-rounds": 5})
    assert (code, error) == (
        1,
        f"error: resume = {str(path)!r}: that run is finished, and has no checkpoint to go on from; a new run: "
        f"-c {path}/config.toml, with what is another\n",
    )
    assert (path / "metrics.jsonl").read_bytes() == before


def test_another_config_is_refused_with_the_keys_named(run, tmp_path):
    run(strategy="fedprox", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    code, error = run(
        resume=str(path), strategy="fedavg", lr=0.1, **{"num-server-rounds": 2, "model": "mlp", "seed": 0}
    )
    assert code == 1
    assert error == (
        f"error: resume = {str(path)!r}: that run has another config than strategy = 'fedavg' (it has 'fedprox'), "
        "num-server-rounds = 2 (it has 3), model = 'mlp' (it has 'logistic'); num-server-rounds and time-budget may "
        f"be raised, {', '.join(FREE)} may change\n"
    )
    code, error = run(resume=str(tmp_path))
    assert (code, error.startswith(f"error: resume = {str(tmp_path)!r}: no run is there")) == (1, True)


OWN = """
import numpy as np
from torch import nn

def rows(data_path):
    table = np.loadtxt(data_path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(2, num_classes)

    def forward(self, x):
        return self.layer(x) * 1.0
"""


def test_other_data_and_sources_of_own_parts_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    table, module = tmp_path / "rows.csv", tmp_path / "own_of_resume.py"
    rows = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(80))
    table.write_text(rows)
    module.write_text(OWN)
    own = {"dataset": "own_of_resume:rows", "model": "own_of_resume:Net", "data-path": str(table)}
    assert run(strategy="fedavg", **own, **{"run-name": "run", "num-server-rounds": 2})[0] == 0
    path = tmp_path / "run"
    before = {file.name: file.read_bytes() for file in path.glob("*.npz")}

    def refused(what: str) -> bool:
        sys.modules.pop("own_of_resume", None)
        code, error = run(resume=str(path), **{"num-server-rounds": 4})
        assert {file.name: file.read_bytes() for file in path.glob("*.npz")} == before
        return (code, error) == (
            1,
            f"error: resume = {str(path)!r}: {what} changed since; allowed is what the run began with, and a new "
            f"run: -c {path}/config.toml\n",
        )

    table.write_text(rows * 3)
    assert refused("the rows of dataset = 'own_of_resume:rows'")
    table.write_text(rows.replace("6,", "8,"))  # other values of as many rows of each class
    assert refused("the rows of dataset = 'own_of_resume:rows'")
    table.write_text(rows)
    module.write_text(OWN.replace("* 1.0", "* 2.0"))
    sources = "the source of model = 'own_of_resume:Net' and the source of dataset = 'own_of_resume:rows'"
    assert refused(sources)
    module.write_text(OWN)
    sys.modules.pop("own_of_resume", None)
    assert run(resume=str(path), **{"num-server-rounds": 4})[0] == 0


def images(seed: int) -> dict[str, np.ndarray]:
    """Eighty training and twenty test images of MNIST's shape, with labels that no seed changes."""
    rng = np.random.default_rng(seed)
    found = {f"x_{part}": rng.integers(0, 256, (n, 28, 28), np.uint8) for part, n in PARTS.items()}
    return found | {f"y_{part}": np.arange(n, dtype=np.uint8) % 10 for part, n in PARTS.items()}


PARTS = {"train": 80, "test": 20}


def test_data_may_have_moved_but_must_be_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    first, moved, other = (tmp_path / f"{name}.npz" for name in ("first", "moved", "other"))
    np.savez(first, **images(0))
    np.savez(other, **images(1))
    config = {"strategy": "fedavg", "dataset": "mnist", "data-path": str(first), "checkpoint-every": 1}
    assert run(**config, **{"run-name": "run", "num-server-rounds": 2})[0] == 0
    assert run(**config, **{"run-name": "whole", "num-server-rounds": 4})[0] == 0
    first.rename(moved)
    path, longer = str(tmp_path / "run"), {"num-server-rounds": 4}
    code, error = run(resume=path, **longer)
    assert (code, f"data-path = {str(first)!r}: no such file or folder" in error) == (1, True)
    code, error = run(resume=path, **longer, **{"data-path": str(other)})
    assert (code, "the rows of dataset = 'mnist' changed since" in error) == (1, True)
    assert run(resume=path, **longer, **{"data-path": str(moved)})[0] == 0
    config = tomllib.loads((tmp_path / "run/config.toml").read_text("utf-8"))
    assert config["data-path"] == str(moved)
    assert same_files(tmp_path / "run", tmp_path / "whole", "model.safetensors")


def test_data_that_were_generated_are_not_taken_for_files(run, tmp_path):
    run(strategy="fedavg", dataset="synthetic", **{"run-name": "run", "num-server-rounds": 2})
    data = load_dataset(
        "synthetic", num_clients=CLIENTS
    )  # as many rows of each class for each client, elsewhere
    (tmp_path / "files").mkdir()
    for part, rows in (("train", slice(data.num_train)), ("test", slice(data.num_train, None))):
        x, y, groups = (array[rows] for array in (data.x, data.y, data.groups))
        of = {
            f"user-{g}": {"x": (x[groups == g] + 1).tolist(), "y": y[groups == g].tolist()}
            for g in range(CLIENTS)
        }
        (tmp_path / f"files/{part}.json").write_text(json.dumps({"users": list(of), "user_data": of}))
    path, files = tmp_path / "run", str(tmp_path / "files")
    code, error = run(resume=str(path), **{"num-server-rounds": 3, "data-path": files})
    assert (code, "the rows of dataset = 'synthetic' changed since" in error) == (1, True)


def test_a_run_that_went_on_elsewhere_names_each_machine(run, tmp_path, monkeypatch):
    for rounds, place in enumerate(("one", "one", "two"), start=1):
        monkeypatch.setattr("fedapp.server.journal.machine", lambda place=place: f"machine {place}")
        begun = {"resume": str(tmp_path / "run")} if rounds > 1 else {"strategy": "fedavg", "run-name": "run"}
        assert run(**begun, **{"num-server-rounds": rounds})[0] == 0
    assert summary_of(tmp_path / "run")["machine"] == "machine one, then machine two"


def test_another_number_of_clients_is_refused(run, tmp_path, capsys):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    arguments = ["--engine", "sequential", "--run-config", f'resume="{tmp_path / "run"}" num-server-rounds=5']
    assert run_simulation.main([*arguments, "--federation-config", "num-supernodes=5"]) == 1
    assert capsys.readouterr().err == "error: num-supernodes = 5: the run to resume has 4 clients\n"


def test_a_damaged_checkpoint_is_refused_and_nothing_is_overwritten(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    before = (path / "metrics.jsonl").read_bytes()
    for name, spoil in (
        ("model.npy", lambda content: content[:-8]),
        ("model.npy", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("model.npy", None),
        ("state.json", lambda content: content[: len(content) // 2]),
        ("state.json", lambda content: content.replace(b'"time": 3', b'"time": 4')),
        ("checksums.json", lambda content: content[:5]),
        ("checksums.json", None),
    ):
        (file,) = path.glob(f"checkpoint/*/{name}")
        content = file.read_bytes()
        if spoil is None:
            file.unlink()
        else:
            assert spoil(content) != content
            file.write_bytes(spoil(content))
        code, error = run(resume=str(path), **{"num-server-rounds": 5})
        assert code == 1
        assert error.startswith(f"error: resume = {str(path)!r}: its checkpoint can't be read ("), name
        assert error.count("\n") == 1
        assert (path / "metrics.jsonl").read_bytes() == before
        file.write_bytes(content)
    assert run(resume=str(path), **{"num-server-rounds": 5})[0] == 0


def test_a_run_that_keeps_no_checkpoints_cannot_be_resumed(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3, "checkpoint-every": 0})
    path = tmp_path / "run"
    assert not (path / "checkpoint").exists()
    code, error = run(resume=str(path), **{"num-server-rounds": 5})
    assert (code, error) == (
        1,
        f"error: resume = {str(path)!r}: that run was made with checkpoint-every = 0\n",
    )


def test_a_run_that_went_on_without_checkpoints_goes_on_from_the_one_that_it_has(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "whole", "num-server-rounds": 6})
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    assert run(resume=str(path), **{"num-server-rounds": 5, "checkpoint-every": 0})[0] == 0
    assert run(resume=str(path), **{"num-server-rounds": 6})[0] == 0
    assert len(lines_of(path)) == 7
    assert same_files(path, tmp_path / "whole", "model.safetensors")


def test_a_run_that_is_still_going_on_cannot_be_resumed(run, tmp_path):
    config = {
        **BASE,
        "strategy": "fedavg",
        "results-dir": str(tmp_path),
        "run-name": "run",
        "num-server-rounds": 2,
    }
    directory = RunDirectory(RunConfig.load(config))
    directory.write_config(CLIENTS)
    refused = f"error: resume = {str(directory.path)!r}: that run is still going on\n"
    assert run(resume=str(directory.path)) == (1, refused)
    directory.close()
    assert run(resume=str(directory.path))[0] == 0  # it had no checkpoint yet: it starts over
    assert len(lines_of(directory.path)) == 3


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        ({}, True),
        ({"aggregation-weights": "observed"}, False),
        ({"concurrency": 2}, False),
    ],
)
def test_weights_that_go_by_the_number_of_aggregations_are_said_to_be_others(
    run, tmp_path, caplog, keys, others
):
    path = tmp_path / "run"
    config = {**BASE, **keys, "strategy": "fedbuff", "buffer-size": 2, "num-server-rounds": 6}
    assert run(**config, **{"results-dir": str(tmp_path), "run-name": "run"})[0] == 0
    assert run(resume=str(path), **{"num-server-rounds": 12})[0] == 0
    said = "num-server-rounds = 12 (was 6): time-based weights of fedbuff are those of all aggregations"
    assert (said in caplog.text) is others


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_aggregation_that_was_reported_is_lost_when_the_serverapp_dies(tmp_path, repository):
    results = tmp_path / "results"
    config = {
        "strategy": "async-fedavg",
        "clock": "wall",
        "server-lr": 0.3,
        "num-server-rounds": 10,
        "min-clients": 2,
        "local-epochs": 5,
        "round-timeout": 120.0,
        "results-dir": str(results),
        "run-name": "run",
    }
    path = results / "run"
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    with LocalDeployment(tmp_path / "deployment", nodes) as deployment:
        deployment.start()
        with (tmp_path / "first.log").open("wb") as log:
            first = deployment.start_run(repository, config, stdout=log, stderr=log)
        wait_until(lambda: count_of(path) >= 5)
        (server,) = server_apps(deployment.folder)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not server_apps(deployment.folder))
        reported = (path / "metrics.jsonl").read_bytes()
        reported = reported[: reported.rfind(b"\n") + 1]
        assert summary_of(path)["status"] == "running"
        first.wait(timeout=120)
        with (tmp_path / "second.log").open("wb") as log:
            second = deployment.start_run(repository, {"resume": str(path)}, stdout=log, stderr=log)
        second.wait(timeout=240)
    output = (tmp_path / "second.log").read_text()
    assert f"Run directory: {path}" in output, output
    assert (path / "metrics.jsonl").read_bytes().startswith(reported)
    rest = lines_of(path)
    assert [line["aggregation"] for line in rest] == list(range(11))
    assert rest[-1]["time"] > rest[reported.count(b"\n") - 1]["time"]  # the run's clock goes on
    assert sum(last_clients(path)["participation"]) == 10
    assert rest[-1]["accuracy"] > rest[0]["accuracy"]
    summary = summary_of(path)
    assert (summary["status"], summary["aggregations"], summary["engine"]) == ("finished", 10, "deployment")
