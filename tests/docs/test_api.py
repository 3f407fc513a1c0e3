"""docs/api.md can be read where nothing makes it a site: a table of the public names, as the sources have them."""

import re

import pytest

import fedapp
import strategies
from tests.docs.pages import ROOT

pytest.importorskip("griffe", reason="griffe isn't installed: pip install '.[docs]'")


@pytest.fixture(scope="module")
def api_page():
    """The module that makes the tables."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(ROOT / "docs"))
        import api_page

        yield api_page


def test_the_tables_are_those_of_the_sources(api_page):
    text = api_page.PAGE.read_text("utf-8")
    assert api_page.page(text) == text, "python docs/api_page.py"


def test_each_public_name_is_readable_with_a_sentence(api_page):
    read = re.sub(r"<!--.*?-->", "", api_page.PAGE.read_text("utf-8"), flags=re.S)
    assert ":::" not in read
    rows = dict(re.findall(r"^\| `([\w.]+)(?:\(.*\))?` \| (.*) \|$", read, re.M))
    assert read.count("\n| `") == len(rows)
    assert all(rows.values())
    own = {"__version__", "client", "secure", "testing", "clock", "streams"}
    assert {*strategies.__all__, *fedapp.__all__} - rows.keys() <= own
    assert rows["compare"] == "Compare runs at their end, and at equal time, equal rounds and equal bytes."
    assert "| `FedProxConfig(proximal_mu=0.1)` | Parameters of FedProx. |" in read
    assert "| `load(path)` | Read a run or a sweep from its folder. |" in read
