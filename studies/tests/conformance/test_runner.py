"""Who passes, and what is said of whom who doesn't; the package needs numpy alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from studies.conformance import Implementation, check, load, names
from studies.conformance.adapters import fedapp_strategies, flower
from studies.conformance.table import cell, column, main

KIT = Path(__file__).parents[2] / "conformance"


class Read:
    """An implementation that reads the problem's own models; ``change`` is applied to those from step 3 on."""

    def __init__(self, problem, change=lambda model: model):
        self.models, self.change = problem.models, change

    def step(self, number, who):
        model = self.models[number - 1].copy()
        return self.change(model) if number >= 3 else model


def changed(change):
    return lambda problem: Read(problem, change)


def test_what_equals_the_models_passes():
    verdict = check(Read, "fedavg")
    assert (verdict.passes, verdict.step, verdict.difference) == (True, 0, 0.0)
    assert str(check(changed(lambda model: model + 5e-8), "fedavg")) == "passes: largest difference 5.0e-08"


def test_what_differs_is_named_with_its_first_step():
    verdict = check(changed(lambda model: model + 2e-7), "fedavg")
    assert str(verdict) == "differs from step 3 on, by 2.0e-07"
    assert check(changed(lambda model: model + 2e-7), "fedavg", tolerance=1e-6).passes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_fails(value):
    verdict = check(changed(lambda model: np.where(np.arange(len(model)) == 7, value, model)), "fedavg")
    assert (verdict.passes, verdict.step) == (False, 3)


@pytest.mark.parametrize(
    ("method", "shape", "must"),
    [("fedavg", (3, 5), "(15,) (global)"), ("ditto", (15,), "(6, 15) (global and")],
)
def test_a_wrong_shape_is_one_clear_line(method, shape, must):
    with pytest.raises(
        ValueError, match=re.escape(f"{method}, step 3: the model has shape {shape}, must have {must}")
    ):
        check(changed(lambda model: np.zeros(shape)), method)


def test_an_unknown_method_is_one_clear_line():
    with pytest.raises(ValueError, match="no problem is called 'fedsgd': allowed are fedavg, fedprox, "):
        check(Read, "fedsgd")
    with pytest.raises(ValueError, match="no problem is called 'rows'"):
        load("rows")


@pytest.mark.parametrize("method", names())
def test_ours_pass(method):
    made = fedapp_strategies.implementations()[method]
    assert check(made, method, fedapp_strategies.TOLERANCE).passes


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("fedavg", {"client_weights": "uniform"}),
        ("feddyn", {"feddyn_alpha": 0.51}),
        ("fedbuff", {"staleness_discount": "polynomial:0.6"}),
        ("fedadam", {"server_optimizer": "yogi"}),
    ],
)
def test_ours_fail_with_another_setting(method, keywords):
    def make(problem) -> Implementation:
        return fedapp_strategies.Run(problem, keywords)

    assert not check(make, method, fedapp_strategies.TOLERANCE).passes


def first_second_moment(problem):
    """Return Flower's strategy, with the second moment that the paper begins with, v = τ²."""
    made = flower.FlowerServer(problem)
    made.strategy.v_t = {"w": np.full_like(problem.initial, problem.parameters["tau"] ** 2)}
    return made


class Uncorrected:
    """Flower's FedAdam without its bias correction, whose exponents are the round's number plus 1."""

    def __init__(self, problem):
        self.made, self.given = first_second_moment(problem), problem.parameters

    def step(self, number, who):
        first, second = (1 - self.given[key] ** (number + 1) for key in ("beta_1", "beta_2"))
        self.made.strategy.eta = self.given["server_lr"] * first / np.sqrt(second)
        return self.made.step(number, who)


def test_why_flowers_adaptive_methods_differ():
    """README.md says so: v starts at 0, and FedAdam has a bias correction."""
    for method in ("fedadagrad", "fedyogi", "fedadam"):
        assert check(flower.FlowerServer, method).step == 1
    assert check(first_second_moment, "fedadagrad").passes
    assert check(first_second_moment, "fedyogi").passes
    assert not check(first_second_moment, "fedadam").passes
    assert check(Uncorrected, "fedadam").passes


def rows_of(table):
    return [
        [text.strip() for text in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]


def test_the_table_of_the_readme_is_what_comes_out():
    """Of the differences the step is compared, of passes that they pass."""
    text = (KIT / "README.md").read_text("utf-8").partition("## Who passes")[2]
    ours, flowers = (column(name, names()) for name in ("fedapp", "flower"))
    assert not ours.fails
    assert ours.verdicts.keys() == set(names())
    assert f"{ours.title} passes all {len(names())} problems" in text
    head, _, *written = rows_of(text)
    assert head[1] == flowers.title
    said = {row[0]: row[1].split(":")[0] for row in written}
    assert said == {name: cell(flowers.verdicts.get(name)).split(":")[0] for name in said}
    assert flowers.verdicts.keys() <= said.keys()


def test_the_table_says_who_passes_and_by_how_much(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_mine.py").write_text(
        "import numpy as np\n"
        "class Mine:\n"
        "    def __init__(self, problem): self.models = problem.models\n"
        "    def step(self, number, who): return self.models[number - 1] + 3e-7 * (number >= 5)\n"
        "class Broken(Mine):\n"
        "    def step(self, number, who): raise KeyError('w')\n"
        "NAME, TOLERANCE = 'Mine', 1e-6\n"
        "def implementations(): return {'fedavg': Mine, 'scaffold': Broken}\n"
    )
    (tmp_path / "of_none.py").write_text("NAME, PACKAGES = 'None', ('no-such-distribution',)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--of", "of_mine", "of_none"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| problem  | Mine          |",
        "|----------|---------------|",
        "| fedavg   | passes: 3e-07 |",
        "| scaffold | KeyError: 'w' |",
        "",
        "None: no-such-distribution isn't installed.",
        "Mine: the tolerance is 1e-06.",
    ]
    assert main(["--of", "of_mine", "--methods", "fedavg"]) == 0
    with pytest.raises(SystemExit):
        main(["--of", "nobodys"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no adapter 'nobodys'" in error
    assert error.endswith("known are fedapp, flower, appfl, flgo")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "def implementations(): return {'fedavg': None, 'FedAvg': None}",
            "adapter 'of_mine': no problem is called 'FedAvg': allowed are fedavg, fedprox, ",
        ),
        ("NAME = 'Mine'", "adapter 'of_mine' has no function implementations()"),
        ("import no_such_package", "adapter 'of_mine' can't be imported: No module named 'no_such_package'"),
    ],
)
def test_an_adapter_that_cannot_be_tried_is_one_clear_line(text, error, tmp_path, monkeypatch, capsys):
    (tmp_path / "of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--of", "of_mine"])
    assert ended.value.code == 2
    assert f"error: {error}" in capsys.readouterr().err.splitlines()[-1]


def test_without_an_implementation_to_try_the_status_is_1_and_no_problem_is_listed(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "of_mine.py").write_text("def implementations(): return {'fedavg': None}")
    (tmp_path / "of_none.py").write_text("NAME, PACKAGES = 'None', ('no-such-distribution',)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    monkeypatch.delitem(sys.modules, "of_none", raising=False)
    assert main(["--of", "of_mine", "--methods", "scaffold"]) == 1
    assert capsys.readouterr().out.splitlines() == ["| problem | of_mine |", "|---------|---------|"]
    assert main(["--of", "of_none"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| problem |",
        "|---------|",
        "",
        "None: no-such-distribution isn't installed.",
    ]


def test_the_package_and_its_readme_need_numpy_alone(tmp_path):
    """As a distribution of its own it is called ``conformance``."""
    shutil.copytree(KIT, tmp_path / "conformance", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import conformance, conformance.table\n"
        "from conformance.reference.settings import SETTINGS\n"
        "class Reference:\n"
        "    def __init__(self, problem): self.models = SETTINGS[problem.method].rule(problem)\n"
        "    def step(self, number, who): return next(self.models)\n"
        "assert all(conformance.check(Reference, name).passes for name in conformance.names())\n"
        "there = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(there - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['conformance', 'numpy']\n"
    (sample,) = re.findall("```python\n(.*?)```", (KIT / "README.md").read_text("utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", sample], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"passes: largest difference \S+\n", done.stdout)
