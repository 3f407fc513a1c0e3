"""curves.parquet: what of a run's folder goes into it, and what comes out again."""

import json
import math

import numpy as np
import pytest
import tomli_w
from pyarrow import parquet

from fedapp.config import RunConfig
from fedapp.report.client_tables import ClientsFile
from fedapp.server.journal import machine
from fedapp.sweeps.point import PlannedRun, is_finished
from studies.reproduce import store
from studies.reproduce.runs import Curves, Run
from studies.reproduce.store import Stored, read_folder, read_stored, write_stored


def write_folder(path, records):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    summary = {"status": "finished", "engine": "sequential", "wall-seconds": 1.5, "clients": [1, 2]}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "config.toml").write_text(tomli_w.dumps({"versions": {"python": "3"}}))
    return PlannedRun({"seed": 0}, RunConfig.load({}), 2)


def test_a_folder_is_read_into_columns_and_facts(tmp_path):
    records = [
        {"aggregation": 0, "time": 0.0, "clock": "virtual", "loss": 2.0},
        {"aggregation": 1, "time": 1.5, "clock": "virtual", "loss": None, "accuracy": 0.5},
    ]
    planned = write_folder(tmp_path / "run", records)
    assert is_finished(tmp_path / "run")
    curves = read_folder(planned, tmp_path / "run")
    assert set(curves.columns) == {"aggregation", "time", "loss", "accuracy"}
    np.testing.assert_array_equal(curves.columns["loss"], [2.0, math.nan])
    np.testing.assert_array_equal(curves.columns["accuracy"], [math.nan, 0.5])
    facts = {key: curves.facts[key] for key in ("engine", "wall-seconds", "evaluations", "versions")}
    assert facts == {
        "engine": "sequential",
        "wall-seconds": 1.5,
        "evaluations": 2,
        "versions": {"python": "3"},
    }
    assert "clients" not in curves.facts


def test_a_run_was_made_where_it_says_and_not_where_it_is_read(tmp_path):
    planned = write_folder(tmp_path / "run", [{"aggregation": 0, "time": 0.0, "loss": 1.0}])
    facts = read_folder(planned, tmp_path / "run").facts
    assert facts["machine"] == machine()  # one of before says nothing
    path = tmp_path / "run" / "summary.json"
    said = {"date": "2020-02-02", "machine": "an abacus"}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    facts = read_folder(planned, tmp_path / "run").facts
    assert {key: facts[key] for key in said} == said


def test_a_run_that_exploded_has_no_metrics_and_ended_early(tmp_path):
    records = [
        {"aggregation": 0, "time": 0.0, "accuracy": 0.1},
        {"aggregation": 1, "time": 1.0, "accuracy": 0.99},  # an excellent one, before it exploded
    ]
    planned = write_folder(tmp_path / "run", records)
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text()) | {"status": "diverged"}
    for complete, expected in ((True, [0.1, 0.99]), (False, [math.nan, math.nan])):
        path.write_text(json.dumps({**summary, "complete": complete}))
        run = Run(planned, read_folder(planned, tmp_path / "run"))
        np.testing.assert_array_equal(run.column("accuracy"), expected)
        np.testing.assert_array_equal(run.column("time"), [0.0, 1.0])
        assert run.exploded is not complete
    assert run.rounds_within(0.5) == planned.config.num_server_rounds + 1


def test_the_surrogate_objective_weighs_clients_by_how_often_they_answer(tmp_path):
    # τ = 0.25 and 1: shares 4/5 and 1/5; mean 0.8 · 1 + 0.2 · 6 = 2, variance 0.8 · 1² + 0.2 · 4² = 4.
    records = [
        {"aggregation": 0, "time": 0.0},
        {"aggregation": 1, "time": 1.0},
    ]
    planned = write_folder(tmp_path / "run", records)
    file = ClientsFile(tmp_path / "run")
    file.append(1, 1.0, {"loss": [1.0, 6.0], "task-time": [0.25, 1.0]}, {})
    file.publish(last=True)
    columns = read_folder(planned, tmp_path / "run").columns
    np.testing.assert_allclose(columns["hardware-loss"], [np.nan, 2.0])
    np.testing.assert_allclose(columns["hardware-loss-std"], [np.nan, 2.0])


def stored_runs(*lengths):
    rng = np.random.default_rng(0)
    curves = {
        f"k{number}": Curves(
            f"run-{number}",
            {
                "aggregation": np.arange(length),
                "time": rng.random(length),
                f"metric-{number}": rng.random(length),
            },
            {"evaluations": length, "wall-seconds": 1.0},
        )
        for number, length in enumerate(lengths)
    }
    seeds = {key: 40 + at for at, key in enumerate(curves)}
    return Stored(curves, seeds, {"ζ": [1.5, None]}, {"date": "d"}, {"x": "y"})


def test_a_file_gives_back_what_was_put_in(tmp_path):
    stored = stored_runs(3, 5)
    path = tmp_path / store.FILE
    write_stored(path, stored)
    back = read_stored(path)
    assert (back.numbers, back.measured, back.absent, back.seeds) == (
        stored.numbers,
        stored.measured,
        stored.absent,
        {"k0": 40, "k1": 41},
    )
    for key, curves in stored.curves.items():
        assert (back.curves[key].name, back.curves[key].facts) == (curves.name, curves.facts)
        assert back.curves[key].columns.keys() == curves.columns.keys()
        for name, values in curves.columns.items():
            np.testing.assert_array_equal(back.curves[key].columns[name], values)
    schema = parquet.read_schema(path)
    assert schema.names == ["run", "seed", "aggregation", "time", "metric-0", "metric-1"]
    assert not back.changed_from(stored)


def test_no_file_and_no_runs(tmp_path):
    assert read_stored(tmp_path / "none.parquet") == Stored()
    write_stored(tmp_path / store.FILE, Stored(numbers={"a": 1}))
    assert read_stored(tmp_path / store.FILE).numbers == {"a": 1}


def test_metadata_of_files_before_they_were_compressed_are_read(tmp_path, monkeypatch):
    path, stored = tmp_path / store.FILE, stored_runs(30)
    write_stored(path, stored)
    compressed = path.stat().st_size
    monkeypatch.setattr(store, "_packed", str.encode)
    stored.numbers = {"many": ["the same"] * 1000}
    write_stored(path, stored)
    assert path.stat().st_size > compressed + 5000
    assert read_stored(path).numbers == stored.numbers


@pytest.mark.parametrize("change", ["numbers", "absent", "sources", "name"])
def test_what_has_changed_is_written(change):
    before, after = stored_runs(2), stored_runs(2)
    if change == "name":
        after.curves["k0"] = Curves("renamed", after.curves["k0"].columns, after.curves["k0"].facts)
    else:
        setattr(after, change, {"new": 1})
    assert after.changed_from(before)
