"""Numbers read back from run folders."""

import math

import numpy as np
import pytest

from fedapp.reproduce.report import Report, Row, judge, write_report
from fedapp.reproduce.runs import Runs


def test_columns_tails_and_thresholds(folder_with):
    run = folder_with({"seed": 0}, {"accuracy": [0.1, 0.5, None, 0.8], "loss": [4.0, 3.0, 2.0, 1.0]})
    assert np.isnan(run.column("accuracy")[2])
    assert run.tail("loss", 0.5).tolist() == [2.0, 1.0]
    assert run.tail("loss").tolist() == [1.0]  # 5 % of 4, but at least one
    assert run.rounds_to(0.4) == 1  # 0.5 > 0.4 at aggregation 1
    assert run.rounds_to(0.5) == 3  # exceeds, not reaches
    assert math.isnan(run.rounds_to(0.9))


def test_the_federated_objective_has_two_names(folder_with):
    run = folder_with({"seed": 0}, {"federated-loss": [3.0, None], "client-loss": [9.0, 2.0]})
    assert run.column("objective").tolist() == [3.0, 2.0]


def test_the_surrogate_objective_weighs_clients_by_how_often_they_answer(folder_with):
    # τ = 0.25 and 1: shares 4/5 and 1/5; mean 0.8 · 1 + 0.2 · 6 = 2, variance 0.8 · 1² + 0.2 · 4² = 4.
    run = folder_with({"seed": 0}, {"clients": [{"loss": [1.0, 6.0], "task-time": [0.25, 1.0]}, None]})
    np.testing.assert_allclose(run.column("hardware-loss"), [2.0, np.nan])
    np.testing.assert_allclose(run.column("hardware-loss-std"), [2.0, np.nan])


def test_a_band_is_mean_and_deviation_of_step_functions(folder_with):
    # At time 0: 0 and 2; from 1: 4 and 6; the second run ends at 2.
    first = folder_with({"seed": 0}, {"time": [0, 1, 4], "loss": [0.0, 4.0, 100.0]})
    second = folder_with({"seed": 1}, {"time": [0, 1, 2], "loss": [2.0, 6.0, 8.0]})
    runs = Runs([first, second])
    grid, curves = runs.curves("loss", points=5)
    assert grid.tolist() == [0, 0.5, 1, 1.5, 2]
    assert curves.tolist() == [[0, 0, 4, 4, 4], [2, 2, 6, 6, 8]]
    _, middle, spread = runs.band("loss")
    assert (middle[0], middle[-1], spread[0], spread[-1]) == (1, 6, 1, 2)


def test_runs_are_chosen_by_label(folder_with):
    runs = Runs(
        folder_with({"seed": s, "local-steps": k}, {"loss": [float(s)]}) for s in (0, 1) for k in (1, 5)
    )
    assert [run["seed"] for run in runs.where(local_steps=5)] == [0, 1]
    assert runs.labels("local-steps") == [1, 5]
    assert runs.where(seed=1).values("loss") == [1.0, 1.0]
    assert len(runs.where(seed=2)) == 0


def test_a_report_has_ours_beside_the_published(tmp_path):
    rows = [
        Row("a", [1.0, 3.0], 5.0),  # mean 2, deviation √2, difference −3
        Row("b", [1.0, math.nan], 1.0),
        Row("c | d", [math.nan]),
    ]
    report = Report(rows, [judge("1", True, "seen | twice")], notes=["a note"], extra=["## More\n\ntext"])
    text = write_report(
        tmp_path, report, title="T", source="S", claims={"1": "one", "2": "two"}, setting=["quick"]
    ).read_text()
    assert "| a | 5 | 2 ± 1.4 | -3 | 2 |" in text
    assert "| b | 1 | 1 of 2 seeds | – | 2 |" in text
    assert r"| c \| d | – | – | – | 1 |" in text
    assert r"| 1 | one | **holds** | seen \| twice |" in text
    assert "| 2 | two | **not decided** |" in text
    assert "- a note" in text
    assert "## More" in text
    assert "numpy" in text
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == "a,5,2,1.41421,-3,2"
    assert (tmp_path / "claims.csv").read_text().splitlines()[1] == "1,holds,seen | twice"


@pytest.mark.parametrize(("holds", "text"), [(True, "holds"), (False, "doesn't hold"), (None, "not decided")])
def test_a_verdict_has_three_values(holds, text):
    assert judge("x", holds, "").outcome == text
