"""What is committed of a map follows from the curves that are committed with it."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.sweeps.plan import read_file
from studies.maps.curves import FILE
from studies.maps.picture import _sides, colors_of
from studies.maps.plan import MapPlan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDERS = sorted(path.parent for path in EXPERIMENTS.glob("results/*/map.csv"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_table_and_report_come_from_the_curves(folder: Path, tmp_path: Path):
    shutil.copy(folder / FILE, tmp_path)
    plan = EXPERIMENTS / f"{folder.name}.toml"
    done = CliRunner().invoke(app, ["map", str(plan), "--from-results", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    kept = {path.name for path in folder.iterdir() if path.is_file()}  # runs/ is there while a map goes on
    assert {path.name for path in tmp_path.iterdir()} == kept
    for name in ("map.csv", "report.md"):
        assert (tmp_path / name).read_text("utf-8") == (folder / name).read_text("utf-8"), name


NAMED = 4  # methods that a cell of the page's table lists
NAMES = {
    "async-spectral": "AsyncSpectral",
    "ca2fl": "CA²FL",
    "fadas": "FADAS",
    "fedadam": "FedAvg with Adam",
    "fedavg-over-select": "FedAvg with over-selection",
    "fedbuff": "FedBuff",
    "fedcompass": "FedCompass",
    "feddyn": "FedDyn",
}
NUMBERS = {7: "Seven", 8: "Eight"}
ROUNDS = (
    "fedavg",
    "fedprox",
    "spectral",
    "fednova",
    "scaffold",
    "feddyn",
    "mifa",
    "fedstale",
    "fedau",
    "fedadam",
)


@pytest.fixture(scope="module")
def page() -> str:
    return (EXPERIMENTS.parents[1] / "docs" / "map.md").read_text("utf-8")


@pytest.fixture(scope="module")
def cells() -> list[pd.DataFrame]:
    """The methods of each cell that was run."""
    table = pd.read_csv(EXPERIMENTS / "results" / "map" / "map.csv")
    table = table[table["mean"].notna()]
    return [cell for _, cell in table.groupby(["problem", "across", "upwards"], sort=False)]


def as_said(found: str) -> str:
    """Return what a cell of the report is in the page's table."""
    if found == "not reached":
        return "no method reaches it on each seed"
    level = found.removeprefix("not told apart: ").split(", ")
    if found != ", ".join(level) and len(level) > NAMED:
        return f"{len(level)} methods"
    found = found.removeprefix("not told apart: ").replace(", by ", ", ")
    return re.sub(r"[a-z][a-z0-9-]+", lambda name: NAMES.get(name[0], name[0]), found)


def test_the_table_of_the_page_is_the_reports(page: str):
    report = (EXPERIMENTS / "results" / "map" / "report.md").read_text("utf-8")
    found = [
        [cell.strip() for cell in line.split("|")[2:5]] for line in report.splitlines() if "; p = " in line
    ]
    table = page.partition("| mean accuracy over the time |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [[cell.strip() for cell in line.split("|")[2:5]] for line in table]
    assert said == [[speeds, as_said(mean), as_said(time)] for speeds, time, mean in found]
    assert f"{NUMBERS[len(found)]} of its eight cells have been run" in page


def test_the_sentences_of_the_page_follow_from_the_table(page: str, cells: list[pd.DataFrame]):
    words = " ".join(page.split())
    means = [cell.set_index("method")["mean"] for cell in cells]
    ranks = [mean.rank(ascending=False).to_dict() for mean in means]
    level = [cell.set_index("method")["by-mean"].notna() for cell in cells]
    problems = [cell["problem"].iloc[0] for cell in cells]

    synthetic = [place for place, name in enumerate(problems) if name.startswith("synthetic")]
    assert "In the four cells of synthetic data it isn't told apart from the best" in words
    assert [bool(level[place]["fedadam"]) for place in synthetic] == [True] * 4
    assert "On MNIST it is second to fourth by mean accuracy" in words
    assert {ranks[place]["fedadam"] for place, name in enumerate(problems) if name.startswith("mnist")} == {
        2,
        3,
        4,
    }

    assert "on synthetic(1,1) with equal speeds eleven methods are ahead of it" in words
    assert ranks[synthetic[1]]["feddyn"] == 12

    assert "the best method of rounds is at most 0.0070 behind the best in mean accuracy" in words
    waiting = [mean[[name for name in mean.index if name.startswith(ROUNDS)]].max() for mean in means]
    behind = [mean.max() - best for mean, best in zip(means, waiting, strict=True)]
    assert f"{max(behind):.4f}" == "0.0070"

    assert "FedAvg, FedStale and FedAU with it are behind FedAvg with all clients in each cell" in words
    for mean in means:
        assert mean[["fedavg-drawn", "fedstale", "fedau"]].max() < mean["fedavg"]

    assert "its mean accuracy is 0.10 to 0.11 lower" in words
    lower = [
        means[p].max() - means[p]["fedavg-over-select"] for p in synthetic if level[p]["fedavg-over-select"]
    ]
    assert (f"{min(lower):.2f}", f"{max(lower):.2f}") == ("0.10", "0.11")


def test_winners_have_colours_of_their_own():
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    colors = colors_of(plan, {"fedcompass", "fadas", "fedbuff", "feddyn", "fedavgm"})
    assert list(colors) == ["fedavgm", "feddyn", "fedbuff", "fedcompass", "fadas"]
    assert len(set(colors.values())) == 5


def test_rows_of_the_picture_rise_where_they_are_numbers():
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    assert plan.sides("synthetic")[1] == ["5", "1", "50"]  # the order of the runs
    assert _sides(plan, "synthetic") == (["each of its own law"], ["1", "5", "50"])
