"""The page's file: template and style, and in a compressed text Plotly, the page's script and the runs' content.

Plotly's script is 4.8 MB; browsers decompress it themselves. A script of a few lines, the loader, unpacks the texts.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_PLACES = ("policy", "style", "plotly", "page", "content", "loader")


class NoPlotlyError(Exception):
    """The extra `report` isn't installed."""


def make_page(content: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page as HTML, with nothing in it that is loaded from elsewhere.

    A browser runs only the page's own three scripts, known by their hashes, whatever text of runs and devices is in
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
    scripts = {
        "plotly": _plotly(),
        "page": (here / "page.js").read_text("utf-8"),
        "loader": (here / "loader.js").read_text("utf-8"),
    }
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts.values())
    asks = "'self'" if live else "'none'"
    parts = {
        "style": (here / "page.css").read_text("utf-8"),
        "plotly": _packed_plotly(),
        "page": packed(scripts["page"]),
        "content": packed(as_json({**content, "live": live})),
        "loader": scripts["loader"],
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'",
    }
    page = (here / "page.html").read_text("utf-8")
    pieces = []
    for name in _PLACES:  # in the order of the template, so that no marker is looked for in inserted text
        before, _, page = page.partition(f"[[{name}]]")
        pieces += [before, parts[name]]
    return "".join([*pieces, page])


def packed(text: str) -> str:
    """Return a text compressed by gzip, in base 85 (RFC 1924), with / in place of <, so that no tag is in it."""
    return base64.b85encode(gzip.compress(text.encode(), 9, mtime=0)).decode().replace("<", "/")


def unpacked(text: str) -> str:
    """Return the text that was `packed`."""
    return gzip.decompress(base64.b85decode(text.replace("/", "<"))).decode()


def as_json(content: Mapping[str, Any]) -> str:
    """Return JSON in ASCII without numbers that aren't finite."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise NoPlotlyError("needs Plotly, the extra `report`: pip install '.[report]'") from None
    return str(get_plotlyjs())


@cache
def _packed_plotly() -> str:
    return packed(_plotly())


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
