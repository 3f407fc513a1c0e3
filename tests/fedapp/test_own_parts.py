"""Parts of one's own in a run: what doesn't fit is said in one line, before any client starts; all engines agree."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_simulation as command
from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from tests.fedapp import own_parts
from tests.runs import arrays_of, close, lines_of, same_files, summary_of

HERE = "tests.fedapp.own_parts"


def run(tmp_path: Path, name: str, engine: Any = SequentialGrid, **config: Any) -> Path:
    given = {"num-server-rounds": 3, "results-dir": str(tmp_path), "run-name": name, "lr": 0.05}
    given |= {key.replace("_", "-"): value for key, value in config.items()}
    experiment = server.prepare(RunConfig.load(given), 4)
    return server.run(engine(client_app.app, 4), experiment).path


def last(path: Path) -> Mapping[str, Any]:
    return lines_of(path)[-1]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"model": "custom.nets:ConvNet"}, marks=pytest.mark.thorough),
        {"model": "custom.nets:ConvNet", "strategy": "spectral", "perturbation_beta": 0.7},
        {"model": "custom.nets:ConvNet", "strategy": "fedbuff", "buffer_size": 2, "client_evaluation": True},
        {"model": f"{HERE}:noisy"},
        {"loss": "custom.losses:focal", "metrics": "accuracy,f1-macro,auroc,custom.losses:worst_recall"},
        pytest.param({"optimizer": "rmsprop", "lr": 0.003}, marks=pytest.mark.thorough),
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_sequential_and_vectorized_give_the_same_bits(tmp_path, config):
    config = {**config, "client_device": "cpu"}  # a GPU trains many at once, which rounds otherwise
    one, other = (run(tmp_path, grid.__name__, grid, **config) for grid in (SequentialGrid, VectorizedGrid))
    assert same_files(one, other)
    assert last(one)["failures"] == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_dense_layers_of_ones_own_are_stacked(tmp_path, optimizer):
    config = {"model": "custom.nets:wide", "optimizer": optimizer, "lr": 0.003}
    paths = [run(tmp_path, grid.__name__, grid, **config) for grid in (SequentialGrid, VectorizedGrid)]
    assert close(*paths)


def test_a_model_in_training_mode_learns_and_its_statistics_are_averaged(tmp_path):
    path = run(tmp_path, "run", VectorizedGrid, model="custom.nets:ConvNet", num_server_rounds=10)
    model = arrays_of(path)
    assert model["norm.num_batches_tracked"].dtype == np.int64
    assert model["norm.num_batches_tracked"] > 10
    assert (model["norm.running_var"] > 0).all()
    assert last(path)["accuracy"] > 0.85


def test_a_frozen_layer_stays_to_the_bit_and_gets_no_noise(tmp_path):
    changes = ({}, {"num_server_rounds": 1}, {"dp": "central", "client_weights": "uniform"})
    paths = [run(tmp_path, f"run{k}", model=f"{HERE}:half_frozen", **more) for k, more in enumerate(changes)]
    kept = [arrays_of(path) for path in paths]
    assert all(np.array_equal(model["1.weight"], kept[0]["1.weight"]) for model in kept)
    assert not np.array_equal(kept[0]["3.weight"], kept[1]["3.weight"])


@pytest.mark.parametrize("config", [{}, {"dp": "local", "dp_noise_multiplier": 0.01}])
def test_tied_weights_stay_one_with_noise_too(tmp_path, config):
    path = run(tmp_path, "run", model=f"{HERE}:Tied", **config)
    model = arrays_of(path)
    assert set(model) == {"first.weight", "second.weight", "output.weight", "output.bias"}
    assert np.array_equal(model["first.weight"], model["second.weight"])
    # each of three arrays, with NumPy's header of 128 bytes, travels once: 3 rounds of 4 clients
    once = 4 * (64 * 64 + 64 * 10 + 10) + 3 * 128
    assert summary_of(path)["bytes-down"] == 3 * 4 * once


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model": f"{HERE}:nothing"}, f"model = '{HERE}:nothing': can't be imported (there is no 'nothing'"),
        ({"model": "no.such:Net"}, "model = 'no.such:Net': can't be imported (ModuleNotFoundError"),
        ({"model": f"{HERE}:number"}, f"model = '{HERE}:number': must be a class or function"),
        (
            {"model": f"{HERE}:made"},
            f"model = '{HERE}:made': is an instance of Linear; a class, or a function that makes a new one",
        ),
        ({"model": f"{HERE}:no_module"}, f"model = '{HERE}:no_module': must make an nn.Module, makes str"),
        (
            {"model": f"{HERE}:NeedsDepth"},
            f"model = '{HERE}:NeedsDepth': needs 'depth'; it is called with those of",
        ),
        (
            {"model": f"{HERE}:fails"},
            f"model = '{HERE}:fails': RuntimeError: out of luck; own_parts.py, line ",
        ),
        ({"model": f"{HERE}:too_narrow"}, f"model = '{HERE}:too_narrow': can't predict inputs (8, 1, 8, 8)"),
        ({"model": f"{HERE}:no_parameters"}, f"model = '{HERE}:no_parameters': has no parameter that takes"),
        ({"model": f"{HERE}:one_output"}, "loss = 'cross-entropy': can't take outputs (8, 1) of model"),
        (
            {"loss": "torch.nn:CrossEntropyLoss"},
            "loss = 'torch.nn:CrossEntropyLoss': must return the loss of each",
        ),
        (
            {"loss": f"{HERE}:NeedsGamma"},
            f"loss = '{HERE}:NeedsGamma': a class is called without arguments (TypeError: ",
        ),
        (
            {"model": f"{HERE}:halving"},
            f"model = '{HERE}:halving': changes its inputs in place, and with them the data; a copy, such as",
        ),
        (
            {"loss": f"{HERE}:merging"},
            f"loss = '{HERE}:merging': changes its targets in place, and with them the data; a copy, such as",
        ),
        ({"loss": "torch:nothing"}, "loss = 'torch:nothing': can't be imported"),
        ({"metrics": "rmse"}, "metrics = 'rmse': is one of numbers, the targets of the data are classes"),
        ({"metrics": "accuracy,best"}, "metrics = 'best': must be auto, none, or some of accuracy"),
        (
            {"metrics": f"{HERE}:text"},
            "metrics = 'text': can't take outputs (8, 10), targets (8,) (ValueError",
        ),
        ({"optimizer": "adma"}, "optimizer = 'adma': must be one of sgd, adam, adamw"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum = 0.9 with optimizer = 'adam': "),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_doesnt_fit_is_one_line_before_any_client_starts(config, said):
    with pytest.raises(server.USER_ERRORS) as error:
        server.prepare(RunConfig.load(config), 4)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_module_beside_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text(
        "from torch import nn\n\n\n"
        "def make(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    model = server.prepare(RunConfig.load({"model": "nets_of_mine:make"}), 4).model
    assert model.get_parameter("1.weight").shape == (10, 64)  # which the layer learnt from the data


def test_options_of_sgd_are_not_read(configure):
    with pytest.raises(server.USER_ERRORS, match=r"^optimizer-options = 'eps=1': sgd has none"):
        server.prepare(RunConfig.load({"optimizer-options": "eps=1"}), 4)


def test_what_a_strategy_of_ones_own_raises_is_one_line(tmp_path, capsys, no_figures):
    """The line names the part, the file and the line; log.txt has the traceback."""
    words = [
        f"strategy={HERE}:RaisesAtItsFirstRound",
        f"results-dir={tmp_path}",
        "run-name=run",
        "model=logistic",
    ]
    assert command.main([*words, "num-clients=2"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    place = re.fullmatch(
        rf"error: strategy = '{HERE}:RaisesAtItsFirstRound': raised ZeroDivisionError: my own "
        r"\(own_parts.py, line (\d+), in configure_train\); the run's log.txt has the traceback",
        line,
    )
    assert place
    assert "my own" in Path(own_parts.__file__).read_text().splitlines()[int(place[1]) - 1]
    assert "Traceback (most recent call last)" in (tmp_path / "run" / "log.txt").read_text()
    assert "line " + place[1] in summary_of(tmp_path / "run")["reason"]
