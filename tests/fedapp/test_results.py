"""The run directory: names, errors, and every file read back."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from fedapp.config import ConfigError, RunConfig
from fedapp.data import Partition
from fedapp.server.run_directory import Checkpoint, RunDirectory
from tests.runs import summary_of


@pytest.fixture
def results(tmp_path):
    return str(tmp_path / "results")


@pytest.fixture
def directory(results, configure):
    return RunDirectory(configure(results_dir=results, run_name="run"))


def names(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        RunDirectory(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names -----------------------------------------------------------------------------------------------------


def test_unnamed_runs_take_the_first_free_number(results, configure):
    config = configure(results_dir=results, strategy="fedprox", model="cnn")
    paths = [RunDirectory(config).path for _ in range(3)]
    assert [path.name for path in paths] == [f"fedprox-digits-cnn-00{number}" for number in (1, 2, 3)]
    paths[1].rmdir()
    assert RunDirectory(config).path == paths[1]
    assert RunDirectory(config).path.name == "fedprox-digits-cnn-004"
    other = RunDirectory(configure(results_dir=results, strategy="fedavg", model="cnn"))
    assert other.path.name == "fedavg-digits-cnn-001"


def test_a_named_run_gets_its_name(directory, results):
    assert directory.path == Path(results) / "run"
    assert directory.path.is_dir()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            "interrupted",
            "that run was interrupted after aggregation 7, and resume={} goes on from aggregation 5; or ",
        ),
        (
            "stopped",
            "that run was stopped after aggregation 7, and resume={} goes on from aggregation 5; or ",
        ),
        ("failed", "that run failed after aggregation 7, and resume={} goes on from aggregation 5; or "),
        ("finished", ""),
    ],
)
def test_the_same_name_again_says_how_a_run_that_was_cut_off_goes_on(
    status, said, directory, results, configure
):
    directory.write_config(3)
    directory.write_summary({"status": status, "aggregations": 7})
    directory.write_checkpoint(Checkpoint({"aggregations": 3}, {}))
    directory.write_checkpoint(Checkpoint({"aggregations": 5}, {}))
    text = refusal(configure(results_dir=results, run_name="run"))
    assert text.endswith(f"its results are kept; {said.format(directory.path)}choose another name")


def test_a_run_without_checkpoints_is_not_said_to_go_on(directory, results, configure):
    directory.write_config(3)
    directory.write_summary({"status": "interrupted", "aggregations": 7})
    assert "begins it anew, as it has no checkpoint yet" in refusal(
        configure(results_dir=results, run_name="run")
    )
    none = RunDirectory(configure(results_dir=results, run_name="none", checkpoint_every=0))
    none.write_config(3)
    none.write_summary({"status": "interrupted", "aggregations": 7})
    assert "resume" not in refusal(configure(results_dir=results, run_name="none"))


def test_parts_of_python_have_no_digest_in_the_name_of_a_run(results, configure):
    directory = RunDirectory(configure(results_dir=results, model="python:narrow_0123abcd"))
    assert directory.path.name == "fedavg-digits-python-narrow-001"


def test_a_taken_name_is_refused_and_its_results_kept(directory, results, configure):
    (directory.path / "metrics.jsonl").write_text("{}\n")
    text = refusal(configure(results_dir=results, run_name="run"))
    assert text.startswith("run-name = 'run': ")
    assert str(directory.path) in text
    assert "choose another name" in text
    assert (directory.path / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("run_name", ["", "run"])
def test_a_results_dir_that_is_a_file_is_refused(run_name, tmp_path, configure):
    (tmp_path / "file").write_text("")
    text = refusal(configure(results_dir=str(tmp_path / "file"), run_name=run_name))
    assert text.startswith(
        f"results-dir = {str(tmp_path / 'file')!r}: must be a folder that can be written to"
    )


@pytest.mark.parametrize("run_name", ["", "run"])
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
def test_a_results_dir_that_cannot_be_written_to_is_refused(run_name, configure):
    text = refusal(configure(results_dir="/proc/no-results-here", run_name=run_name))
    assert text.startswith("results-dir = '/proc/no-results-here': must be a folder that can be written to")


def test_a_name_that_is_too_long_is_refused_by_its_key(results, configure):
    assert refusal(configure(results_dir=results, run_name="x" * 300)).startswith("run-name = ")


def test_a_relative_results_dir_is_fixed_at_the_start(tmp_path, monkeypatch, configure):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(configure(results_dir="here", run_name="run"))
    assert directory.path == tmp_path / "here" / "run"


# Files -----------------------------------------------------------------------------------------------------


def test_config_toml_reads_back_as_the_same_config(results, configure):
    config = configure(results_dir=results, run_name='it\'s a "run"', lr=1 / 3, local_epochs=0, local_steps=3)
    directory = RunDirectory(config)
    directory.write_config(7)
    written = tomllib.loads((directory.path / "config.toml").read_text("utf-8"))
    assert written.pop("num-clients") == 7
    versions = written.pop("versions")
    assert versions["torch"].startswith(torch.__version__.partition("+")[0])
    assert versions["numpy"] == np.__version__
    assert {"python", "fedapp", "flwr", "ray"} <= set(versions)
    assert written == config.flat()
    assert RunConfig.load(written) == config


def test_metrics_grow_line_by_line_and_what_is_not_finite_becomes_null(directory):
    path = directory.path / "metrics.jsonl"
    records: list[dict[str, Any]] = [
        {"aggregation": 0, "loss": 2.5, "clock": "virtual"},
        {"aggregation": 1, "loss": float("nan"), "accuracy": float("inf"), "time": -float("inf")},
    ]
    for number, record in enumerate(records, start=1):
        directory.append_metrics(record)
        assert len(path.read_text().splitlines()) == number  # readable at once
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == records[0]
    assert second == {"aggregation": 1, "loss": None, "accuracy": None, "time": None}


def test_a_summary_is_valid_json_whatever_the_numbers(directory):
    directory.write_summary({"status": "finished", "loss": float("nan"), "accuracy": 0.5})
    text = (directory.path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "status": "finished",
        "loss": None,
        "accuracy": 0.5,
    }


def test_the_model_reads_back_by_name(directory):
    state = {"0.weight": torch.randn(3, 2), "0.bias": torch.zeros(3), "counter": torch.tensor(4)}
    directory.write_model(state)
    read = safetensors.torch.load_file(directory.path / "model.safetensors")
    assert set(read) == set(state)
    assert all(
        torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in state.items()
    )


@pytest.mark.parametrize("large", [0, 1 << 20])
def test_the_partition_reads_back(large, directory, monkeypatch):
    monkeypatch.setattr("fedapp.server.run_directory.LARGE", large)
    parts = [np.array(part) for part in ([0, 3, 4], [0, 1, 3], [1, 2], [0, 2])]
    directory.write_partition(Partition(*parts), np.array([1, 0, 0, 2, 1]), 3)
    with np.load(directory.path / "partition.npz") as read:
        keys = ["client_indices", "client_offsets", "test_indices", "test_offsets"]
        assert sorted(read.files) == ["class_counts", *keys]
        # client 0 has row 0, of class 1; client 1 rows 3 and 4
        assert read["class_counts"].tolist() == [[0, 1, 0], [0, 1, 1]]
        assert [read[key].tolist() for key in keys] == [part.tolist() for part in parts]
        assert {read[key].itemsize for key in keys} == {8 if large else 4}


def test_files_are_replaced_whole_and_leave_no_temporary_one(directory):
    for number in (1, 2):
        directory.write_config(number)
        directory.write_summary({"aggregations": number})
        directory.write_model({"w": torch.full((2,), float(number))})
    assert names(directory) == ["config.toml", "model.safetensors", "summary.json"]
    assert summary_of(directory.path) == {"aggregations": 2}


def test_a_write_that_is_cut_off_leaves_the_old_file(directory, monkeypatch):
    directory.write_summary({"aggregations": 1})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.write_summary({"aggregations": 2})
    assert summary_of(directory.path) == {"aggregations": 1}
