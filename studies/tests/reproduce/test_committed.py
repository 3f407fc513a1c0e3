"""What is committed in studies/experiments/results follows from the curves that are committed with it."""

import re
import shutil
from pathlib import Path

import pytest

from studies.reproduce.command import from_results
from studies.reproduce.plan import folder_of_plans, plan_names, read_plan
from studies.reproduce.report import cell
from studies.reproduce.store import FILE
from studies.reproduce.summary import NAME, NEXT, PAPERS, papers, table

MOST_BYTES = 4_000_000  # of a file of curves
RESULTS = folder_of_plans() / "results"
ALL = sorted(path for path in RESULTS.iterdir() if path.is_dir())
FOLDERS = [
    path for path in ALL if not (path / "map.csv").exists()
]  # a map: studies/tests/maps/test_committed_map.py


def test_every_result_has_its_curves():
    assert [folder.name for folder in ALL if not (folder / FILE).exists()] == []
    assert [path for path in RESULTS.glob(f"*/{FILE}") if path.stat().st_size > MOST_BYTES] == []


def test_the_table_of_all_verdicts_is_what_the_claims_say():
    assert table(RESULTS) in (RESULTS / NAME).read_text("utf-8")


def test_the_page_of_the_papers_has_every_claim_with_its_verdict():
    text = PAPERS.read_text("utf-8")
    assert papers(text) == text
    rows = re.findall(r"^\| (.+) \| \[(.+)\]\(\.\./studies/\S+/report\.md\)(?:, [^|]+)? \|$", text, re.M)
    shown = [name for name in plan_names() if name[:3].isdigit() or f"<!-- verdicts: {name} -->" in text]
    claims = {
        cell(claim.text)
        for name in shown
        if (RESULTS / name).exists()
        for claim in read_plan(name).claims.values()
    }
    assert {claim for claims, _ in rows for claim in claims.split(NEXT)} == claims
    assert all((RESULTS / name).exists() or f"[{name}](" in text for name in shown)
    outcomes = {"holds", "doesn't hold", "not decided", "not testable at this scale", "not run"}
    assert {verdict for _, verdict in rows} <= outcomes
    readings = text.partition("our reading of it")[2].partition("<!-- end -->")[0]
    assert "the error floor, F − F*, is set by ζ²" in readings


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_verdicts_and_figures_come_from_the_curves(folder: Path, tmp_path):
    quick = folder.name.endswith("-quick")
    again = tmp_path / folder.name
    again.mkdir()
    shutil.copy(folder / FILE, again)
    from_results(folder.name.removesuffix("-quick"), tmp_path, quick=quick)
    assert {path.name for path in again.iterdir()} == {
        path.name for path in folder.iterdir() if path.is_file()
    }
    for name in ("table.csv", "claims.csv", "report.md"):
        assert (again / name).read_text("utf-8") == (folder / name).read_text("utf-8"), name
