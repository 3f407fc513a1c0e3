"""What MkDocs is told of the repository around docs/: its pages there, and what becomes of links and formulas.

README.md is the site's first page. A link out of docs/ goes to a page, where mkdocs.yml has one of it in ``nav``, or
to a copy of the file; where it names a folder, its text alone stays. So the same links hold here and in the
repository. One that leads nowhere is a warning, and with ``--strict`` the site isn't made.
"""

import importlib.util
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.site_links")

ROOT = Path(__file__).parents[1]
HOME, API, ELSEWHERE = "index.md", "api.md", "repository"

# A Markdown link or image whose target is neither an address nor an anchor of its page.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)
# p_i or 2^BITS of a formula in the text, as the Markdown has it; neither in code nor in tags.
INDEX = re.compile(
    r"(?P<kept><(code|pre|svg|script|style)\b.*?</\2>|<[^>]*>)"
    r"|(?<![^\W\d_]{2})(?<=[^\W\d_])_(?P<low>[a-zα-ω]{1,2}|[A-Z]|max|eff)\b|(?<=[\w)])\^(?P<high>−?\w+)\b",
    re.S,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files of the repository that pages link to."""
    for uri in [HOME, *_listed(config["nav"])]:
        if uri == HOME or uri.startswith(f"{ELSEWHERE}/"):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / _path_of(uri))))
    errors = _beside("errors_page")
    if errors.PAGE in _listed(config["nav"]):
        files.append(File.generated(config, errors.PAGE, content=errors.page()))
    there = {file.src_uri for file in files}
    for page in list(files.documentation_pages()):
        for _, _, target, _ in LINK.findall(FENCE.sub("", page.content_string)):
            path = _resolved(page.src_uri, target)
            uri = _uri_of(path, there)
            if uri not in there and (ROOT / path).is_file():
                there.add(uri)
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links hold in the site that hold in the repository."""
    here = page.file.src_uri
    if here == API:
        markdown = _beside("api_page").for_the_site(markdown)
    there = {file.src_uri for file in files}

    def moved(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = _resolved(here, target)
        if not (ROOT / path).exists():
            log.warning("%s: there is no %s", _path_of(here), path)
        uri = _uri_of(path, there)
        if uri not in there:
            return text
        return f"{image}[{text}]({os.path.relpath(uri, PurePosixPath(here).parent)}{anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Set indices and powers as such, and what methods say of themselves in lines.

    Docstrings announce code with two colons, as reStructuredText does.
    """
    lines = re.sub(r"\n(?=(?:Rule|Needs|Sent|Kept|Helps): )", "<br>\n", html)
    return INDEX.sub(_set, re.sub(r"\s*::</p>", ":</p>", lines))


def _beside(name: str) -> Any:
    """Import a file beside this one, which is no package's."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _set(found: re.Match[str]) -> str:
    if found["kept"]:
        return found["kept"]
    return f"<sub>{found['low']}</sub>" if found["low"] else f"<sup>{found['high']}</sup>"


def _listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [uri for part in parts for uri in _listed(part)]


def _path_of(uri: str) -> str:
    """Return where a page stands in the repository."""
    if uri == HOME:
        return "README.md"
    return uri.removeprefix(f"{ELSEWHERE}/") if uri.startswith(f"{ELSEWHERE}/") else f"docs/{uri}"


def _resolved(uri: str, target: str) -> str:
    return os.path.normpath(str(PurePosixPath(_path_of(uri)).parent / target))


def _uri_of(path: str, there: set[str]) -> str:
    """Return where a file of the repository stands in the site; Markdown that is no page there is a text."""
    if path == "README.md":
        return HOME
    uri = path.removeprefix("docs/") if path.startswith("docs/") else f"{ELSEWHERE}/{path}"
    return uri if uri in there or not uri.endswith(".md") else f"{uri}.txt"
