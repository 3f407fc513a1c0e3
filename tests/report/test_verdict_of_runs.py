"""The verdict on recorded runs: what is compared, what may spoil it, what it costs, and where it is shown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import fedapp
from fedapp.cli import app
from fedapp.report.cells import Tuning
from fedapp.report.comparison import Comparison
from fedapp.report.page.content import page_content
from fedapp.report.recorded import RecordedRun
from fedapp.report.verdict.costs import costs_of
from fedapp.report.verdict.of_runs import verdict_of as judged_by
from fedapp.report.verdict.verdict import Cost, Verdict
from tests.report.test_comparison import write_run

TIMES = [0.0, 5.0, 8.0, 10.0]
NOT_TUNED = "nothing was tuned: each method has one setting, which may suit one method better than another"


def run(folder: Path, strategy: str, seed: int, ends: Sequence[float], **options: Any) -> RecordedRun:
    """A run of four evaluations, at 0, 5, 8 and 10."""
    server = {"bytes-server": 8000.0}
    path = folder / f"{strategy}-{options.get('lr', '')}-{seed}"
    return RecordedRun(write_run(path, TIMES, ends, strategy=strategy, seed=seed, more=server, **options))


def swept(folder: Path, curves: Mapping[str, Sequence[Sequence[float]]], **options: Any) -> list[RecordedRun]:
    """Runs of each strategy, a curve for each seed."""
    return [
        run(folder, strategy, seed, curve, **options)
        for strategy, of_seeds in curves.items()
        for seed, curve in enumerate(of_seeds)
    ]


def flat(*ends: float) -> list[list[float]]:
    return [[0.1, end - 0.015, end, end] for end in ends]


CLEAR = {"feddyn": flat(0.92, 0.93, 0.94, 0.91, 0.95), "fedavg": flat(0.82, 0.83, 0.845, 0.81, 0.85)}


def verdict_of(runs: Sequence[RecordedRun]) -> Verdict:
    return Comparison(runs).verdict


def test_two_methods_and_nothing_but_tuning_may_spoil_it(tmp_path):
    """Differences .10, .10, .095, .10, .10: mean .099, deviation .00224, t = 99 on four degrees of freedom."""
    found = verdict_of(swept(tmp_path, CLEAR))
    assert found.leader == "feddyn"
    assert found.sentences[0] == (
        "feddyn leads fedavg by 0.099 in accuracy at time 10, 0.930 against 0.831 (95 % interval 0.096 to 0.102, "
        "p < 0.001, paired t-test over 5 seeds)."
    )
    assert found.doubts == (NOT_TUNED,)
    assert found.files == "metrics.jsonl in the folder of each run"


def test_costs_are_those_of_the_evaluation_from_which_the_target_is_kept(tmp_path):
    """Both have on every seed what the worse ends with on its worst: .81. Two of FedAvg's seeds are there at 8."""
    comparison = Comparison(swept(tmp_path, CLEAR))
    target, costs = costs_of(comparison.cells, "accuracy", higher=True, time=None)
    assert target == 0.81
    # Two million bytes for each aggregation: one by time 5, two by time 8.
    assert costs[0] == Cost("feddyn", 5.0, 2e6, 8000.0, 5, 5, 5.0, 5.0, 4.0)
    assert costs[0].evaluations == 4
    assert (costs[1].time, costs[1].reached) == (pytest.approx((3 * 5 + 2 * 8) / 5), 5)
    assert comparison.verdict.sentences[1] == (
        "To reach accuracy ≥ 0.81 and keep it until time 10 (what more than half of the settings have then on every "
        "seed; means over 5 seeds, in brackets the range of the time; untested): feddyn takes time 5, 2.0 MB sent, "
        "8.0 kB on the server; fedavg takes time 6.2 (5 to 8), 2.8 MB sent, 8.0 kB on the server."
    )


def test_a_peak_that_is_lost_again_is_no_target_and_costs_nothing_before_it_is_kept(tmp_path):
    """a has .9 on each seed at 5, and ends at .8 and .7: it keeps .7, b's end, from 10, on seed 1 from 5 on."""
    curves = {"a": [[0.1, 0.9, 0.6, 0.8], [0.1, 0.9, 0.7, 0.7]], "b": [[0.1, 0.5, 0.6, 0.7]] * 2}
    comparison = Comparison(swept(tmp_path, curves))
    target, costs = costs_of(comparison.cells, "accuracy", higher=True, time=None)
    assert target == 0.7
    assert [(cost.time, cost.earliest, cost.latest) for cost in costs] == [(7.5, 5, 10), (10, 10, 10)]
    lucky = {**curves, "c": [[0.1, 0.9, 0.9, 0.9], [0.1, 0.2, 0.9, 0.1]]}
    said = verdict_of(swept(tmp_path / "three", lucky)).sentences[-1]
    assert said.startswith("To reach accuracy ≥ 0.7 and keep it until time 10 (")
    assert "untested): a takes time 7.5 (5 to 10), " in said
    assert said.endswith("; c keeps it on 1 of 2 seeds.")
    best = {"a": [[0.9, 0.5, 0.6, 0.8]] * 2, "b": [[0.1, 0.5, 0.6, 0.7]] * 2}
    assert (
        costs_of(Comparison(swept(tmp_path / "at-once", best)).cells, "accuracy", higher=True, time=None)[1]
        == ()
    )


def test_a_direction_against_the_metrics_name_is_doubted(tmp_path):
    cells = Comparison(swept(tmp_path, CLEAR)).cells
    found = judged_by(cells, "accuracy", stated={"accuracy": False})
    assert found.leader == "fedavg"
    line = "a lower accuracy counts as better, as was asked for; by its name a higher one is"
    assert found.doubts[0] == line
    assert line not in judged_by(cells, "accuracy").doubts
    assert line not in judged_by(cells, "accuracy", stated={"accuracy": True}).doubts


def test_settings_that_all_take_the_same_have_no_sentence_on_costs(tmp_path):
    """Both reach the worse one's end at the last evaluation alone."""
    found = verdict_of(swept(tmp_path, {"a": [[0.1, 0.2, 0.3, 0.9]] * 3, "b": [[0.1, 0.2, 0.3, 0.8]] * 3}))
    assert [cost.time for cost in found.costs] == [10.0, 10.0]
    assert len(found.sentences) == 1


def test_settings_with_a_lower_loss_are_named(tmp_path):
    """The best by accuracy has the higher loss on every seed: differences of 1 + seed/100, t far above the bound."""
    runs = [
        RecordedRun(
            write_run(
                tmp_path / f"{name}-{seed}", TIMES, curve, strategy=name, seed=seed, more={"loss": loss}
            )
        )
        for name, low in (("feddyn", 2.0), ("fedavg", 1.0))
        for seed, curve in enumerate(CLEAR[name])
        for loss in [low + (low - 1) * seed / 100]
    ]
    found = verdict_of(runs)
    assert found.leader == "feddyn"
    (line,) = [each for each in found.doubts if "loss" in each]
    p = found_p([1.0 + seed / 100 for seed in range(5)])
    assert line == f"by the test loss feddyn is worse than fedavg (p = {p:.2g})"
    assert not [each for each in verdict_of(swept(tmp_path / "without", CLEAR)).doubts if "loss" in each]


def test_where_all_seeds_have_the_same_test_rows_that_is_said_of_what_is_told_apart(tmp_path):
    runs = swept(tmp_path, CLEAR)
    for each in runs:
        np.savez(each.path / "partition.npz", test_indices=np.arange(1000))
    line = "all seeds have the same 1,000 test rows: the tests don't cover which rows those are"
    assert line in verdict_of(runs).doubts
    unlike = swept(tmp_path / "unlike", CLEAR)
    for each in unlike:  # drawn by the seed
        np.savez(each.path / "partition.npz", test_indices=np.arange(1000) + each.config["seed"])
    assert line not in verdict_of(unlike).doubts
    equal = swept(tmp_path / "equal", {"a": flat(0.5, 0.6), "b": flat(0.5, 0.61)})
    for each in equal:
        np.savez(each.path / "partition.npz", test_indices=np.arange(1000))
    assert line not in verdict_of(equal).doubts


def found_p(differences: Sequence[float]) -> float:
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def test_one_seed_on_which_two_are_equal_names_no_best(tmp_path):
    found = verdict_of(swept(tmp_path, {"a": flat(0.5), "b": flat(0.5)}))
    assert found.sentences[0] == (
        "1 seed can't tell settings apart: a and b are equal on it (accuracy at time 10: 0.500); a test needs two "
        "seeds or more."
    )
    assert found.leader == ""
    assert found.doubts == ("1 seed: nothing is known of the deviation over seeds",)


def test_of_a_cost_the_target_is_from_above(tmp_path):
    curves = {
        "good": [[9.0, 0.5, 0.4, 0.3]] * 2,
        "bad": [[9.0, 2.0, 1.0, 0.6667]] * 2,
        "worst": [[9.0] * 4] * 2,
    }
    cells = Comparison(swept(tmp_path, curves)).cells
    target, costs = costs_of(cells, "accuracy", higher=False, time=None)
    assert target == 0.667
    assert [(cost.time, cost.reached) for cost in costs[:2]] == [(5.0, 2), (10.0, 2)]
    assert costs[2].reached == 0


DOUBTS: dict[str, tuple[dict[str, Any], str]] = {
    "few seeds": (
        {"a": flat(0.9, 0.91), "b": flat(0.8, 0.812)},
        # χ² of one degree of freedom has the quantiles .00098 and 5.02, so 1/√5.02 = .45 and 1/√.00098 = 31.9
        "2 seeds: a true deviation is 0.45 to 32 times the one seen (95 % interval), and nothing shows whether "
        "differences are normal",
    ),
    "one seed": (
        {"a": flat(0.8, 0.8, 0.8, 0.8, 0.9), "b": flat(0.81, 0.81, 0.81, 0.81, 0.81)},
        "seed 4 alone decides: without it b has a better mean than a",
    ),
    "rising": (
        {"a": [[0.1, 0.5, 0.6, 0.8 + 0.01 * at] for at in range(5)], "b": CLEAR["fedavg"]},
        "accuracy is still rising, in the last fifth of a by +0.22: a longer run may have another order",
    ),
    "rising by the difference that tells": (  # .01 of .81 from 8 to 10 is little, but as much as the two differ by
        {"a": [[0.1, 0.8, 0.9, 0.91 + at / 1e5] for at in range(5)], "b": [[0.1, 0.8, 0.9, 0.9]] * 5},
        "accuracy is still rising, in the last fifth of a by +0.01: a longer run may have another order",
    ),
    "lacking": (
        {"a": flat(0.9, 0.91, 0.9, 0.92, 0.9), "b": flat(0.8, 0.81, 0.8, 0.8)},
        "b lacks seed 4, and is compared on the others",
    ),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_what_may_spoil_it_is_a_line_where_it_holds(tmp_path, case):
    curves, line = DOUBTS[case]
    assert list(verdict_of(swept(tmp_path, curves)).doubts) == [NOT_TUNED, line]


def test_a_setting_with_a_diverged_run_is_not_judged(tmp_path):
    curves = {**CLEAR, "wild": flat(0.99, 0.99, 0.99, 0.99)}
    wild = run(tmp_path, "wild", 4, [0.1] * 4, status="diverged")
    found = verdict_of([*swept(tmp_path, curves), wild])
    assert found.leader == "feddyn"
    assert "wild" not in found.means
    assert found.doubts == (NOT_TUNED, "wild isn't judged: of 5 runs 1 diverged")


def test_an_unstable_run_is_named(tmp_path):
    runs = swept(tmp_path, CLEAR)
    (runs[0].path / "summary.json").write_text(json.dumps({"status": "finished", "unstable": "lr"}))
    assert verdict_of([RecordedRun(each.path) for each in runs]).doubts == (
        NOT_TUNED,
        "unstable runs: feddyn (1 of its runs)",
    )


def test_a_run_that_finished_without_a_number_is_named(tmp_path):
    runs = swept(tmp_path, CLEAR)
    lines = [json.loads(line) for line in (runs[0].path / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "accuracy": None} for line in lines]
    (runs[0].path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdict_of([RecordedRun(each.path) for each in runs]).doubts == (
        NOT_TUNED,
        "1 of 5 seeds of feddyn finished without a finite accuracy",
        "feddyn lacks seed 0, and is compared on the others",
    )


def test_what_was_tuned_is_not_doubted(tmp_path):
    runs = swept(tmp_path, CLEAR)
    assert Comparison(runs, Tuning(("lr",))).verdict.doubts == ()
    assert (
        Comparison(runs[:5] + swept(tmp_path / "other", {"feddyn": CLEAR["fedavg"]}, lr=0.2)).verdict.doubts
        == ()
    )


def test_the_end_of_what_was_tried_and_unequal_tries(tmp_path):
    """FedDyn was run with three step sizes, of which the largest is best, FedAvg with one."""
    best = CLEAR["feddyn"]
    runs = swept(tmp_path, {"fedavg": CLEAR["fedavg"]}, lr=0.1)
    for lr, less in ((0.1, 0.2), (0.2, 0.1), (0.4, 0.0)):
        runs += swept(tmp_path, {"feddyn": [[value - less for value in curve] for curve in best]}, lr=lr)
    assert list(verdict_of(runs).doubts) == [
        "lr = 0.4 of feddyn lr=0.4 is at the end of the 3 values that were tried",
        "methods had unequal numbers of tries: fedavg 1, feddyn 3",
    ]


def test_what_can_not_be_compared_has_no_leader(tmp_path):
    curves = {"a": CLEAR["feddyn"]}
    runs = swept(tmp_path, curves, **{"test-fraction": 0.2})
    runs += swept(tmp_path, {"b": CLEAR["fedavg"]}, **{"test-fraction": 0.5})
    found = verdict_of(runs)
    assert (found.leader, found.pairs) == ("", ())
    assert found.sentences[0].startswith("Settings can't be compared: tested on different rows")


def test_the_verdict_is_in_compare_its_report_the_page_and_python(tmp_path):
    runs = swept(tmp_path / "runs", CLEAR)
    sentence = verdict_of(runs).sentences[0]
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "runs" / "*"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert sentence in " ".join(done.output.split())
    assert f"- {sentence}" in (tmp_path / "out" / "comparison.md").read_text().splitlines()[:4]
    content = page_content([each.path for each in runs])["verdict"]
    assert content["sentences"][0] == sentence
    assert [(each["name"], each["leads"]) for each in content["costs"]] == [
        ("feddyn", True),
        ("fedavg", False),
    ]
    digits = [each[key] for each in content["costs"] for key in ("mean", "time", "bytes", "server")]
    assert digits == [
        "0.930",
        "5",
        "2.0 MB",
        "8.0 kB",
        "0.831",
        "6.2",
        "2.8 MB",
        "8.0 kB",
    ]  # as in the sentences
    assert page_content([runs[0].path])["verdict"] is None
    assert fedapp.compare(*(each.path for each in runs)).verdict() == verdict_of(runs)
