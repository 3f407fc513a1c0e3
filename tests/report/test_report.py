"""Metrics, figures and the closing table of a run, read from real files."""

import io
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedapp.report import as_number, read_metrics
from fedapp.report.client_tables import ClientsFile
from fedapp.report.figures import (
    _names,
    _stacked_bars,
    class_counts,
    draw_curves,
    draw_partition,
    new_figure,
)
from fedapp.report.table import closing_table
from tests.selection import covering

Record = Mapping[str, object]

CONFIG = 'strategy = "fedprox"\ndataset = "digits"\nmodel = "logistic"\nnum-clients = 20\n'
MAX_BYTES = 150_000
SUMMARY = {
    "strategy": "async-fedavg",
    "engine": "vectorized",
    "status": "interrupted",
    "wall-seconds": 73.24,
    "aggregations": 1200,
    "failures": 3,
    "bytes-up": 5_200_000,
    "bytes-down": 1_300_000_000,
    "accuracy": 0.9126,
    "loss": 0.3178,
}


def evaluations(count: int, clock: str = "virtual", train: bool = True) -> list[dict[str, object]]:
    noise = np.random.default_rng(7).normal(0, 0.01, count)
    records: list[dict[str, object]] = [
        {
            "aggregation": index,
            "time": index * 1.5 + 0.01 * (index % 2),  # no two rounds of a length
            "clock": clock,
            "loss": 0.2 + 2.1 * float(np.exp(-index / 15)),
            "accuracy": 0.95 - 0.85 * float(np.exp(-index / 12)) + float(noise[index]),
        }
        for index in range(count)
    ]
    for record in records[1:] if train else ():
        record["train-loss"] = 0.1 + 2.1 * float(np.exp(-as_number(record["aggregation"]) / 14))
    return records


def write_run(run_dir: Path, records: Sequence[Record], tail: str = "") -> Path:
    (run_dir / "config.toml").write_text(CONFIG)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return run_dir


def write_partition(run_dir: Path, sizes: Sequence[int], test: int = 10) -> int:
    """Give client c the next ``sizes[c]`` rows of a shuffled dataset; return the number of rows."""
    rows = np.random.default_rng(3).permutation(sum(sizes) + test)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    train, held_out = rows[: offsets[-1]], rows[offsets[-1] :]
    path = run_dir / "partition.npz"
    np.savez(path, client_indices=train, client_offsets=offsets, test_indices=held_out)
    return len(rows)


def check_png(path: Path, size: tuple[int, int]) -> None:
    with Image.open(path) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", size)
        assert len(image.convert("RGB").getcolors(image.width * image.height) or []) > 10, "nothing drawn"
    assert path.stat().st_size <= MAX_BYTES
    assert not [*path.parent.glob("*.tmp"), *path.parent.glob(".*")], "a temporary file stayed behind"


def rendered(summary: Record, metrics: Sequence[Record], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(closing_table(summary, metrics))
    return capture.get()


def test_read_metrics_round_trip(tmp_path):
    records = evaluations(5)
    assert read_metrics(write_run(tmp_path, records)) == records


@pytest.mark.parametrize("tail", ['{"aggregation": 5, "lo', "{", '{"aggregation": 5, "name": "\u00e9'])
def test_read_metrics_leaves_out_a_truncated_last_line(tmp_path, tail):
    records = evaluations(5)
    path = write_run(tmp_path, records, tail) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1] if "\u00e9" in tail else path.read_bytes())
    assert read_metrics(tmp_path) == records


def test_read_metrics_names_a_broken_line_in_the_middle(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"aggregation": 0}\n{"aggre\n{"aggregation": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def test_read_metrics_of_an_empty_and_of_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path)
    assert read_metrics(write_run(tmp_path, [])) == []


def test_as_number():
    assert as_number(np.float32(0.5)) == 0.5
    assert all(np.isnan(as_number(value)) for value in (None, "3", float("nan")))


@pytest.mark.parametrize(
    ("count", "clock"), covering([0, 1, 2, 101, 2000], ["virtual", "wall"], together=1, rest=False)
)
def test_curves(tmp_path, count, clock):
    path = draw_curves(write_run(tmp_path, evaluations(count, clock), '{"aggregation": 99, "ti'))
    assert path == tmp_path / "curves.png"
    check_png(path, (1200, 810 if count > 2 else 450))


@pytest.mark.parametrize("length", [1.0, 0.25])
def test_rounds_that_take_equally_long_are_drawn_once(tmp_path, length):
    records = [{**record, "time": length * as_number(record["aggregation"])} for record in evaluations(40)]
    check_png(draw_curves(write_run(tmp_path, records)), (1200, 450))
    records[-1]["time"] = 100.0  # one took longer
    check_png(draw_curves(write_run(tmp_path, records)), (1200, 810))


@pytest.mark.parametrize(
    "missing",
    [
        {0: None, 10: float("nan"), 12: float("nan"), 39: float("inf")},
        dict.fromkeys(range(20, 40)),
        dict.fromkeys(range(40)),
    ],
    ids=len,
)
def test_curves_with_values_that_are_not_finite(tmp_path, missing):
    records = evaluations(40)
    for index, value in missing.items():
        records[index] |= {"loss": value, "accuracy": value, "train-loss": value}
    check_png(draw_curves(write_run(tmp_path, records)), (1200, 810))


def test_curves_without_times_or_configuration(tmp_path):
    write_run(tmp_path, [{"aggregation": 0, "loss": 1.0}, {"aggregation": 1, "loss": 1e12, "time": None}])
    (tmp_path / "config.toml").unlink()
    check_png(draw_curves(tmp_path), (1200, 450))


def test_curves_show_the_data(tmp_path):
    first = draw_curves(write_run(tmp_path, evaluations(50, train=False))).read_bytes()
    assert draw_curves(write_run(tmp_path, evaluations(50, train=False))).read_bytes() == first
    assert draw_curves(write_run(tmp_path, evaluations(50))).read_bytes() != first


def test_a_failed_write_keeps_the_former_figure(tmp_path, monkeypatch):
    former = draw_curves(write_run(tmp_path, evaluations(3))).read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_curves(write_run(tmp_path, evaluations(30)))
    assert (tmp_path / "curves.png").read_bytes() == former
    check_png(tmp_path / "curves.png", (1200, 810))


def test_threads_draw_at_the_same_time(tmp_path):
    records = evaluations(30)
    records[-1]["loss"] = 1e-3  # so that the axis is logarithmic
    write_run(tmp_path, records)
    alone = draw_curves(tmp_path).read_bytes()
    threads = [threading.Thread(target=draw_curves, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_png(tmp_path / "curves.png", (1200, 810))
    assert (tmp_path / "curves.png").read_bytes() == alone


@pytest.mark.parametrize(
    ("clients", "classes", "height"),
    [
        (1, 2, 660),
        (60, 10, 660),
        (61, 10, 840),
        (5, 100, 840),
        (3000, 62, 840),
    ],
)
def test_partition(tmp_path, clients, classes, height):
    rng = np.random.default_rng(clients)
    rows = write_partition(tmp_path, (rng.integers(0, 200, clients) + (np.arange(clients) == 0)).tolist())
    path = draw_partition(tmp_path, rng.integers(0, classes, rows), classes)
    assert path == tmp_path / "partition.png"
    check_png(path, (1200, height))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["oslo", "b" * 63], ["oslo", "b" * 19 + "…"]),
        (["oslo", ""], []),  # some have none: then all are numbers
        (["oslo"], []),  # devices with data of their own are no parts
        (None, []),
    ],
)
def test_parts_of_devices_have_their_names(tmp_path, names, shown):
    if names is not None:
        file = ClientsFile(tmp_path)
        named = {index: name for index, name in enumerate(names) if name}
        file.append(0, 0.0, {"loss": [0.5] * len(names)}, named)
        file.publish(last=True)
    figure = new_figure(4.4, "")
    _stacked_bars(figure, np.array([[1, 2], [3, 4]]), _names(tmp_path, 2), [], strata="class")
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == (shown or ticks)
    assert (ticks == shown) == bool(shown)


def test_class_counts_by_hand():
    labels = np.array([0, 1, 2, 2, 1, 0, 9])  # row 6 is a test row, of a class that no client may hold
    counts = class_counts(np.array([2, 3, 0, 1, 4]), np.array([0, 3, 3, 5]), labels, 3)
    assert counts.tolist() == [[1, 0, 2], [0, 0, 0], [0, 2, 0]]


@pytest.mark.parametrize("labels", [np.full(60, 3), np.full(60, -1), np.zeros((60, 2), dtype=int)])
def test_partition_refuses_labels_that_are_no_class(tmp_path, labels):
    write_partition(tmp_path, [20, 30])
    with pytest.raises(ValueError, match=r"0\.\.2 per row"):
        draw_partition(tmp_path, labels, 3)


def test_table_contains_the_numbers():
    metrics = evaluations(101)
    metrics[71] |= {"accuracy": 0.99123}
    text = rendered(SUMMARY, metrics)
    lines = text.splitlines()
    assert "async-fedavg on vectorized, interrupted: accuracy 0.9126, loss 0.3178" in " ".join(text.split())
    assert "aggregations 1,200, failures 3, wall time 73.2 s" in text
    assert "up 5.2 MB, down 1.3 GB" in text
    assert "peak accuracy 0.9912 at round 71" in text
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == [0, 17, 33, 50, 67, 71, 83, 100]
    assert rows[0][1:3] == ["0.0", "2.3000"]
    assert rows[0][4] == "-", "no train loss before the first round"
    assert rows[5][1] == "106.5"
    assert rows[5][3] == "0.9912"
    assert rows[5][-1] == "best"
    assert rows[-1][1] == "150.0"
    assert rows[-1][-1] == "last"
    assert re.search(r"virtual\s.*\n.* time ", text)
    assert "train-loss" in text


def test_table_fits_in_60_columns():
    metrics = evaluations(1201)
    lines = rendered(SUMMARY, metrics, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[-1] for line in lines if "best" in line or "last" in line][-1] == "last"
    assert [line.strip() for line in lines] == [
        line.strip() for line in rendered(SUMMARY, metrics).splitlines()
    ]


def test_table_does_not_wrap_at_80_columns():
    metrics = evaluations(31)
    metrics[-1] |= {"aggregation": 123456, "time": 12345678.9, "loss": 3e22}
    text = rendered(SUMMARY, metrics)
    assert rendered(SUMMARY, metrics, width=200).splitlines() == text.splitlines()
    assert max(map(len, text.splitlines())) <= 80
    assert "3.000e+22" in text


def test_table_of_one_wall_clock_evaluation():
    text = rendered({"status": "running", "strategy": "fedavg"}, evaluations(1, clock="wall", train=False))
    assert "seconds" in text
    assert "train-loss" not in text
    assert "best, last" in text


def test_table_without_finite_accuracy_or_evaluations():
    records = [{"aggregation": index, "time": 0.0, "loss": None, "accuracy": None} for index in range(3)]
    text = rendered(SUMMARY | {"loss": None}, records)
    assert "best" not in text
    assert "peak" not in text
    assert "last" in text
    assert "loss -" in text
    assert "aggregations 1,200" in rendered(SUMMARY, [])
    assert "?" in rendered({}, [])
