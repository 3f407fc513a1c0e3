"""FedProx, SCAFFOLD and FedBuff: verdicts on made-up numbers, and reports on runs small enough for a test."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.sweeps.runner import perform
from studies.reproduce import buffered, fedprox, similarity
from studies.reproduce.experiment import collect, report_on
from studies.reproduce.plan import Plan, read_plan
from studies.reproduce.runs import Run
from studies.reproduce.store import FILE
from studies.tests.reproduce.made_up import check_figures, evidence, make_run, outcome, plan_with, results_of

# ---- FedProx ------------------------------------------------------------------------------------------------------

FEDPROX = read_plan("fedprox-synthetic")
CASES = [str(case["label"]) for case in FEDPROX.grid["case"]]  # type: ignore[index]


def fedprox_runs(
    level: Callable[[str, float, int], float], swing: Callable[[str, float], float]
) -> list[Run]:
    """Make runs of 40 rounds that end at a loss, and swing about it; the accuracy is one less the loss."""
    runs = []
    for seed in (2, 4, 5):
        for case in CASES:
            for mu in (0.0, 1.0):
                losses = level(case, mu, seed) + swing(case, mu) * np.resize([1.0, -1.0], 40)
                metrics = {"client-loss": [None, *losses], "accuracy": [0.1, *(1 - losses)]}
                labels = {"seed": seed, "case": case, "proximal-mu": mu}
                runs.append(make_run(labels, metrics, num_clients=30))
    return runs


def as_published(case: str, mu: float, seed: int) -> float:
    return 0.5 + 0.2 * ("dropped" in case) - 0.05 * mu * (case != "iid") + 0.01 * seed


def unlike(case: str, mu: float) -> float:
    return (
        0.01 + 0.01 * FEDPROX.threshold("fedprox-2-heterogeneity", "data").index(case.split(",  ")[0])
        if case in FEDPROX.threshold("fedprox-2-heterogeneity", "data")
        else 0.05
    ) * (2 - mu)


def test_fedprox_as_published(tmp_path: Path) -> None:
    def level(case: str, mu: float, seed: int) -> float:
        return as_published(case, mu, seed) + 0.1 * mu * (case == "iid")

    report = fedprox.synthetic(results_of(fedprox_runs(level, unlike)), FEDPROX, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"holds"}
    assert len(report.verdicts) == len(FEDPROX.claims)
    # The last two of 40 rounds swing to either side: 0.25 is left.
    assert "+0.250" in evidence(report, "fedprox-1-accuracy")
    assert [path.name for path in report.figures] == ["figure-1.png", "figure-2.png"]
    check_figures(report.figures)
    rows = {row.quantity: row.mean for row in report.rows}
    assert rows["synthetic(1, 1), 90 % dropped, μ = 0: training loss, last 5 %"] == pytest.approx(
        0.73, abs=0.11
    )
    # From one round to the next the loss changes by twice its swing.
    assert rows["iid, μ = 0: unsteadiness"] == pytest.approx(0.04)


def test_fedprox_the_other_way(tmp_path: Path) -> None:
    def level(case: str, mu: float, seed: int) -> float:
        return 1.5 - as_published(case, mu, seed) - 0.1 * mu * (case == "iid")

    def swing(case: str, mu: float) -> float:
        return 0.01 * (1 + mu) + 0.1 * (case == "iid")

    report = fedprox.synthetic(results_of(fedprox_runs(level, swing)), FEDPROX, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"doesn't hold"}


def test_fedprox_seeds_that_disagree(tmp_path: Path) -> None:
    def level(case: str, mu: float, seed: int) -> float:
        return 0.5 + 0.2 * ("dropped" in case) * (seed - 4) + 0.1 * mu * (seed - 4) * (case == "iid")

    report = fedprox.synthetic(results_of(fedprox_runs(level, unlike)), FEDPROX, tmp_path)
    for claim in ("fedprox-1-partial", "fedprox-1-proximal", "fedprox-1-accuracy", "fedprox-2-iid"):
        assert outcome(report, claim) == "not decided", claim


def exploded(run: Run) -> Run:
    """Return a run that diverged after its third round: it has no number but rounds and time."""
    columns = {
        key: column[:4] if key in ("aggregation", "time") else np.full(4, np.nan)
        for key, column in run.curves.columns.items()
    }
    facts = {**run.facts, "status": "diverged", "complete": False, "evaluations": 4}
    return replace(run, curves=replace(run.curves, columns=columns, facts=facts))


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        # Dropped work explodes: FedProx is below it whatever it has.
        (
            {"case": ("synthetic(1, 1), 90 % dropped", "synthetic(1, 1), 50 % dropped")},
            {
                "fedprox-1-partial": "holds",
                "fedprox-1-proximal": "holds",
                "fedprox-1-accuracy": "not decided",
            },
        ),
        # FedProx does, too: neither is below the other.
        (
            {"case": ("synthetic(1, 1), 90 % dropped", "synthetic(1, 1), 90 % in part")},
            {"fedprox-1-partial": "not decided", "fedprox-1-proximal": "not decided"},
        ),
        # It alone does.
        (
            {"case": ("synthetic(1, 1), 90 % in part",), "mu": (1.0,)},
            {
                "fedprox-1-partial": "holds",
                "fedprox-1-proximal": "doesn't hold",
                "fedprox-1-steadier": "doesn't hold",
            },
        ),
        # As bad on two data sets: which is worse isn't known. On the most unlike alone: as the claim says.
        ({"case": ("synthetic(1, 1)", "synthetic(0, 0)")}, {"fedprox-2-heterogeneity": "not decided"}),
        ({"case": ("synthetic(1, 1)",)}, {"fedprox-2-heterogeneity": "holds"}),
        ({"case": ("iid",), "mu": (0.0,)}, {"fedprox-2-heterogeneity": "doesn't hold"}),
    ],
)
def test_a_run_of_fedprox_that_exploded_is_worse_than_any_that_did_not(
    tmp_path: Path, who: dict[str, Any], expected: dict[str, str]
) -> None:
    runs = [
        exploded(run)
        if run["case"] in who["case"] and run["proximal-mu"] in who.get("mu", (0.0, 1.0))
        else run
        for run in fedprox_runs(as_published, unlike)
    ]
    report = fedprox.synthetic(results_of(runs), FEDPROX, tmp_path)
    assert {claim: outcome(report, claim) for claim in expected} == expected


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.9, 0.9, 0.9), "doesn't hold"),  # too much is as far off as too little
        ((0.0, 0.0, 0.0), "doesn't hold"),
        ((0.2, 0.9, 0.9), "not decided"),  # on one seed it is what was published
        ((0.2, 0.2, 0.2), "holds"),
    ],
)
def test_a_gain_in_accuracy_is_neither_less_nor_more_than_published(
    gains: tuple[float, ...], expected: str
) -> None:
    by_seed = dict(zip((2, 4, 5), gains, strict=True))

    def level(case: str, mu: float, seed: int) -> float:
        return 0.95 - by_seed[seed] * (mu == 1.0 and "in part" in case)

    results = results_of(fedprox_runs(level, lambda case, mu: 0.0))
    assert fedprox._more_accurate(results, FEDPROX).outcome == expected


def test_fedprox_lacks_what_it_lacks(tmp_path: Path) -> None:
    runs = fedprox_runs(as_published, unlike)
    lacking = [run for run in runs if run["case"] == "iid" and run["proximal-mu"] == 1.0 and run["seed"] == 4]
    there = [run for run in runs if run not in lacking]
    report = fedprox.synthetic(results_of(there, lack=lacking), FEDPROX, tmp_path)
    assert {v.claim for v in report.verdicts if v.outcome == "not run"} == {"fedprox-2-iid"}


# ---- SCAFFOLD -----------------------------------------------------------------------------------------------------

SCAFFOLD = read_plan("scaffold-similarity")


def scaffold_runs(taken: Callable[[str, int, str], int | None]) -> list[Run]:
    """Make runs of 30 rounds that reach the target after so many, or never."""
    runs = []
    for seed in (1, 2, 4):
        for alike in SCAFFOLD.labels("similarity"):
            for epochs in SCAFFOLD.labels("local-epochs"):
                for method in SCAFFOLD.labels("method"):
                    number = taken(alike, epochs, method)
                    late = 31 if number is None else number
                    accuracy = [0.5] * late + [0.9] * (31 - late)
                    labels = {"seed": seed, "similarity": alike, "local-epochs": epochs, "method": method}
                    runs.append(make_run(labels, {"accuracy": accuracy}))
    return runs


def table_3(alike: str, epochs: int, method: str) -> int | None:
    """In the order of the paper's table 3."""
    if method == "SGD":
        return 30
    if method == "FedProx":
        return None
    slow = 10 + epochs if alike == "0 %" else 20 - epochs
    return slow if method == "FedAvg" else slow - 2


def test_scaffold_as_published(tmp_path: Path) -> None:
    report = similarity.rounds(results_of(scaffold_runs(table_3)), SCAFFOLD, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"holds"}
    assert len(report.verdicts) == len(SCAFFOLD.claims)
    assert "0 %: 1.82" in evidence(report, "scaffold-1-drift")  # 20 / 11
    check_figures(report.figures)
    rows = {row.quantity: row for row in report.rows}
    assert len(rows) == 3 * (1 + 3 * 3)  # SGD once, whatever the epochs
    assert rows["0 % alike, FedAvg, 10 epochs: rounds to 85%"].mean == 20
    assert rows["10 % alike, FedProx, 1 epoch: rounds to 85%"].reached == []


@pytest.mark.parametrize(
    ("claim", "other"),
    [
        (
            "scaffold-1-fastest",
            lambda a, e, m: 25 if (a, e, m) == ("100 %", 5, "SCAFFOLD") else table_3(a, e, m),
        ),
        ("scaffold-1-sgd", lambda a, e, m: 8 if m == "SGD" and a == "10 %" else table_3(a, e, m)),
        ("scaffold-1-drift", lambda a, e, m: 9 if (a, m) == ("0 %", "FedAvg") else table_3(a, e, m)),
        ("scaffold-1-epochs", lambda a, e, m: 9 if (a, m) == ("100 %", "SCAFFOLD") else table_3(a, e, m)),
        ("scaffold-1-fedprox", lambda a, e, m: 3 if (a, e, m) == ("0 %", 1, "FedProx") else table_3(a, e, m)),
    ],
)
def test_scaffold_one_cell_refutes(tmp_path: Path, claim: str, other: Any) -> None:
    report = similarity.rounds(results_of(scaffold_runs(other)), SCAFFOLD, tmp_path)
    assert outcome(report, claim) == "doesn't hold"


@pytest.mark.parametrize(("more", "expected"), [(1, "holds"), (2, "doesn't hold")])
def test_scaffold_may_take_a_little_longer(tmp_path: Path, more: int, expected: str) -> None:
    # 21 rounds for 20 are the slack, 1.05; 22 aren't.
    def taken(alike: str, epochs: int, method: str) -> int:
        return 20 + more if method == "SCAFFOLD" else 20

    results = results_of(scaffold_runs(taken))
    found = similarity._compared("scaffold-1-fastest", "SCAFFOLD", ["FedAvg"], results, SCAFFOLD)
    assert found.outcome == expected


def test_scaffold_lacks_a_method(tmp_path: Path) -> None:
    runs = scaffold_runs(table_3)
    lacking = [run for run in runs if run["method"] == "SGD" and run["seed"] == 1]
    there = [run for run in runs if run not in lacking]
    report = similarity.rounds(results_of(there, lack=lacking), SCAFFOLD, tmp_path)
    assert {v.claim for v in report.verdicts if v.outcome == "not run"} == {"scaffold-1-sgd"}


# ---- FedBuff ------------------------------------------------------------------------------------------------------

FEDBUFF = read_plan("fedbuff-speedup")


def fedbuff_runs(taken: Callable[[str, str, int], int | None]) -> list[Run]:
    """Make runs of 8,000 client updates, evaluated every 400, which reach the target after so many, or never.

    On the seed of the tuning 0.3 is the best step size; with another they would never get there.
    """
    runs = []
    for seed, lr in ((0, 0.1), (0, 0.3), (0, 1.0), (1, 0.1), (1, 0.3), (2, 0.3), (3, 0.3)):
        for case in FEDBUFF.grid["case"]:
            assert isinstance(case, dict)
            label = str(case["label"])
            at, method = label.split(" ")[0], label.split(", ")[1]
            number = (1200 if seed == 0 else taken(at, method, seed)) if lr == 0.3 else None
            done = np.arange(0, 8001, 400)
            accuracy = np.where(done >= (9999 if number is None else number), 0.95, 0.5)
            each = 10 if method == "FedBuff" else int(at)
            metrics = {
                "accuracy": accuracy,
                "aggregation": done / each,
                "time": done / (100 if each == 10 else 20),
            }
            config = {key.replace("-", "_"): value for key, value in case.items() if key != "label"}
            labels = {"seed": seed, "lr": lr, "case": label}
            runs.append(make_run(labels, metrics, num_clients=1000, lr=lr, **config))
    return runs


def ahead(at: str, method: str, seed: int) -> int | None:
    """FedBuff is 2 times as fast with 50 at work, and 3 times with 200."""
    return 1200 if method == "FedBuff" else 2400 if at == "50" else 3600


def test_fedbuff_as_published(tmp_path: Path) -> None:
    report = buffered.speed_up(results_of(fedbuff_runs(ahead)), FEDBUFF, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"holds"}
    assert len(report.verdicts) == len(FEDBUFF.claims)
    assert evidence(report, "fedbuff-1-magnitude") == "200, FedAvg: 3.00 (3.00, 3.00, 3.00)"
    assert "200, FedProx: 15.00" in evidence(report, "fedbuff-1-time")
    rows = {row.quantity: row.mean for row in report.rows}
    assert rows["50 at work, FedAvg, γ = 0.3: client updates to 90%"] == 2400
    assert rows["50 at work, FedBuff, γ = 0.3: virtual time to 90%"] == 12
    assert "| 200 at work, FedProx | 0.5000 | 0.8857 | 0.5000 |" in report.extra[0]  # 18 of 21 at 0.95
    check_figures(report.figures)
    # At the last of its step sizes nobody knows how well it could have done.
    two = [run for run in fedbuff_runs(ahead) if run.config.lr <= 0.3 or not run["case"].endswith("FedAvg")]
    report = buffered.speed_up(results_of(two), FEDBUFF, tmp_path)
    assert evidence(report, "fedbuff-1-magnitude").endswith(" [γ = 0.3, an end of those tried]")
    assert {verdict.outcome for verdict in report.verdicts} == {"not decided"}


@pytest.mark.parametrize(
    ("taken", "outcomes"),
    [
        # FedBuff never gets there: how its speed-up grows isn't known.
        (
            lambda at, m, s: None if m == "FedBuff" else 2400,
            ["doesn't hold", "doesn't hold", "not decided", "doesn't hold"],
        ),
        # Rounds never get there: at least 8000 / 1200 = 6.67 times.
        (
            lambda at, m, s: 1200 if m == "FedBuff" else None,
            ["holds", "doesn't hold", "not decided", "holds"],
        ),
        # Rounds are ahead in updates, and the more so the more clients are at work; in time they aren't.
        (
            lambda at, m, s: 2400 if m == "FedBuff" else 2000 if at == "50" else 1200,
            ["doesn't hold", "doesn't hold", "doesn't hold", "holds"],
        ),
        # Seeds disagree.
        (
            lambda at, m, s: 2400 if m == "FedBuff" else [2000, 6000, 800][s - 1] + 400 * s * (at == "50"),
            ["not decided", "not decided", "doesn't hold", "holds"],
        ),
    ],
)
def test_fedbuff_otherwise(tmp_path: Path, taken: Any, outcomes: list[str]) -> None:
    report = buffered.speed_up(results_of(fedbuff_runs(taken)), FEDBUFF, tmp_path)
    assert [verdict.outcome for verdict in report.verdicts] == outcomes


def test_rounds_that_exploded_are_not_cheap(tmp_path: Path) -> None:
    runs = [
        exploded(run) if run["case"].endswith(", FedAvg") and run["seed"] else run
        for run in fedbuff_runs(ahead)
    ]
    report = buffered.speed_up(results_of(runs), FEDBUFF, tmp_path)
    # 160 rounds of 50 and 60 of 200 were planned: 8000 / 1200 and 12000 / 1200.
    assert "50, FedAvg: ≥ 6.67 (" in evidence(report, "fedbuff-1-updates")
    assert "200, FedAvg: ≥ 10.00 (" in evidence(report, "fedbuff-1-updates")
    assert outcome(report, "fedbuff-1-updates") == outcome(report, "fedbuff-1-time") == "holds"


@pytest.mark.parametrize("seed", [0, 2])
def test_fedbuff_lacks_a_run_of_the_tuning_or_one_that_is_judged(tmp_path: Path, seed: int) -> None:
    runs = fedbuff_runs(ahead)
    lacking = [run for run in runs if run["case"] == "50 at work, FedAvg" and run["seed"] == seed]
    there = [run for run in runs if run not in lacking]
    report = buffered.speed_up(results_of(there, lack=lacking), FEDBUFF, tmp_path)
    found = [verdict.outcome for verdict in report.verdicts]
    assert found == ["not run", "holds", "not run", "not run"]


# ---- All three ----------------------------------------------------------------------------------------------------

SMALL: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "fedprox-synthetic": (
        {
            "num-clients": 6,
            "fraction-train": 0.5,
            "local-epochs": 2,
            "batch-size": 100,
            "num-server-rounds": 3,
        },
        {"seed": [0], "case": FEDPROX.grid["case"][::3]},
    ),
    "scaffold-similarity": (
        {"dataset": "digits", "num-clients": 10, "batch-size": 30, "num-server-rounds": 2},
        {"seed": [1], "similarity": [{"label": "10 %", "similarity": 0.1}], "local-epochs": [1]},
    ),
    "fedbuff-speedup": (
        {"dataset": "digits", "model": "logistic", "num-clients": 40},
        {
            "seed": [0, 1],
            "lr": [0.3],
            "case": [
                {**case, "num-server-rounds": 4, **({"concurrency": 12} if "concurrency" in case else {})}
                for case in FEDBUFF.grid["case"][:3]
                if isinstance(case, dict)
            ],
        },
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_report_on_real_runs(name: str, tmp_path: Path) -> None:
    base, grid = SMALL[name]
    plan = plan_with(name)
    plan = Plan.model_validate(
        {**plan.model_dump(), "base": {**plan.base, **base}, "grid": {**plan.grid, **grid}}
    )
    for run in {each.key: each for each in plan.runs()}.values():
        assert perform(run, tmp_path / "runs", "vectorized") == ""
    assert collect(plan, tmp_path) == []
    report = report_on(plan, tmp_path).read_text("utf-8")
    assert "- Full settings." in report
    assert "not run" in report  # claims on what isn't in this grid
    before = (tmp_path / "table.csv").read_text("utf-8")
    assert len(before.splitlines()) > 3
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != FILE:
            path.unlink()
    report_on(plan, tmp_path)
    assert (tmp_path / "table.csv").read_text("utf-8") == before
