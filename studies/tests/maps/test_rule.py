"""Who wins a cell: hand-made numbers beside what is expected of them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedapp.config import ConfigError
from fedapp.sweeps.plan import checked
from studies.maps.curves import MapCurve, read_curves, write_curves
from studies.maps.picture import result_text, strip
from studies.maps.plan import Candidate, MapPlan, Spot
from studies.maps.report import frame, win_text, write_report
from studies.maps.rule import CLOSE, INCOMPLETE, NONE, UNREACHED, WON, Win, told_apart, win
from studies.maps.scores import MapScore, mean_over, score, scores_of, time_to
from studies.maps.search import tune

CONTENT: dict[str, Any] = {
    "title": "a map",
    "seeds": [0, 1, 2],
    "base": {"time-budget": 10.0, "num-clients": 2},
    "across": {"name": "data", "values": [{"label": "even", "class-imbalance": 0.0}]},
    "upwards": {
        "name": "speed",
        "values": [{"label": "1", "time-scenario": "F0"}, {"label": "5", "time-scenario": "F80"}],
    },
    "problems": {"small": {"target": 0.8, "tried": [0.1, 0.2, 0.4], "keys": {"model": "logistic"}}},
    "methods": {
        "avg": {"strategy": "fedavg", "same-upwards": True},
        "buff": {"strategy": "fedbuff", "eval-every": [1, 2]},
        "async": {"strategy": "async-fedavg", "search": {"server-lr": [0.4, 0.1, 0.2]}},
    },
    "tuning": {"seeds": [7, 8], "tries": 3},
    "rule": {"text": "as is", "level": 0.05},
}


def plan(**changes: Any) -> MapPlan:
    return checked("x", {**CONTENT, **changes}, MapPlan)


def scored(
    method: str, times: tuple[float, ...] = (), means: tuple[float, ...] = (), **others: Any
) -> MapScore:
    known: dict[str, Any] = {"tuned": (("lr", 0.1),), "is_complete": True, **others}
    return MapScore(method, times=times or (1.0,) * len(means), means=means or (0.5,) * len(times), **known)


def test_the_best_wins_where_every_other_is_told_apart():
    scores = [
        scored("avg", means=(0.80, 0.81, 0.82)),
        scored("buff", means=(0.85, 0.86, 0.875)),
        scored("async", means=(0.70, 0.90, 0.70)),  # worse on average, but with such a spread who knows
    ]
    assert win(plan(), scores[:2], "mean") == Win(WON, ("buff",), "avg", pytest.approx(0.155 / 3))
    assert win(plan(), scores, "mean") == Win(CLOSE, ("buff", "async"), "avg", pytest.approx(0.155 / 3))


def test_a_method_wins_with_the_optimizer_that_tuning_found_best():
    """Its other optimizers are no rivals; judged seeds don't choose between them."""
    methods = {
        **CONTENT["methods"],
        "buff-adam": {"strategy": "fedbuff", "server-optimizer": "adam", "of": "buff"},
    }
    scores = [
        scored("avg", means=(0.80, 0.81, 0.82)),
        scored("buff", means=(0.85, 0.86, 0.875), tuning=0.9),
        scored("buff-adam", means=(0.85, 0.86, 0.875), tuning=0.8),
    ]
    own = plan(methods=methods)
    assert win(own, scores, "mean") == Win(WON, ("buff",), "avg", pytest.approx(0.155 / 3))
    better = [*scores[:2], replace(scores[2], tuning=0.95, means=(0.85, 0.60, 0.90))]
    assert win(own, better, "mean") == Win(CLOSE, ("avg", "buff-adam"), "buff-adam", pytest.approx(0.08 / 3))
    for wrong in ("buf", "buff-adam"):
        changed = {**methods, "buff-adam": {**methods["buff-adam"], "of": wrong}}
        with pytest.raises(
            ConfigError, match=f"methods.buff-adam.of: '{wrong}' is no method of its own; allowed are avg"
        ):
            plan(methods=changed)


def test_an_added_method_takes_part_once_its_runs_are_there(tmp_path):
    """Before, the cell's outcome stands, and the report says what is missing."""
    added = {"strategy": "fedasync", "added": True}
    for methods, missing in (
        (CONTENT["methods"], ""),
        ({**CONTENT["methods"], "late": added}, "late (in 2 cells)"),
    ):
        own = plan(methods=methods)
        assert [[each.method for each in found] for found in scores_of(own, {}).values()] == [
            list(CONTENT["methods"])
        ] * 2
        write_report(own, {}, {}, tmp_path)
        said = [
            line for line in (tmp_path / "report.md").read_text("utf-8").splitlines() if "were added" in line
        ]
        assert said == [
            f"Methods that were added to be compared, and whose runs are missing: {missing}."
        ] * bool(missing)
    with pytest.raises(ConfigError, match=r"methods\.late\.added: 'yes' must be true or false"):
        plan(methods={**CONTENT["methods"], "late": {**added, "added": "yes"}})


def test_it_is_the_paired_test_of_the_books():
    # 1, 2, 3: t = 2 / (1 / √3) = 3.46, p = 0.074 two-sided; 2, 3, 4: t = 5.196, p = 0.035.
    assert not told_apart(np.array([1.0, 2.0, 3.0]), 0.05)
    assert told_apart(np.array([1.0, 2.0, 3.0]), 0.08)
    assert told_apart(np.array([2.0, 3.0, 4.0]), 0.05)
    assert not told_apart(-np.array([2.0, 3.0, 4.0]), 0.05)
    assert told_apart(np.array([1.0, 1.0, 1.0]), 0.05)  # without any spread
    assert not told_apart(np.zeros(3), 0.05)
    assert not told_apart(np.array([5.0]), 0.05)  # one seed tells nothing


def test_times_are_compared_by_their_ratio():
    scores = [
        scored("avg", (4.0, 8.0, 2.0)),
        scored("buff", (2.0, 4.0, 1.0)),
        scored("async", (9.0, 9.9, 4.5)),
    ]
    found = win(plan(), scores, "time")
    assert (found.outcome, found.best, found.runner_up, found.at_least) == (WON, ("buff",), "avg", False)
    assert found.by == pytest.approx(2.0)
    assert win_text(found, "time") == "**buff**, 2.00 times as fast as avg"


def test_who_does_not_reach_the_target_is_a_bound_and_never_wins():
    never = math.inf
    ahead = [scored("avg", (2.0, 2.5, 2.0)), scored("buff", (never, 8.0, never))]
    found = win(plan(), ahead, "time")
    assert (found.outcome, found.best, found.at_least) == (WON, ("avg",), True)
    assert found.by == pytest.approx((10 / 2.0 * 8 / 2.5 * 10 / 2.0) ** (1 / 3))
    assert "at least 4.31 times" in win_text(found, "time")
    # Faster on two seeds, but not there on the third: the slower one that always gets there isn't told apart from it.
    found = win(plan(), [scored("avg", (5.0, 5.0, 5.0)), scored("buff", (1.0, 1.0, never))], "time")
    assert (found.outcome, found.best) == (CLOSE, ("avg", "buff"))
    assert win(plan(), [scored("avg", (never, 1.0, 1.0)), scored("buff", (never,) * 3)], "time") == Win(
        UNREACHED
    )


def test_methods_with_the_same_runs_are_not_told_apart():
    same = (0.8000, 0.9000, 0.85)
    scores = [scored("avg", means=same), scored("buff", means=same), scored("async", means=(0.7, 0.8, 0.75))]
    assert win(plan(), scores, "mean") == Win(CLOSE, ("avg", "buff"), "buff", 0.0)


def test_of_a_loss_the_lowest_wins():
    of_loss = plan(metric="loss")
    scores = [scored("avg", means=(0.80, 0.81, 0.82)), scored("buff", means=(0.85, 0.86, 0.875))]
    assert win(of_loss, scores, "mean") == Win(WON, ("avg",), "buff", pytest.approx(0.155 / 3))
    curves = made(of_loss, {("buff", 0.1): 0.9, ("buff", 0.2): 0.4, ("buff", 0.4): 0.8})
    assert score(of_loss, SPOT, "buff", curves).tuned == (("lr", 0.2),)


def test_a_cell_that_lacks_runs_is_not_judged_and_who_diverges_can_not_win():
    scores = [scored("avg", means=(0.8, 0.8, 0.8)), scored("buff", means=(0.9, 0.9), diverged=1)]
    found = win(plan(), scores, "mean")
    assert (found.outcome, found.best, found.runner_up) == (WON, ("avg",), "")
    assert win(plan(), [scores[0], replace(scores[1], is_complete=False)], "mean") == Win(INCOMPLETE)
    assert win(plan(), [replace(each, diverged=1) for each in scores], "mean") == Win(NONE)


def test_a_strip_has_the_advantages_over_the_baseline_with_intervals():
    """By hand: log ratios ln 2, ln 2, ln 4 have mean 4/3 ln 2 and deviation ln 2 / √3, so the error is ln 2 / 3."""
    scores = [
        scored("avg", (4.0, 4.0, 4.0), (0.5, 0.5, 0.5)),
        scored("buff", (2.0, 2.0, 1.0), (0.7, 0.7, 0.7)),
        scored("async", (math.inf, 4.0, 4.0), (0.4, 0.6, 0.5)),
    ]
    rows = strip(plan(), scores, win(plan(), scores, "time"), "time")
    assert [row.method for row in rows] == ["buff", "avg"]  # the third doesn't always get there
    assert rows[0].advantage == pytest.approx(2 ** (4 / 3))
    width = stats.t.ppf(0.975, 2) / 3  # in units of ln 2
    assert (rows[0].low, rows[0].high) == pytest.approx((2 ** (4 / 3 - width), 2 ** (4 / 3 + width)))
    assert (rows[1].advantage, rows[1].low, rows[1].high) == (1.0, 1.0, 1.0)
    found = Win(CLOSE, ("buff",))
    rows = strip(plan(), scores, found, "mean")
    assert [(row.method, row.is_best) for row in rows] == [("buff", True), ("avg", False), ("async", False)]
    assert rows[0].advantage == pytest.approx(0.2)
    assert strip(plan(), [replace(scores[0], diverged=1), *scores[1:]], found, "mean") == []
    assert strip(plan(), scores, Win(UNREACHED), "time") == []
    assert result_text(Win(UNREACHED)) == "no method reaches it on every seed"


def test_a_strip_has_few_methods_and_always_the_baseline_and_rivals():
    level = [f"m{number}" for number in range(9)]
    many = plan(methods={name: {"strategy": "fedavg"} for name in ("avg", *level)})
    scores = [scored("avg", means=(0.1, 0.1, 0.1))]
    scores += [scored(name, means=(0.9 - at / 100,) * 3) for at, name in enumerate(level)]
    rows = strip(many, scores, Win(CLOSE, ("m0", "m7")), "mean")
    assert [row.method for row in rows] == ["m0", "m1", "m2", "m3", "m4", "m5", "m7", "avg"]
    assert [row.method for row in rows if row.is_best] == ["m0", "m7"]


def curve(labels: dict[str, Any], values: list[float], status: str = "finished") -> MapCurve:
    times = np.linspace(0, 10, len(values)) if values else np.zeros(0)
    return MapCurve(labels, status, 1.5, times, np.array(values))


def test_the_measures_are_of_the_model_that_there_was():
    # 0.1 for five seconds, then 0.8 for five; what comes after the budget doesn't count.
    made = curve({}, [0.1, 0.8, 0.9])
    assert mean_over(made, 10.0) == pytest.approx(0.45)
    assert mean_over(made, 5.0) == pytest.approx(0.1)
    assert mean_over(curve({}, [0.1, math.nan, 0.9]), 10.0) == pytest.approx(0.1)
    assert time_to(made, 0.8, 10.0, 1.0) == 5.0
    assert time_to(made, 0.85, 9.0, 1.0) == math.inf
    rounded = 10.0 - 1e-13  # a run may go on by a rounding error beyond its budget
    assert time_to(made, 0.85, rounded, 1.0) == 10.0
    assert mean_over(made, rounded) == pytest.approx(0.45)
    assert time_to(curve({}, [2.0, 0.5, 0.4]), 0.5, 10.0, -1.0) == 5.0  # of which less is better
    assert math.isnan(mean_over(curve({}, []), 10.0))


SPOT = Spot("small", "even", "5")


def made(one: MapPlan, heights: dict[tuple[str, float], float]) -> dict[str, MapCurve]:
    """Every run that a map wants, as a curve that steps at 4 s to a height by its lr, a little more on each seed."""
    curves: dict[str, MapCurve] = {}

    def run(spot: Spot, method: str, candidate: Candidate, seed: int) -> None:
        planned = one.run(spot, method, candidate, seed)
        height = heights.get((method, dict(candidate)["lr"]), heights.get((method, 0.0), 0.5)) + 0.001 * seed
        status = "diverged" if height > 1 else "finished"
        values = np.array([0.0, height])
        curves[planned.key] = MapCurve(dict(planned.labels), status, 1.0, np.array([0.0, 4.0]), values)

    for spot, method in one.places:
        while (tuning := tune(one, spot, method, curves)).wanted:
            for candidate, seed in tuning.wanted:
                run(spot, method, candidate, seed)
        if tuning.best is not None:
            for seed in one.seeds:
                run(spot, method, tuning.best, seed)
    return curves


HEIGHTS = {("avg", 0.1): 0.7, ("avg", 0.2): 0.6, ("buff", 0.2): 0.9, ("buff", 0.4): 2.0, ("async", 0.4): 0.6}


def test_a_method_is_judged_with_what_does_best_on_the_tuning_seeds():
    one = plan()
    curves = made(one, HEIGHTS)
    low, middle = (score(one, SPOT, method, curves) for method in ("avg", "buff"))
    assert low.tuned == (("lr", 0.1),)
    assert middle.tuned == (("lr", 0.2),)  # 0.4 is better, but diverges
    assert middle.times == (4.0, 4.0, 4.0)
    assert middle.means == pytest.approx((0.54, 0.5406, 0.5412))
    assert low.times == (math.inf,) * 3
    assert low.time_text() == "not reached in 3 of 3"
    curves.pop(one.run(SPOT, "buff", (("lr", 0.1),), 7).key)  # a run is missing
    found = score(one, SPOT, "buff", curves)
    assert (found.tuned, found.is_complete) == (None, False)


def test_a_judged_run_whose_metric_is_never_finite_has_diverged():
    one = plan()
    curves = made(one, HEIGHTS)
    key = one.run(SPOT, "avg", (("lr", 0.1),), 2).key
    curves[key] = replace(curves[key], values=np.full(2, math.nan))
    scores = scores_of(one, curves)[SPOT]
    assert [(each.diverged, each.can_win) for each in scores] == [(1, False), (0, True), (0, True)]
    assert win(one, scores, "mean").best == ("buff",)


def test_the_target_may_be_reached_at_the_end_of_the_budget_and_no_later():
    assert time_to(curve({}, [0.1, 0.2, 0.8]), 0.8, 10.0, 1.0) == 10.0
    assert time_to(curve({}, [0.1, 0.2, 0.8]), 0.8, 9.99, 1.0) == math.inf
    assert mean_over(curve({}, [0.7]), 0.0) == 0.7  # it is there for no time, and all there is


def test_a_method_that_only_diverges_is_said_to(tmp_path):
    one = plan()
    curves = made(one, {("buff", 0.0): 2.0})
    found = score(one, SPOT, "buff", curves)
    assert (found.tuned, found.is_complete, found.can_win) == (None, True, False)
    write_report(one, curves, {}, tmp_path)
    assert "buff diverged in tuning, with every value" in (tmp_path / "report.md").read_text()


def test_curves_come_back_as_they_were_and_the_report_from_them_is_the_same(tmp_path: Path):
    one = plan()
    curves = made(one, HEIGHTS)
    first = next(iter(curves))
    curves[first] = MapCurve(curves[first].labels, "diverged", 0.5, np.zeros(0), np.zeros(0))
    write_curves(tmp_path / "curves.parquet", curves, {"torch": "2"})
    back, versions = read_curves(tmp_path / "curves.parquet")
    assert versions == {"torch": "2"}
    assert list(back) == list(curves)
    for key, each in curves.items():
        assert (dict(back[key].labels), back[key].status, back[key].seconds) == (
            dict(each.labels),
            each.status,
            each.seconds,
        )
        np.testing.assert_array_equal(back[key].times, each.times)
        np.testing.assert_array_equal(back[key].values, each.values)
    table = frame(one, scores_of(one, back))
    assert table.equals(frame(one, scores_of(one, curves)))
    assert table[["across", "upwards", "method"]].to_numpy().tolist() == [
        ["even", upwards, method] for upwards in ("1", "5") for method in ("avg", "buff", "async")
    ]


def test_runs_that_are_the_same_upwards_are_one():
    one = plan()
    rows, lr = [Spot("small", "even", upwards) for upwards in ("1", "5")], (("lr", 0.1),)
    assert len({one.run(spot, "avg", lr, 0).key for spot in rows}) == 1
    assert len({one.run(spot, "buff", lr, 0).key for spot in rows}) == 2
    assert [one.run(spot, "buff", lr, 0).config.eval_every for spot in rows] == [1, 2]
    assert one.run(rows[0], "async", (*lr, ("server-lr", 0.4)), 0).config.server_lr == 0.4
    # 1 × 1 across, 3 seeds: avg once, the others in both rows.
    assert one.number_judged() == 3 * (1 + 2 + 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuning": {"seeds": [2], "tries": 3}}, "tuning.seeds: 2 is judged, too"),
        ({"base": {"num-clients": 2}}, "base.time-budget: must be above 0, is 0; every"),
        ({"base": {**CONTENT["base"], "time-budget": "ten"}}, "base.time-budget: must be above 0, is 'ten'"),
        ({"base": {**CONTENT["base"], "seed": 4}}, "seeds: seed is set by base, too"),
        (
            {"methods": {**CONTENT["methods"], "avg": {"strategy": "fedavg", "time-budget": 20.0}}},
            "methods.avg: time-budget is set by base, too",
        ),
        (
            {"methods": {**CONTENT["methods"], "avg": {"strategy": "fedavg", "search": {"server-lr": []}}}},
            "methods.avg.search: {'server-lr': []} must be a table of keys, each with a list of numbers",
        ),
        (
            {"methods": {**CONTENT["methods"], "avg": {"strategy": "fedavg", "search": [0.5, 1.0]}}},
            "methods.avg.search: [0.5, 1.0] must be a table of keys",
        ),
        (
            {"methods": {**CONTENT["methods"], "avg": {"strategy": "fedavg", "same-upwards": "even"}}},
            "methods.avg.same-upwards: 'even' must be true or a list of labels across",
        ),
        (
            {
                "methods": {
                    **CONTENT["methods"],
                    "avg": {"strategy": "fedavg", "same-upwards": ["even"], "local-steps": [5, 25]},
                }
            },
            "methods.avg.local-steps: has several values, beside same-upwards",
        ),
        (
            {"methods": {**CONTENT["methods"], "buff": {"strategy": "fedbuff", "eval-every": [1]}}},
            "methods.buff.eval-every: has 1 values, for 2 labels upwards",
        ),
        (
            {"methods": {**CONTENT["methods"], "buff": {"strategy": "fedbuff", "same-upwards": True}}},
            "methods.buff.same-upwards: fedbuff doesn't wait for the slowest",
        ),
        ({"tuning": {"seeds": [7]}}, "tuning.tries: Field required"),
        ({"methods": {**CONTENT["methods"], "buff": {"buffer-size": 2}}}, "methods.buff: has no strategy"),
        (
            {"methods": {**CONTENT["methods"], "buff": {"strategy": "fedbuff", "class-imbalance": 2.0}}},
            "methods.buff: class-imbalance is set by across, too",
        ),
        (
            {"across": {"name": "data", "values": [{"class-imbalance": 1.0}]}},
            "must be a table with a 'label'",
        ),
        (
            {"across": {"name": "data", "values": [{"label": "a"}, {"label": "a", "class-imbalance": 1.0}]}},
            "across: values: labels are there twice: a, a",
        ),
        ({"grid": {}}, "grid: Extra inputs are not permitted"),
    ],
)
def test_a_plan_that_can_not_be_meant_is_refused(changes, said):
    with pytest.raises(ValueError, match=r"^x: ") as error:
        plan(**changes)
    assert said in str(error.value)
