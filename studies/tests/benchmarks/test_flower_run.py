"""The benchmark of the whole command ``flwr run``: what it counts, and the marks that it fills."""

import json
import subprocess
import sys

import pytest

from studies.benchmarks.flower_run import CONTENDERS, MARKS, STARTS, ContenderError, accuracy_of, row_of
from studies.benchmarks.sentences import PAGES, filled
from studies.tests.benchmarks.test_sentences import REPORT

# A child ends before its own child, which then works for 0.3 CPU seconds.
ORPHAN = """
import ctypes, os, subprocess, sys
from contextlib import suppress
from studies.benchmarks.flower_run import PR_SET_CHILD_SUBREAPER, cpu_seconds
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
work = "import time\\nwhile time.process_time() < 0.3: pass"
before = cpu_seconds()
subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, work], check=True)
with suppress(ChildProcessError):
    while True:
        os.wait()
print(cpu_seconds() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts by Linux' process tree")
def test_the_cpu_of_a_process_whose_parent_has_ended_counts():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.3


def test_a_run_on_another_engine_than_asked_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"engine": "vectorized", "accuracy": 0.5}))
    assert accuracy_of("auto", tmp_path) == 0.5
    with pytest.raises(ContenderError, match="ray: ran on vectorized"):
        accuracy_of("ray", tmp_path)


def test_the_pages_marks_are_filled():
    runs = [{"seconds": seconds, "cpu": 1.0, "accuracy": 0.9} for seconds in (11.0, 13.0)]
    rows = [
        row_of(f"{name}-{start}", each, runs)
        for name in ("W1", "W2")
        for start in STARTS
        for each in CONTENDERS
    ]
    texts = [page.read_text("utf-8") for page in PAGES]
    marks = sum(text.count(f"<!-- {MARKS}") for text in texts)
    made = "".join(filled(text, {**REPORT, "rows": rows}, MARKS) for text in texts)
    assert marks == 14
    assert made.count("-->11 to 13<!-- end -->") == 12
    assert made.count("-->1<!-- end -->") == 1  # the ratio, in README
    assert f"<!-- {MARKS}circumstances -->a processor" in made
