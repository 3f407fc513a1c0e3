"""Texts that follow from the sources are kept, and made anew when a source has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp import cache
from fedapp.cache import remembered


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A package of one source in place of the app's, an empty cache, and what was made since."""
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "of_texts").mkdir()
    (tmp_path / "of_texts" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "PACKAGES", ("of_texts",))
    return []


def ask(made: list[str], *question: str) -> str:
    return remembered(lambda: made.append(" ".join(question)) or f"of {' '.join(question)}", *question)


def test_a_text_is_made_once_until_a_source_changes(made, tmp_path):
    assert [ask(made, "keys"), ask(made, "keys"), ask(made, "keys", "lr")] == [
        "of keys",
        "of keys",
        "of keys lr",
    ]
    assert made == ["keys", "keys lr"]
    (tmp_path / "of_texts" / "more.py").write_text("")
    assert ask(made, "keys") == "of keys"
    os.utime(tmp_path / "of_texts" / "more.py", (1, 1))
    assert ask(made, "keys", "lr") == "of keys lr"
    assert made == ["keys", "keys lr", "keys", "keys lr"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["texts.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"sources": 1}', "\xff"])
def test_a_damaged_file_is_made_anew(made, tmp_path, content):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "texts.json").write_text(content, "latin-1")
    assert [ask(made, "keys"), ask(made, "keys")] == ["of keys"] * 2
    assert made == ["keys"]
    assert json.loads((tmp_path / "cache" / "texts.json").read_text())["texts"] == {'["keys"]': "of keys"}


def test_without_a_folder_it_is_made_each_time(made, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "file"))
    assert [ask(made, "keys"), ask(made, "keys")] == ["of keys"] * 2
    assert made == ["keys", "keys"]


@pytest.mark.parametrize("words", [["keys", "lr"], ["methods", "fedbuff"], ["run", "--help"], ["--version"]])
def test_the_second_time_no_library_is_imported(words, tmp_path):
    program = (
        "import sys; from fedapp.cli import main\n"
        "heavy = {'flwr', 'torch', 'numpy', 'pydantic'}\n"
        "try:\n    main()\nfinally:\n    print(*heavy & sys.modules.keys(), file=sys.stderr)"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "FEDAPP_CACHE": str(tmp_path)},
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    assert seen[0].stdout == seen[1].stdout != ""
    assert seen[1].stderr.strip() == ""
