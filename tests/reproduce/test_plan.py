"""From an experiment's file to its runs."""

import pytest

from fedapp.config import ConfigError
from fedapp.reproduce.plan import STORED, folder_of_plans, plan_names, read_plan


def test_a_grid_is_every_combination_with_the_last_axis_fastest(plan):
    grid = {
        "seed": [0, 1],
        "rate": [{"label": "slow", "lr": 0.1, "local-epochs": 2}, {"label": "fast", "lr": 0.2}],
    }
    runs = plan(grid=grid).runs()
    assert [dict(run.labels) for run in runs] == [
        {"seed": 0, "rate": "slow"},
        {"seed": 0, "rate": "fast"},
        {"seed": 1, "rate": "slow"},
        {"seed": 1, "rate": "fast"},
    ]
    assert [(run.config.seed, run.config.lr, run.config.local_epochs) for run in runs] == [
        (0, 0.1, 2), (0, 0.2, 1), (1, 0.1, 2), (1, 0.2, 1),
    ]  # fmt: skip
    assert {run.num_clients for run in runs} == {3}


def test_quick_replaces_axes_and_wins_over_all_else(plan):
    grid = {"seed": [0, 1], "lr": [0.1, 0.2]}
    quick = {"note": "less", "base": {"num-server-rounds": 1, "num-clients": 2}, "grid": {"seed": [7]}}
    runs = plan(grid=grid, quick=quick).runs(quick=True)
    found = [(run.config.seed, run.config.lr, run.config.num_server_rounds, run.num_clients) for run in runs]
    assert found == [(7, 0.1, 1, 2), (7, 0.2, 1, 2)]


def test_a_run_is_named_by_what_it_computes(plan):
    def names(**base):
        return {run.name for run in plan(base={**plan().base, **base}).runs()}

    usual = names()
    assert names(lr=0.1) == usual  # 0.1 is the default
    assert names(**{"checkpoint-every": 5}) == usual  # how a run is kept
    assert not names(lr=0.2) & usual
    assert not names(**{"num-clients": 4}) & usual


def test_two_experiments_with_the_same_run_name_it_alike(plan):
    as_axis = plan(grid={"lr": [0.3]}).runs()[0]
    as_base = plan(grid={"lr": [{"label": "x", "lr": 0.3}]}).runs()[0]
    assert as_axis.name.rpartition("-")[2] == as_base.name.rpartition("-")[2]


def test_data_path_goes_to_the_datasets_that_are_read_from_files(plan):
    runs = plan(grid={"dataset": ["digits", "mnist"]}).runs(data_path="/data")
    assert [run.config.data_path for run in runs] == ["", "/data"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": {"num-clients": 0}}, "num-clients = 0: must be a whole number >= 1"),
        ({"base": {}}, "num-clients = 0: must be"),
        ({"grid": {"learning-rate": [1.0]}}, "unknown key 'learning-rate'"),
        ({"grid": {"lr": [-1.0]}}, "lr = -1.0: must be a number > 0"),
    ],
)
def test_a_run_that_is_not_possible_is_named_before_anything_runs(plan, changes, message):
    base = (
        {**plan().base, **changes.get("base", {})}
        if changes.get("base")
        else changes.get("base", plan().base)
    )
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        plan(**{**changes, "base": base}).runs()


def test_a_file_with_unknown_keys_is_refused(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('title = "x"\nsource = "y"\nreport = "z:f"\nsweep = 1\n[quick]\nnote = ""\n')
    with pytest.raises(ConfigError, match="sweep"):
        read_plan(str(path))
    path.write_text("title =")
    with pytest.raises(ConfigError, match="not TOML"):
        read_plan(str(path))
    path.write_text('title = "x"\n[base]\nseed = 1\n[quick.base]\nseed = 2\nseed = 3\n')
    with pytest.raises(ConfigError, match=r"x\.toml: seed is given twice, as 2 and 3$"):
        read_plan(str(path))
    with pytest.raises(ConfigError, match=r"NAME = .nothing.: allowed are .*003-table-4-2"):
        read_plan("nothing")


@pytest.mark.parametrize("name", list(plan_names()))
@pytest.mark.parametrize("quick", [False, True])
def test_every_experiment_that_ships_can_be_expanded(name, quick):
    plan = read_plan(name)
    runs = plan.runs(quick=quick, data_path="/data") if not plan.is_study else []
    assert plan.is_study or runs
    assert len({run.name for run in runs}) == len(runs)
    assert {run.config.data_path for run in runs if run.config.dataset in STORED} <= {"/data"}


def test_every_published_claim_is_checked_by_one_experiment():
    claims = [claim for name in plan_names() for claim in read_plan(name).claims]
    assert sorted(claims) == [
        *(f"000-{n}" for n in range(1, 6)), "001-1", *(f"002-{n}" for n in range(1, 5)),
        *(f"003-{n}" for n in range(1, 5)), "004-1",
    ]  # fmt: skip


def test_the_published_table_has_all_of_its_32_cells():
    lines = (folder_of_plans() / "003-table-4-2.csv").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(("#", "method"))]) == 32
