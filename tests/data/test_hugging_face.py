"""Any data in Hugging Face's form, from folders: nothing is asked of the hub."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Array2D, Array3D, ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as Pictures

from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import DataColumns
from fedapp.data.hugging_face import hugging_face_data
from tests.data.sources import message


def saved(folder: Path, data: dict[str, Any], features: Features | None = None, **more: Any) -> str:
    """Write a dataset as `save_to_disk` does, with a test split if there is one; return its name."""
    train = Dataset.from_dict(data, features)
    test = {part: Dataset.from_dict(rows, features) for part, rows in more.items()}
    (DatasetDict({"train": train, **test}) if test else train).save_to_disk(str(folder / "own"))
    return f"hf:{folder / 'own'}"


IMAGE_FEATURES = Features({"img": Image(), "label": Value("int64")})


def picture(value: int, mode: str = "L", size: tuple[int, int] = (5, 4)) -> Pictures.Image:
    return Pictures.new(mode, size, value if mode == "L" else (value,) * 3)


def test_images_with_names_of_classes_and_a_test_split(tmp_path):
    features = Features({"img": Image(), "kind": ClassLabel(names=["cat", "ant"]), "who": Value("string")})
    train = {"img": [picture(1), picture(2), picture(3)], "kind": [1, 0, 1], "who": ["b", "a", "b"]}
    name = saved(tmp_path, train, features, test={"img": [picture(9)], "kind": [0], "who": ["c"]})
    data = load_dataset(name, columns=DataColumns("", "kind", "who"))
    assert (data.kind, data.scale, data.input_shape) == ("image", 1 / 255, (1, 4, 5))
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 3, 9]
    assert (data.y.tolist(), data.classes, data.num_train) == ([1, 0, 1, 0], ("cat", "ant"), 3)
    assert data.groups is not None
    assert data.groups.tolist() == [1, 0, 1, 2]
    named = load_dataset(name, columns=DataColumns("img", "kind", "who"))
    assert named.x.tolist() == data.x.tolist()
    # A copy at data-path is read in place of what is on the hub.
    copy = load_dataset("hf:owner/name", name.removeprefix("hf:"), columns=DataColumns("", "kind"))
    assert copy.y.tolist() == data.y.tolist()


def of_classes(names: list[str], labels: list[int]) -> Dataset:
    features = Features({"a": Value("float32"), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"a": [float(label) for label in labels], "label": labels}, features)


def parts(folder: Path, train: Dataset, test: Dataset) -> str:
    DatasetDict({"train": train, "test": test}).save_to_disk(str(folder))
    return f"hf:{folder}"


def test_a_blank_is_a_class_and_no_natural_id(tmp_path):
    name = saved(tmp_path, {"a": [1.0, 2.0], "label": ["x", " "], "who": ["Ada", " "]})
    assert load_dataset(name, columns=DataColumns("a")).classes == (" ", "x")
    assert "column 'who' has empty cells" in message(name, columns=DataColumns("a", group="who"))


def test_images_of_several_sizes_and_modes_are_made_alike(tmp_path):
    name = saved(tmp_path, {"img": [picture(7), picture(9, "RGB", (8, 6))], "label": [0, 1]}, IMAGE_FEATURES)
    assert "image-size and image-mode make them alike" in message(name)
    data = load_dataset(name, columns=DataColumns(image_size="3x2", image_mode="grey"))
    assert data.x.tolist() == [[[[7, 7]] * 3], [[[9, 9]] * 3]]


def test_labels_of_test_are_train_s_by_their_names(tmp_path):
    train = of_classes(["ant", "bee", "cat"], [2, 0, 1])
    data = load_dataset(parts(tmp_path / "fewer", train, of_classes(["ant", "cat"], [0, 1, 1])))
    assert (data.y.tolist(), data.classes) == ([2, 0, 1, 0, 2, 2], ("ant", "bee", "cat"))
    data = load_dataset(parts(tmp_path / "order", train, of_classes(["cat", "bee", "ant"], [0, 1, 2])))
    assert data.y.tolist() == [2, 0, 1, 2, 1, 0]
    assert message(parts(tmp_path / "more", train, of_classes(["ant", "dog"], [0]))).endswith(
        "has 1 classes in test whose names train lacks; train must name them all"
    )
    for number, labels in enumerate((["ant", "bee"], [0, 1])):
        plain = Dataset.from_dict({"a": [0.0, 1.0], "label": labels})
        for pair in ((train, plain), (plain, train)):
            assert message(parts(tmp_path / f"{number}{pair[0] is train}", *pair)).endswith(
                "column 'label' has labels of another type in test than in train; they must match"
            )


def test_classes_that_have_names_may_be_rare(tmp_path):
    names = [f"kind {number}" for number in range(1500)]
    of_classes(names, [0, 1499]).save_to_disk(str(tmp_path / "rare"))
    data = load_dataset(f"hf:{tmp_path / 'rare'}")
    assert (data.y.tolist(), data.num_classes, data.classes) == ([0, 1499], 1500, tuple(names))


def test_columns_of_numbers(tmp_path):
    name = saved(tmp_path, {"a": [1.5, 2.5], "b": [3, 4], "label": [1, 0], "other": [0.5, 0.25]})
    data = load_dataset(name)
    assert (data.x.tolist(), data.columns) == ([[1.5, 3, 0.5], [2.5, 4, 0.25]], ("a", "b", "other"))
    assert (data.y.tolist(), data.targets, data.kind) == ([1, 0], "classes", "vector")
    several = load_dataset(name, columns=DataColumns("a, b", "other,label"))
    assert (several.x.tolist(), several.y.tolist()) == ([[1.5, 3], [2.5, 4]], [[0.5, 1], [0.25, 0]])
    assert several.targets == "numbers"
    assert load_dataset(name, targets="numbers").y.tolist() == [[1], [0]]


def test_lists_and_arrays_of_numbers(tmp_path):
    features = Features({"v": List(Value("float32")), "label": List(Value("float32"), length=2)})
    name = saved(tmp_path / "a", {"v": [[1, 2, 3], [4, 5, 6]], "label": [[0, 1], [2, 3]]}, features)
    data = load_dataset(name)
    assert (data.x.tolist(), data.y.tolist(), data.num_outputs) == (
        [[1, 2, 3], [4, 5, 6]],
        [[0, 1], [2, 3]],
        2,
    )
    features = Features({"m": Array2D((2, 3), "float32"), "label": Value("string")})
    name = saved(tmp_path / "b", {"m": np.arange(12.0).reshape(2, 2, 3), "label": ["b", "a"]}, features)
    data = load_dataset(name)
    assert (data.kind, data.input_shape, data.classes, data.y.tolist()) == (
        "series",
        (2, 3),
        ("a", "b"),
        [1, 0],
    )


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_format_that_is_set_changes_nothing(form):
    data = {"img": [picture(1), picture(2)], "label": ["b", "a"], "who": [3, 5]}
    found = Dataset.from_dict(
        data, Features({"img": Image(), "label": Value("string"), "who": Value("int8")})
    )
    columns = DataColumns(group="who")
    plain = hugging_face_data(found, columns, None, DataError)
    formed = hugging_face_data(found.with_format(form), columns, None, DataError)
    assert formed.blocks[0].tolist() == plain.blocks[0].tolist()
    assert (formed.y.tolist(), formed.classes) == ([1, 0], ("a", "b"))
    assert formed.groups is not None
    assert formed.groups.tolist() == [3, 5]
    with pytest.raises(DataError, match="has a transform"):
        hugging_face_data(found.with_transform(lambda rows: rows), columns, None, DataError)


@pytest.mark.parametrize("feature", [List(List(List(Value("uint8")))), Array3D((1, 2, 3), "uint8")])
def test_bytes_in_lists_are_bytes(feature):
    pixels = np.arange(12).reshape(2, 1, 2, 3) + 200
    found = Dataset.from_dict(
        {"x": pixels.tolist(), "label": [0, 1]}, Features({"x": feature, "label": Value("int64")})
    )
    data = hugging_face_data(found, DataColumns(), None, DataError)
    assert (data.blocks[0].dtype, data.scale, data.blocks[0].tolist()) == (np.uint8, 1 / 255, pixels.tolist())


def test_row_numbers_are_no_input(tmp_path):
    (tmp_path / "train.csv").write_text(",a,label\n0,1,0\n1,3,1\n")
    assert load_dataset(f"hf:{tmp_path}").x.tolist() == [[1], [3]]


def test_what_load_dataset_reads(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (tmp_path / "test.csv").write_text("a,b,label\n5,6,1\n")
    data = load_dataset(f"hf:{tmp_path}")
    assert (data.x.tolist(), data.num_train, data.y.tolist()) == ([[1, 2], [3, 4], [5, 6]], 2, [0, 1, 1])


@pytest.mark.parametrize(
    ("data", "columns", "text"),
    [
        (
            {"a": [1], "b": [2]},
            DataColumns(),
            "needs a column 'label' and others, each name once (found: a, b)",
        ),
        (
            {"a": [1], "label": [2]},
            DataColumns("c"),
            "needs a column 'c' and others, each name once (found: a, l",
        ),
        ({"a": [1], "label": [2]}, DataColumns(group="c"), "needs a column 'c' and others"),
        (
            {"a": ["x"], "label": [2]},
            DataColumns(),
            "column 'a' has type string; images, numbers, or lists of them",
        ),
        (
            {"a": [[1], [1, 2]], "label": [2, 0]},
            DataColumns(),
            "column 'a' has lists of 1 to 2 values; they must be equally long (a function that returns a torch",
        ),
        (
            {"a": [[1, 2], [3, 4]], "b": [1, 2], "label": [2, 0]},
            DataColumns("a,b"),
            "column a holds lists; input-column must name it alone, or leave it out",
        ),
        ({"a": [1, None], "label": [2, 0]}, DataColumns(), "column 'a' has type int64; images, numbers"),
        ({"a": [1], "label": [-1]}, DataColumns(), "column 'label' of train has a label below 0"),
        (
            {"a": [1, 2], "label": ["x", None]},
            DataColumns(),
            "column 'label' has empty cells; all must be filled",
        ),
        (
            {"a": [1, 2], "label": ["x", ""]},
            DataColumns(),
            "column 'label' has empty cells; all must be filled",
        ),
        (
            {"a": [1.5, float("inf")], "label": [2, 0]},
            DataColumns(),
            "column 'a' has empty cells, or values that are not finite in float32",
        ),
        (
            {"a": [1.5, None], "label": [2, 0]},
            DataColumns(),
            "column 'a' has type float64; images, numbers",
        ),
        (
            {"a": [picture(1), picture(1, "L", (4, 4))], "label": [0, 1]},
            DataColumns(),
            "column 'a' has an image of",
        ),
    ],
)
def test_data_that_are_wrong(data, columns, text, tmp_path):
    name = saved(tmp_path, data)
    found = message(name, columns=columns)
    assert found.startswith(f"dataset = {name!r}: ")
    assert text in found


def test_data_that_are_not_there(tmp_path):
    none = str(tmp_path / "none")
    assert message(f"hf:{none}") == (
        f"dataset = {'hf:' + none!r}: no such folder; Hugging Face data are to be read from there"
    )
    assert message("hf:owner/name", none).startswith(f"data-path = {none!r}: no such folder; ")
    (tmp_path / "empty").mkdir()
    assert "can't be had from the folder" in message(f"hf:{tmp_path / 'empty'}")
    DatasetDict({part: Dataset.from_dict({"a": [1], "label": [0]}) for part in ("a", "b")}).save_to_disk(
        str(tmp_path / "own")
    )
    assert message(f"hf:{tmp_path / 'own'}").endswith(
        "has the splits a, b; train, and maybe test, are needed"
    )


def test_a_changed_folder_is_read_again(tmp_path):
    (tmp_path / "train.csv").write_text("a,label\n1,0\n3,1\n")
    assert load_dataset(f"hf:{tmp_path}").x.tolist() == [[1], [3]]
    (tmp_path / "train.csv").write_text("a,label\n7,0\n3,1\n5,1\n")
    assert load_dataset(f"hf:{tmp_path}").x.tolist() == [[7], [3], [5]]


def test_a_folder_of_the_working_directory_is_not_taken_for_the_hub_s(tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "mine"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("a,label\n1,0\n3,1\n")
    monkeypatch.chdir(tmp_path)
    for name in ("hf:owner/mine", "hf:owner/mine:small"):
        assert message(name).startswith(
            f"dataset = {name!r}: there is a folder 'owner/mine' here; hf:./owner/mine names it, "
        )
    assert load_dataset("hf:./owner/mine").x.tolist() == [[1], [3]]


def test_the_hub_is_named_where_it_can_not_be_had(monkeypatch):
    def load(*_: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError) as caught:
        load_dataset("hf:owner/name")
    assert str(caught.value) == (
        "dataset = 'hf:owner/name': can't be had from the Hugging Face hub (ConnectionError: no network); give a "
        "local copy with data-path"
    )


def test_values_far_from_the_others_and_ids_are_named_as_those_of_tables():
    rng = np.random.default_rng(0)
    age, cost = rng.normal(60, 8, 100).round(1), rng.normal(10, 1, 100).round(2)
    age[7], cost[[2, 5]] = -999, 9999
    rows = {"id": range(100), "age": age, "pressure": rng.normal(120, 9, 100), "label": cost}
    split = Dataset.from_dict({**rows, "id": list(rows["id"])})
    data = hugging_face_data(split, DataColumns(), "numbers", ValueError)
    ages, costs = ([f"{value:.10g}" for value in np.sort(values)] for values in (age, cost))
    assert data.remarks == (
        f"column 'age': 1 of 100 cells is -999, far from the others ({ages[1]} to {ages[-1]})",
        "column 'id' has a different whole number in each of 100 rows, as ids have, and would be trained on; "
        "drop-column = 'id' leaves it out",
        f"column 'label': 2 of 100 cells are 9999, far from the others ({costs[0]} to {costs[-3]})",
    )
    kept = hugging_face_data(split, DataColumns(inputs="id,pressure"), None, ValueError)
    assert kept.remarks == data.remarks[-1:]  # ids that are named are meant
