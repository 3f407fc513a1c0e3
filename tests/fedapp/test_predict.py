"""A run's model on new rows: preparation.json, ``fedapp predict`` and ``result.predict``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import fedapp
from fedapp.cli import app
from fedapp.data import DataError
from tests import own_models
from tests.docs.pages import blocks_of

WARDS = np.array(["ICU", "Ward 2", "Ward 10"])


def patients(rows: int = 240, *, seed: int = 0) -> pd.DataFrame:
    """Measurements with gaps, words, an id, and an outcome that follows from age and ward."""
    rng = np.random.default_rng(seed)
    age, ward = rng.normal(60, 12, rows), rng.integers(0, 3, rows)
    ill = age + 15 * (ward == 0) + rng.normal(0, 5, rows) > 64
    frame = pd.DataFrame(
        {
            "patient": [f"P-{number}" for number in range(rows)],
            "age": age.round(1),
            "ward": WARDS[ward],
            "pressure": rng.normal(120, 15, rows).round(),
            "outcome": np.where(ill, "ill", "well"),
        }
    )
    frame.loc[::9, "pressure"] = np.nan
    frame.loc[4::11, "ward"] = None
    return frame


KEYS = {
    "label_column": "outcome",
    "input_column": "age,ward,pressure",
    "missing": "mean",
    "encode": True,
    "normalize": "standardize",
    "model": "logistic",
    "num_server_rounds": 4,
    "num_clients": 3,
    "lr": 0.3,
    "quiet": True,
    "figures": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on the patients' table, from a CSV file."""
    folder = tmp_path_factory.mktemp("predict")
    patients().to_csv(folder / "patients.csv", index=False)
    return fedapp.run(
        dataset="files", data_path=str(folder / "patients.csv"), results_dir=str(folder / "results"), **KEYS
    )


def by_hand(run: Path, frame: pd.DataFrame) -> np.ndarray:
    """Return the shares of the classes by NumPy alone: every number from preparation.json and the model's file."""
    told = json.loads((run / "preparation.json").read_text())
    x = []
    for row in range(len(frame)):
        inputs: list[float] = []
        for column in told["columns"]:
            cell = frame[column["name"]].iloc[row]
            if column["kind"] == "categories":
                inputs += [float(cell == each) for each in column["categories"]]
            else:
                inputs.append(column["fill"] if pd.isna(cell) else float(cell))
        x.append(inputs)
    state = {name: value.double().numpy() for name, value in load_file(run / "model.safetensors").items()}
    ready = (np.array(x) - told["mean"]) / told["deviation"]
    logits = ready @ state["1.weight"].T + state["1.bias"]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def predict(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["predict", *map(str, args)])
    if done.exit_code:  # the runner puts the text of SystemExit into the output
        return done.exit_code, "", done.output.strip()
    return 0, done.stdout.strip(), done.stderr.strip()


def test_preparation_says_how_inputs_are_made(made):
    told = json.loads((made.path / "preparation.json").read_text())
    train = patients().iloc[np.load(made.path / "partition.npz")["client_indices"]]
    age, ward, pressure = told["columns"]
    assert (age["name"], ward["name"], pressure["name"]) == ("age", "ward", "pressure")
    assert (age["kind"], ward["kind"], pressure["kind"]) == ("number", "categories", "number")
    assert ward["categories"] == ["ICU", "Ward 2", "Ward 10"]
    assert pressure["fill"] == pytest.approx(train["pressure"].mean(), rel=1e-6)
    shares = [(train["ward"] == each).mean() for each in ward["categories"]]
    assert told["mean"] == pytest.approx([train["age"].mean(), *shares, train["pressure"].mean()], rel=1e-6)
    assert told["deviation"][0] == pytest.approx(train["age"].std(ddof=0), rel=1e-6)
    assert (told["targets"], told["target_columns"], told["classes"]) == (
        "classes",
        ["outcome"],
        ["ill", "well"],
    )
    assert (told["scale"], told["dtype"], told["shape"], told["outputs"]) == (1, "float32", [5], 2)
    assert not (made.path / "standardization.json").exists()


def test_a_frame_is_predicted_as_by_hand_whatever_the_order_of_its_columns(made):
    new = patients(60, seed=5)
    shares = by_hand(made.path, new)
    found = made.predict(new[["pressure", "outcome", "ward", "patient", "age"]])
    assert list(found) == [
        "outcome",
        "patient",
        "class",
        "probability",
        "probability ill",
        "probability well",
    ]
    assert found["patient"].tolist() == new["patient"].tolist()
    np.testing.assert_allclose(found[["probability ill", "probability well"]], shares, atol=1e-6)
    assert found["class"].tolist() == np.array(["ill", "well"])[shares.argmax(axis=1)].tolist()
    np.testing.assert_allclose(found["probability"], shares.max(axis=1), atol=1e-6)
    assert (found["class"] == new["outcome"]).mean() > 0.7


def test_the_command_writes_a_file_of_its_own_for_each_call(made, tmp_path):
    new = patients(50, seed=6)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.drop(columns="outcome").to_parquet(tmp_path / "new.parquet")
    files = []
    for name in ("new.csv", "new.parquet"):
        code, out, error = predict(made.path, tmp_path / name)
        assert code == 0, error
        files.append(Path(out))
        gaps = f"pressure: {new['pressure'].isna().sum()}, "
        assert "of 50 rows have an empty cell (ward: 5, pressure: 6): filled in as in training" in error, gaps
        assert "\n" not in error
    assert [file.name for file in files] == ["predictions-001.csv", "predictions-002.csv"]
    first, second = map(pd.read_csv, files)
    assert first.drop(columns="outcome").equals(second)
    np.testing.assert_allclose(first["probability ill"], by_hand(made.path, new)[:, 0], atol=1e-6)
    code, _, error = predict(made.path, tmp_path / "new.csv", "-o", files[0])
    assert (code, error) == (
        1,
        f"error: --out = '{files[0]}': is there already, and is kept; another name is needed",
    )


def test_wrong_columns_are_refused_in_one_line(made, tmp_path):
    new = patients(5)
    new.drop(columns=["age", "ward"]).to_csv(tmp_path / "new.csv", index=False)
    code, out, error = predict(made.path, tmp_path / "new.csv")
    assert (code, out) == (1, "")
    assert error == (
        f"error: {tmp_path / 'new.csv'}: needs the columns that the model was trained on, each once; it has not: "
        "'age', 'ward' (found: 'patient', 'pressure', 'outcome')"
    )
    with pytest.raises(DataError, match="the table: column 'age' has type large_string; numbers are needed"):
        made.predict(new.assign(age="old"))
    with pytest.raises(DataError, match="each once; it has not: 'age'"):
        made.predict(pd.concat([new, new[["age"]]], axis=1))
    with pytest.raises(DataError, match="the table: has no rows"):
        made.predict(new.iloc[:0])


def test_new_categories_are_said_with_their_number(made, caplog):
    new = patients(40, seed=7).assign(pressure=100.0, ward="ICU")
    new.loc[:2, "ward"] = ["Ward 3", "Ward 3", "Attic"]
    found = made.predict(new)
    assert (
        "column ward: 3 of 40 cells hold a text that the model doesn't know ('Ward 3', 'Attic'): they count as none "
        "of its 3 categories"
    ) in caplog.text
    np.testing.assert_allclose(found["probability ill"], by_hand(made.path, new)[:, 0], atol=1e-6)


def test_categories_that_look_like_numbers_are_texts(made, tmp_path):
    frame = patients().assign(ward=lambda each: each["ward"].replace({"Ward 2": "2", "Ward 10": "10"}))
    run = fedapp.run(dataset=frame, results_dir=str(tmp_path), **KEYS)
    new = frame[frame["ward"].isin(["2", "10"])].head(30)
    new.to_csv(tmp_path / "new.csv", index=False)  # all of its wards read as numbers
    code, out, error = predict(run.path, tmp_path / "new.csv")
    assert code == 0
    assert "doesn't know" not in error
    np.testing.assert_allclose(pd.read_csv(out)["probability ill"], by_hand(run.path, new)[:, 0], atol=1e-6)


def test_rows_with_gaps_have_no_prediction_where_none_were_trained_on(tmp_path, caplog):
    frame = patients()
    run = fedapp.run(dataset=frame, results_dir=str(tmp_path), **{**KEYS, "missing": "drop"})
    found = run.predict(frame)
    full = frame[["age", "ward", "pressure"]].notna().all(axis=1)
    assert found["class"].notna().tolist() == full.tolist()
    assert found["probability"].notna().tolist() == full.tolist()
    assert (
        f"{(~full).sum()} of 240 rows have an empty cell (ward: 22, pressure: 27): without a pred"
        in caplog.text
    )
    np.testing.assert_allclose(
        found["probability ill"][full], by_hand(run.path, frame[full])[:, 0], atol=1e-6
    )


def test_numbers_are_predicted_by_name(tmp_path):
    frame = patients().assign(cost=lambda each: 2 * each["age"] - 100)
    keys = {**KEYS, "label_column": "cost", "loss": "mse", "lr": 0.05, "input_column": "age,pressure"}
    run = fedapp.run(dataset=frame, results_dir=str(tmp_path), **keys)
    found = run.predict(frame)
    assert list(found)[-1] == "predicted cost"
    assert np.corrcoef(found["predicted cost"], frame["cost"])[0, 1] > 0.9


def test_images_are_predicted_by_folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, light in (("dark", 40), ("light", 200)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(rng.normal(light, 20, (6, 5)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    keys = {"model": "logistic", "num_clients": 2, "num_server_rounds": 5, "lr": 0.5, "quiet": True}
    run = fedapp.run(
        dataset="files",
        data_path=str(tmp_path / "data"),
        normalize="standardize",
        results_dir=str(tmp_path),
        figures=False,
        **keys,
    )
    told = json.loads((run.path / "preparation.json").read_text())
    assert (told["kind"], told["shape"], told["dtype"], told["classes"]) == (
        "image",
        [1, 6, 5],
        "uint8",
        ["dark", "light"],
    )
    assert told["image"] == {"height": 6, "width": 5, "mode": "grey"}
    new = tmp_path / "new"
    new.mkdir()
    for name, pixels in (
        ("2.png", np.full((6, 5), 210)),
        ("10.png", np.full((6, 5), 30)),
        ("big.png", np.full((9, 9), 9)),
    ):
        Image.fromarray(pixels.astype(np.uint8)).save(new / name)
    (new / "broken.png").write_bytes(b"not an image")
    code, out, error = predict(run.path, new)
    found = pd.read_csv(out)
    assert (code, found["file"].tolist()) == (0, ["2.png", "10.png", "big.png", "broken.png"])
    assert found["class"].tolist()[:2] == ["light", "dark"]
    assert found["class"].isna().tolist() == [False, False, True, True]
    assert error.splitlines() == [
        "1 of 4 images can't be read (broken.png): without a prediction",
        "1 of 4 images aren't 6x5 in grey, as in training (big.png): without a prediction (image-size and image-mode "
        "train on any)",
    ]
    state = load_file(run.path / "model.safetensors")
    ready = (torch.full((30,), 210 / 255) - told["mean"][0]) / told["deviation"][0]
    shares = torch.softmax(state["1.weight"] @ ready + state["1.bias"], 0)
    assert found["probability light"][0] == pytest.approx(float(shares[1]), abs=1e-5)


def test_a_function_of_ones_own_is_named_in_the_run_and_in_predict(tmp_path, caplog):
    keys = {"model": "logistic", "num_clients": 2, "num_server_rounds": 1, "normalize": "standardize"}
    with caplog.at_level("INFO"):
        run = fedapp.run(dataset="custom.wine:load", results_dir=str(tmp_path), figures=False, **keys)
    line = "how custom.wine:load makes the model's inputs isn't known here"
    assert line in caplog.text
    patients(5).to_csv(tmp_path / "new.csv", index=False)
    code, _, error = predict(run.path, tmp_path / "new.csv")
    assert code == 1
    assert (
        "how custom.wine:load made the model's inputs isn't known here; an .npz file with inputs x" in error
    )
    x = fedapp.federation.dataset_of(run.config, 2).x[:7]
    np.savez(tmp_path / "new.npz", x=x)
    code, out, _ = predict(run.path, tmp_path / "new.npz")
    assert code == 0
    found = pd.read_csv(out)
    assert len(found) == 7
    assert found.equals(run.predict(np.asarray(x)).astype(found.dtypes))
    with pytest.raises(DataError, match=r"has inputs of shape \(7, 12\); \(N, 13\) is needed"):
        run.predict(np.asarray(x)[:, 1:])


def test_what_a_run_without_preparation_says(tmp_path, made):
    (tmp_path / "config.toml").write_text("num-clients = 2\n")
    code, _, error = predict(tmp_path, "x.csv")
    assert (code, len(error.splitlines())) == (1, 1)
    assert "has no preparation.json" in error
    code, _, error = predict(tmp_path / "nothing", "x.csv")
    assert (code, error) == (1, f"error: {tmp_path / 'nothing'}: holds no run, a folder with a config.toml")
    code, _, error = predict(made.path, tmp_path / "x.csv")
    assert (code, error) == (1, f"error: {tmp_path / 'x.csv'}: no such file or folder")


def test_the_data_need_not_be_there_any_more(tmp_path):
    patients().to_csv(tmp_path / "patients.csv", index=False)
    run = fedapp.run(
        dataset="files", data_path=str(tmp_path / "patients.csv"), results_dir=str(tmp_path), **KEYS
    )
    before = run.predict(patients(9))
    (tmp_path / "patients.csv").unlink()
    fedapp.federation.forget()
    assert fedapp.load(run.path).predict(patients(9)).equals(before)


def test_the_lines_of_the_docs_give_the_same_numbers_without_the_app(tmp_path, monkeypatch):
    (lines,) = [
        block.code
        for block in blocks_of("docs/model.md")
        if block.language == "python" and "preparation.json" in block.code
    ]
    assert len([line for line in lines.splitlines() if not line.startswith(("import", "from"))]) <= 22
    monkeypatch.chdir(tmp_path)
    patients().to_csv("table.csv", index=False)
    fedapp.run(dataset="files", data_path="table.csv", run_name="wines", **KEYS)
    new = patients(70, seed=8)
    new.loc[3, "ward"] = "Attic"
    new.to_csv("wines.csv", index=False)
    blocked = "import sys\nsys.modules.update(fedapp=None, strategies=None, flwr=None)\n"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", blocked + lines], check=True, env=environment)
    by_lines = pd.read_csv("wines-by-hand.csv")
    code, out, error = predict("results/wines", "wines.csv", "-o", "by-app.csv")
    assert code == 0, error
    by_app = pd.read_csv(out)
    assert by_lines["class"].tolist() == by_app["class"].tolist()
    np.testing.assert_allclose(by_lines["probability"], by_app["probability"], atol=1e-6)


def test_a_spreadsheet_is_predicted_as_it_was_read_in_training(made, tmp_path):
    frame = patients(90, seed=1)
    frame.loc[3, "age"], frame.loc[5, "ward"] = -999, "?"
    frame.assign(visit="2024-05-01").to_csv(tmp_path / "a.csv", sep=";", decimal=",", encoding="cp1252")
    keys = {key: value for key, value in KEYS.items() if key != "input_column"}
    run = fedapp.run(
        dataset="files",
        data_path=str(tmp_path / "a.csv"),
        results_dir=str(tmp_path / "results"),
        drop_column="patient,visit",
        missing_values="?,-999",
        **keys,
    )
    told = json.loads((run.path / "preparation.json").read_text())
    assert [column["name"] for column in told["columns"]] == ["age", "ward", "pressure"]
    plain = frame.assign(age=frame["age"].replace(-999, np.nan), ward=frame["ward"].replace("?", None))
    expected = run.predict(plain)["probability ill"].tolist()
    for given in (str(tmp_path / "a.csv"), frame):
        assert run.predict(given)["probability ill"].tolist() == expected
    np.testing.assert_allclose(expected, by_hand(run.path, plain)[:, 0], rtol=1e-5)


def test_several_inputs_are_predicted_by_name(tmp_path):
    inputs, y = own_models.baskets()
    keys = {
        "model": own_models.TwoInputs,
        "optimizer": "adam",
        "lr": 0.02,
        "num_clients": 3,
        "num_server_rounds": 2,
    }
    run = fedapp.run(dataset=(inputs, y), results_dir=tmp_path, quiet=True, figures=False, **keys)
    some = {name: value[:7] for name, value in inputs.items()}
    with torch.no_grad():
        shares = (
            run.model()(**{name: torch.from_numpy(value) for name, value in some.items()}).softmax(1).numpy()
        )
    np.testing.assert_allclose(run.predict(some)["probability"], shares.max(axis=1), atol=1e-6)
    np.savez(tmp_path / "new.npz", **{f"x.{name}": value for name, value in some.items()})
    code, out, error = predict(run.path, tmp_path / "new.npz")
    assert code == 0, error
    np.testing.assert_allclose(pd.read_csv(out)["probability"], shares.max(axis=1), atol=1e-6)
    some.popitem()
    with pytest.raises(DataError, match="has the inputs ids int64 6, there bool 6; ids int64 6, there bool"):
        run.predict(some)


class Tokens:
    """A tokenizer, as far as its name is asked for."""

    name_or_path = "tiny-words"


class Padded:
    """A collate function with a tokenizer."""

    tokenizer = Tokens()

    def __call__(self, rows):
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


def test_a_collate_function_and_its_tokenizer_are_named(tmp_path, caplog):
    rng = np.random.default_rng(0)
    rows = [(torch.tensor(rng.normal(size=3), dtype=torch.float32), place % 2) for place in range(40)]
    loader = DataLoader(rows, collate_fn=Padded())
    keys = {
        "model": "logistic",
        "num_clients": 2,
        "num_server_rounds": 1,
        "results_dir": tmp_path,
        "figures": False,
    }
    with caplog.at_level("INFO"):
        run = fedapp.run(dataset=loader, **keys)
    made_by = f"collate_fn {__name__}.Padded, tokenizer tiny-words"
    assert json.loads((run.path / "preparation.json").read_text())["made_by"] == made_by
    assert f"how {made_by} makes the model's inputs isn't known here" in caplog.text
    assert len(run.predict(torch.zeros(4, 3))) == 4


def test_images_of_any_size_and_mode_are_made_as_in_training(tmp_path):
    rng = np.random.default_rng(0)
    for name, light in (("dark", 40), ("light", 200)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(8):
            shape = (6 + number % 2, 5) if number % 3 else (6, 5, 3)
            pixels = np.clip(rng.normal(light, 20, shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    keys = {"model": "logistic", "num_clients": 2, "num_server_rounds": 5, "lr": 0.5, "quiet": True}
    form = {"image_size": "4x5", "image_mode": "grey", "normalize": "standardize", "figures": False}
    data = {"dataset": "files", "data_path": str(tmp_path / "data"), "results_dir": str(tmp_path)}
    run = fedapp.run(**data, **form, **keys)
    new = tmp_path / "new.png"
    Image.fromarray(rng.integers(180, 240, (30, 40, 3), np.uint8)).save(new)
    found = run.predict(new)
    assert found["class"].tolist() == ["light"]
    with Image.open(new) as image:
        small = np.asarray(image.convert("L").resize((5, 4), Image.Resampling.BILINEAR))
    told = json.loads((run.path / "preparation.json").read_text())
    state = load_file(run.path / "model.safetensors")
    ready = (torch.tensor(small.ravel() / 255) - told["mean"][0]) / told["deviation"][0]
    shares = torch.softmax(state["1.weight"].double() @ ready + state["1.bias"], 0)
    assert found["probability light"][0] == pytest.approx(float(shares[1]), abs=1e-5)


def test_columns_beside_the_predictions_stay_as_they_are(made, tmp_path):
    rows = 6
    beside = pd.DataFrame(
        {
            "number": [f"{row:05d}" for row in range(rows)],
            "visits": pd.array([1, None, 3] * 2, dtype="Int64"),
            "code": 2**60 + 1,
            "note": ["NA", None, "null, or 1"] * 2,
            "flag": pd.array([True, None, False] * 2, dtype="boolean"),
        }
    )
    new = patients(rows, seed=8)[["age", "ward", "pressure"]].fillna({"ward": "Ward 2"}).join(beside)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        code, out, error = predict(made.path, tmp_path / name)
        assert code == 0, error
        found = pd.read_csv(out, dtype=str, keep_default_na=False)[list(beside)]
        assert (
            found.values.tolist()
            == beside.astype(object).where(beside.notna(), "").astype(str).values.tolist()
        )


def test_what_was_assumed_of_a_file_of_new_rows_is_said(made, tmp_path):
    patients(9, seed=8).to_csv(tmp_path / "new.csv", index=False, sep=";")
    code, _, error = predict(made.path, tmp_path / "new.csv")
    assert (code, error.splitlines()[0]) == (
        0,
        "CSV is read with ';' between columns; the keys csv-encoding, separator and decimal can say otherwise",
    )


def test_numbers_far_from_those_in_training_are_said(made, caplog):
    new = patients(40, seed=7).dropna()
    made.predict(new)
    assert "deviations" not in caplog.text
    made.predict(new.assign(age=new["age"] * 365))
    told = json.loads((made.path / "preparation.json").read_text())
    mean = told["mean"][[column["name"] for column in told["columns"]].index("age")]
    assert (
        f"column age: {len(new)} of {len(new)} cells are more than 20 deviations from the mean in training, "
        f"{mean:.4g}"
    ) in caplog.text


def test_rows_by_column_name_are_predicted_as_a_frame(made):
    new = patients(20, seed=6).dropna()[["age", "ward", "pressure"]]
    expected = made.predict(new)["probability ill"]
    rows = new.to_dict("records")
    assert made.predict(rows)["probability ill"].tolist() == expected.tolist()
    assert made.predict(new.to_dict("list"))["probability ill"].tolist() == expected.tolist()
    for one in (rows[1], new.iloc[1]):
        assert made.predict(one)["probability ill"].tolist() == expected.tolist()[1:2]
