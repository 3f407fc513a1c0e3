"""``fedapp look`` and ``fedapp partition``: data and their division before any training."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from examples.hospitals import SITES, patients
from fedapp.cli import app
from fedapp.data import DataError
from fedapp.data.dataset import DataColumns
from fedapp.data.facts.look import look_at_images, look_at_table

GUESS = DataColumns(label="")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, args)))
    return done.exit_code, done.output


def test_a_hospitals_table_is_described_and_gets_a_config(here):
    table = patients(400, seed=3)
    table["pulse"] = table["pulse"].astype(object)
    table.loc[:4, "pulse"] = "?"
    table.loc[5:8, "crp"] = -999
    table.to_csv("t.csv", index=False)
    found = look_at_table(Path("t.csv"), GUESS)
    by_name = {each.name: each for each in found.columns}
    assert [(each.name, each.kind, each.role) for each in found.columns] == [
        ("patient", "text", "dropped"),
        ("admitted", "date", "dropped"),
        ("site", "text", "site"),
        ("age", "number", "input"),
        ("sex", "text", "input"),
        ("smoker", "text", "input"),
        ("crp", "number", "input"),
        ("pulse", "number", "input"),
        ("died", "text", "label"),
    ]
    assert by_name["smoker"].gaps == table["smoker"].isna().sum()
    assert by_name["pulse"].gaps == table["pulse"].isna().sum() + 5
    assert (by_name["pulse"].markers, by_name["crp"].markers) == (["?"], ["-999"])
    assert "cells are numbers, 5 are '?'" in by_name["pulse"].notes[0]
    assert "4 of 362 cells are -999, far from the others" in by_name["crp"].notes[0]
    assert by_name["age"].holds == f"{table['age'].min():g} to {table['age'].max():g}"
    assert found.sites == {
        name: (table["site"] == name).sum() for name in (*sorted(SITES[1:3]), *SITES[3:])
    } | {"Genève": (table["site"] == "Genève").sum()}
    assert list(found.sites) == ["Basel", "Genève", "Hospital 2", "Hospital 10", "Zürich"]
    assert found.classes == table["died"].value_counts().sort_index().to_dict()
    assert found.keys == {
        "dataset": "files",
        "data-path": "t.csv",
        "label-column": "died",
        "group-column": "site",
        "drop-column": "patient,admitted",
        "missing-values": "-999,?",
        "missing": "mean",
        "encode": True,
        "normalize": "standardize",
        "partitioner": "natural",
        "test-on": "own",
        "metrics": "auroc,accuracy",
        "model": "mlp",
    }


def test_the_command_writes_the_config_and_the_picture_and_the_run_takes_it(here):
    patients(300, seed=3).to_csv("t.csv", index=False)
    code, shown = command("look", "t.csv", "-o", "t.toml")
    assert code == 0, shown
    assert "no division" not in shown
    with Image.open("t.png") as image:
        assert image.size[0] == 1200
    config = tomllib.loads(Path("t.toml").read_text("utf-8"))
    assert (config["partitioner"], config["label-column"]) == ("natural", "died")
    assert "num-clients" not in config
    for name in ("Basel", "Genève", "Hospital 2", "Hospital 10", "Zürich"):
        assert name in shown
    assert command("run", "t.toml", "num-server-rounds=1", "figures=false", "run-name=r")[0] == 0
    code, shown = command("look", "t.csv", "-o", "t.toml")
    assert (code, shown) == (
        1,
        "error: --out = 't.toml': is there already, and is kept; another name is needed\n",
    )
    before = sorted(here.iterdir())
    code, shown = command(
        "look", "t.csv", "label-column=smoker", "partitioner=iid", "num-clients=3", "missing=drop"
    )
    assert (code, sorted(here.iterdir())) == (0, before)  # without --out nothing is written
    assert "iid: 3 clients" in shown


def test_what_cannot_be_guessed_is_asked_for(here):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "number": range(100),
            "a": rng.normal(size=100),
            "b": 1.0,
            "day": "2024-05-06",
            "c": rng.normal(size=100),
        }
    )
    table.to_csv("t.csv", index=False)
    found = look_at_table(Path("t.csv"), GUESS)
    assert [(each.name, each.role) for each in found.columns] == [
        ("number", "dropped"),
        ("a", "input"),
        ("b", "dropped"),
        ("day", "dropped"),
        ("c", "label"),
    ]
    assert found.keys["loss"] == "mse"
    assert "partitioner" not in found.keys
    table.assign(y=1.5, label=table["a"] > 0).to_csv("u.csv", index=False)
    assert look_at_table(Path("u.csv"), GUESS).keys["label-column"] == "label"
    with pytest.raises(DataError, match=r"label-column = 'd': t\.csv has no such column"):
        look_at_table(Path("t.csv"), DataColumns(label="d"))


def test_gaps_in_labels_and_sites_and_a_site_of_one_row_leave_a_config_that_runs(here):
    table = patients(120, seed=3)
    table.loc[:4, "died"] = None
    table.loc[5:7, "site"] = None
    table.loc[8, "site"] = "Lonely"
    table.to_csv("t.csv", index=False)
    code, shown = command("look", "t.csv", "-o", "t.toml")
    assert code == 0, shown
    assert "no division" not in shown
    assert "8 of 120 rows have an empty cell (died: 5, site: 3) and are left out" in shown
    assert "1 row is in no client and goes unused, all rows of Lonely" in shown
    assert command("run", "t.toml", "num-server-rounds=1", "figures=false", "run-name=r")[0] == 0


def test_two_whole_numbers_below_0_are_no_targets_of_a_regression(here):
    pd.DataFrame({"a": np.arange(40) % 7, "label": np.arange(40) % 2 * 2 - 1}).to_csv("t.csv", index=False)
    code, shown = command("look", "t.csv")
    assert code == 0
    assert "loss =" not in shown
    assert "column 'label' has a label below 0; whole numbers from 0 are needed" in shown


def test_tables_of_a_folder_are_sites(here):
    for number in (10, 9):
        patients(40, seed=number).drop(columns="site").to_csv(here / f"clinic {number}.csv", index=False)
    found = look_at_table(here, DataColumns(label="died"))
    assert (found.rows, list(found.sites.items())) == (80, [("clinic 9", 40), ("clinic 10", 40)])


def test_a_folder_of_images_is_described_with_all_that_is_damaged(here):
    rng = np.random.default_rng(0)
    for name, number, shape in (("cat 2", 5, (8, 6)), ("cat 10", 4, (8, 6, 3)), ("dog", 2, (9, 9))):
        (here / "data" / name).mkdir(parents=True)
        for place in range(number):
            Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(here / "data" / name / f"{place}.png")
    (here / "data" / "empty").mkdir()
    for name in ("cat 2/bad.png", "dog/worse.jpg"):
        (here / "data" / name).write_bytes(b"no image")
    turned = Image.fromarray(rng.integers(0, 256, (8, 6, 3), np.uint8))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(here / "data" / "dog" / "turned.jpg", exif=exif)
    found = look_at_images(here / "data")
    assert list(found.classes.items()) == [("cat 2", 5), ("cat 10", 4), ("dog", 3), ("empty", 0)]
    assert [file.name for file in found.damaged] == ["bad.png", "worse.jpg"]
    assert found.turned == 1
    assert found.keys["image-mode"] == "colour"
    code, shown = command("look", "data")
    assert code == 0
    assert "2 images can't be read: cat 2/bad.png, dog/worse.jpg" in shown
    assert "1 class folders have no image that can be read: empty" in shown
    assert "8x6 grey 5" in shown


def test_a_partition_is_shown_without_training(here):
    code, shown = command("partition", "dataset=digits", "num-clients=4", "partitioner=iid", "-o", "p.png")
    assert code == 0, shown
    assert "iid: 4 clients, 1,438 rows to train on, 359 to test on" in shown
    assert [path.name for path in here.iterdir()] == ["p.png"]
    patients(300, seed=3).to_csv("t.csv", index=False)
    keys = ["dataset=files", "data-path=t.csv", "label-column=died", "input-column=age", "group-column=site"]
    code, shown = command("partition", *keys, "partitioner=natural", "num-clients=5", "test-on=own")
    assert code == 0, shown
    all_five = command("partition", *keys, "partitioner=natural", "test-on=own")
    assert all_five == (0, shown)
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("Genève", "Hospital"))]
    table = patients(300, seed=3)
    train_and_test = [int(number) for number in rows[0][1:3]]
    assert (rows[0][0], sum(train_and_test)) == ("Genève", (table["site"] == "Genève").sum())
    assert Path("partition.png").is_file()
    code, shown = command("partition", "dataset=digits", "num-clients=4000")
    assert (code, shown.startswith("error: num-supernodes = 4000: 'digits' has 1438 training rows")) == (
        1,
        True,
    )


def test_mistakes_are_one_line(here):
    (here / "t.xlsx").write_bytes(b"PK")
    for args, line in (
        (("look", "nowhere.csv"), "error: nowhere.csv: no such file or folder\n"),
        (
            ("look", "digits", "-o", "no/t.toml"),
            "error: --out = 'no/t.toml': the folder 'no' isn't there; it must be\n",
        ),
        (
            ("partition", "-o", "no/p.png"),
            "error: --out = 'no/p.png': the folder 'no' isn't there; it must be\n",
        ),
        (
            ("look", "digits", "num-clients=4000"),
            "error: num-supernodes = 4000: 'digits' has 1438 training rows, at least "
            "min-samples = 2 per client are needed; at most 719 clients\n",
        ),
        (
            ("look", "t.xlsx"),
            f"error: data-path = '{here / 't.xlsx'}': is in no known format; allowed: a .npz, .csv, .tsv or .parquet "
            "file, a folder of images by class, or one with a table for each client\n",
        ),
        (("look", "digits", "lr"), "error: 'lr': is not of the form KEY=VALUE, and no .toml file\n"),
        (
            ("look", "digits", "-o", "x.png"),
            "error: --out = 'x.png': the config is a TOML file; its name must end in .toml\n",
        ),
    ):
        assert command(*args) == (1, line)
