"""Whose data fit a model, and what becomes of their labels."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data import DataError, Dataset
from fedapp.data.schema import Schema


def dataset(labels: list[int], **more: object) -> Dataset:
    facts = {"x": np.zeros((len(labels), 2), np.float32), "num_classes": 3, "kind": "vector", **more}
    return Dataset(
        name="files",
        y=np.array(labels),
        groups=None,
        num_train=len(labels),
        scale=1.0,
        **facts,  # type: ignore[arg-type]
    )


MODEL = Schema("vector", "float32", (2,), 3)
NAMED = Schema("vector", "float32", (2,), 3, ("ant", "bee", "cat"), ("u", "v"))


def test_what_fits_is_left_as_it_is():
    own = dataset([0, 1])
    assert MODEL.fit(own) is own
    assert Schema.of(own) == MODEL
    fewer = dataset([0, 1], num_classes=2)
    assert MODEL.fit(fewer) is fewer


def test_names_decide_which_label_a_class_has():
    fitted = NAMED.fit(dataset([0, 1, 0], classes=("bee", "cat"), num_classes=2, columns=("u", "v")))
    assert fitted.y.tolist() == [1, 2, 1]
    assert (fitted.classes, fitted.num_classes) == (NAMED.classes, 3)


@given(st.data())
def test_every_row_keeps_the_name_of_its_class(data):
    names = data.draw(st.lists(st.text(min_size=1), min_size=1, unique=True))
    own = tuple(sorted(data.draw(st.sets(st.sampled_from(names), min_size=1))))
    labels = data.draw(st.lists(st.integers(0, len(own) - 1), min_size=1))
    model = Schema("vector", "float32", (2,), len(names), tuple(sorted(names)))
    fitted = model.fit(dataset(labels, classes=own, num_classes=len(own)))
    assert [model.classes[label] for label in fitted.y] == [own[label] for label in labels]


@pytest.mark.parametrize(
    ("model", "own", "text"),
    [
        (
            MODEL,
            {"num_classes": 4},
            "this client's data are vector [2] with 4 classes, the model's vector [2] with 3",
        ),
        (
            MODEL,
            {"x": np.zeros((1, 1, 2), np.float32), "kind": "image"},
            "this client's data are image [1, 2] with 3 classes, the model's vector [2] with 3",
        ),
        (MODEL, {"x": np.zeros((1, 2), np.uint8)}, "this client's inputs are uint8, the model's float32"),
        (NAMED, {}, "the model's classes have names, the client's are numbers; both must be alike"),
        (
            MODEL,
            {"classes": ("a",)},
            "the client's classes have names, the model's are numbers; both must be alike",
        ),
        (
            NAMED,
            {"classes": ("ant", "dog"), "num_classes": 2},
            "this client's data have the classes 'dog', the model's are 'ant', 'bee', 'cat'",
        ),
        (
            NAMED,
            {"classes": NAMED.classes, "columns": ("v", "u")},
            "this client's columns are 'v', 'u', the model's 'u', 'v'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(model, own, text):
    with pytest.raises(DataError) as caught:
        model.fit(dataset([0], **own))
    assert str(caught.value) == text


def test_long_lists_of_names_are_cut():
    many = Schema("vector", "float32", (2,), 20, tuple(f"c{number:02}" for number in range(20)))
    with pytest.raises(DataError, match=r"'c07', … \(20\)$"):
        many.fit(dataset([0], classes=("x",), num_classes=1))


def test_numbers_fit_a_model_of_as_many():
    numbers = {"y": np.zeros((1, 2), np.float32), "num_classes": 0, "targets": "numbers"}
    facts: dict[str, Any] = {"groups": None, "num_train": 1, "kind": "vector", "scale": 1.0, **numbers}
    own = Dataset("files", np.zeros((1, 2), np.float32), **facts)
    model = Schema("vector", "float32", (2,), 0, targets="numbers", target_shape=(2,))
    assert model.fit(own) is own
    assert (Schema.of(own), model.num_outputs, MODEL.num_outputs) == (model, 2, 3)
    with pytest.raises(DataError) as caught:
        MODEL.fit(own)
    assert str(caught.value) == "this client's targets are numbers, 2 for each row, the model's classes"
    with pytest.raises(
        DataError, match="this client's targets are classes, the model's numbers, 2 for each row"
    ):
        model.fit(dataset([0]))
