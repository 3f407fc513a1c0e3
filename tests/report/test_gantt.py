"""timeline.png: what each client did when, of few clients and of many, of all of a run or a part of it."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.report.activity import STATES, WAITING
from fedapp.report.client_tables import Away, TasksFile, write_away
from fedapp.report.gantt import COLORS, FIGURE, OUTCOMES, ROWS, draw_timeline
from strategies.clients.client_statistics import TaskSpan
from tests.selection import only


def written(
    folder: Path,
    clients: int,
    *,
    rounds: int = 5,
    parts: bool = True,
    gone: bool = True,
    outcomes: Sequence[str] = (),
    clock: str = "virtual",
) -> Path:
    """Write a run of rounds of 10 s; clients work for 2 to 8 s, and are away for the last round.

    The tasks of the first clients end as ``outcomes`` says, and those of the others are accepted.
    """
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'strategy = "fedavg"\nnum-clients = {clients}\navailability = "{"diurnal:0.8,50" if gone else "always"}"\n'
    )
    (folder / "metrics.jsonl").write_text(
        f'{{"aggregation": {rounds}, "time": {10.0 * rounds}, "clock": "{clock}"}}\n'
    )
    outcomes = [*outcomes, *["accepted"] * clients]
    file, takes = TasksFile(folder), np.linspace(2, 8, clients)
    ways = (0.5, 1.0) if parts else (None, None)
    for began in 10.0 * np.arange(rounds - gone):
        file.add(
            [
                TaskSpan(
                    client,
                    began,
                    began + takes[client],
                    began,
                    began + takes[client],
                    outcomes[client],
                    *ways,
                )
                for client in range(clients)
            ]
        )
    file.publish(last=True)
    if gone:
        places, end = np.arange(clients, dtype=np.int32), 10.0 * rounds
        write_away(folder, Away(places, np.full(clients, end - 10), np.full(clients, end), 0.0, end))
    return folder


def seen(path: Path) -> dict[str, int]:
    """Return how many pixels of the axes have the colour of each state."""
    image = Image.open(path)
    assert image.width == 1200
    pixels = np.asarray(image.convert("RGB")).astype(int)
    # Without the legend.
    pixels = pixels[: int(0.88 * len(pixels))]
    return {
        state: int((np.abs(pixels - 255 * np.array(to_rgb(COLORS[state]))).max(axis=-1) < 6).sum())
        for state in STATES
    }


@pytest.mark.parametrize("clients", only([10, ROWS + 1, 1, ROWS, 1000], 2))
def test_all_that_clients_did_is_drawn(tmp_path, clients):
    path = draw_timeline(written(tmp_path / "run", clients))
    assert path == tmp_path / "run" / FIGURE
    assert all(count > 1000 for count in seen(path).values()), seen(path)


def test_what_is_not_known_is_not_drawn(tmp_path):
    path = draw_timeline(written(tmp_path / "whole", 10, parts=False, gone=False))
    assert path is not None
    counts = seen(path)
    assert [state for state in STATES if counts[state] > 2000] == ["working", WAITING]
    real = draw_timeline(written(tmp_path / "real", 10, rounds=2, gone=False, clock="wall"))
    assert real is not None
    assert [state for state in STATES if seen(real)[state] > 2000] == ["working", WAITING]
    assert draw_timeline(tmp_path) is None
    assert not (tmp_path / FIGURE).exists()


@pytest.mark.parametrize("clients", [10, 100])
def test_how_a_task_ends_is_marked(tmp_path, clients):
    # In a row the mark of a task that is under way is too thin for its colour to be there.
    ends = sorted(set(OUTCOMES) - {"accepted"} - ({"under way"} if clients == 10 else set()))
    drawn = [
        draw_timeline(written(tmp_path / name, clients, outcomes=outcomes))
        for name, outcomes in (("plain", ()), ("marked", ends))
    ]
    # Without the legend.
    plain, marked = (np.asarray(Image.open(path).convert("RGB"))[:-220].astype(int) for path in drawn)
    for outcome in ends:
        color = 255 * np.array(to_rgb(OUTCOMES[outcome][0]))
        before, after = ((np.abs(each - color).max(axis=-1) < 12).sum() for each in (plain, marked))
        assert after > before, outcome


def test_a_stretch_of_time_is_drawn_where_all_would_be_too_narrow_or_if_it_is_asked_for(tmp_path):
    long = draw_timeline(written(tmp_path / "long", 10, rounds=400))
    assert long is not None
    assert seen(long)["away"] > 5000  # in the rows: above, the last round is too narrow to be seen
    command = ["timeline", str(tmp_path / "long"), "--since", "100", "--until", "120", "-o"]
    refused = CliRunner().invoke(app, [*command, "part.pdf"])
    assert "--out = 'part.pdf': the figure is a PNG; the file's name must end in .png" in refused.output
    done = CliRunner().invoke(app, [*command, str(tmp_path / "part.png")])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "part.png")
    part = seen(tmp_path / "part.png")
    assert part["receiving"] > 2000
    assert part["away"] < 3000  # nobody is away then: only above, of the whole run


@pytest.mark.parametrize("clients", [10, ROWS + 1])
def test_a_stretch_of_time_without_a_task_is_drawn_without_a_warning(clients, tmp_path):
    run = written(tmp_path / "run", clients, gone=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert draw_timeline(run, 8.5, 9.5) == run / FIGURE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "error: nowhere: holds no run, a folder with a config.toml"),
        (["none"], "error: none: has no task on record (tasks.parquet)"),
        (
            ["run", "--since", "60"],
            "error: since = 60, until = 50: since must be below until, and the run is on record from 0 to 50 s",
        ),
        (["run", "--since", "9", "--until", "9"], "error: since = 9, until = 9: since must be below until"),
        (["run", "-o", "no/such/figure.png"], "error: [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run", 3)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.toml").write_text("seed = 0\n")
    done = CliRunner().invoke(app, ["timeline", *arguments])
    assert done.exit_code == 1
    assert said in done.output
