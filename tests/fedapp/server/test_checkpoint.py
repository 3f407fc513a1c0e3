"""Checkpoints: read back as written, whole at every moment, and out of a full disk's way."""

import json
import logging
import os
from typing import Any

import numpy as np
import pytest

from fedapp.server import run_directory
from fedapp.server.run_directory import Checkpoint, RunDirectory, read_checkpoint, write_checkpoint
from tests.full_disk import files_of_at_most


def of(number: int, size: int = 5) -> Checkpoint:
    return Checkpoint({"aggregations": number, "model": np.full(size, float(number))}, {"line": None})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([1.0, np.nan, -np.inf, 5e-324]),
        np.array(3.5),
        np.empty((0, 7), dtype=np.float16),
        np.arange(4)[::2],
    ],
    ids=["matrix", "special", "scalar", "empty", "strided"],
)
def test_arrays_and_values_come_back_as_they_were(tmp_path, array):
    values: dict[str, Any] = {
        "time": 0.1 + 0.2,
        "nodes": [2**63 + 1],
        "none": None,
        "dropped": [True],
        "text": "θ",
    }
    write_checkpoint(tmp_path / "checkpoint", Checkpoint({**values, "a": array}, {"loss": float("nan")}))
    read = read_checkpoint(tmp_path / "checkpoint")
    assert read is not None
    found = read.strategy.pop("a")
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert read.strategy == values
    assert np.isnan(read.observers["loss"])


def test_there_is_none_at_first_and_only_the_newest_later(tmp_path):
    folder = tmp_path / "checkpoint"
    assert read_checkpoint(folder) is None
    for number in (3, 6, 4):
        write_checkpoint(folder, of(number))
        assert len(list(folder.iterdir())) == 1
        read = read_checkpoint(folder)
        assert read is not None
        assert read.strategy["aggregations"] == number


def test_a_memory_mapped_matrix_is_written_from_where_it_is(tmp_path):
    matrix = np.memmap(tmp_path / "matrix", dtype=np.float32, mode="w+", shape=(50, 20))
    matrix[:] = np.arange(1000).reshape(50, 20)
    write_checkpoint(tmp_path / "checkpoint", Checkpoint({"local-models": matrix}, {}))
    read = read_checkpoint(tmp_path / "checkpoint")
    assert read is not None
    assert isinstance(read.strategy["local-models"], np.memmap)
    assert read.strategy["local-models"][49, 19] == 999


@pytest.mark.parametrize("step", ["fsync", "replace", "rmtree"])
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    """Every call of a step in turn is the last thing that the process does."""

    class KilledError(BaseException):
        pass

    killed = True
    at = 0
    while killed:
        folder = tmp_path / f"{step}-{at}"
        write_checkpoint(folder, of(1))
        module: Any = run_directory.shutil if step == "rmtree" else os
        calls, real = iter(range(1000)), getattr(module, step)

        def dies(*arguments: Any, calls: Any = calls, real: Any = real, at: int = at, **options: Any) -> Any:
            if next(calls) == at:
                raise KilledError
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, step, dies)
            try:
                write_checkpoint(folder, of(2))
                killed = False
            except KilledError:
                pass
        read = read_checkpoint(folder)
        assert read is not None
        number = read.strategy["aggregations"]
        assert number in (1, 2)
        assert read.strategy["model"].tolist() == [float(number)] * 5
        write_checkpoint(folder, of(3))  # what the kill left doesn't stand in the way
        assert len(list(folder.iterdir())) == 1
        at += 1
    assert at > {"fsync": 4, "replace": 1, "rmtree": 1}[step]


def test_a_byte_that_has_changed_is_found_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "BLOCK", 16)  # which every file has several of
    write_checkpoint(tmp_path, of(1))
    (made,) = tmp_path.iterdir()
    files = [path for path in made.iterdir() if path.name != run_directory.CHECKSUMS]
    assert {path.name for path in files} == {"model.npy", "state.json"}
    for path in files:
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=rf"^{path.name} isn't what was written$"):
                read_checkpoint(tmp_path)
        path.write_bytes(whole)
    assert read_checkpoint(tmp_path) is not None


@pytest.mark.parametrize("checksums", [{}, {"state.json": 1}])
def test_a_file_without_a_checksum_is_found(checksums, tmp_path):
    write_checkpoint(tmp_path, of(1))
    (made,) = tmp_path.iterdir()
    written = json.loads((made / run_directory.CHECKSUMS).read_bytes())
    kept = {name: written[name] for name in checksums}
    (made / run_directory.CHECKSUMS).write_text(json.dumps(kept), "utf-8")
    with pytest.raises(ValueError, match=r"^checksums\.json names other files than are there: model\.npy"):
        read_checkpoint(tmp_path)


def test_without_space_the_last_one_stays_and_the_run_goes_on(tmp_path, configure, caplog):
    directory = RunDirectory(configure(results_dir=str(tmp_path), run_name="run"))
    directory.write_checkpoint(of(1))
    with files_of_at_most(4096), caplog.at_level(logging.WARNING, "flwr.fedapp"):
        directory.write_checkpoint(of(2, size=10_000))
    assert "no checkpoint of aggregation 2, the last one stays: " in caplog.text
    folder = directory.path / "checkpoint"
    read = read_checkpoint(folder)
    assert read is not None
    assert read.strategy["aggregations"] == 1
    assert [path.name for path in folder.iterdir()] == ["00000001"]  # what was begun takes no space
    directory.write_checkpoint(of(3, size=10_000))
    read = read_checkpoint(folder)
    assert read is not None
    assert len(read.strategy["model"]) == 10_000
    directory.close()


def test_lines_beyond_the_checkpoint_are_cut(tmp_path, configure):
    directory = RunDirectory(configure(results_dir=str(tmp_path), run_name="run"))
    assert directory.metrics_size() == 0
    directory.append_metrics({"aggregation": 0})
    size = directory.metrics_size()
    directory.append_metrics({"aggregation": 1})
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"aggreg')  # killed while it wrote
    directory.cut_metrics(size)
    assert json.loads((directory.path / "metrics.jsonl").read_text()) == {"aggregation": 0}
    with pytest.raises(ValueError, match="has lost lines since the checkpoint"):
        directory.cut_metrics(size + 1)
    directory.close()
