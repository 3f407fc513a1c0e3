"""The command ``fedapp``."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import entry_points

import pytest
from typer.testing import CliRunner

import strategies
from fedapp import manual, names
from fedapp.cli import _imported, app
from fedapp.config import RunConfig
from fedapp.config.manual import text as written
from fedapp.training.evaluation import METRICS
from fedapp.training.losses import LOSSES
from strategies import REGISTRY


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_keys_are_told_by_name():
    done = run("keys", "lr", "eval-every")
    assert done.exit_code == 0
    assert re.findall(r"^\S+$", done.output, re.MULTILINE) == ["lr", "eval-every"]
    assert "default: 0.1" in done.output
    assert max(map(len, run("keys", "--all").output.splitlines())) <= 80


def test_a_part_of_a_name_tells_all_that_have_it():
    found = re.findall(r"^\S+$", run("keys", "message-e", "server-").output, re.MULTILINE)
    assert found == ["message-epsilon", "server-lr", "server-optimizer", "num-server-rounds", "server-device"]


def named(*arguments: str) -> list[str]:
    return re.findall(r"^[a-z][\w-]*$", run("keys", *arguments).output, re.MULTILINE)


def test_everyday_keys_come_first_and_topics_and_all_of_them_when_asked():
    everyday, every = named(), named("--all")
    assert 12 <= len(everyday) <= 18
    assert set(everyday) < set(every) == set(RunConfig.key_names())
    assert "buffer-size" in named("async")
    assert "dp" in named("privacy")
    topics = ("methods", "data", "training", "privacy", "runs")
    assert sorted(key for topic in topics for key in named(topic)) == sorted(every)
    assert set(named("devices")) < set(every)
    assert run("keys", "--all", "lr").exit_code == 1


def test_help_groups_what_runs_what_looks_and_research_in_this_order():
    shown = re.findall(r"^╭─ (Run|Look|Research|Commands)|^│ ([a-z]+)  ", run("--help").output, re.MULTILINE)
    assert ["".join(each) for each in shown] == [
        *("Run", "run", "sweep", "deploy"),
        *("Look", "look", "partition", "predict", "list", "compare", "report", "timeline", "keys", "methods"),
        *("Research", "attacks", "bounds", "graph", "map", "reproduce"),
    ]


def test_no_such_key_and_all_as_markdown():
    done = run("keys", "learning-rate")
    assert (done.exit_code, done.output.startswith("error: unknown key 'learning-rate'")) == (1, True)
    assert run("keys", "--markdown", "lr").exit_code == 1
    assert run("keys", "--markdown").output.startswith("# Keys of the run config")


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (("--help",), 0, "Run every combination of some values"),
        (("keys", "lr"), 0, "learning rate"),
        (("keys", "learning-rat"), 1, "error: unknown key 'learning-rat': near are"),
        (("methods", "fedavg"), 0, "McMahan et al. 2017"),
        (("run", "--run-config", "lrr=0.1"), 1, "unknown key 'lrr': did you mean 'lr'?"),
        (("runn",), 2, "Did you mean 'run'"),
    ],
)
def test_a_quick_answer_imports_nothing_heavy(arguments, code, shown, tmp_path):
    heavy = ("torch", "pandas", "ray", "sklearn", "matplotlib", "scipy", "pyarrow")
    if arguments[0] != "run":
        heavy += ("flwr", "numpy", "pydantic", "strategies", "fedapp.config")
    program = (
        "import sys; from fedapp.cli import app\n"
        "try: app(sys.argv[1:])\n"
        f"finally: print('heavy:', *[name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, "FEDAPP_CACHE": str(tmp_path)},  # nothing was asked before
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1].strip()) == (code, "heavy:")
    assert shown in done.stdout + done.stderr


def test_the_manual_follows_from_the_declarations():
    assert manual.FILE.read_text("utf-8") == written(), "python -m fedapp.config.manual"


def test_names_are_those_of_what_they_stand_for():
    assert (tuple(LOSSES), tuple(METRICS)) == (names.LOSSES, names.METRICS)


def test_the_version_of_the_app_is_the_library_s_everywhere(repository):
    assert re.match(rf"fedapp {re.escape(strategies.__version__)}, flwr \d+", run("--version").output)
    for project in ("pyproject.toml", "studies/pyproject.toml"):
        declared = tomllib.loads((repository / project).read_text("utf-8"))["project"]
        assert declared["version"] == strategies.__version__
    assert f"## {strategies.__version__}\n" in (repository / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.thorough
def test_without_a_package_that_brings_commands_the_others_work(repository, tmp_path):
    # As in an image: the distribution's metadata, and of its packages not all. -S leaves out what a .pth file adds.
    for package in ("fedapp", "strategies", "custom"):
        (tmp_path / package).symlink_to(repository / package)
    paths = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-m", "fedapp.cli", *arguments],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )

    assert "reproduce" in {entry.name for entry in entry_points(group="fedapp.commands")}
    told = without("--version")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("fedapp ")
    assert "No such command 'reproduce'" in without("reproduce").stderr


def test_a_package_that_is_there_and_broken_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "brings_a_command.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        _imported("brings_a_command:other")


def test_methods_are_told_in_short_in_full_and_of_ones_own():
    done = run("methods")
    assert done.exit_code == 0
    assert set(re.findall(r"^(\S+)$", done.output, re.M)) == set(REGISTRY)
    assert max(map(len, done.output.splitlines())) <= 80
    full = run("methods", "fedfix").output
    assert (
        "own keys: aggregation-weights, arrival-weight-bound, dp-max-contributions,\n      fedfix-interval"
        in full
    )
    assert "JMLR 24, 2023, section 4.4:" in full
    assert "own keys:" in run("methods", "custom.half_life:HalfLife").output
    assert "error: strategy = 'fedfax': must be one of" in run("methods", "fedfax").output
    assert (
        "error: --markdown: is of all methods, not of fedfix" in run("methods", "fedfix", "--markdown").output
    )
