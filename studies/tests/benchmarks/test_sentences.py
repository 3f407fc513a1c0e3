"""Figures of speed in README and docs are those of a measurement, and say its range."""

import json

import pytest

from studies.benchmarks import flower_run
from studies.benchmarks.sentences import MEASURED, PAGES, filled
from studies.benchmarks.workloads import DEFAULT_CONTENDERS, WORKLOADS

REPORT = {
    "date": "2099-01-01",
    "commit": "abc1234",
    "machine": {"cpu": "a processor", "cores": "2", "torch": "3.0", "flwr": "1.50"},
    "rows": [
        {"workload": "W1", "contender": "stock", "seconds-of-runs": [1.0, 0.8]},
        {"workload": "W1", "contender": "vectorized", "seconds-of-runs": [0.1, 0.05]},
        {"workload": "W2", "contender": "stock", "seconds-of-runs": [2.0, 1.5]},
        {"workload": "W2", "contender": "vectorized", "seconds-of-runs": [0.25, 0.25]},
    ],
}


@pytest.mark.parametrize(
    ("mark", "figure"),
    [
        ("speed: W1 vectorized/stock", "10 to 16"),  # 1/0.1 and 0.8/0.05, turn by turn
        ("speed: W1,W2 vectorized/stock", "6 to 16"),  # 1.5/0.25
        ("seconds: W2 vectorized", "0.25"),
        ("seconds: W1,W2 stock", "0.8 to 2"),
        ("circumstances", "a processor, 2 cores, torch 3.0, flwr 1.50, commit abc1234, 2099-01-01"),
    ],
)
def test_a_marked_figure_is_the_range_over_runs(mark, figure):
    page = f"trains <!-- {mark} -->old<!-- end --> times as fast, and <!-- else -->this<!-- end --> stays"
    assert filled(page, REPORT) == page.replace("old", figure)


def test_a_figure_that_was_not_measured_is_an_error():
    with pytest.raises(ValueError, match="W3 stock: not in the measurement of 2099-01-01"):
        filled("<!-- seconds: W3 stock -->1<!-- end -->", REPORT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_pages_mark_is_measured_by_the_benchmark(page):
    rows = [
        {"workload": workload.name, "contender": name, "seconds-of-runs": [2.0]}
        for workload in WORKLOADS.values()
        for name in DEFAULT_CONTENDERS
        if name not in workload.without
    ]
    text = page.read_text("utf-8")
    assert filled(text, {**REPORT, "rows": rows}) != text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize(
    ("measured", "prefix"),
    [
        (MEASURED, ""),
        (flower_run.MEASURED, flower_run.MARKS),
        (flower_run.MEASURED_SWAPPED, flower_run.MARKS_SWAPPED),
    ],
)
def test_the_pages_figures_are_those_of_the_committed_measurements(page, measured, prefix):
    text = page.read_text("utf-8")
    assert filled(text, json.loads(measured.read_text("utf-8")), prefix) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_a_page_begins_with_a_mark_which_would_end_a_list(page):
    lines = page.read_text("utf-8").splitlines()
    assert not [line for line in lines if line.lstrip().startswith("<!-- ") and line.count("-->") > 1]
