"""A search by halving and a walk, and wins of a family of cells: hand-made curves and what is expected of them."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import ConfigError
from fedapp.sweeps.plan import checked, read_file
from strategies import REGISTRY
from studies.maps.curves import FILE, MapCurve, read_curves
from studies.maps.plan import Candidate, MapPlan, Spot
from studies.maps.report import effect_text, frame
from studies.maps.rule import CLOSE, WON, advantage_p, win, wins_of
from studies.maps.scores import MapScore, score, scores_of
from studies.maps.search import beside, candidates, tries, tune
from studies.tests.maps.test_rule import CONTENT, scored

SEARCHED: dict[str, Any] = {
    **CONTENT,
    "methods": {
        "avg": {"strategy": "fedavg", "same-upwards": ["even"], "search": {"server-lr": [0.5, 1.0, 2.0]}},
        "buff": {"strategy": "fedbuff", "search": {"buffer-size": [5, 10]}},
    },
    "tuning": {
        "seeds": [7, 8, 9],
        "keys": {"test-on": "held-out-even"},
        "tries": 4,
        "most": {"buffer-size": 20},
    },
}
SPOT = Spot("small", "even", "5")
Height = Callable[[dict[str, float], int], float]


def plan(**changes: Any) -> MapPlan:
    return checked("x", {**SEARCHED, **changes}, MapPlan)


def made(
    one: MapPlan, method: str, height: Height
) -> tuple[dict[str, MapCurve], list[tuple[Candidate, int]]]:
    """Run a method's search to its end on curves of a constant height (diverged: NaN); return them and the order."""
    curves: dict[str, MapCurve] = {}
    order: list[tuple[Candidate, int]] = []
    while wanted := tune(one, SPOT, method, curves).wanted:
        order += wanted
        for candidate, seed in wanted:
            value, run = height(dict(candidate), seed), one.run(SPOT, method, candidate, seed)
            status = "finished" if math.isfinite(value) else "diverged"
            curves[run.key] = MapCurve(run.labels, status, 1.0, np.array([0.0]), np.array([value]))
    return curves, order


def hill(lr: float, other: float) -> Height:
    """Return heights that fall with the distance, in factors, from a step size and a second value."""

    def height(values: dict[str, float], seed: int) -> float:
        own, second = values.values()
        return 0.9 - 0.05 * abs(math.log(own / lr)) - 0.03 * abs(math.log(second / other)) + 0.001 * seed

    return height


def test_tries_are_drawn_once_all_different_and_the_same_for_all_methods_with_these_values():
    grid = {"lr": [0.1, 0.2, 0.4], "server-lr": [0.5, 1.0, 2.0]}
    drawn = tries(grid, 4, 0)
    assert len(set(drawn)) == 4
    assert drawn == tries(grid, 4, 0) != tries(grid, 4, 1)
    assert len(tries(grid, 20, 0)) == 9  # there are no more
    assert candidates(plan(), "small", "avg") == drawn


def test_half_of_the_tries_go_on_to_each_next_seed():
    one = plan(tuning={**SEARCHED["tuning"], "tries": 5})
    drawn = candidates(one, "small", "avg")
    heights = dict(zip(drawn, [0.5, 0.8, 0.7, 0.6, 0.4], strict=True))
    _, order = made(one, "avg", lambda values, seed: heights.get(tuple(values.items()), 0.1))
    assert order[:5] == [(each, 7) for each in drawn]
    assert order[5:8] == [(drawn[1], 8), (drawn[2], 8), (drawn[3], 8)]
    assert order[8:10] == [(drawn[1], 9), (drawn[2], 9)]
    walk = order[
        10:
    ]  # four neighbours, of which those that were tried on seed 7 aren't tried again; none is ahead
    assert {seed for _, seed in walk} == {7}
    assert not {each for each, _ in walk} & set(drawn)


@pytest.mark.parametrize("best", [0.1, 0.2, 0.8, 3.2, 0.025])
def test_no_best_value_is_the_end_of_a_grid(best: float):
    one = plan()
    curves, _ = made(one, "avg", hill(best, 1.0))
    picked = score(one, SPOT, "avg", curves).tuned
    assert picked == (("lr", pytest.approx(best)), ("server-lr", 1.0))
    tried = {dict(c)["lr"] for c, _ in made(one, "avg", hill(best, 1.0))[1]}
    assert min(tried) < best < max(tried)
    assert not score(one, SPOT, "avg", curves).is_open


def test_nobody_wins_over_a_walk_that_is_still_ahead_at_its_last_step():
    one = plan(tuning={**SEARCHED["tuning"], "steps": 2})
    curves, _ = made(one, "avg", hill(1000.0, 1.0))
    assert score(one, SPOT, "avg", curves).is_open
    ahead, behind = scored("buff", means=(0.8, 0.81, 0.83)), scored("avg", means=(0.5, 0.51, 0.52))
    assert win(one, [behind, ahead], "mean").outcome == WON
    assert win(one, [replace(behind, is_open=True), ahead], "mean").outcome == CLOSE


def test_the_end_of_a_keys_range_is_no_edge():
    # A buffer of 20 is the most; the run config allows none of 0.
    one = plan()
    for best in (1000.0, 0.01):
        curves, order = made(one, "buff", hill(0.2, best))
        sizes = {dict(candidate)["buffer-size"] for candidate, _ in order}
        assert sizes <= {1, 2, 5, 10, 20}
        assert all(isinstance(size, int) for size in sizes)
        found = tune(one, SPOT, "buff", curves)
        assert (dict(found.best or ())["buffer-size"], found.is_open) == (20 if best > 1 else 1, False)


def test_who_diverges_with_every_try_goes_on_to_smaller_steps_and_a_neighbour_that_diverges_is_no_rival():
    one = plan()
    curves, _ = made(one, "avg", lambda values, seed: 0.5 if values["lr"] < 0.04 else math.nan)
    assert dict(score(one, SPOT, "avg", curves).tuned or ())["lr"] == pytest.approx(0.025)
    steep = hill(10.0, 1.0)
    curves, _ = made(one, "avg", lambda values, seed: steep(values, seed) if values["lr"] < 0.3 else math.nan)
    assert dict(score(one, SPOT, "avg", curves).tuned or ())["lr"] == 0.2
    curves, _ = made(one, "avg", lambda values, seed: math.nan)
    assert score(one, SPOT, "avg", curves).tuned is None


@pytest.mark.parametrize("good", [0.5, 1.0])
def test_a_candidate_that_never_diverged_is_found_where_all_that_the_halving_kept_diverge(good: float):
    # With one step size there is no smaller first key to go on to. The better half on seed 7 diverges on seed 8.
    of_one = {"small": {**CONTENT["problems"]["small"], "tried": [0.1]}}
    one = plan(problems=of_one, tuning={**SEARCHED["tuning"], "tries": 3})

    def height(values: dict[str, float], seed: int) -> float:
        if seed == 7:
            return 0.1 if values["server-lr"] == good else 0.2
        return 0.5 if values["server-lr"] == good else math.nan

    curves, order = made(one, "avg", height)
    assert score(one, SPOT, "avg", curves).tuned == (("lr", 0.1), ("server-lr", good))
    diverged = [candidate for candidate, seed in order if seed == 8 and dict(candidate)["server-lr"] != good]
    assert diverged
    assert not {(candidate, 9) for candidate in diverged} & set(order)


def test_values_go_on_as_they_began():
    ladder = [0.01, 0.03, 0.1, 0.3]
    assert [beside(ladder, each, 1) for each in (0.01, 0.3, 1.0, 3.0)] == [0.03, 1.0, 3.0, 10.0]
    assert [beside(ladder, each, -1) for each in (0.3, 0.01, 0.003, 1.0)] == [0.1, 0.003, 0.001, 0.3]
    assert [beside([5, 10, 20], each, by) for each, by in ((20, 1), (5, -1), (2, -1), (1, -1))] == [
        40,
        2,
        1,
        None,
    ]
    assert beside([0.0, 0.5, 1.0], 0.0, -1) is None
    assert beside([0.5], 0.5, 1) is None


def test_tuning_runs_have_keys_of_their_own_and_the_labels_across_say_where_rows_are_the_same():
    one = plan(
        across={"name": "data", "values": [{"label": "even"}, {"label": "odd", "class-imbalance": 1.0}]}
    )
    (candidate, *_) = candidates(one, "small", "avg")
    runs = {
        (across, upwards): one.run(Spot("small", across, upwards), "avg", candidate, seed)
        for across in ("even", "odd")
        for upwards, seed in (("1", 0), ("5", 0))
    }
    assert runs["even", "1"].key == runs["even", "5"].key
    assert runs["odd", "1"].key != runs["odd", "5"].key
    assert runs["even", "1"].config.test_on == "held-out"
    assert one.run(SPOT, "avg", candidate, 7).config.test_on == "held-out-even"
    assert runs["even", "1"].labels["tuned"] == " ".join(f"{key}={value:g}" for key, value in candidate)
    # avg: once for even, in both rows for odd; buff: four times.
    assert one.number_judged() == 3 * (1 + 2 + 4)


def test_a_problem_may_have_a_part_of_the_cells():
    few = {"small": {**CONTENT["problems"]["small"], "upwards": ["5"]}}
    assert plan(problems=few).spots == [SPOT]
    assert plan(problems=few).number_judged() == 3 * 2
    with pytest.raises(ConfigError, match=r"problems.small.upwards: '6' isn't there; allowed are 1, 5"):
        plan(problems={"small": {**CONTENT["problems"]["small"], "upwards": ["6"]}})


def test_a_p_value_is_of_an_advantage():
    # Mean 3, deviation 1, of three: t = 5.196 on two degrees of freedom.
    assert advantage_p(np.array([2.0, 3.0, 4.0])) == pytest.approx(0.0351, abs=1e-4)
    assert advantage_p(np.array([1.0, -1.0])) == advantage_p(np.array([5.0])) == 1.0
    assert advantage_p(np.array([1.0, 1.0])) == 0.0


def test_a_win_that_does_not_survive_the_family_is_none():
    one = plan()
    # p = .0351 by hand: a win alone, and none among the four tests of two cells by two measures.
    apart = [scored("avg", means=(0.52, 0.53, 0.54)), scored("buff", means=(0.50, 0.50, 0.50))]
    assert win(one, apart, "mean").outcome == WON
    missing = [MapScore("avg"), MapScore("buff")]
    spots = one.spots
    found = wins_of(one, {spots[0]: apart, spots[1]: missing})[spots[0], "mean"]
    assert (found.outcome, found.best) == (CLOSE, ("avg", "buff"))
    assert found.holm == pytest.approx(4 * 0.0351, abs=1e-3)
    assert effect_text(found, "mean") == "0.0300 [0.0052, 0.0548] over buff; p = 3.5e-02, Holm 0.14, BH 0.14"
    # The next one is .0120 behind on each seed: it isn't what takes the win away.
    one = plan(methods={**SEARCHED["methods"], "fix": {"strategy": "fedfix"}})
    rivals = [*apart, scored("fix", means=(0.508, 0.5180, 0.5280))]
    by_rival = wins_of(one, {spots[0]: rivals, spots[1]: missing})[spots[0], "mean"]
    assert by_rival.best == ("avg", "buff")
    assert effect_text(by_rival, "mean").startswith(
        "0.0120 [0.0120, 0.0120] over fix; p = 3.5e-02 over buff, Holm 0.14"
    )
    clear = [scored("avg", means=(0.52, 0.53, 0.54)), scored("buff", means=(0.50, 0.5101, 0.52))]
    assert wins_of(one, {spots[0]: clear, spots[1]: missing})[spots[0], "mean"].outcome == WON


def test_the_table_writes_candidates_and_the_pages_of_a_search_are_made_of_its_curves():
    one = plan()
    curves, _ = made(one, "avg", hill(0.2, 1.0))
    table = frame(one, scores_of(one, curves))
    assert table.loc[table["method"] == "avg", "tuned"].tolist()[1] == "lr=0.2 server-lr=1"
    assert table["by-mean"].tolist() == [""] * 4  # nothing has been judged yet


def test_rows_are_the_same_where_a_label_across_says_so():
    with pytest.raises(ConfigError, match=r"methods.avg.same-upwards: 'uneven' is no label across"):
        plan(methods={**SEARCHED["methods"], "avg": {"strategy": "fedavg", "same-upwards": ["uneven"]}})


SHIPPED = Path(__file__).parents[2] / "experiments" / "map.toml"


def test_the_shipped_map_searches_for_every_method_with_as_many_tries_and_judges_ten_seeds():
    one = read_file(SHIPPED, MapPlan)
    personal = {"ditto", "fedamp"}  # judged by each client's own model, not by one for all
    later = {"malenia", "fedawe"}  # newer than the runs, as docs/map.md says
    assert {own["strategy"] for own in one.methods.values()} == REGISTRY.keys() - personal - later
    every = {
        (problem, method): candidates(one, problem, method)
        for problem in one.problems
        for method in one.methods
    }
    assert {len(each) for each in every.values()} == {one.tuning.tries}
    for spot, method in one.places:
        tuned, judged = (one.run(spot, method, every[spot.problem, method][0], seed) for seed in (100, 0))
        assert (tuned.config.test_on, judged.config.test_on) == ("held-out-even", "held-out-odd")
    assert len(one.spots) == 8
    assert len(one.seeds) == 10
    assert one.number_judged() == 3940


def test_the_quick_search_is_made_stopped_and_goes_on_from_its_curves_alone(tmp_path: Path):
    def make(minutes: str) -> str:
        words = [
            "map",
            str(SHIPPED),
            "--quick",
            "--engine",
            "sequential",
            "--minutes",
            minutes,
            "-o",
            str(tmp_path),
        ]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == (1 if minutes == "0" else 0), done.output
        return done.output

    assert "no run came to its end" in make("0")
    assert "1 of 1 cells are complete" not in (said := make("60"))
    assert "cell 1 of 1: synthetic" in said
    curves, _ = read_curves(tmp_path / FILE)
    table = (tmp_path / "map.csv").read_bytes()
    report = (tmp_path / "report.md").read_text()
    assert "| fedbuff | `strategy = fedbuff`" in report
    assert "Holm" in report
    shutil.rmtree(tmp_path / "runs")
    assert f"1 of 1 cells are complete, {len(curves)} runs" in make("60")
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "map.csv").read_bytes() == table
