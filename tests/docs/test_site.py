"""The site is made without a warning, asks nobody else, and tells of every public name."""

import json
import logging
import re
from html import unescape
from pathlib import Path

import pytest

import fedapp
import strategies
from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="MkDocs isn't installed: pip install '.[docs]'")
pytest.importorskip("material", reason="MkDocs' theme isn't installed: pip install '.[docs]'")
pytest.importorskip(
    "mkdocstrings_handlers.python", reason="mkdocstrings isn't installed: pip install '.[docs]'"
)


class Warnings(logging.Handler):
    """What MkDocs, its plugins and our own hook complain of: what `--strict` counts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    """Make the site as `make docs` does, in this process; return the warnings."""
    from mkdocs.commands.build import build as make
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    warnings = Warnings()
    log = logging.getLogger("mkdocs")
    log.addHandler(warnings)
    try:
        make(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changes))
    finally:
        log.removeHandler(warnings)
    return warnings.texts


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, build(folder, monkeypatch)


def test_no_warning(site):
    assert site[1] == []


def test_every_page_is_in_it(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages | {"index", "404", "errors"} == {path.stem for path in site[0].glob("*.html")}
    assert (site[0] / "repository" / "CHANGELOG.html").exists()
    assert (site[0] / "repository" / "custom" / "nets.py").read_text() == (
        ROOT / "custom/nets.py"
    ).read_text()


def test_a_reader_asks_nobody_else(site):
    for page in site[0].rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(
            r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|icon)[^>]*href=[\"']?([^\"' >]+)", text
        )
        assert loaded
        assert [address for address in loaded if re.match(r"(\w+:)?//", address)] == []


def test_the_search_finds_a_key_and_words_in_brackets(site):
    text = (site[0] / "search" / "search_index.json").read_text("utf-8")
    assert "normalize-steps" in text
    assert "learning rate: lr" in [entry["title"] for entry in json.loads(text)["docs"]]
    separator = json.loads(text)["config"]["separator"]
    assert "Byzantine" in re.split(separator, "faulty (Byzantine) clients")


def test_messages_are_on_the_page_of_errors(site):
    text = unescape((site[0] / "errors.html").read_text("utf-8"))
    message = "optimizer = … with strategy = …: the method divides an update"
    row = re.search(rf"<td>{message}.*?</td>\s*<td>(.*?)</td>", text, re.S)
    assert row
    assert row[1] == "allowed is optimizer = sgd"
    assert re.search(r"<td>data-path = …: column … has … empty cells</td>\s*<td>all must be filled", text)
    assert text.count("<tr>") > 150


def test_formulas_are_set_as_they_are_meant(site):
    methods = (site[0] / "methods.html").read_text("utf-8")
    assert "Σ p<sub>i</sub> f<sub>i</sub>" in methods
    assert 'id="letters-and-words"' in methods
    api = (site[0] / "api.html").read_text("utf-8")
    assert "d_i; by default those of the draw" in api  # in code all stays as it is
    assert "x<sup>−S</sup>" in (site[0] / "fleet.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("module", "names"),
    [("strategies", strategies.__all__), ("fedapp", fedapp.__all__)],
)
def test_every_public_name_is_in_the_api(site, module, names):
    text = (site[0] / "api.html").read_text("utf-8")
    headings = " ".join(re.findall(r"<h\d[^>]* id=\"([^\"]+)\"", text))
    missing = [name for name in names if not re.search(rf"\b{module}(\.\w+)*\.{name}\b", headings)]
    assert missing == []


def test_a_link_that_leads_nowhere_is_a_warning(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text(
        "[gone](gone.md), [no file](../no.py), [no anchor](page.md#nowhere)\n", "utf-8"
    )
    plugins = {"plugins": ["search"], "nav": ["index.md", "page.md"]}
    warnings = "\n".join(build(tmp_path / "site", monkeypatch, docs_dir=str(docs), **plugins))
    for part in (
        "there is no docs/gone.md",
        "there is no no.py",
        "page.md#nowhere', but there is no such anchor",
    ):
        assert part in warnings
