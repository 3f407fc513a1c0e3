"""Every block of code in the README and the guides does what it says, or is listed as one that can't run here."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedapp.report.page.html import unpacked
from tests.docs.hospitals import check_hospitals
from tests.docs.pages import BLOCK, GUIDES, LANGUAGES, NOT_RUN, ROOT, blocks_of, text_of

IN_CI = ("docs/start.md",)
TIMEOUT = 600  # of a block

FIRST_RUN = "results/fedavg-digits-mlp-001"  # what `make run` leaves, and guides go on with
INIT = "fedapp deploy init deployment"  # of docs/deploy.md; docs/operations.md goes on with the folder

COPIED = ("custom", "fedapp", "strategies")  # what is bundled for devices: Flower follows no links
LINKED = (
    "examples",
    "studies",
    "run_simulation.py",
    "Makefile",
)
COMMAND = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    command = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(command).encode()], [1, 2])
    sys.exit(int(server.recv(100) or 1))
"""
# What code of a page takes as given: the README's is inside an app of one's own, here a stock one.
GIVEN = {
    "README.md": """
import sys
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from strategies.testing import MemoryGrid
sys.path.append("examples/own_scheme")
from own_scheme import task
from own_scheme.client_app import app
grid = MemoryGrid(app, [{"partition-id": i, "num-partitions": 6} for i in range(6)])
for node in grid.nodes.values():
    node.context.run_config = {"local-steps": 2, "lr": 0.1}
initial_arrays, config = ArrayRecord([np.zeros(task.FEATURES)]), ConfigRecord()
""",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project that is set up; one process answers `.venv/bin/fedapp`."""
    folder = tmp_path_factory.mktemp("tree")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "server"
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    write_command(commands / "fedapp", COMMAND.format(python=sys.executable, path=str(path)))
    write_command(commands / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / ".venv" / ".installed").touch()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.docs.command_server", str(path)],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        cwd=folder,  # first on its path: custom/ is the copy
        stdin=subprocess.DEVNULL,
    ) as server:
        try:
            wait_for(path, server)
            yield folder
        finally:
            server.terminate()


def wait_for(path: Path, server: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert server.poll() is None, "the process that answers commands is gone"
        try:
            server.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue


def write_command(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    path.chmod(0o755)


def run(code: str, folder: Path) -> str:
    """Run commands as a user who is in the project's folder, its environment active; return what they print."""
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}"
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.ci) if page in IN_CI else page for page in GUIDES]
)
def test_the_code_of_a_page_runs(page, tree):
    script = GIVEN.get(page, "")
    blocks = [block for block in blocks_of(page) if block.runs]
    if any(FIRST_RUN in block.code for block in blocks) and not (tree / FIRST_RUN).exists():
        run("make run", tree)
    if page == "docs/operations.md" and not (tree / "deployment").exists():
        run(next(block.code for block in blocks_of("docs/deploy.md") if INIT in block.code), tree)
    for block in blocks:
        if block.title:
            (tree / block.title).write_text(block.code, "utf-8")
        elif block.language == "sh":
            run(block.code, tree)
        else:
            script += block.code
    if script:
        (tree / "page.py").write_text(script, "utf-8")
        run(".venv/bin/python page.py", tree)
    CHECKS.get(page, lambda _: None)(tree)


def sees_predictions_by_five_commands(tree: Path) -> None:
    assert (tree / FIRST_RUN / "summary.json").exists()
    code = "\n".join(block.code for block in blocks_of("docs/start.md") if block.language == "sh")
    commands = re.findall(r"^\.venv/bin/fedapp (\w+)", code, re.M)
    assert commands == ["look", "run", "sweep", "compare", "predict"]
    check_hospitals(tree)
    table = (tree / "results" / "swept" / "report.md").read_text("utf-8")
    assert all(name in table for name in ("fedavg", "fedprox"))
    assert len(list((tree / "results" / "swept" / "runs").glob("lr-*"))) == 12
    assert (tree / "results" / "swept-compared" / "comparison.md").exists()


def sees_that_it_learns(tree: Path) -> None:
    lines = (tree / "results" / "diabetes" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert f'"r2": {0.475:.3f}' in lines[-1]


def last_of(tree: Path, name: str) -> dict[str, float]:
    lines = (tree / "results" / name / "metrics.jsonl").read_text("utf-8").splitlines()
    return dict(json.loads(lines[-1]))


def sees_text(tree: Path) -> None:
    assert last_of(tree, "text")["perplexity"] == pytest.approx(5.9, abs=0.15)
    assert last_of(tree, "text")["accuracy"] == pytest.approx(0.5, abs=0.03)


def sees_pictures(tree: Path) -> None:
    assert last_of(tree, "pictures")["iou"] == pytest.approx(0.98, abs=0.01)


def sees_three_methods_and_three_devices(tree: Path) -> None:
    page, table = ((tree / name).read_text("utf-8") for name in ("letters.html", "letters.tex"))
    content = json.loads(
        unpacked(page.partition('<script id="content" type="text/plain">')[2].partition("</script>")[0])
    )
    assert {run["name"] for run in content["runs"]} == {
        f"{method} seed={seed}" for method in ("fedavg", "fedprox", "fedfix") for seed in (0, 1)
    }
    assert table.count(r"\begin{tabular}") == 3  # accuracy, perplexity, loss
    assert all(method in table for method in ("FedAvg", "FedProx", "FedFix"))
    summaries = [
        json.loads(path.read_text("utf-8")) for path in tree.glob("results/fedavg-*letters*/summary.json")
    ]
    assert sorted(each["engine"] for each in summaries) == ["deployment", "vectorized"]
    for summary in summaries:
        assert summary["status"] == "finished"
        assert summary["num-clients"] == 3
        assert summary["accuracy"] > 0.2  # of 29 letters


CHECKS = {
    "docs/start.md": sees_predictions_by_five_commands,
    "docs/model.md": sees_that_it_learns,
    "docs/text.md": sees_text,
    "docs/pictures.md": sees_pictures,
    "docs/hour.md": sees_three_methods_and_three_devices,
}


@pytest.mark.parametrize("page", GUIDES)
def test_a_block_has_a_language_and_none_is_skipped_unseen(page):
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= LANGUAGES
    assert all(block.runs != bool(block.title) for block in blocks if block.language == "sh")
    needs = Counter(block.title for block in blocks if block.title.startswith("needs "))
    assert needs == {reason: number for (where, reason), number in NOT_RUN.items() if where == page}
    rest = BLOCK.sub("", text_of(page))
    assert "```" not in rest
    assert not re.search(r"^\n {4}(?! *[-*0-9])\S", rest, re.M), "an indented block has no language"


def test_every_page_of_the_list_is_there():
    assert {page for page, _ in NOT_RUN} <= set(GUIDES)
