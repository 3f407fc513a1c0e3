"""Bad input: one clear line that names the key, the value and what is allowed, before any client starts."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

import run_simulation
from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.server.run_directory import Checkpoint, read_checkpoint, write_checkpoint
from strategies import REGISTRY


@pytest.fixture
def refusal(tmp_path, capsys):
    """Run a config from the command line; return what it says, which is one line, and leaves no folder."""

    def run(config: str, clients: int = 4) -> str:
        results = (
            "" if "results-dir" in config or "resume" in config else f' results-dir="{tmp_path}/results"'
        )
        rounds = "" if "num-server-rounds" in config else "num-server-rounds=1 "
        code = run_simulation.main(
            [
                "--engine",
                "sequential",
                "--run-config",
                f"{rounds}{config}{results}",
                "--federation-config",
                f"num-supernodes={clients}",
            ]
        )
        text = capsys.readouterr().err
        assert code == 1
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, text
        assert "Traceback" not in text
        return lines[0].removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            'strategy="fednova" optimizer="adam"',
            "optimizer = 'adam' with strategy = 'fednova': the method divides an update by how far steps of sgd go "
            "along a steady gradient; allowed is optimizer = sgd",
        ),
        *(
            (
                f'strategy="{name}" server-optimizer="fedexp" buffer-size=2',
                f"server-optimizer = 'fedexp' with strategy = '{name}': the step size is by the lengths of the "
                "updates and of their sum in one round, which the method doesn't have; allowed is server-optimizer = "
                "sgd, momentum, nesterov, adagrad, adam, amsgrad, yogi",
            )
            for name in ("mifa", "fedbuff")
        ),
        (
            'strategy="scaffold" dp="central" client-weights="uniform"',
            "dp = 'central' with strategy = 'scaffold': the method puts updates together by itself",
        ),
        (
            'personal="3.*, haed.*"',
            "personal = '3.*, haed.*': no array of the model is called 'haed.*'; its arrays are 1.weight, 1.bias, "
            "3.weight, 3.bias",
        ),
        (
            'personal="3.*" strategy="ditto"',
            "personal = '3.*' with strategy = 'ditto': clients have whole models of their own; allowed is an empty",
        ),
        (
            'personal="3.*" strategy="spectral"',
            "personal = '3.*' with strategy = 'spectral': the method takes gradients between a client's model and "
            "those of its neighbours, who don't send such arrays; allowed is perturbation-beta = 1, or an empty",
        ),
        (
            'personal="*" personal-epochs=2',
            "personal-epochs = 2: with personal = '*' every array that is trained is a client's own; allowed is 0",
        ),
        (
            'keep="best" best-of="f1"',
            "best-of = 'f1': this run measures no 'f1'; allowed are loss, accuracy, train-loss, and of clients "
            "such as client-accuracy-mean",
        ),
        (
            'stop-at="rmse<=2"',
            "stop-at = 'rmse<=2': this run measures no 'rmse'; allowed are loss, accuracy, ",
        ),
        (
            'stop-at="client-accuracy-mean>=0.9" client-records="never"',
            "stop-at = 'client-accuracy-mean>=0.9': needs the clients' numbers of every evaluation, and "
            "client-records = 'never'; allowed are auto, always",
        ),
        (
            'patience=2 best-of="client-loss-worst-tenth" client-records="last"',
            "best-of = 'client-loss-worst-tenth': needs the clients' numbers of every evaluation, and "
            "client-records = 'last'; allowed are auto, always",
        ),
        (
            'keep="best" best-of="federated-loss"',
            "best-of = 'federated-loss': this run measures no 'federated-loss'",
        ),
        (
            'strategy="fedasync" keep="best" best-of="federated-loss" client-records="never"',
            "best-of = 'federated-loss': needs the clients' numbers of every evaluation, and client-records = ",
        ),
        ('time-scenario="trace:/dev/zero"', "time-scenario = 'trace:/dev/zero': is no file"),
        ('time-scenario="trace:~nouser/x"', "time-scenario = 'trace:~nouser/x': can't be found"),
        ('dataset="npz" data-path="~nouser/x.npz"', "data-path = '~nouser/x.npz': can't be found"),
        ('results-dir="~nouser/x"', "results-dir = '~nouser/x': can't be found"),
        ('resume="~nouser/x"', "resume = '~nouser/x': can't be found"),
        (
            'step-heterogeneity="uniform:5-1"',
            "step-heterogeneity = 'uniform:5-1': must be uniform:A-B with A <= B",
        ),
    ],
)
def test_a_value_that_cannot_be(config, says, refusal, tmp_path):
    assert refusal(config).startswith(says)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("key", ["data-path", "results-dir"])
def test_a_path_that_is_too_long(key, refusal):
    other = 'dataset="npz" ' if key == "data-path" else ""
    text = refusal(f'{other}{key}="/{"x" * 5000}"')
    assert text.startswith(f"{key} = '/xxx")
    assert text.endswith("can't be found (File name too long)")
    assert len(text) < 300


def test_more_clients_than_there_can_be(refusal):
    assert refusal("", 10**9) == "num-supernodes = 1000000000: must be a whole number from 1 to 1000000"


def test_a_trace_that_is_another_file_is_not_quoted(refusal, tmp_path):
    (tmp_path / "passwd").write_text("root:secret:0:0\n")
    text = refusal(f'time-scenario="trace:{tmp_path}/passwd"')
    assert text.endswith("row 1 must be client,seconds with seconds > 0")
    assert "secret" not in text


def test_a_pipe_is_not_waited_for(refusal, tmp_path):
    os.mkfifo(tmp_path / "data.csv")
    assert refusal(f'dataset="files" data-path="{tmp_path}/data.csv"').endswith("is no file or folder")


def images(root: Path, *classes: str, dtype: Any = np.uint8) -> Path:
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, np.iinfo(dtype).max, (8, 8), dtype)).save(
                root / name / f"{i}.png"
            )
    return root


@pytest.mark.parametrize(
    ("classes", "dtype", "says"),
    [
        (
            ("0", "1000000"),
            np.uint8,
            "has the label 1000000, but 2 different ones; labels are whole numbers from 0",
        ),
        (("01", "1", "2"), np.uint8, "has the folders 01 and 1, which are the same label"),
        (("a", "b"), np.uint16, "12 images have more than 8 bits a pixel: "),
    ],
)
def test_images_that_would_be_taken_for_something_else(classes, dtype, says, refusal, tmp_path):
    folder = images(tmp_path / "images", *classes, dtype=dtype)
    assert says in refusal(f'dataset="files" data-path="{folder}"')


@pytest.mark.parametrize("weights", ['client-weights="adjacency"', 'strategy="spectral"'])
def test_data_without_a_direction(weights, refusal, tmp_path):
    np.savez(tmp_path / "zeros.npz", x_train=np.zeros((60, 4), np.float32), y_train=np.arange(60) % 3)
    text = refusal(f'dataset="npz" data-path="{tmp_path}/zeros.npz" {weights}')
    assert text.startswith("no client sent a direction to place it in the graph; the log names the reasons")


def test_a_run_in_which_nothing_is_accepted_has_diverged(refusal, tmp_path):
    assert refusal("lr=1e30").startswith("no client's work was accepted in 1 aggregations")
    (summary,) = (tmp_path / "results").glob("*/summary.json")
    assert '"status": "diverged"' in summary.read_text()


def test_a_run_that_diverges_says_so(refusal, tmp_path):
    # With λ = 1 an update is about −w / 10, and the next model −10^5 times this one.
    text = refusal('num-server-rounds=9 server-lr=1e6 model="logistic" l2=1.0')
    assert (
        "made a model that isn't finite, or too large to train on: the steps are too large (lr, server-lr)"
        in text
    )
    (summary,) = (tmp_path / "results").glob("*/summary.json")
    assert '"status": "diverged"' in summary.read_text()


# What is odd, and said --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        ([0] * 60, None, "all training rows are of one class, 0: any model is right"),
        ([0, 2, 7] * 20, None, "of 8 classes no row has 1, 3, 4, 5, 6"),
        ([0, 1] * 30, [0, 1, 2], "test rows have 2, which no training row has"),
        (
            [0, 1] * 30,
            [1, 1],
            "all test rows are of one class, 1: accuracy says little, and there is no auroc",
        ),
        ([0, 1] * 30, [1], "there is a single test row: accuracy is 0 or 1"),
    ],
)
def test_odd_data_are_remarked_on(train, test, says, tmp_path, caplog):
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x_train": rng.normal(size=(60, 4)), "y_train": np.array(train)}
    if test:
        arrays |= {"x_test": rng.normal(size=(len(test), 4)), "y_test": np.array(test)}
    np.savez(tmp_path / "own.npz", **arrays)
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        server.prepare(RunConfig.load({"dataset": "npz", "data-path": str(tmp_path / "own.npz")}), 3)
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("data: ")] == [
        f"data: {says}"
    ]


@pytest.mark.parametrize(
    ("scale", "given", "said"), [(1e4, False, True), (1.0, False, False), (1e4, True, False)]
)
def test_large_inputs_are_remarked_on(scale, given, said, tmp_path, caplog):
    x = np.random.default_rng(0).normal(size=(60, 4))
    x[:, 2] *= scale
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(60) % 3)
    values = {"dataset": "npz", "data-path": str(tmp_path / "own.npz")}
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        server.prepare(RunConfig.load({**values, **({"normalize": "standardize"} if given else {})}), 3)
    lines = [record.getMessage() for record in caplog.records]
    assert [" (feature 2, root mean square): " in line for line in lines] == [True] * said
    assert all("normalize = 'standardize' brings them to mean 0" in line for line in lines)


def test_steps_too_small_to_do_anything(tmp_path, caplog):
    config = RunConfig.load({"lr": 1e-30, "num-server-rounds": 2, "results-dir": str(tmp_path)})
    with caplog.at_level(logging.WARNING, "flwr"):
        server.run(SequentialGrid(client_app.app, 3), server.prepare(config, 3))
    assert caplog.text.count("left the model as it was: are the steps (lr, server_lr) too small?") == 1


# Any config -------------------------------------------------------------------------------------------------

WORDS = [
    "",
    "none",
    "auto",
    "full",
    "md",
    "fixed:0",
    "fixed:9",
    "F0",
    "F99",
    "exponential",
    "trace:",
    "speed",
    "list:1,2,3",
    "range:1-3",
    "uniform:1-2",
    "lognormal:1",
    "~nouser",
    "\x1b[31m",
    "x" * 300,
    "ü",
    "-rf",
]
NUMBERS = [0, 1, 2, 3, -1, 0.5, 1e-300, 1e300, float("inf"), float("nan"), 2**63 - 1, 2**63, 10**9]


def anything(key: str) -> st.SearchStrategy[Any]:
    """Return values of a key: what its type allows, and what it doesn't."""
    allowed = RunConfig.allowed(key).removeprefix("one of ").replace(" or ", ", ").split(", ")
    return st.sampled_from([*allowed, *WORDS, *NUMBERS, True, False])


# Not those that say where a run goes or what it takes from the network, or that make a task as long as they are.
ELSEWHERE = {
    "results-dir",
    "run-name",
    "data-path",
    "dataset",
    "resume",
    "num-server-rounds",
    "local-epochs",
    "local-steps",
    "client-threads",
    "round-timeout",
    "min-clients",
    "model",
    "tracker",
    "clock",
}
KEYS = [key for key in RunConfig.key_names() if key not in ELSEWHERE]
configs = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: anything(key) for key in keys})
)


@pytest.mark.thorough
@given(configs, st.sampled_from(list(REGISTRY)))
def test_any_config_runs_or_is_refused_in_one_line(tmp_path, values, strategy):
    own = {
        "strategy": strategy,
        "model": "logistic",
        "num-server-rounds": 1,
        "round-timeout": 60.0,
        "buffer-size": 2,
    }
    config = {**own, "server-lr": 0.1, **values, "results-dir": str(tmp_path)}
    try:
        experiment = server.prepare(RunConfig.load(config), 3)
        server.run(SequentialGrid(client_app.app, 3), experiment)
    except server.USER_ERRORS as error:
        lines = str(error).splitlines()
        assert 1 <= len(lines) <= len(values) + 1
        assert all(line.strip() for line in lines)


@pytest.mark.thorough
@given(st.binary(max_size=400), st.sampled_from(["npz", "csv", "parquet"]), st.booleans())
@example(b"\x0b\n", "csv", False)
def test_any_file_is_read_or_refused_in_one_line(tmp_path, content, suffix, text):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(b"label,a,b\n" + content if text else content)
    refused = ""
    try:
        server.prepare(RunConfig.load({"dataset": "files", "data-path": str(path), "min-samples": 1}), 2)
    except server.USER_ERRORS as error:
        refused = str(error)
    assert len(refused.splitlines()) <= 1


# A checkpoint that somebody else has written ------------------------------------------------------------------


def tampered(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a run's newest checkpoint anew, changed, with checksums that fit."""
    checkpoint = read_checkpoint(run / "checkpoint")
    assert checkpoint is not None
    state = {
        key: np.array(value) if isinstance(value, np.memmap) else value
        for key, value in checkpoint.strategy.items()
    }
    content = {"strategy": state, "observers": checkpoint.observers}
    change(content)
    write_checkpoint(run / "checkpoint", Checkpoint(**content))


def drop(part: str, key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[part].pop(key)


def put(part: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[part].update({key: value})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The runs of two methods, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    for strategy in STRATEGIES:
        own = f'strategy="{strategy}" model="logistic" checkpoint-every=1 server-lr=0.1 num-server-rounds=2'
        place = f'results-dir="{folder}" run-name="{strategy}" figures=false'
        arguments = ["--engine", "sequential", "-c", f"{own} {place}", "--federation-config"]
        assert run_simulation.main([*arguments, "num-supernodes=3"]) == 0
    return folder


STRATEGIES = ("fedavg", "async-fedavg")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("strategy", "began"), "its checkpoint has no 'began'"),
        (
            drop("strategy", "norms-of"),
            "the state has no 'norms-of', which a run with these settings goes on from",
        ),
        (drop("observers", "totals"), "its checkpoint has no 'totals'"),
        (drop("observers", "metrics-size"), "its checkpoint has no 'metrics-size'"),
        (put("strategy", "aggregations", "two"), ""),
        (put("observers", "totals", 3), ""),
        (put("observers", "wall-seconds", "long"), ""),
        (put("strategy", "strategy", "FedProx"), "the state is that of FedProx"),
        (put("strategy", "model", np.full(650, np.nan)), "the model of its state isn't finite"),
        (put("strategy", "model", np.zeros(3)), "the state is that of a model of 3 values, this one has 650"),
    ],
)
def test_a_checkpoint_that_does_not_fit(strategy, change, says, refusal, finished, tmp_path):
    shutil.copytree(finished / strategy, tmp_path / "r")
    tampered(tmp_path / "r", change)
    text = refusal(f'resume="{tmp_path}/r" num-server-rounds=4', 3)
    assert text.startswith(f"resume = '{tmp_path}/r': ")
    assert says in text
