"""The verdict at a sweep's end: its numbers from the sweep's files, and what the tuning may have spoiled."""

import json
from typing import Any

import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

import fedapp
from fedapp.cli import app
from fedapp.report.page.content import page_content
from fedapp.report.page.html import unpacked
from fedapp.sweeps.sweep import tuning_of

SMALL: dict[str, Any] = {"num_clients": 3, "model": "logistic", "batch_size": 0, "quiet": True}


def test_every_number_can_be_computed_from_the_file_that_it_names(tmp_path):
    """FedBuff's last aggregation is before the budget of 4 and FedAvg's at it: each model counts until the next."""
    folder = tmp_path / "swept"
    keys = {"time_budget": 4.0, "num_server_rounds": 10_000, "time_scenario": "F80", "lr": 0.5}
    swept = fedapp.sweep(**SMALL, **keys, strategy=["fedavg", "fedbuff"], seed=range(3), out=folder)
    verdict = swept.verdict()
    assert verdict.files == f"runs.csv in {folder}"
    assert verdict.place == "at time 4"
    assert swept.equal_time is None
    runs = pd.read_csv(folder / "runs.csv")
    last = runs.groupby(["strategy", "seed"])["accuracy"].last()
    means = last.groupby("strategy").mean()
    assert dict(verdict.means) == pytest.approx(means.to_dict())
    (pair,) = verdict.pairs
    test = stats.ttest_rel(last[pair.better], last[pair.other])
    assert pair.p == pytest.approx(test.pvalue)
    assert (pair.low, pair.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert verdict.target > 0
    for cost in verdict.costs:
        own = runs[runs["strategy"] == cost.setting]
        below = own["accuracy"] < verdict.target
        kept = own[~below[::-1].groupby(own["seed"]).cummax()[::-1]]  # from the last evaluation below it on
        first = kept.groupby("seed").first()
        assert (cost.reached, cost.time) == (len(first), pytest.approx(first["time"].mean()))
        assert cost.bytes == pytest.approx((first["bytes-up"] + first["bytes-down"]).mean())
        assert cost.server_bytes == first["bytes-server"].max() > 0
    assert (
        "3 seeds: a true deviation is 0.52 to 6.3 times the one seen (95 % interval), and nothing shows whether "
        in "".join(verdict.doubts)
    )
    report = (folder / "report.md").read_text().splitlines()
    assert report[2] == "## Verdict"
    assert report[4] == f"- {verdict.sentences[0]}"
    assert str(fedapp.load(folder).verdict()) == str(verdict)


PLAN = """
[base]
num-clients = 3
model = "logistic"
num-server-rounds = 2
[grid]
lr = [0.1]
work = [{ label = "one epoch", local-epochs = 1 }, { label = "two steps", local-epochs = 0, local-steps = 2 }]
seed = [0, 1]
"""


def test_settings_are_called_as_the_plan_says_without_what_all_have(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    folder = tmp_path / "swept"
    options = [str(tmp_path / "plan.toml"), "-o", str(folder), "--jobs", "0"]
    done = CliRunner().invoke(app, ["sweep", *options], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert sorted(fedapp.load(folder).verdict().means) == ["one epoch", "two steps"]
    done = CliRunner().invoke(app, ["compare", str(folder), "--csv"])
    assert {line.partition(",")[0] for line in done.stdout.splitlines()[1:]} == {"one epoch", "two steps"}
    runs = sorted(path.parent for path in folder.glob("runs/*/config.toml"))
    content = page_content(runs, tuning_of(runs))
    assert sorted(each["name"] for each in content["settings"]) == ["one epoch", "two steps"]


def test_the_tuning_may_spoil_it(tmp_path):
    """Of three step sizes that are all too small the largest is best; FedAvg doesn't read FedProx's mu."""
    plan = ["lr=0.001,0.002,0.004", "strategy=fedavg,fedprox", "proximal-mu=0.1,0.2", "seed=0"]
    config = "num-clients=3 model=logistic batch-size=0 num-server-rounds=2"
    options = ["--tune", "lr", "--tune", "proximal-mu", "--by", "loss", "-c", config, "-o", str(tmp_path)]
    options += ["--jobs", "0"]
    done = CliRunner().invoke(app, ["sweep", *plan, *options], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "Caution: lr of fedavg is best at the end of what was tried; go on beyond it" in done.output
    assert "Caution: lr of fedprox is best at the end of what was tried; go on beyond it" in done.output
    assert "Caution: methods had unequal numbers of tries: fedavg 3, fedprox 6" in done.output
    assert "1 seed can't tell settings apart: " in done.output
    assert f"Numbers: runs.csv in {tmp_path}, and tuning.csv of the tuning" in done.output
    assert "significant" not in done.output
    doubts = [
        line.removeprefix("Caution: ")
        for line in done.output.splitlines()
        if " tried" in line or " tries" in line
    ]
    assert len(doubts) == 3
    compared = CliRunner().invoke(app, ["compare", str(tmp_path), "--latex"], env={"COLUMNS": "300"})
    assert all(f"Caution: {doubt}" in compared.stderr for doubt in doubts)
    caption = "lr, proximal-mu tuned for each setting by loss on 1 other seed"
    assert caption in compared.stdout
    assert "method & lr & proximal-mu & " in compared.stdout
    pytest.importorskip("plotly")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text("utf-8")
    content = json.loads(unpacked(page.partition('id="content" type="text/plain">')[2].partition("<")[0]))
    assert set(doubts) <= set(content["verdict"]["doubts"])
    assert content["verdict"]["metric"].startswith("loss ")
