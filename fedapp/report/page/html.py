"""The page's file: template, style, script, Plotly and the runs' content in one."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_PLACES = ("policy", "style", "plotly", "content", "script")


class NoPlotlyError(Exception):
    """The extra `report` isn't installed."""


def make_page(content: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page as HTML, with nothing in it that is loaded from elsewhere.

    A browser runs only the page's own two scripts, known by their hashes, whatever text of runs and devices is in
    the page.

    Parameters
    ----------
    content
        The content from ``fedapp.report.page.content.page_content``.
    live
        Whether the page polls its server for new content.

    Raises
    ------
    NoPlotlyError
        If Plotly isn't installed.
    """
    here = files(__package__)
    parts = {
        "style": (here / "page.css").read_text("utf-8"),
        "plotly": _plotly(),
        "script": (here / "page.js").read_text("utf-8"),
        "content": as_json({**content, "live": live}),
    }
    hashes = " ".join(f"'sha256-{_digest(parts[name])}'" for name in ("plotly", "script"))
    asks = "'self'" if live else "'none'"
    parts["policy"] = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )
    page = (here / "page.html").read_text("utf-8")
    pieces = []
    for name in _PLACES:  # in the order of the template, so that no marker is looked for in inserted text
        before, _, page = page.partition(f"[[{name}]]")
        pieces += [before, parts[name]]
    return "".join([*pieces, page])


def as_json(content: Mapping[str, Any]) -> str:
    """Return JSON that ends no script element, whatever text is in it."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise NoPlotlyError("needs Plotly, the extra `report`: pip install '.[report]'") from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
