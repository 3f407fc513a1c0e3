"""What hostile clients send, what the study writes, and that its committed table follows from the committed runs."""

from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fedapp import server
from fedapp.api.values import load_config
from strategies import FedAvg
from studies.attacks import runs, table
from studies.attacks.cell import OFF, ON, Cell, accuracy
from studies.attacks.command import attacks_command
from studies.attacks.hostile import (
    ATTACKS,
    CONSTANT,
    DRIFT,
    FALSE_SIZE,
    FALSE_STATISTICS,
    HONEST,
    HostileGrid,
)
from studies.attacks.plan import MOST_BY_ATTACK, cells
from studies.attacks.problem import IID, pictures

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "studies" / "attacks" / "results"
app = typer.Typer()
app.command()(attacks_command)


def updates(attack: str, *, statistics: bool = False) -> tuple[dict[int, np.ndarray], FedAvg, np.ndarray]:
    """Return each client's update in one round, client 0 hostile, the strategy, and the model after the round."""
    keys = Cell(IID, 3, 1, "fedavg", OFF, attack, statistics, 0).keys()
    config = load_config({**keys, "dataset": pictures(""), "num_server_rounds": 1})
    experiment = server.prepare(config, 3)
    arrays = experiment.initial_arrays()
    found: dict[int, np.ndarray] = {}
    strategy = experiment.strategy
    assert isinstance(strategy, FedAvg)
    strategy.run_options.on_client_model = lambda client, model: found.update(
        {client: model - strategy.session.model}
    )
    grid = HostileGrid(3, ATTACKS.get(attack), [0], 0)
    result = strategy.start(grid, arrays, 1, 1e9, server.task_config(experiment))
    grid.trainer.close()
    return found, strategy, strategy.session.run.layout.to_vector(result.arrays)


@pytest.fixture(scope="module")
def honest() -> dict[int, np.ndarray]:
    return updates("honest")[0]


@pytest.mark.parametrize("attack", [name for name, each in ATTACKS.items() if not each.statistics])
def test_a_hostile_client_sends_what_its_attack_says_and_the_others_their_updates(attack, honest):
    found, strategy, _ = updates(attack)
    for client in (1, 2):
        assert np.array_equal(found[client], honest[client])
    own, true = found.get(0), honest[0]
    if attack == "silent":
        assert own is None
        return
    factor = {"reversed-1": -1, "reversed-5": -5, "reversed-10": -10, "sizes": -10, "drift": -DRIFT}
    if attack in factor:
        assert own == pytest.approx(factor[attack] * true, rel=1e-4, abs=1e-5)
    elif attack == "constant":
        assert own + strategy.session.model == pytest.approx(np.full(len(true), CONSTANT), abs=1e-6)
    elif attack == "random":
        assert 0.9 < own.std() < 1.1
    else:
        assert 0 < np.linalg.norm(own - true) < 3 * np.linalg.norm(true)
    size = strategy.session.clients[0].num_examples
    assert (size == FALSE_SIZE) == (attack == "sizes")


def test_false_statistics_are_in_the_buffers_alone():
    _, strategy, false = updates("statistics", statistics=True)
    true = updates("honest", statistics=True)[2]
    at = strategy.session.run.buffers.positions[~strategy.session.run.buffers.counters]
    rest = np.setdiff1d(np.arange(len(true)), at)
    assert np.array_equal(false[rest], true[rest])
    # A third of the mean is false.
    assert false[at] == pytest.approx(np.full(len(at), FALSE_STATISTICS / 3), rel=1e-2)


def test_the_command_runs_what_is_missing_and_writes_table_and_figure(tmp_path):
    pattern = "iid/5/1/fedavg/o*/[hr]*e[sd]*/0"  # honest, and reversed
    arguments = ["--out", str(tmp_path), "--jobs", "1", "--only", pattern]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "attacks.png").stat().st_size > 0
    written = (tmp_path / runs.FILE).read_text()
    rows = {row.attack: row for row in table.rows_of(runs.read(tmp_path / runs.FILE)) if not row.statistics}
    assert rows["reversed-10"].lost("off") > 60 > 15 > rows["reversed-10"].lost("on")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / runs.FILE).read_text() == written


def test_means_of_a_row_are_over_the_same_seeds():
    def of(mode: str, attack: str, *accuracies: float) -> dict[Cell, float]:
        return {
            Cell(IID, 5, 1, "fedavg", mode, attack, statistics=False, seed=seed): accuracy
            for seed, accuracy in enumerate(accuracies)
        }

    honest = of(OFF, HONEST, 0.9, 0.5, 0.7) | of(ON, HONEST, 0.9, 0.5)
    only, attacked = table.rows_of(honest | of(ON, "drift", 0.8))
    assert (only.seeds, only.lost(ON)) == (2, 0.0)
    assert (attacked.seeds, attacked.lost(ON)) == (1, pytest.approx(10.0))
    assert (
        table.rows_of(of(OFF, HONEST, 0.9) | of(ON, HONEST, 0.9) | dict([of(ON, "drift", 1, 1).popitem()]))[
            1:
        ]
        == []
    )


def test_what_the_command_can_not_do_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "own"
    for arguments, said in (
        (
            ["--only", "fedavg"],
            "--only 'fedavg': no run has such a name; they are called like iid/5/1/fedavg/",
        ),
        (["--out", str(place)], f"--out: [Errno 20] Not a directory: '{place}'"),
    ):
        done = CliRunner().invoke(app, ["--out", str(tmp_path / "own"), *arguments])
        assert done.exit_code == 1
        assert done.output.startswith(f"error: {said}")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("method", "attack"),
    [("scaffold", "reversed-10"), ("scaffold", "sizes"), ("feddyn", "reversed-10"), ("fedavg", "sizes")],
)
def test_safeguards_leave_what_methods_keep_of_a_liar_near_the_others(method, attack):
    honest, attacked = (
        accuracy(Cell(IID, 5, 1, method, ON, each, statistics=False, seed=0), "") for each in (HONEST, attack)
    )
    unguarded = accuracy(Cell(IID, 5, 1, method, OFF, attack, statistics=False, seed=0), "")
    assert 100 * (honest - attacked) < MOST_BY_ATTACK < 100 * (honest - unguarded)


def test_the_committed_table_and_the_page_follow_from_the_committed_runs(tmp_path):
    found = runs.read(RESULTS / runs.FILE)
    assert set(found) == set(cells())
    rows = table.rows_of(found)
    table.write_table(tmp_path / table.FILE, rows)
    assert (tmp_path / table.FILE).read_text() == (RESULTS / table.FILE).read_text()
    page = (ROOT / "docs" / "protection.md").read_text("utf-8")
    assert table.in_words(rows) in page
    assert table.verdict(rows) in " ".join(page.split())
