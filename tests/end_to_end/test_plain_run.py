"""How much of the project a plain run of FedAvg works in: few files, and calls that aren't nested deeply."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT

# Two files are the client's side of compression, and the sequence of clients that many of them may come to and leave;
# one frame is the mod of the site's own rules.
MOST_FILES, MOST_FRAMES = 110, 26


@pytest.mark.thorough
@pytest.mark.ci
def test_a_plain_run_works_in_few_files_and_frames(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))  # the dataset is prepared, too
    script = Path(__file__).with_name("plain_run.py")
    command = [sys.executable, str(script), str(ROOT), str(tmp_path / "results")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["code"] == 0, ended.stderr
    (run,) = (tmp_path / "results").iterdir()
    made = {path.name for path in run.iterdir()}
    assert made >= {"checkpoint", "clients.parquet", "curves.png", "model.safetensors", "timeline.png"}
    files, frames = found["files"], found["frames"]
    assert "strategies/rounds/strategy.py" in files
    assert "fedapp/training/dense.py" in files
    assert len(files) <= MOST_FILES, "\n".join(files)
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)
