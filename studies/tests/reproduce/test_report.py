"""The report's text and tables, and the table of all verdicts."""

import math

import pytest

from studies.reproduce.report import Report, Row, judge, not_run, write_report
from studies.reproduce.summary import MARKER, table, write_summary

CLAIMS = {
    "1": {"text": "one", "rule": "|a / {wanted} − 1| ≤ {close}", "thresholds": {"wanted": 2.0, "close": 0.5}},
    "2": {"text": "two", "rule": "never"},
}


def test_a_report_has_ours_beside_the_published(plan, tmp_path):
    rows = [
        Row("a", [1.0, 3.0], 5.0),  # mean 2, deviation √2, difference −3
        Row("b", [1.0, math.nan], 1.0),
        Row("c | d", [math.nan]),
    ]
    report = Report(rows, [judge("1", True, "seen | twice")], notes=["a note"], extra=["## More\n\ntext"])
    readings = [{"text": "Pixels are in [0, 1].", "chosen": "after seed 0 was seen"}]
    made = plan(claims=CLAIMS, readings=readings)
    text = write_report(tmp_path, report, made, setting=["2 of 3 runs"]).read_text()
    assert "| a | 5 | 2 ± 1.4 | -3 | 2 |" in text
    assert "| b | 1 | 1 of 2 seeds | – | 2 |" in text
    assert r"| c \| d | – | – | – | 1 |" in text
    assert r"| 1 | one | \|a / 2.0 − 1\| ≤ 0.5 | **holds** | seen \| twice |" in text
    assert "| 2 | two | never | **not run** |" in text
    assert "- Pixels are in [0, 1]. (Chosen: after seed 0 was seen.)" in text
    assert 'dataset = "digits"' in text
    assert "seed = [0, 1]" in text
    for part in ("- a note", "## More", "- 2 of 3 runs"):
        assert part in text
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == "a,5,2,1.41421,-3,2"
    assert (tmp_path / "claims.csv").read_text().splitlines()[1:] == [
        "1,one,holds,seen | twice",
        "2,two,not run,what it needs isn't there",
    ]


def test_a_quick_run_has_no_verdict(plan, tmp_path):
    report = Report(verdicts=[judge("1", False, "seen"), not_run("2", "nothing there")])
    write_report(tmp_path, report, plan(claims=CLAIMS).as_quick(), setting=[])
    assert (tmp_path / "claims.csv").read_text().splitlines()[1:] == [
        "1,one,quick: no verdict,seen",
        "2,two,not run,nothing there",
    ]


@pytest.mark.parametrize(
    ("budget", "outcome"),
    [(19.0, "not testable at this scale"), (20.0, "doesn't hold"), (100.0, "doesn't hold")],
)
def test_runs_of_less_than_a_fifth_of_the_sources_time_have_no_verdict(plan, tmp_path, budget, outcome):
    scale = {"key": "time-budget", "published": 100.0}
    claims = {
        "1": {"text": "one", "rule": "never", "thresholds": {"problem": "short"}, "scale": scale},
        "2": {"text": "two", "rule": "never", "thresholds": {"problems": ["long"]}, "scale": scale},
        "3": {"text": "three", "rule": "never", "scale": scale},
    }
    problem = [{"label": "short", "time-budget": budget}, {"label": "long", "time-budget": 99.0}]
    verdicts = [judge("1", False, "seen"), judge("2", True, "seen"), not_run("3", "nothing there")]
    made = plan(claims=claims, grid={"problem": problem})
    text = write_report(tmp_path, Report(verdicts=verdicts), made, setting=[]).read_text()
    rows = (tmp_path / "claims.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == [outcome, "holds", "not run"]
    assert "never; not testable where time-budget is below 20% of the source's 100" in text
    if budget == 19.0:
        assert "time-budget is 19, 19% of the source's 100" in text
        assert "These runs: doesn't hold; seen" in text


def test_a_verdict_on_what_nobody_claimed_is_refused(plan, tmp_path):
    with pytest.raises(ValueError, match="verdicts on 9"):
        write_report(tmp_path, Report(verdicts=[judge("9", True, "")]), plan(claims=CLAIMS), setting=[])


@pytest.mark.parametrize(("holds", "text"), [(True, "holds"), (False, "doesn't hold"), (None, "not decided")])
def test_a_verdict_has_three_values(holds, text):
    assert judge("x", holds, "").outcome == text


def test_the_summary_is_made_of_the_claims_and_leaves_prose_alone(plan, tmp_path):
    assert "Nothing is there yet." in write_summary(tmp_path).read_text()
    for name, claims in (("b", CLAIMS), ("a", {})):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, Report(verdicts=[]), plan(claims=claims), setting=[])
    path = tmp_path / "README.md"
    path.write_text(path.read_text() + "\n## By hand\n")
    text = write_summary(tmp_path).read_text()
    assert table(tmp_path).splitlines()[2:] == [
        "| [a](a/report.md) | | | see report | |",
        "| [b](b/report.md) | 1 | one | not run | what it needs isn't there |",
        "| [b](b/report.md) | 2 | two | not run | what it needs isn't there |",
    ]
    assert table(tmp_path) in text
    assert text.endswith(f"{MARKER}\n\n## By hand\n")
    assert write_summary(tmp_path).read_text() == text
