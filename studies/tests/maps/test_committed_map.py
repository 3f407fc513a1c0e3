"""What is committed of a map follows from the curves that are committed with it."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from studies.maps.curves import FILE

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDERS = sorted(path.parent for path in EXPERIMENTS.glob("results/*/map.csv"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_table_and_report_come_from_the_curves(folder: Path, tmp_path: Path):
    shutil.copy(folder / FILE, tmp_path)
    plan = EXPERIMENTS / f"{folder.name}.toml"
    done = CliRunner().invoke(app, ["map", str(plan), "--from-results", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}
    for name in ("map.csv", "report.md"):
        assert (tmp_path / name).read_text("utf-8") == (folder / name).read_text("utf-8"), name
