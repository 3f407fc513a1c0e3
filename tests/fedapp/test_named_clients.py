"""Natural ids, device names and class names, wherever a run names a client or a class."""

import json

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.api.command import parser_of
from fedapp.api.command import run as run_command
from fedapp.api.look import _division
from fedapp.api.values import as_values
from fedapp.cli import app
from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns
from fedapp.report import gantt
from fedapp.report.client_tables import ClientsFile, TasksFile, names_of_clients
from fedapp.report.page.content import page_content
from fedapp.report.runs import client_tables_of
from fedapp.sorting import naturally_sorted
from fedapp.sweeps.point import PlannedRun
from tests.runs import summary_of

SITES = ["Zürich", "Genève", "basel", "Hospital 10", "Hospital 2"]
SORTED = ["basel", "Genève", "Hospital 2", "Hospital 10", "Zürich"]
GRADES = ["grade 1", "grade 2", "grade 10"]


def hospitals(rows: int = 200) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    age = rng.normal(60, 10, rows)
    grade = np.array(GRADES)[np.digitize(age + rng.normal(0, 3, rows), [55, 65])]
    return pd.DataFrame({"age": age, "grade": grade, "site": [SITES[row % 5] for row in range(rows)]})


@pytest.fixture
def run(tmp_path):
    """A short run over the five hospitals."""
    return fedapp.run(
        dataset=hospitals(),
        label_column="grade",
        group_column="site",
        partitioner="natural",
        num_clients=5,
        test_on="own",
        normalize="standardize",
        model="logistic",
        metrics="auroc",
        lr=0.5,
        num_server_rounds=3,
        results_dir=str(tmp_path),
        quiet=True,
    )


def test_all_natural_clients_take_part_by_default(tmp_path, capsys):
    hospitals().rename(columns={"grade": "label"}).to_csv(tmp_path / "t.csv", index=False)
    given = {"dataset": "files", "data_path": str(tmp_path / "t.csv"), "group_column": "site"}
    tiny = {"partitioner": "natural", "model": "logistic", "num_server_rounds": 1, "lr": 1e-4}
    made = fedapp.run(**given, **tiny, test_on="own", results_dir=tmp_path / "python", quiet=True)
    assert made.summary["num-clients"] == 5
    counted = _division({key.replace("_", "-"): value for key, value in {**given, **tiny}.items()}, None)[2]
    assert counted.num_clients == 5
    planned = PlannedRun.of({}, as_values({**given, **tiny, "test_on": "own"}))
    assert planned.num_clients == 5
    keys = [
        f"{key.replace('_', '-')}={value}" for key, value in {**given, **tiny}.items() if key != "figures"
    ]
    assert command(*keys, f"results-dir={tmp_path / 'command'}", "test-on=unseen-clients") == 0
    (run,) = (tmp_path / "command").iterdir()
    assert summary_of(run)["num-clients"] == 4  # one of five, round(0.2 * 5), is there to test on
    assert command(*keys, "num-clients=6") == 1
    assert capsys.readouterr().err.startswith(
        "error: num-clients = 6: 'files' has 5 natural clients with at least"
    )
    assert command(*keys, "--federation-config", "num-supernodes=6") == 1
    assert capsys.readouterr().err.startswith("error: num-supernodes = 6: 'files' has 5 natural clients")


def test_a_model_file_that_is_cut_off_is_one_line(run):
    file = run.path / "model.safetensors"
    for size in (file.stat().st_size // 2, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(DataError, match=r"model.safetensors: is no whole model file \(") as error:
            run.model()
        assert "\n" not in str(error.value)


def command(*given: str) -> int:
    return run_command(parser_of(None, "").parse_args(list(given)))


def test_names_are_sorted_as_people_sort_them():
    assert naturally_sorted(SITES) == SORTED
    assert naturally_sorted(["lr=0.1", "lr=0.03", "lr=1", "lr=0.125"]) == [
        "lr=0.03",
        "lr=0.1",
        "lr=0.125",
        "lr=1",
    ]
    assert naturally_sorted(["é", "e", "E", "f", "10", "9", "1.5"]) == ["1.5", "9", "10", "E", "e", "é", "f"]


def test_classes_clients_and_texts_are_in_that_order(tmp_path):
    hospitals().assign(label=lambda frame: frame["grade"]).to_csv(tmp_path / "t.csv", index=False)
    columns = DataColumns(label="label", group="site", inputs="age,grade", encode=True)
    data = load_dataset("files", str(tmp_path / "t.csv"), columns=columns)
    assert data.classes == tuple(GRADES)
    assert data.group_names == tuple(SORTED)
    assert data.groups[:5].tolist() == [4, 1, 0, 3, 2]
    assert data.columns == ("age", *(f"grade={grade}" for grade in GRADES))
    assert data.encoded == (("grade", tuple(GRADES)),)


def test_folders_and_tables_of_a_folder_are_in_that_order(tmp_path):
    for number in (1, 2, 10):
        pd.DataFrame({"x": [float(number)], "label": [0]}).to_csv(
            tmp_path / f"site {number}.csv", index=False
        )
    data = load_dataset("files", str(tmp_path))
    assert (data.group_names, data.x.ravel().tolist()) == (("site 1", "site 2", "site 10"), [1, 2, 10])


def test_a_run_names_its_clients_and_classes_in_its_files(run):
    clients = run.clients
    last = clients[clients["aggregation"] == 3]
    assert last["name"].tolist() == SORTED
    assert last["auroc"].between(0.6, 1).all()
    with np.load(run.path / "partition.npz", allow_pickle=False) as stored:
        assert stored["client_names"].tolist() == SORTED
        assert stored["class_names"].tolist() == GRADES
    assert names_of_clients(run.path) == dict(enumerate(SORTED))


def test_clients_that_are_only_tested_on_are_named(tmp_path):
    hospitals().rename(columns={"grade": "label"}).to_csv(tmp_path / "t.csv", index=False)
    keys = [f"data-path={tmp_path / 't.csv'}", "dataset=files", "group-column=site", "partitioner=natural"]
    keys += ["test-on=unseen-clients", "test-fraction=0.4", "num-clients=3"]
    given = [*keys, "model=logistic", "num-server-rounds=1", f"results-dir={tmp_path / 'results'}"]
    assert command(*given) == 0
    (run,) = (tmp_path / "results").iterdir()
    with np.load(run / "partition.npz", allow_pickle=False) as stored:
        trained, tested = stored["client_names"].tolist(), stored["test_client_names"].tolist()
        first = stored["test_indices"][stored["test_offsets"][:-1]]
    assert (len(trained), len(tested)) == (3, 2)
    assert sorted([*trained, *tested]) == sorted(SITES)
    assert [SITES[row % 5] for row in first] == tested
    line = f"tested on clients that don't train: {', '.join(tested)}\n"
    assert line in (run / "log.txt").read_text("utf-8")
    done = CliRunner().invoke(app, ["partition", *keys, "-o", str(tmp_path / "partition.png")])
    assert line in done.output


def test_the_tables_and_the_page_name_them(run):
    (table,) = client_tables_of(run.path)
    assert table.title == "each client, on its test rows"
    assert list(map(str, table.columns[0].cells)) == SORTED
    assert [column.header for column in table.columns] == ["client", "auroc", "loss"]
    (shown,) = page_content([run.path])["runs"]
    assert shown["clients"]["names"] == shown["partition"]["names"] == SORTED
    assert shown["partition"]["classes"] == GRADES
    json.dumps(shown)


@pytest.mark.figures
def test_the_figures_name_them(monkeypatch, run):
    from fedapp.report import by_client, figures

    drawn: list[matplotlib.figure.Figure] = []
    for module in (figures, gantt, by_client):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure) or path)
    dataset = fedapp.federation.dataset_of(run.config, 5)
    figures.draw_partition(run.path, dataset.strata, dataset.num_strata)
    gantt.draw_timeline(run.path)
    by_client.draw_by_client(run.path)
    partition, timeline, clients = drawn
    assert [label.get_text() for label in partition.axes[0].get_xticklabels()] == SORTED
    legend = [text.get_text() for text in partition.axes[0].get_legend().get_texts()]
    assert sorted(legend) == sorted(GRADES)
    assert [label.get_text() for label in timeline.axes[1].get_yticklabels()] == SORTED
    below = [label.get_text() for label in clients.axes[0].get_xticklabels()]
    last = run.clients[run.clients["aggregation"] == 3]
    assert below == last.sort_values("auroc", kind="stable")["name"].tolist()


def test_ids_that_are_numbers_are_names_unless_they_count_from_0(tmp_path):
    frame = hospitals(100)
    keys = {
        "label_column": "grade",
        "group_column": "ward",
        "partitioner": "natural",
        "num_clients": 4,
        "normalize": "standardize",
        "model": "logistic",
        "lr": 0.5,
        "num_server_rounds": 1,
        "results_dir": str(tmp_path),
        "quiet": True,
    }
    frame = frame.drop(columns="site")
    wards = fedapp.run(dataset=frame.assign(ward=np.arange(100) % 4 * 7 + 3), **keys)
    assert names_of_clients(wards.path) == {0: "3", 1: "10", 2: "17", 3: "24"}
    counted = fedapp.run(dataset=frame.assign(ward=np.arange(100) % 4), **keys)
    assert names_of_clients(counted.path) == {}


def test_a_deployments_timeline_has_the_names_of_its_devices(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text('strategy = "fedavg"\nclock = "wall"\n')
    clients = ClientsFile(tmp_path)
    clients.append(1, 1.0, {"loss": [1.0, 2.0]}, {0: "basel", 1: "bern"})
    clients.publish(last=True)
    tasks = TasksFile(tmp_path)
    tasks.add([(index, 0.0, 1.0, 0.0, 1.0, "accepted", None, None) for index in (0, 1)])
    tasks.publish(last=True)
    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(gantt, "save", lambda figure, path: drawn.append(figure) or path)
    gantt.draw_timeline(tmp_path)
    assert [label.get_text() for label in drawn[0].axes[1].get_yticklabels()] == ["basel", "bern"]
