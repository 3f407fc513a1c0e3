"""timeline.png: what each client did when, of few clients and of many, of all of a run or a part of it."""

from functools import cache
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
from strategies.clients.accounts import TaskSpan
from tests.selection import covering, only


def written(
    folder: Path,
    clients: int,
    *,
    rounds: int = 5,
    parts: bool = True,
    gone: bool = True,
    outcome: str = "accepted",
    clock: str = "virtual",
) -> Path:
    """Write a run of rounds of 10 s; clients work for 2 to 8 s, and are away for the last round."""
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'strategy = "fedavg"\nnum-clients = {clients}\navailability = "{"diurnal:0.8,50" if gone else "always"}"\n'
    )
    (folder / "metrics.jsonl").write_text(
        f'{{"aggregation": {rounds}, "time": {10.0 * rounds}, "clock": "{clock}"}}\n'
    )
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
                    outcome if client == 0 else "accepted",
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Draw a run all of whose tasks are accepted; once for each number of clients."""

    @cache
    def pixels(clients):
        drawn = draw_timeline(written(tmp_path_factory.mktemp("plain") / "run", clients))
        return np.asarray(Image.open(drawn).convert("RGB")).astype(int)

    return pixels


@pytest.mark.parametrize(
    ("clients", "outcome"), covering([10, 100], sorted(set(OUTCOMES) - {"accepted"}), together=1)
)
def test_how_a_task_ends_is_marked(plain, tmp_path, clients, outcome):
    drawn = draw_timeline(written(tmp_path / "marked", clients, outcome=outcome))
    marked = np.asarray(Image.open(drawn).convert("RGB")).astype(int)
    color = 255 * np.array(to_rgb(OUTCOMES[outcome][0]))
    inside = [(np.abs(each[:-160] - color).max(axis=-1) < 12).sum() for each in (plain(clients), marked)]
    assert inside[1] > inside[0]


def test_a_stretch_of_time_is_drawn_where_all_would_be_too_narrow_or_if_it_is_asked_for(tmp_path):
    long = draw_timeline(written(tmp_path / "long", 10, rounds=400))
    assert long is not None
    assert seen(long)["away"] > 5000  # in the rows: above, the last round is too narrow to be seen
    command = ["timeline", str(tmp_path / "long"), "--since", "100", "--until", "120", "-o"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "part.png")])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "part.png")
    part = seen(tmp_path / "part.png")
    assert part["receiving"] > 2000
    assert part["away"] < 3000  # nobody is away then: only above, of the whole run


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
