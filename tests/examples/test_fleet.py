"""The example of a fleet: what it shows is what its files have, and it runs, in small."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from examples.fleet.__main__ import (
    BUDGET,
    METHODS,
    PICKED,
    SEEDS,
    STEP_SIZES,
    TUNING_SEEDS,
    main,
    picked,
    table,
)

FOLDER = Path(__file__).parents[2] / "examples" / "fleet"


@pytest.mark.thorough
def test_it_prints_a_table_and_draws_a_figure(tmp_path, capsys):
    arguments = [
        "--out",
        str(tmp_path),
        "--jobs",
        "1",
        "--clients",
        "60",
        "--budget",
        "60",
        "--seeds",
        "4",
        "5",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert [name for name in METHODS if name in printed] == list(METHODS)
    shown = pd.read_csv(tmp_path / "shown.csv")
    assert shown[["method", "seed"]].to_numpy().tolist() == [
        [name, seed] for name in METHODS for seed in (4, 5)
    ]
    assert set(shown["status"]) == {"finished"}
    assert shown["accuracy"].between(0, 1).all()
    with Image.open(tmp_path / "fleet.png") as figure:
        assert figure.size[0] == 1200
        assert len(set(figure.convert("RGB").getdata())) > 20
    runs = sorted((tmp_path / "shown" / "runs").glob("*/metrics.jsonl"))
    made = {run: run.stat().st_mtime_ns for run in runs}
    assert len(made) == 8
    assert main(arguments) == 0  # nothing is made again
    assert {run: run.stat().st_mtime_ns for run in runs} == made
    assert capsys.readouterr().out == printed


def rows(**times: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"method": "a", "lr": float(lr), "seed": seed, "status": "finished", "time": time}
        for lr, each in times.items()
        for seed, time in enumerate(each)
    )


def test_the_step_size_with_the_least_mean_time_is_picked():
    nan = np.nan
    assert picked(rows(**{"0.1": [30, 50], "0.3": [35, 35], "1": [20, nan]}), 100) == {"a": 0.3}
    assert picked(rows(**{"0.1": [30, 50], "0.3": [40, 40], "1": [10, nan]}), 100) == {"a": 0.1}
    assert picked(rows(**{"0.1": [30, 50], "1": [10, nan]}), 60) == {"a": 1.0}
    diverged = rows(**{"0.1": [30, 50], "1": [10, 10]})
    diverged.loc[3, "status"] = "diverged"
    assert picked(diverged, 100) == {"a": 0.1}


def test_what_is_shown_is_what_the_files_have():
    tried, shown = (pd.read_csv(FOLDER / f"{name}.csv") for name in ("tuning", "shown"))
    assert sorted(set(tried["seed"])) == list(TUNING_SEEDS)
    assert sorted(set(shown["seed"])) == list(SEEDS)
    assert not set(TUNING_SEEDS) & set(SEEDS)
    assert sorted(set(tried["lr"])) == list(STEP_SIZES)
    assert len(tried) == len(METHODS) * len(STEP_SIZES) * len(TUNING_SEEDS)
    assert picked(tried, BUDGET) == PICKED
    assert dict(zip(shown["method"], shown["lr"], strict=True)) == PICKED
    readme = (FOLDER / "README.md").read_text("utf-8")
    for _, row in table(shown).iterrows():
        assert f"| {' | '.join(cells_of(row))} |\n" in readme


def cells_of(row: pd.Series) -> list[str]:  # type: ignore[type-arg]
    return [
        row["method"],
        f"{row['lr']:g}",
        f"{row['seconds']:.0f} ({row['least']:.0f} to {row['most']:.0f})",
        row["reached"],
        f"{row['device-seconds']:,.0f}",
        f"{row['wasted-seconds']:,.0f}",
        f"{row['final accuracy']:.3f}",
    ]
