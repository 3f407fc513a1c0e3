"""What a run that goes on may be given: what it was given before, and what changes none of what was done."""

from typing import Any

import pytest

from fedapp.config import ConfigError, RunConfig
from fedapp.server import RunDirectory, prepare


@pytest.fixture
def recorded(tmp_path):
    """Leave the folder of a run of three clients, with its config.toml alone; return its path."""

    def record(*, prepared: bool = True, **given: Any) -> str:
        values = {"model": "logistic", "results-dir": str(tmp_path), **_keys(given)}
        config = RunConfig.load(values)
        directory = RunDirectory(prepare(config, 3).config if prepared else config)
        directory.write_config(3)
        directory.close()
        return str(directory.path)

    return record


def _keys(given: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in given.items()}


def again(path: str, **given: Any) -> RunConfig:
    return RunConfig.load({"resume": path, **_keys(given)})


@pytest.mark.parametrize("strategy", ["fedavg", "ace"])
def test_a_schedule_by_the_number_of_rounds_keeps_it(strategy, recorded):
    path = recorded(num_server_rounds=6, strategy=strategy, lr_schedule="cosine")
    with pytest.raises(ConfigError) as caught:
        again(path, num_server_rounds=12)
    assert str(caught.value) == (
        f"resume = {path!r}: num-server-rounds = 12 (it has 6): lr-schedule = 'cosine' is for so many rounds, and "
        f"for more another from the first on; a new run: -c {path}/config.toml with the larger number"
    )
    for same in ({}, {"num_server_rounds": 6}, {"num_server_rounds": 0}):
        assert again(path, **same).num_server_rounds == 6


@pytest.mark.parametrize(
    "keys",
    [
        {"lr_schedule": "inverse"},
        {"strategy": "fedbuff", "buffer_size": 2},
    ],
)
def test_what_does_not_may_have_more(keys, recorded):
    assert again(recorded(num_server_rounds=6, **keys), num_server_rounds=12).num_server_rounds == 12


def test_what_was_given_is_the_same_as_what_became_of_it(recorded, caplog):
    caplog.set_level("INFO", "flwr.fedapp")
    given = {"strategy": "async-fedavg", "clock": "auto", "num_server_rounds": 0, "eval_every": 5}
    path = recorded(**given)
    was = again(path)
    # F80, three clients: 1, 0.6 and 0.2 s, so in 40 s 40 + 66.7 + 200 arrivals, rounded up; 5/40 of them
    assert (was.clock, was.num_server_rounds, was.eval_every) == ("virtual", 307, 38)
    assert again(path, **given) == again(path, eval_every=5) == again(path, eval_every=38) == was
    assert [r.getMessage() for r in caplog.records if "eval-every" in r.getMessage()] == [
        "eval-every = 5: taken for what the run was given with num-server-rounds = 0, which is 38 aggregations; it "
        "goes on with these"
    ] * 2
    with pytest.raises(ConfigError, match=r"another config than eval-every = 6 \(it has 38\)"):
        again(path, eval_every=6)
    with pytest.raises(ConfigError, match=r"another config than eval-every = 5 \(it has 38\)"):
        again(path, num_server_rounds=400, eval_every=5)  # no number that 5 was scaled by
    with pytest.raises(ConfigError, match=r"another config than clock = 'wall' \(it has 'virtual'\)"):
        again(path, clock="wall")


def test_a_folder_of_hugging_face_data_is_the_same_from_where_it_was(recorded, tmp_path, monkeypatch):
    folder = f"hf:{tmp_path / 'data'}"
    path = recorded(prepared=False, dataset=folder)
    monkeypatch.chdir(tmp_path)
    assert again(path, dataset="hf:./data").dataset == folder
    for other in ("hf:./others", "hf:data"):  # the second is a name on the hub
        with pytest.raises(ConfigError, match="another config than dataset = "):
            again(path, dataset=other)


def test_a_run_on_devices_goes_on_with_those_it_had_however_many_are_waited_for(recorded):
    config = again(recorded(), min_clients=4)
    assert prepare(config, 3, on_devices=True).num_clients == 3
    with pytest.raises(ConfigError, match="min-clients = 4: there are 3 clients"):
        prepare(config, 3)
