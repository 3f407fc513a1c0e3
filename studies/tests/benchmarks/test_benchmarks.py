"""The benchmark harness: whole processes on tiny data, and the arithmetic behind a figure."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedapp.data import DataError
from studies.benchmarks.__main__ import app as benchmarks
from studies.benchmarks.job import Job, Log, load_rows
from studies.benchmarks.measure import ContenderError, Measurement, descendants, measure, resident, summarise
from studies.benchmarks.report import draw, markdown, tables, write_results
from studies.benchmarks.results import REFERENCES, differences, report, rows_of
from studies.benchmarks.sentences import PAGES
from studies.benchmarks.workloads import CONTENDERS, WORKLOADS, Data, digits, images, letters, scaled


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows for each of 100 clients, and 100 to test on."""
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, **images(200, 100))
    return path


def measured(seconds: float, accuracy: float) -> Measurement:
    return Measurement(seconds, startup=1.0, memory=2**30, accuracy={10: accuracy})


@pytest.mark.thorough
def test_a_whole_benchmark(repository: Path, image_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "tiny.json"
    command = [
        sys.executable,
        "-m",
        "studies.benchmarks",
        "--workloads",
        "W1",
        "--contenders",
        "bare-1,bare-2",
    ]
    command += ["--rounds", "4", "--repeats", "2", "--data-path", str(image_file), "--out", str(out)]
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["contender"] for row in rows] == ["bare-1", "bare-2"]
    assert all(row["aggregations"] == 4 and len(row["seconds-of-runs"]) == 2 for row in rows)
    assert rows[1]["speedup"]["bare-1"] == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])
    # They import torch, which alone takes over 100 MiB.
    assert all(row["seconds"] > 0 and row["startup"] > 0 and row["memory"] > 100 * 2**20 for row in rows)
    # Chance is 0.1; without training it would be about that.
    assert all(row["accuracy"] > 0.3 for row in rows)
    in_turn = [line.split()[1] for line in done.stdout.splitlines() if line.endswith("s per round")]
    assert in_turn == ["bare-1:", "bare-2:", "bare-1:", "bare-2:"]
    assert "bare loop, 1 thread" in done.stdout
    with Image.open(out.with_suffix(".png")) as figure:
        assert figure.width == 1200


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--workloads", "W1,W9", "'W9': allowed are W1, W2, W3, W4, W5, W6, scaling, small"),
        (
            "--contenders",
            "tf",
            "'tf': allowed are bare-1, bare-2, stock, simulate, ray, sequential, vectorized, workers, vmap, jax, "
            "batched, appfl, flgo, pfl",
        ),
    ],
)
def test_unknown_names(repository: Path, option: str, value: str, expected: str) -> None:
    command = [sys.executable, "-m", "studies.benchmarks", option, value]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=repository, text=True, capture_output=True, timeout=60, env=environment
    )
    assert done.returncode == 2
    assert expected in done.stderr


@pytest.mark.thorough
def test_contenders_that_share_rows_agree(tmp_path: Path) -> None:
    """Each client has one row of its own, and asynchronous FedAvg no randomness: the runs are the same."""
    np.savez(tmp_path / "digits.npz", **digits())
    workload = WORKLOADS["W4"].with_rounds(1_100)
    found = {
        name: measure(name, workload.job(name_of, tmp_path / "digits.npz"), workload.warmup, timeout=280)
        for name, name_of in (("bare", "bare-1"), ("sequential", "sequential"))
    }
    assert set(found["bare"].accuracy) == {1_100}
    assert found["bare"].accuracy == found["sequential"].accuracy


@pytest.mark.thorough
def test_adapters_are_trained_alike_by_a_loop_and_by_this_app(tmp_path: Path) -> None:
    """Each client has one batch: the mean of all clients' steps is that of all rows, whoever has which."""
    arrays = letters()
    cut = {name: rows[:200] for name, rows in arrays.items()}
    np.savez(tmp_path / "letters.npz", **cut)  # type: ignore[arg-type]
    workload = WORKLOADS["W6"].with_rounds(16)
    found = [
        measure(name, workload.job(of, tmp_path / "letters.npz"), workload.warmup, timeout=280).accuracy[16]
        for name, of in (("bare", "bare-1"), ("vectorized", "vectorized"))
    ]
    assert found[0] == pytest.approx(found[1], abs=2e-3)
    assert found[0] > 0.05  # chance is 0.01


@pytest.mark.thorough
def test_stock_flower_trains(image_file: Path) -> None:
    job = WORKLOADS["W1"].with_rounds(8).job("stock", image_file)
    small = Job(**{**vars(job), "num_clients": 4, "participants": 4})
    found = measure("stock", small, warmup=1, timeout=280)
    assert found.accuracy[8] > 0.3  # chance is 0.1
    assert found.seconds > 0


def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    job = WORKLOADS["W1"].job("bare-1", tmp_path / "missing.npz")
    with pytest.raises(ContenderError, match=r"bare failed within .*(.|\n)*missing\.npz"):
        measure("bare", job, warmup=1, timeout=60)


def test_what_was_measured_before_a_contender_failed_is_kept(image_file, monkeypatch, tmp_path: Path) -> None:
    def fails_at_w2(kind: str, job: Job, warmup: int, timeout: float) -> Measurement:
        if job.model == "mlp" and kind == "stock":
            raise ContenderError("stock failed")
        return Measurement(1.0, 1.0, 2**20, {job.rounds: 0.9})

    monkeypatch.setattr("studies.benchmarks.measure.measure", fails_at_w2)
    out = tmp_path / "own.json"
    arguments = ["--data-path", str(image_file), "--out", str(out), "--contenders", "stock,vectorized"]
    done = CliRunner().invoke(benchmarks, [*arguments, "--workloads", "W1,W2,W3"])
    assert done.exit_code == 1
    assert "error: W2: stock failed" in done.output
    whole = json.loads(out.read_text("utf-8"))
    assert [row["workload"] for row in whole["rows"]] == ["W1", "W1", "W3", "W3"]
    assert whole["problems"] == ["W2: stock failed"]
    out.unlink()
    assert CliRunner().invoke(benchmarks, [*arguments, "--workloads", "W2"]).exit_code == 1
    assert not out.exists()
    # A page has figures of W2, too: none is written.
    pages = {path: path.read_bytes() for path in PAGES}
    done = CliRunner().invoke(benchmarks, [*arguments, "--workloads", "W1,W2", "--write-results"])
    assert done.exit_code == 1
    assert {path: path.read_bytes() for path in PAGES} == pages


def test_a_contender_that_takes_too_long_is_ended(image_file: Path) -> None:
    job = WORKLOADS["W1"].with_rounds(10**6).job("bare-1", image_file)
    before = descendants(os.getpid())
    with pytest.raises(ContenderError, match="bare took longer than"):
        measure("bare", job, warmup=1, timeout=4)
    assert set(descendants(os.getpid())) <= set(before)


def test_first_and_last_aggregations_are_not_timed() -> None:
    # Started at 100. Initial model at 110, rounds complete at 115, 117, 119, 130: round 1 is slow because processes
    # start, round 4 because it has the evaluation. Rounds 2 and 3 take 2 s each; start-up is 115 - 100 - 2 = 13 s.
    found = summarise(Log([110.0, 115.0, 117.0, 119.0, 130.0], {4: 0.5}), 100.0, 7, warmup=1)
    assert (found.seconds, found.startup, found.memory) == (2.0, 13.0, 7)


def test_too_few_aggregations_to_time() -> None:
    with pytest.raises(ValueError, match="2 aggregations: 3 or more are needed"):
        summarise(Log([0.0, 1.0, 2.0], {}), 0.0, 0, warmup=1)


def test_memory_counts_child_processes() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(200 << 20); input()"], stdin=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while resident(child.pid) < 200 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert child.pid in descendants(os.getpid())
    finally:
        child.communicate(b"\n")
    assert resident(child.pid) == 0


def test_medians_and_ratios() -> None:
    runs = {
        "stock": [measured(seconds, 0.9) for seconds in (1.0, 1.2, 9.0)],
        "vectorized": [measured(seconds, 0.9) for seconds in (0.3, 0.1, 0.2)],
    }
    stock, ours = rows_of(WORKLOADS["W1"], runs)
    assert (stock["seconds"], ours["seconds"]) == (1.2, 0.2)
    assert ours["speedup"] == {"stock": pytest.approx(6.0)}
    # An asynchronous run is told per 1,000 arrivals.
    (asynchronous,) = rows_of(WORKLOADS["W4"], {"ray": [Measurement(0.01, 1.0, 1, {2_500: 0.8})]})
    assert asynchronous["seconds"] == pytest.approx(10.0)


def test_accuracies_over_a_point_apart() -> None:
    runs = {"stock": [measured(1, 0.90)], "ray": [measured(1, 0.905)], "vectorized": [measured(1, 0.885)]}
    (problem,) = differences(rows_of(WORKLOADS["W1"], runs))
    assert problem == (
        "W1: after 10 aggregations accuracies differ by over a point: stock 0.9000, ray 0.9050, vectorized 0.8850"
    )
    del runs["vectorized"]
    assert differences(rows_of(WORKLOADS["W1"], runs)) == []


def test_report(tmp_path: Path) -> None:
    rows = rows_of(WORKLOADS["W1"], {"stock": [measured(1.0, 0.9)], "vectorized": [measured(0.1, 0.9)]})
    scaling = [
        row
        for number, seconds in ((100, 0.02), (1_000, 0.2), (10_000, 2.1))
        for row in rows_of(scaled(number).with_rounds(10), {"vectorized": [measured(seconds, 0.9)]})
    ]
    whole = report(rows, scaling, ["W1: they differ"], "generated images")
    assert [table.row_count for table in tables(whole)] == [2, 1, 1, 1]
    text = markdown(whole)
    assert "| fedapp, vectorized | 0.100 | 10.00 | - | - | 1.0 s | 1,024 MiB | 0.9000 |" in text
    assert "**Not comparable**: W1: they differ" in text
    with Image.open(draw(whole, tmp_path / "figure.png")) as figure:
        assert figure.width == 1200


def test_results_keep_what_else_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    whole = report(rows_of(WORKLOADS["W1"], {"stock": [measured(1.0, 0.9)]}), [], [], "generated images")
    write_results(whole, path)
    path.write_text(path.read_text("utf-8") + "\n## On a GPU\n\nfast\n", "utf-8")
    write_results({**whole, "date": "2099-01-01"}, path)
    text = path.read_text("utf-8")
    assert text.count("stock Flower on Ray") == 1
    assert "Measured on 2099-01-01" in text
    assert text.endswith("## On a GPU\n\nfast\n")


def test_images_are_learnable_but_not_wholly() -> None:
    """One label in ten is drawn at random: the classes' means tell nine in ten rows, and one in ten of the rest."""
    data = images(4_000, 2_000)
    assert data["x_train"].dtype == np.uint8
    assert data["x_train"].shape == (4_000, 28, 28)
    x, y = data["x_train"].reshape(4_000, -1).astype(float), data["y_train"]
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    test = data["x_test"].reshape(2_000, -1).astype(float)
    nearest = ((test[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == data["y_test"]).mean() == pytest.approx(0.91, abs=0.03)


def test_bytes_are_scaled_and_floats_are_not(image_file: Path, tmp_path: Path) -> None:
    x, y = load_rows(str(image_file), "test")
    assert x.shape == (100, 1, 28, 28)
    assert float(x.max()) == 1.0
    np.savez(tmp_path / "digits.npz", **digits())
    x, y = load_rows(str(tmp_path / "digits.npz"), "train")
    assert (x.shape, len(y), float(x.max())) == ((1_000, 1, 8, 8), 1_000, 1.0)


def test_own_images_must_be_like_mnist(tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", x_train=np.zeros((4, 8, 8), np.uint8), y_train=np.arange(4))
    with pytest.raises(
        DataError,
        match=r"28x28 images of 10 classes or 32x32 in colour; found 0 test sets, images of shape \(8, 8\), 4",
    ):
        Data(tmp_path, tmp_path / "wrong.npz")


def test_every_contender_has_a_color_and_scaling_leaves_out_the_slow() -> None:
    from studies.benchmarks.report import COLORS

    assert set(COLORS) == set(CONTENDERS)
    peers = ("appfl", "flgo", "pfl")
    slow = ("stock", "simulate", "ray", "bare-2", "bare-1", "sequential", "vmap", *peers)
    assert scaled(100_000).without == slow
    assert scaled(100).without == ("bare-2", *peers)
    assert scaled(1_000_000, small=True).without == scaled(100_000).without


def test_small_images_have_the_digits_size(tmp_path: Path) -> None:
    workload = scaled(1_000, small=True)
    with np.load(Data(tmp_path).path(workload.data)) as stored:
        assert stored["x_train"].shape == (10_000, 8, 8)
        assert stored["x_train"].dtype == np.uint8
        assert len(stored["x_test"]) == 10_000


def test_tables_fit_in_80_columns() -> None:
    cells = {"seconds": 123.456, "startup": 123.4, "memory": 23456 << 20, "accuracy": 0.9876}
    speedup = dict.fromkeys(REFERENCES, 123.45)
    rows = [
        {
            **cells,
            "workload": "w",
            "title": "1,000 clients of 10 samples, CNN",
            "unit": "round",
            "contender": name,
            "speedup": speedup,
            "seconds-of-runs": [1.0],
        }
        for name in CONTENDERS
    ]
    (table,) = tables({"rows": rows, "scaling": []})
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(text.count(word) == len(rows) for word in ("123.456", "123.4 s", "23,456 MiB", "0.9876"))
    assert text.count("123.45 ") == 3 * len(rows)
