"""``fedapp report --live`` and how runs stand: also one whose process is gone without a word."""

import json
import subprocess
import sys

import pytest

from fedapp.report.files import GONE, this_process
from fedapp.report.page import LivePage

HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_run_goes_on_no_more(tmp_path):
    pytest.importorskip("plotly")
    run = tmp_path / "killed"
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    (run / "metrics.jsonl").write_text(json.dumps({"aggregation": 0, "loss": 1.0}) + "\n")
    (run / "summary.json").write_text(json.dumps({"status": "running", "process": this_process()}))
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        page = LivePage([run])
        try:
            assert summary_of(page)["status"] == "running"
        finally:
            process.kill()
    try:
        assert summary_of(page) == {"status": "failed", "reason": GONE}
    finally:
        page.server.server_close()


def summary_of(page: LivePage) -> dict[str, object]:
    summary: dict[str, object] = json.loads(page.content())["runs"][0]["summary"]
    return summary
