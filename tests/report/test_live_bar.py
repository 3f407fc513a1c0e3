"""The bar in a notebook: one output that is written over, which needs no widgets."""

import io

import pytest
from rich.console import Console

from fedapp.report.live_bar import EVERY, LiveBar


@pytest.fixture
def notebook():
    """Yield what a notebook would be sent, as IPython captures it."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    from IPython.core.displaypub import CapturingDisplayPublisher

    before, shell.display_pub = shell.display_pub, CapturingDisplayPublisher()
    yield shell.display_pub
    shell.display_pub = before
    type(shell).clear_instance()


def test_a_notebook_has_one_line_that_is_written_over(notebook):
    seconds = iter([0.0, 0.0, EVERY / 2, EVERY, EVERY, EVERY + 0.1, EVERY + 0.1])
    bar = LiveBar(Console(file=io.StringIO(), force_jupyter=True), 4, "waiting", now=lambda: next(seconds))
    assert bar.shown
    bar.start()
    bar.begin_at(0, 4)
    for done in (1, 2, 3, 4):  # the second comes too soon after the first
        bar.advance(done, "rounds", f"accuracy 0.{done}")
    texts = [each["data"]["text/plain"] for each in notebook.outputs]
    assert [text.split()[0] for text in texts] == ["waiting", "rounds", "rounds", "rounds"]
    assert [part for text in texts for part in text.split() if "/" in part] == ["0/4", "1/4", "3/4", "4/4"]
    assert "accuracy 0.3" in texts[2]
    assert texts[2].endswith("left")
    assert texts[3].endswith("in all")
    assert [each.get("update", False) for each in notebook.outputs] == [False, True, True, True]
    assert len({each["transient"]["display_id"] for each in notebook.outputs}) == 1


def test_nothing_is_drawn_into_a_pipe():
    pipe = io.StringIO()
    bar = LiveBar(Console(file=pipe), 2, "waiting")
    bar.start()
    bar.begin_at(0, 2)
    bar.advance(2, "rounds")
    bar.stop()
    assert not bar.shown
    assert pipe.getvalue() == ""
    assert bar.text().split()[0] == "rounds"
