"""What is committed of a map follows from the curves that are committed with it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.sweeps.plan import read_file
from studies.maps.curves import FILE, read_curves
from studies.maps.picture import colors_of
from studies.maps.plan import MapPlan
from studies.maps.rule import WON, holm_adjusted, wins_of
from studies.maps.scores import scores_of

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


def test_the_page_says_what_is_left_of_the_wins_of_the_map():
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    scores = scores_of(plan, read_curves(EXPERIMENTS / "results" / "map" / FILE)[0])
    wins = wins_of(plan, scores)
    won = {place: each for place, each in wins.items() if each.outcome == WON}
    adjusted = holm_adjusted(np.array([1.0 if np.isnan(each.p) else each.p for each in wins.values()]))
    left = [place for place, p in zip(wins, adjusted, strict=True) if p <= plan.rule.level and place in won]
    at_edge = [
        place
        for place, each in won.items()
        if any(rival.method == each.runner_up and rival.at_edge for rival in scores[place[0]])
    ]
    assert (len(won), len(wins), len(left), len(at_edge)) == (25, 48, 3, 7)
    page = " ".join((EXPERIMENTS.parents[1] / "docs" / "map.md").read_text("utf-8").split())
    assert "seven of the 25 wins are over a runner-up of which that is so" in page
    assert (
        "If all 48 comparisons are judged as one family by Holm's method, three of the 25 wins are left"
        in page
    )


def test_the_page_says_what_has_been_run_of_the_fair_map():
    report = (EXPERIMENTS / "results" / "map-fair" / "report.md").read_text("utf-8")
    rows = [line for line in report.splitlines() if line.count("|") == 7]
    not_run = [row for row in rows if "| not run | not run |" in row]
    judged = [row for row in rows if "; p = " in row]
    page = (EXPERIMENTS.parents[1] / "docs" / "map.md").read_text("utf-8")
    numbers = {1: "one", 2: "two", 3: "three", 5: "Five", 6: "Six", 7: "Seven"}
    assert f"{numbers[len(judged)]} of its eight cells" in " ".join(page.split())
    assert f"the other {numbers[len(not_run)]} cells" in " ".join(page.split())
    table = [
        line
        for line in page.splitlines()
        if line.count("|") == 5 and not line.startswith(("|--", "| problem"))
    ]
    assert len(table) == len(judged) == 8 - len(not_run)
    won = [row for row in judged if "**" in row]
    said = [line for line in table if "**" in line]
    assert len(won) == len(said) == 2
    assert "**fedcompass**, 1.25 times as fast as feddyn | **fedcompass**, by 0.0070 over feddyn" in won[0]
    assert "**FedCompass** | 0.007 over FedDyn, and 1.25 times as fast to 90 %" in said[0]
    assert "**fadas**, 2.02 times as fast as fedavgm | **fadas**, by 0.0270 over fedavgm" in won[1]
    assert "**FADAS** | 0.027 over FedAvg with server momentum, and 2.02 times as fast to 90 %" in said[1]
    level = {tuple(row.split("|")[1:3]): row.split("|")[4] for row in judged if "**" not in row}
    assert level[" each of its own law ", " 5 "].count(",") == 9
    assert level[" each of its own law ", " 1 "].count(",") == 11
    assert (
        level[" each of its own law ", " 50 "]
        == " not told apart: async-spectral, ca2fl, fedavg-over-select "
    )
    assert level[" unlike, half of the time away ", " 5 "] == " not told apart: fedcompass, feddyn "


def test_winners_have_colours_of_their_own():
    plan = read_file(EXPERIMENTS / "map-fair.toml", MapPlan)
    colors = colors_of(plan, {"fedcompass", "fadas", "fedbuff", "feddyn", "fedavgm"})
    assert list(colors) == ["fedavgm", "feddyn", "fedbuff", "fedcompass", "fadas"]
    assert len(set(colors.values())) == 5
