"""From an experiment's file to its runs."""

import pytest

from fedapp.config import ConfigError
from fedapp.config.options import SimulationConfig
from studies.reproduce.plan import STORED, folder_of_plans, plan_names, read_plan


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
        (0, 0.1, 2),
        (0, 0.2, 1),
        (1, 0.1, 2),
        (1, 0.2, 1),
    ]
    assert {run.num_clients for run in runs} == {3}


def test_quick_replaces_axes_and_wins_over_all_else(plan):
    grid = {"seed": [0, 1], "lr": [0.1, 0.2]}
    quick = {
        "note": "less",
        "settings": {"b": 3},
        "base": {"num-server-rounds": 1, "num-clients": 2},
        "grid": {"seed": [7]},
    }
    small = plan(grid=grid, quick=quick, settings={"a": 1, "b": 2}).as_quick()
    runs = small.runs()
    found = [(run.config.seed, run.config.lr, run.config.num_server_rounds, run.num_clients) for run in runs]
    assert found == [(7, 0.1, 1, 2), (7, 0.2, 1, 2)]
    assert small.is_quick
    assert small.settings == {"a": 1, "b": 3}
    assert small.labels("seed") == [7]


def test_quick_wins_over_what_an_axis_sets(plan):
    grid = {"case": [{"label": "long", "num-server-rounds": 9}]}
    (run,) = plan(grid=grid, quick={"note": "", "base": {"num-server-rounds": 1}}).as_quick().runs()
    assert run.config.num_server_rounds == 1


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
    assert as_axis.key == as_base.key
    assert as_axis.name != as_base.name
    assert as_axis.name.endswith(as_axis.key)


def test_data_path_goes_to_the_datasets_that_are_read_from_files(plan):
    inside = {"label": "inside", "dataset": "synthetic", "data-path": "theirs"}
    runs = plan(grid={"dataset": ["digits", "mnist", inside]}).runs("/data")
    assert [run.config.data_path for run in runs] == ["", "/data", "/data/theirs"]


def test_runs_without_a_number_of_clients_have_that_of_a_single_run(plan):
    assert {run.num_clients for run in plan(base={}).runs()} == {SimulationConfig().num_supernodes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": {"num-clients": 0}}, "num-clients = 0: must be a whole number >= 1"),
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
    head = 'title = "x"\nsource = "y"\nreport = "z:f"\n[quick]\nnote = ""\n[claims.1]\ntext = "t"\n'
    path.write_text(head + 'rule = "below {limit}"\nthresholds = { limt = 1 }\n')
    with pytest.raises(ConfigError, match=r"KeyError.*limit.* is no threshold"):
        read_plan(str(path))
    path.write_text("title =")
    with pytest.raises(ConfigError, match="not TOML"):
        read_plan(str(path))
    path.write_text('title = "x"\n[base]\nseed = 1\n[quick.base]\nseed = 2\nseed = 3\n')
    with pytest.raises(ConfigError, match=r"x\.toml: seed is given twice, as 2 and 3$"):
        read_plan(str(path))
    with pytest.raises(ConfigError, match=r"NAME = .nothing.: allowed are .*003-table-4-2"):
        read_plan("nothing")


def test_reports_take_numbers_from_the_plan_or_say_what_is_missing(plan):
    made = plan(
        claims={"1-a": {"text": "t", "rule": "≤ {most}, {of}", "thresholds": {"most": 2, "of": ["x", "y"]}}}
    )
    assert made.threshold("1-a", "most") == 2
    assert made.claims["1-a"].filled_rule() == "≤ 2, x; y"
    assert made.parts("1") == made.parts("1-a") == ["1-a"]
    assert plan().parts("1") == []
    with pytest.raises(ConfigError, match=r"claims\.1-a\.thresholds\.least: missing in the file of 'A test'"):
        made.threshold("1-a", "least")
    with pytest.raises(ConfigError, match=r"claims\.2\.thresholds\.most: missing"):
        made.threshold("2", "most")
    with pytest.raises(ConfigError, match=r"settings\.seeds: missing"):
        made.setting("seeds")


@pytest.mark.parametrize("name", list(plan_names()))
@pytest.mark.parametrize("quick", [False, True])
def test_every_experiment_that_ships_can_be_expanded(name, quick):
    plan = read_plan(name)
    runs = (plan.as_quick() if quick else plan).runs("/data")
    assert plan.is_study or runs
    assert len({run.name for run in runs}) == len(runs)
    assert {run.config.data_path for run in runs if run.config.dataset in STORED} <= {"/data"}


def test_every_published_claim_is_checked_by_one_experiment():
    claims = [claim for name in plan_names() for claim in read_plan(name).claims]
    assert len(set(claims)) == len(claims)
    assert {"-".join(claim.split("-")[:2]) for claim in claims} == {
        *(f"000-{n}" for n in range(1, 6)),
        "001-1",
        *(f"002-{n}" for n in range(1, 5)),
        *(f"003-{n}" for n in range(1, 5)),
        "004-1",
        "004-2",
        "fedprox-1",
        "fedprox-2",
        "scaffold-1",
        "fedbuff-1",
        "fedbuff-2",
        "flgo-1",
        "niid-1",
        "niid-2",
        "flamby-c",
        "flamby-order",
        # of this project's own
        "buffer-size",
        "fedfix-auto",
        "graph-sources",
    }


def test_the_published_table_has_all_of_its_32_cells():
    lines = (folder_of_plans() / "003-table-4-2.csv").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(("#", "method"))]) == 32
