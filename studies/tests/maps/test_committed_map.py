"""What is committed of a map follows from the curves that are committed with it."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.sweeps.plan import read_file
from strategies import REGISTRY, AsynchronousStrategy
from studies.maps.curves import FILE, MapCurve, read_curves
from studies.maps.measures import mean_over
from studies.maps.picture import _rows
from studies.maps.plan import MapPlan
from studies.maps.rule import advantage_p
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


NAMED = 5  # methods that a cell of the page's table lists
NAMES = {
    "async-spectral": "AsyncSpectral",
    "ca2fl": "CA²FL",
    "fadas": "FADAS",
    "fedadam": "FedAvg with Adam",
    "fedadam-steps": "FedAvg with Adam and steps by speed",
    "fedavg-deadline": "FedAvg with a deadline",
    "fedavg-over-select": "FedAvg with over-selection",
    "fedbuff": "FedBuff",
    "fedcompass": "FedCompass",
    "fedcompass-adam": "FedCompass with Adam",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "feddyn-steps": "FedDyn with steps by speed",
    "ringmaster": "Ringmaster",
}
Cell = tuple[str, str]  # problem, label upwards


@pytest.fixture(scope="module")
def page() -> str:
    return (EXPERIMENTS.parents[1] / "docs" / "map.md").read_text("utf-8")


@pytest.fixture(scope="module")
def cells() -> dict[Cell, pd.DataFrame]:
    """The methods of each cell that was run."""
    table = pd.read_csv(
        EXPERIMENTS / "results" / "map" / "map.csv", dtype={"upwards": str}, index_col="method"
    )
    table = table[table["mean"].notna()]
    return dict(list(table.groupby(["problem", "upwards"], sort=False)))


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
    table = page.partition("| mean accuracy |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [[cell.strip() for cell in line.split("|")[2:5]] for line in table]
    assert said == [[speeds, as_said(mean), as_said(time)] for speeds, time, mean in found]
    assert len(found) == 8


def test_the_sentences_of_the_page_follow_from_the_table(page: str, cells: dict[Cell, pd.DataFrame]):
    words = " ".join(page.split())

    def says(sentence: str) -> None:
        assert sentence in words

    means = {cell: table["mean"] for cell, table in cells.items()}
    behind = {cell: (mean.max() - mean).to_dict() for cell, mean in means.items()}
    level = {cell: set(table.index[table["by-mean"].notna()]) for cell, table in cells.items()}
    mnist = [cell for cell in cells if cell[0].startswith("mnist")]
    femnist, iid = ("femnist", "5"), ("synthetic-iid", "5")
    five, alike, fifty = (("synthetic", speeds) for speeds in ("5", "1", "50"))

    says("Four of the eight cells have a winner, three of them on MNIST")
    won = {
        cell: {by: list(table.index[table[f"by-{by}"] == "won"]) for by in ("mean", "time")}
        for cell, table in cells.items()
    }
    assert [cell for cell, by in won.items() if any(by.values())] == [*mnist, iid]

    says(
        "FedCompass with Adam at the server wins on MNIST where speeds differ by 5 times,** by mean accuracy"
    )
    best = {cell: mean.idxmax() for cell, mean in means.items()}
    of_five = [cell for cell in cells if cell[1] == "5"]
    assert [won[cell]["mean"] for cell in mnist] == [["fedcompass-adam"], ["feddyn"], ["fedcompass-adam"]]
    says("It has the highest mean in all cells with such speeds but FEMNIST, where it is 0.010 behind")
    assert [cell for cell in cells if best[cell] == "fedcompass-adam"] == [
        cell for cell in of_five if cell != femnist
    ]
    compass = {cell: behind[cell]["fedcompass-adam"] for cell in cells}
    assert f"{compass[femnist]:.3f}" == "0.010"
    says("Adam adds 0.002 to 0.013 to it in four of these cells, and 0.045 where data are alike")
    by_adam = {cell: means[cell]["fedcompass-adam"] - means[cell]["fedcompass"] for cell in of_five}
    assert f"{by_adam.pop(iid):.3f}" == "0.045"
    assert (f"{min(by_adam.values()):.3f}", f"{max(by_adam.values()):.3f}") == ("0.002", "0.013")
    says(
        "with equal speeds it is 0.014 and 0.017 behind the best, and with speeds that differ by 50 times 0.011"
    )
    assert [f"{compass[cell]:.3f}" for cell in (alike, ("mnist", "1"), fifty)] == ["0.014", "0.017", "0.011"]

    says(
        "FedDyn wins on MNIST where speeds are equal,** and with steps by speed has the highest mean on FEMNIST"
    )
    assert [cell for cell in cells if "feddyn" in best[cell]] == [("mnist", "1"), femnist]
    assert won["mnist", "1"]["time"] == ["feddyn"]
    says("Where speeds differ it is second on MNIST")
    seconds = {cell: mean.sort_values(ascending=False).index[1] for cell, mean in means.items()}
    assert [seconds[cell] for cell in mnist if cell[1] == "5"] == ["feddyn-steps"] * 2
    says("on synthetic(1,1) it is 0.010 to 0.018 behind the best, with steps by speed or without")
    dyns = [behind[cell][name] for cell in (five, alike, fifty) for name in behind[cell] if "feddyn" in name]
    assert (f"{min(dyns):.3f}", f"{max(dyns):.3f}") == ("0.010", "0.018")
    says("where data are alike 0.019 and 0.040")
    assert [f"{behind[iid][name]:.3f}" for name in ("feddyn-steps", "feddyn")] == ["0.019", "0.040"]

    says("FedAvg gains 0.020 of mean accuracy by steps by speed, FedAvg with Adam 0.011, FedDyn 0.010")
    gains = {
        cell: {name[:-6]: mean[name[:-6]] - mean[name] for name in mean.index if "-steps" in name}
        for cell, mean in means.items()
    }
    assert [f"{-gains['mnist', '5'][name]:.3f}" for name in ("fedavg", "fedadam", "feddyn")] == [
        "0.020",
        "0.011",
        "0.010",
    ]
    says("which leaves FedCompass without Adam 0.0030 behind FedDyn")
    assert f"{means['mnist', '5']['feddyn-steps'] - means['mnist', '5']['fedcompass']:.4f}" == "0.0030"
    says(
        "on synthetic(1,1) with speeds that differ by 50 times FedAvg, FedAvg with Adam and FedNova lose 0.015 to "
        "0.024 by it, while FedDyn gains 0.007"
    )
    lost = [gains[fifty][name] for name in ("fedavg", "fedadam", "fednova")]
    assert (f"{min(lost):.3f}", f"{max(lost):.3f}") == ("0.015", "0.024")
    assert f"{-gains[fifty]['feddyn']:.3f}" == "0.007"

    says("On synthetic(1,1) it isn't told apart from the best")
    assert all("fedadam" in level[cell] for cell in (five, alike, fifty))
    says("where data are alike it is second, with steps by speed")
    assert seconds[iid] == "fedadam-steps"
    says(
        "on MNIST it is 0.004 to 0.034 behind without them, and on FEMNIST 0.024, hardly less than plain FedAvg"
    )
    adams = [behind[cell]["fedadam"] for cell in mnist]
    assert (f"{min(adams):.3f}", f"{max(adams):.3f}") == ("0.004", "0.034")
    assert f"{behind[femnist]['fedadam']:.3f}" == "0.024"
    assert 0 < behind[femnist]["fedavg"] - behind[femnist]["fedadam"] < 0.002

    says("FedAvg with Adam, which waits for all clients, is 0.003 behind")
    assert f"{behind[fifty]['fedadam']:.3f}" == "0.003"
    says(
        "FedCompass with its plain server's step and FedDyn without steps by speed have lower means than plain"
    )
    assert min(behind[fifty][name] for name in ("fedcompass", "feddyn")) > behind[fifty]["fedavg"]

    says("FedDyn or FedAvg with Adam, with or without steps by speed, is at most 0.007 behind the best")
    waiting = ("feddyn", "feddyn-steps", "fedadam", "fedadam-steps")
    assert f"{max(min(each.get(name, 1.0) for name in waiting) for each in behind.values()):.3f}" == "0.007"
    says("plain FedAvg with a tuned server's step is up to 0.082 behind")
    assert f"{max(each['fedavg'] for each in behind.values()):.3f}" == "0.082"
    says("FedAvg, FedStale and FedAU with such a draw are behind FedAvg with all clients in each cell")
    assert all(mean[["fedavg-drawn", "fedstale", "fedau"]].max() < mean["fedavg"] for mean in means.values())


def test_the_sentences_of_the_page_follow_from_the_curves(page: str):
    words = " ".join(page.split())
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    curves, _ = read_curves(EXPERIMENTS / "results" / "map" / FILE)
    scores = {spot[::2]: {each.method: each for each in own} for spot, own in scores_of(plan, curves).items()}
    spots = {spot[::2]: spot for spot in plan.spots}

    def judged(cell: tuple[str, str], method: str) -> list[MapCurve]:
        tuned = scores[cell][method].tuned
        assert tuned is not None
        return [curves[plan.run(spots[cell], method, tuned, seed).key] for seed in plan.seeds]

    def merits(cell: tuple[str, str], method: str) -> np.ndarray:
        return np.array(scores[cell][method].means)

    def p(cell: tuple[str, str], better: str, worse: str) -> float:
        return advantage_p(merits(cell, better) - merits(cell, worse))

    fifty, five, femnist = ("synthetic", "50"), ("synthetic", "5"), ("femnist", "5")
    assert "by 50 times FedAvg, FedAvg with Adam and FedNova lose 0.015 to 0.024 by it" in words
    assert all(p(fifty, name, f"{name}-steps") < 0.05 for name in ("fedavg", "fedadam", "fednova"))
    assert not any(p(five, name, f"{name}-steps") < 0.05 for name in ("fedavg", "fedadam", "fednova"))
    assert p(fifty, "feddyn-steps", "feddyn") < 0.05
    assert "have lower means than plain FedAvg, and aren't told apart from it" in words
    assert min(p(fifty, "fedavg", name) for name in ("fedcompass", "feddyn")) > 0.05
    assert (
        "of a seed at 0.571. It is 0.029 behind in the mean, and FedCompass with Adam and FADAS, the next"
        in words
    )
    assert "after FedDyn, 0.010, on each of the ten seeds" in words
    assert f"{merits(femnist, 'scaffold').min():.3f}" == "0.571"
    ahead = {
        name: merits(femnist, "feddyn-steps") - merits(femnist, name)
        for name in ("scaffold", "fedcompass-adam", "fadas")
    }
    assert [f"{each.mean():.3f}" for each in ahead.values()] == ["0.029", "0.010", "0.010"]
    assert min(each.min() for each in ahead.values()) > 0
    assert "by their account mean accuracy .9419 where speeds differ by 5 times" in words  # another's numbers
    assert "Of the 21 methods that are registered with Adam since" in words
    assert (
        "`fedcompass`, `rennala`, `ca2fl`, `ringmaster` and `scaffold` have run in all cells; 16 haven't"
        in words
    )
    added = list(filter(plan.is_added, plan.methods))
    whole = [name for name in added if all(name in own for own in scores.values())]
    assert (len(added), whole) == (
        21,
        [f"{name}-adam" for name in ("fedcompass", "rennala", "ca2fl", "ringmaster", "scaffold")],
    )
    assert len(plan.methods) - len(added) + len(whole) == 39
    hours = sum(each.seconds for each in curves.values()) / 3600
    assert f"The map took {len(curves):,} runs of 39 contenders in {hours:.0f} core-hours" in words

    assert "drawn from 15 to 180" in words
    sizes = [math.prod(map(len, plan.grid("mnist", method).values())) for method in plan.methods]
    assert (min(sizes), max(sizes)) == (15, 180)
    assert "no value beside it is better: 13 to 40 combinations" in words
    tuned: dict[tuple[object, ...], set[object]] = {}
    for each in curves.values():
        of = each.labels
        if of["seed"] in plan.tuning.seeds:
            cell = (of["problem"], of["across"], of["upwards"], of["method"])
            tuned.setdefault(cell, set()).add(of["tuned"])
    numbers = [len(each) for each in tuned.values()]
    assert (min(numbers), max(numbers)) == (13, 40)

    def gap(curve: MapCurve) -> float:
        return plan.budget / np.count_nonzero(curve.times > 0)

    def lost(curve: MapCurve) -> float:
        half = replace(curve, times=curve.times[::2], values=curve.values[::2])
        return mean_over(curve, plan.budget) - mean_over(half, plan.budget)

    without_rounds = {
        (cell, method): [gap(curve) for curve in judged(cell, method)]
        for cell, own in scores.items()
        for method in own
        if issubclass(REGISTRY[str(plan.methods[method]["strategy"])], AsynchronousStrategy)
    }
    away = without_rounds.pop((("mnist-away", "5"), "ringleader"))
    assert (
        f"methods without rounds every 0.1 to 5 s (Ringleader, of clients that are away, every {np.mean(away):.0f})"
        in words
    )
    means = [np.mean(each) for each in without_rounds.values()]
    assert (round(min(means), 1), round(max(means))) == (0.1, 5)
    assert "FedAvg, evaluated every second, loses 0.004 to 0.006 of mean accuracy" in words
    losses = [np.mean([lost(curve) for curve in judged(cell, "fedavg")]) for cell in scores]
    assert (f"{min(losses):.3f}", f"{max(losses):.3f}") == ("0.004", "0.006")

    assert "the rounds are at most a quarter shorter" in words
    rounds = [
        len(judged(cell, "fedavg")[0].times) / len(judged(cell, "fedavg-drawn")[0].times) for cell in scores
    ]
    assert 0.75 < min(rounds) < 0.85

    assert "Because of one, on which it stays at 1 % accuracy, over-selection is named" in words
    assert "is behind the best on all ten seeds, in the mean of the other nine by 0.05 to 0.06" in words
    for speeds in ("1", "5", "50"):
        own = scores["synthetic", speeds]
        whole = [each for each in own.values() if not each.diverged]
        best = max(whole, key=lambda each: np.mean(each.means))
        lost = np.sort(np.subtract(best.means, own["fedavg-over-select"].means))
        assert lost[0] > 0
        assert f"{lost[:-1].mean():.2f}" in ("0.05", "0.06")
        assert min(own["fedavg-over-select"].means) == pytest.approx(0.01, abs=0.005)


def test_what_the_page_of_the_methods_says_against_its_table_follows_from_the_curves():
    words = " ".join((EXPERIMENTS.parents[1] / "docs" / "methods.md").read_text("utf-8").split())
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    curves, _ = read_curves(EXPERIMENTS / "results" / "map" / FILE)
    merits = {
        spot[::2]: {each.method: np.array(each.means) for each in own}
        for spot, own in scores_of(plan, curves).items()
    }
    iid, away = ("synthetic-iid", "5"), ("mnist-away", "5")
    own_laws = [("synthetic", speeds) for speeds in ("5", "1", "50")]

    def ahead(cell: Cell, method: str, rival: str = "fedavg") -> np.ndarray:
        return merits[cell][method] - merits[cell][rival]

    def span(values: list[float]) -> str:
        return f"{min(map(abs, values)):.3f} to {max(map(abs, values)):.3f}"

    def told(pairs: dict[Cell, np.ndarray], sign: int) -> list[float]:
        """Return the mean differences of this sign that a paired t-test tells from 0."""
        return [
            each.mean()
            for each in pairs.values()
            if sign * each.mean() > 0 and advantage_p(sign * each) < 0.05
        ]

    def best(cell: Cell, name: str) -> float:
        return max(merits[cell][each].mean() for each in (name, f"{name}-steps") if each in merits[cell])

    assert "**FedDyn** is 0.007 to 0.014 below FedAvg with Adam on all synthetic data" in words
    assert (
        span([best(cell, "feddyn") - best(cell, "fedadam") for cell in (*own_laws, iid)]) == "0.007 to 0.014"
    )
    assert all(best(cell, "feddyn") < best(cell, "fedadam") for cell in (*own_laws, iid))
    assert (
        "**FedCompass** without Adam is 0.006 below plain FedAvg on synthetic(1,1) where speeds are" in words
    )
    assert [f"{ahead(cell, 'fedcompass').mean():.3f}" for cell in own_laws[1:]] == ["-0.006", "-0.006"]
    assert "and 0.021 on MNIST with equal speeds" in words
    assert f"{ahead(('mnist', '1'), 'fedcompass').mean():.3f}" == "-0.021"
    assert "With Adam it is 0.013 below FedAvg with Adam on MNIST with equal speeds" in words
    assert f"{ahead(('mnist', '1'), 'fedcompass-adam', 'fedadam').mean():.3f}" == "-0.013"
    over, late, nova = (
        {cell: ahead(cell, name, rival) for cell in merits if name in merits[cell]}
        for name, rival in (
            ("fedavg-over-select", "fedavg"),
            ("fedavg-deadline", "fedavg"),
            ("fednova-steps", "fedavg-steps"),
        )
    )
    assert "is never ahead of FedAvg with all clients, and is 0.011 to 0.037 behind in three" in words
    assert told(over, 1) == []
    assert (len(told(over, -1)), span(told(over, -1))) == (3, "0.011 to 0.037")
    assert "**`round-deadline`** is 0.004 to 0.030 ahead in four cells, and 0.003 to 0.008 below on" in words
    assert (len(told(late, 1)), span(told(late, 1))) == (4, "0.004 to 0.030")
    assert all(late[cell].mean() < 0 for cell in own_laws)
    assert span([late[cell].mean() for cell in own_laws]) == "0.003 to 0.008"
    assert (
        "is 0.009 to 0.017 behind FedAvg in four of the six cells where fast clients do more steps" in words
    )
    assert (len(nova), told(nova, 1)) == (6, [])
    assert (len(told(nova, -1)), span(told(nova, -1))) == (4, "0.009 to 0.017")
    assert (
        "is 0.180 behind FedAvg where each client is away half of the time, and SCAFFOLD 0.007 (with Adam"
        in words
    )
    assert [f"{ahead(away, name).mean():.3f}" for name in ("mifa", "scaffold", "scaffold-adam")] == [
        "-0.180",
        "-0.007",
        "-0.006",
    ]
    assert "FedDyn is 0.034 ahead there" in words
    assert f"{ahead(away, 'feddyn').mean():.3f}" == "0.034"


def test_rows_of_the_picture_rise_where_they_are_numbers():
    plan = read_file(EXPERIMENTS / "map.toml", MapPlan)
    assert plan.sides("synthetic")[1] == ["5", "1", "50"]  # the order of the runs
    rows = _rows(plan, "synthetic")
    assert [[spot[1:] for spot in row] for row in rows] == [
        [("each of its own law", "50")],
        [("each of its own law", "5")],
        [("each of its own law", "1")],
    ]
