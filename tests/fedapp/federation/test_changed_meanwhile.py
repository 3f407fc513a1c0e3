"""What changes on disk between two runs of one process counts for the second; what doesn't isn't read again."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedapp
from fedapp.config import ConfigError
from fedapp.federation import loaded
from fedapp.own import changed_since

SMALL: dict[str, Any] = {
    "num_clients": 2,
    "model": "logistic",
    "batch_size": 0,
    "num_server_rounds": 1,
    "figures": False,
    "quiet": True,
}


def write_table(path: Path, rows: int) -> None:
    path.write_text("a,label\n" + "".join(f"{row / rows},{row % 2}\n" for row in range(rows)))


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_changed_file_is_read_again(tmp_path, engine):
    table = tmp_path / "table.csv"
    sizes = []
    for rows in (100, 300):
        write_table(table, rows)
        made = fedapp.run(
            **SMALL, engine=engine, dataset="files", data_path=str(table), results_dir=tmp_path / "runs"
        )
        with np.load(made.path / "partition.npz") as division:
            sizes.append(len(division["client_indices"]))
        assert made.metrics["failures"].tolist() == [0, 0]
    assert sizes == [80, 240]


def test_unchanged_data_are_loaded_once(tmp_path, monkeypatch):
    table, times = tmp_path / "table.csv", []
    load = loaded.load_dataset

    def counted(*arguments: Any, **more: Any) -> Any:
        times.append(1)
        return load(*arguments, **more)

    monkeypatch.setattr(loaded, "load_dataset", counted)
    write_table(table, 50)
    swept = fedapp.sweep(
        **SMALL, dataset="files", data_path=str(table), lr=[0.1, 0.2, 0.3], out=tmp_path / "sweep"
    )
    assert swept.table["runs"].tolist() == [1, 1, 1]
    assert len(times) == 1


def test_a_loss_that_is_loaded_again_is_the_new_one(tmp_path, monkeypatch):
    source = tmp_path / "loss_of_mine.py"
    text = "from torch.nn.functional import cross_entropy as of\n\n\ndef loss(o, t):\n    "
    text += "return {} * of(o, t, reduction='none')\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    losses = []
    for factor in ("1", "100"):
        source.write_text(text.format(factor))
        if module := sys.modules.get("loss_of_mine"):
            importlib.reload(module)
        made = fedapp.run(**SMALL, loss="loss_of_mine:loss", results_dir=tmp_path / "runs")
        losses.append(made.metrics["loss"].iloc[0])
    assert losses[1] == pytest.approx(100 * losses[0])
    del sys.modules["loss_of_mine"]


def test_other_processes_are_refused_what_they_would_import_otherwise(tmp_path, monkeypatch):
    source = tmp_path / "losses_of_mine.py"
    source.write_text(
        "from torch.nn.functional import cross_entropy as of\n\n\ndef loss(o, t):\n    "
        "return of(o, t, reduction='none')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    swept: dict[str, Any] = {**SMALL, "loss": "losses_of_mine:loss", "lr": [0.1], "out": tmp_path / "sweep"}
    assert fedapp.sweep(**swept).table["runs"].tolist() == [1]
    source.write_text(source.read_text() + "# changed\n")
    said = r"^loss = 'losses_of_mine:loss': losses_of_mine\.py has changed since it was imported, and other processes"
    with pytest.raises(ConfigError, match=said):
        fedapp.sweep(**{**swept, "lr": [0.2]}, jobs=2)
    for more in ({"engine": "ray"}, {"federation_config": {"workers": 2}}):
        with pytest.raises(ConfigError, match=said):
            fedapp.run(**SMALL, **more, loss="losses_of_mine:loss", results_dir=tmp_path / "runs")
    assert fedapp.sweep(**{**swept, "lr": [0.2]}).table["runs"].tolist() == [1]
    importlib.reload(sys.modules["losses_of_mine"])
    assert changed_since({"loss": "losses_of_mine:loss"}) == ""
    del sys.modules["losses_of_mine"]
