"""docs/start.md's own commands: from a table to predictions. The sweep has fewer and shorter runs here."""

import re
import runpy
import shlex

import pandas as pd
from typer.testing import CliRunner

from fedapp.cli import app
from tests.docs.hospitals import IN_ORDER, check_hospitals
from tests.docs.pages import ROOT, blocks_of

SHORT = """
num-server-rounds = 1
figures = false
"""


def test_the_commands_of_the_page_lead_to_predictions(tmp_path, monkeypatch):
    lines = [
        line
        for block in blocks_of("docs/start.md")
        if block.language == "sh"
        for line in block.code.splitlines()
    ]
    assert ".venv/bin/python examples/hospitals.py" in lines
    commands = [shlex.split(line)[1:] for line in lines if line.startswith(".venv/bin/fedapp ")]
    assert [words[0] for words in commands] == ["look", "run", "sweep", "compare", "predict"]
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "hospitals.py"), run_name="__main__")
    shown = {}
    for words in commands:
        if words[0] == "sweep":
            config = tmp_path / "hospitals.toml"
            config.write_text(SHORT + config.read_text("utf-8"), "utf-8")
            assert {"lr=0.03,0.1,0.3", "strategy=fedavg,fedprox", "seed=0-1"} < set(words)
            words = [
                {"lr=0.03,0.1,0.3": "lr=0.03,0.1", "seed=0-1": "seed=0"}.get(word, word) for word in words
            ]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        shown[words[0]] = done.output
    check_hospitals(tmp_path)
    runs = pd.read_csv(tmp_path / "results" / "swept" / "runs.csv")
    settings = {(strategy, lr) for strategy in ("fedavg", "fedprox") for lr in (0.03, 0.1)}
    assert {*zip(runs["strategy"], runs["lr"], strict=True)} == settings
    assert {f"lr={lr} {strategy}" for strategy, lr in settings} == {  # in the order of the sweep's axes
        *re.findall(r"lr=[\d.]+ fed\w+", shown["compare"])
    }
    assert (tmp_path / "results" / "swept-compared" / "comparison.md").is_file()
    for name in IN_ORDER:
        assert name in shown["look"]
        assert name in shown["run"]
    assert "each client, on its test rows" in shown["run"]
    assert "4 of 40 rows have an empty cell (crp: 2, pulse: 2): filled in as in training" in shown["predict"]


def test_the_config_on_the_page_is_what_look_writes(tmp_path, monkeypatch):
    (text,) = [block.code for block in blocks_of("docs/start.md") if block.language == "text"]
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "hospitals.py"), run_name="__main__")
    written = CliRunner().invoke(app, ["look", "hospitals.csv"]).output
    for line in text.splitlines():
        assert line.partition("#")[0].strip() in written
