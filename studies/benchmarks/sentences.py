"""Figures of speed in README and docs, from a measurement: ``--write-results`` puts them in.

A page marks each, and says in the mark what it is:

    small models train <!-- speed: W1,W2 vectorized/stock -->6.4 to 13<!-- end --> times as fast
    a round takes <!-- seconds: W1,W2 vectorized -->0.07 to 0.25<!-- end --> s
    measured with <!-- circumstances -->commit …<!-- end -->

A figure is the range over the runs of the workloads that it names, not the best one.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from studies.benchmarks.results import JsonObject

# The measurement behind them, written beside RESULTS.md.
MEASURED = Path(__file__).with_name("measured.json")
PAGES = [Path(__file__).parents[2] / name for name in ("README.md", "docs/scale.md")]

_MARK = r"(<!-- {}(speed|seconds|circumstances)(?:: (\S+) (\S+))? -->)[^<]*(<!-- end -->)"


def filled(text: str, report: JsonObject, prefix: str = "") -> str:
    """Return a page with its figures made anew from a report (`studies.benchmarks.results.report`).

    ``prefix`` is what the marks of another benchmark than this command begin with.

    Raises
    ------
    ValueError
        If a mark names what wasn't measured.
    """

    def figure(found: re.Match[str]) -> str:
        mark, kind, workloads, of, end = found.groups()
        if kind == "circumstances":
            return f"{mark}{_circumstances(report)}{end}"
        faster, _, slower = of.partition("/")
        values = [
            value
            for workload in workloads.split(",")
            for value in (
                _ratios(report, workload, faster, slower) if slower else _seconds(report, workload, faster)
            )
        ]
        return f"{mark}{_range(min(values), max(values))}{end}"

    return re.sub(_MARK.format(re.escape(prefix)), figure, text)


def fill_pages(report: JsonObject, prefix: str = "") -> None:
    """Write the figures into `PAGES`."""
    texts = {path: filled(path.read_text("utf-8"), report, prefix) for path in PAGES}
    for path, text in texts.items():
        path.write_text(text, "utf-8")


def _ratios(report: JsonObject, workload: str, faster: str, slower: str) -> Iterator[float]:
    """Yield how many times as fast one contender is as another, turn by turn: they ran interleaved."""
    pairs = zip(_seconds(report, workload, faster), _seconds(report, workload, slower), strict=True)
    return (theirs / ours for ours, theirs in pairs)


def _seconds(report: JsonObject, workload: str, contender: str) -> list[float]:
    for row in report["rows"]:
        if (row["workload"], row["contender"]) == (workload, contender):
            seconds: list[float] = row["seconds-of-runs"]
            return seconds
    raise ValueError(f"{workload} {contender}: not in the measurement of {report['date']}")


def _range(least: float, most: float) -> str:
    """Write two figures with two digits, as one where they are equal then."""
    ends = dict.fromkeys(f"{value:.2g}" if value < 99.5 else f"{value:.0f}" for value in (least, most))
    return " to ".join(ends)


def _circumstances(report: JsonObject) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, flwr {machine['flwr']}, commit "
        f"{report['commit']}, {report['date']}"
    )
