"""The notebook in examples/ runs, cell by cell, and holds nothing of the machine it was run on."""

import json
from typing import Any

import pytest

import fedapp


@pytest.fixture(scope="module")
def notebook(repository):
    content: dict[str, Any] = json.loads((repository / "examples" / "python.ipynb").read_text("utf-8"))
    return content


@pytest.mark.thorough
def test_its_cells_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert isinstance(names["made"], fedapp.RunResult)
    assert names["made"].summary["accuracy"] > 0.5
    assert names["swept"].table["runs"].tolist() == [2, 2, 2, 2]
    assert len(names["compared"].table) == 2 * len(names["swept"].table)


def test_it_has_been_run_and_is_small(notebook, repository):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    assert not [out for cell in code for out in cell["outputs"] if out["output_type"] in ("error", "stream")]
    text = (repository / "examples" / "python.ipynb").read_text("utf-8")
    assert len(text) < 30_000
    assert "/root" not in text
    assert "/home" not in text
