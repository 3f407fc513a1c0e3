"""The tables of all verdicts: README.md beside the experiments' folders, and paper by paper in docs/papers.md."""

import csv
import re
from pathlib import Path

from studies.reproduce.plan import folder_of_plans, plan_names, read_plan
from studies.reproduce.report import cell

NAME = "README.md"

# What stands below is written by hand and stays.
MARKER = "<!-- above: fedapp reproduce --summary -->"

_INTRODUCTION = """# Results

`fedapp reproduce` made a folder for each experiment: `report.md`, figures, `table.csv`, `claims.csv`,
`curves.parquet`. From the last one `fedapp reproduce NAME --from-results --out studies/experiments/results` makes
all the others again.

Names begin with the source's in [docs/references.md](../../docs/references.md); the other experiments are this
project's own."""


def write_summary(folder: Path) -> Path:
    """Write the table of the verdicts in every ``claims.csv`` below a folder; keep what stands below the marker.

    Of studies/experiments/results those in docs/papers.md, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    below = path.read_text("utf-8").partition(MARKER)[2] if path.exists() else ""
    path.write_text(f"{_INTRODUCTION}\n\n{table(folder)}\n\n{MARKER}{below or chr(10)}", encoding="utf-8")
    if folder.resolve() == RESULTS.resolve() and PAPERS.exists():
        PAPERS.write_text(papers(PAPERS.read_text("utf-8")), "utf-8")
    return path


RESULTS, PAPERS = folder_of_plans() / "results", folder_of_plans().parents[1] / "docs" / "papers.md"

# A paper's table on the page: between these, of the experiments whose names begin so.
_TABLE = re.compile(r"(<!-- verdicts: (\S+) -->\n).*?(<!-- end -->)", re.S)


def papers(text: str) -> str:
    """Return the text of the page of the papers with its tables made anew from the committed results."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_of_paper(found[2])}\n\n{found[3]}", text)


def _of_paper(prefix: str) -> str:
    """Return every registered claim of a paper with its verdict.

    Neighbours with the same verdict of the same experiment share a row. The numbers behind a verdict are in the
    experiment's report: here they would make the table unreadable.
    """
    rows: dict[str, list[tuple[str, list[str]]]] = {basis: [] for basis in _SAID}
    waiting = []
    for name in (name for name in plan_names() if name.startswith(prefix)):
        claims = read_plan(name).claims
        path = RESULTS / name / "claims.csv"
        if not path.exists():
            waiting.append(f"[{name}](../studies/experiments/{name}.toml), {len(claims)} claims")
            continue
        verdicts = {row["claim"]: row["verdict"] for row in _rows(path)}
        for claim, registered in claims.items():
            shown = f"[{verdicts.get(claim, 'not run')}](../studies/experiments/results/{name}/report.md)"
            shown += f", {cell(registered.here)}" if registered.here else ""
            of_basis = rows[registered.basis]
            if not of_basis or of_basis[-1][0] != shown:
                of_basis.append((shown, []))
            of_basis[-1][1].append(cell(registered.text))
    parts = [
        "\n".join(
            [
                f"| {said} | here |",
                "|---|---|",
                *(f"| {NEXT.join(texts)} | {shown} |" for shown, texts in rows[basis]),
            ]
        )
        for basis, said in _SAID.items()
        if rows[basis]
    ]
    if waiting:
        parts.append(f"Not run: {'; '.join(waiting)}.")
    return "\n\n".join(parts)


# Stands between the claims of a row.
NEXT = "<br>"

# Heads of the tables, by a claim's basis.
_SAID = {
    "source": "the paper says",
    "reading": "our reading of it, which the paper doesn't say",
    "memory": "the paper says, from memory: not verified against it",
}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(folder: Path) -> str:
    """Return the verdicts as Markdown; an experiment without claims has a line too."""
    lines = []
    for path in sorted(folder.glob("*/claims.csv")):
        name = path.parent.name
        claims = _rows(path)
        link = f"[{name}]({name}/report.md)"
        lines += [
            f"| {link} | {claim['claim']} | {cell(claim['published'])} | {claim['verdict']} "
            f"| {cell(claim['evidence'])} |"
            for claim in claims
        ] or [f"| {link} | | | see report | |"]
    if not lines:
        return "Nothing is there yet."
    header = ["| experiment | claim | published | verdict | evidence |", "|---|---|---|---|---|"]
    return "\n".join([*header, *lines])
