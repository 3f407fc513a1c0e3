"""The apps of examples/ learn, in this process; as processes they run in test_apps_run.py."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.constant import FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION

from tests.examples import apps
from tests.selection import only

NAMES = sorted(apps.LEAST)


def test_every_app_is_tested():
    assert sorted(path.parent.name for path in apps.EXAMPLES.glob("*/pyproject.toml")) == NAMES


@pytest.mark.parametrize("name", only(NAMES, 0))
def test_it_learns_and_does_so_again(name, capsys):
    apps.needs(name)
    first = apps.run(name)
    accuracy = apps.accuracy_in(capsys.readouterr().out)
    assert accuracy >= apps.LEAST[name]
    second = apps.run(name)
    assert apps.accuracy_in(capsys.readouterr().out) == accuracy
    assert second.asked() == first.asked()


@pytest.mark.parametrize("name", only(NAMES, 0))
def test_without_training_it_knows_nothing(name, capsys):
    # so that the test above is one of learning, not of data that are all of one kind
    apps.needs(name)
    nothing = {"local-epochs": 0} if name == "sklearn_fedprox" else {"lr": 0.0}  # scikit-learn refuses this
    apps.run(name, **{"num-server-rounds": 1, **nothing})
    assert apps.accuracy_in(capsys.readouterr().out) < apps.LEAST[name] - 0.1


@pytest.mark.parametrize("name", NAMES)
def test_its_clients_need_nothing_of_the_library(name):
    folder = apps.EXAMPLES / name / name
    for path in folder.glob("*.py"):
        imports = [line for line in path.read_text("utf-8").splitlines() if "import" in line.split()[:3]]
        theirs = [line for line in imports if "strategies" in line]
        handler = ["from strategies.client import direction_of"] * (name == "pytorch_spectral")
        assert path.stem in ("server_app", "scheme") or theirs == handler * (path.stem == "client_app")


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_the_line(name):
    folder = apps.EXAMPLES / name
    server, readme = ((folder / path).read_text("utf-8") for path in (f"{name}/server_app.py", "README.md"))
    diff = readme.split("```diff\n")[1].split("```")[0].splitlines()
    taken, added = ([line[2:] for line in diff if line.startswith(sign)] for sign in ("- ", "+ "))
    assert (len(taken), len(added)) == (1, 1)
    assert taken[0] in ("strategy = FedAvg()", "from flwr.serverapp.strategy import FedProx")
    if "import" in added[0]:
        assert added[0] in [line.partition("  #")[0] for line in server.splitlines()]
        return
    said, real = strategy_made(added[0]), strategy_made(server)
    assert ast.dump(said.func) == ast.dump(real.func)
    assert {keyword.arg for keyword in said.keywords} == {keyword.arg for keyword in real.keywords}
    for keyword in said.keywords:  # a value that the app has by itself
        assert apps.settings(name)["config"][str(keyword.arg).replace("_", "-")] == ast.literal_eval(
            keyword.value
        )


def strategy_made(code: str) -> ast.Call:
    """Return the call that makes the strategy."""
    (call,) = [
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "strategy"
    ]
    assert isinstance(call, ast.Call)
    return call


def test_proximal_mu_reaches_the_client_and_changes_its_work(capsys):
    free = apps.run("sklearn_fedprox", **{"proximal-mu": 0.0, "num-server-rounds": 1})
    held = apps.run("sklearn_fedprox", **{"proximal-mu": 2.0, "num-server-rounds": 1})
    norms = []
    for grid in (free, held):
        (evaluated, *_) = grid.requests("evaluate", 1)
        arrays = evaluated.content.array_records["arrays"].to_numpy_ndarrays()
        norms.append(sum(float((values**2).sum()) for values in arrays))
    assert norms[1] < 0.9 * norms[0]


def test_neighbours_reach_the_client():
    grid = apps.run("numpy_spectral", **{"num-server-rounds": 3})
    assert len(grid.requests("query.direction")) == 4
    sent = grid.requests(server_round=3)
    assert len(sent) == 4
    assert all("neighbours" in request.content.array_records for request in sent)


def test_an_app_is_small():
    for name in NAMES:
        lines = [
            line
            for path in Path(apps.EXAMPLES / name).rglob("*.py")
            for line in path.read_text("utf-8").splitlines()
            if line.strip() and '"""' not in line
        ]
        assert len(lines) <= 100, name


@pytest.mark.parametrize("name", only(NAMES, 1))
def test_the_readmes_commands_let_a_stranger_run_it(name):
    apps.needs(name)
    (block,) = (apps.EXAMPLES / name / "README.md").read_text("utf-8").split("```sh\n")[1:]
    install, export, run = block.split("```")[0].splitlines()
    assert (export, run) == (
        f"export {FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION}=1",
        "flwr run . --stream",
    )
    # As the line has it, but without a network: what it needs beside the library is here.
    words = ["--dry-run", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", *install.split(), *words],
        cwd=apps.EXAMPLES / name,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Would install fedapp-strategies-" in done.stdout
