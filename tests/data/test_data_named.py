"""Named datasets, from files in their published forms and from the hub's, on local folders of the same shape."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data import DATASETS, DataError, load_dataset
from fedapp.data.hub import HUB_SOURCES, HubSource, hub_data
from fedapp.data.loading import FORMS
from tests.data.sources import message, save

# Named image datasets --------------------------------------------------------------------------------------


def test_named_npz_in_a_folder(tmp_path, images):
    save(tmp_path / "mnist.npz", images)
    mnist = load_dataset("mnist", str(tmp_path))
    assert mnist.x.shape == (40, 1, 28, 28)
    assert (mnist.num_train, mnist.num_classes, mnist.kind) == (30, 10, "image")
    assert np.array_equal(mnist.x[30:, 0], images["x_test"])
    assert mnist.y.tolist() == [*images["y_train"], *images["y_test"]]


def test_femnist_and_its_digits(tmp_path, images):
    labels = {"y_train": np.arange(30) * 2, "writer_train": np.arange(30) % 4, "writer_test": np.arange(10)}
    save(tmp_path / "femnist.npz", images | labels)
    femnist, digits = (load_dataset(name, str(tmp_path)) for name in ("femnist", "femnist-digits"))
    assert (femnist.num_classes, len(femnist.y), femnist.num_train) == (62, 40, 30)
    assert (digits.num_classes, len(digits.y), digits.num_train) == (10, 15, 5)
    assert digits.y.tolist() == [0, 2, 4, 6, 8, *range(10)]
    assert digits.groups.tolist() == [0, 1, 2, 3, 0, *range(10)]
    assert np.array_equal(digits.x[5:], femnist.x[30:])


def test_a_file_of_another_dataset(tmp_path, images):
    path = save(tmp_path / "a.npz", images)
    assert message("cifar10", path).endswith(
        "has rows of shape (1, 28, 28) and type uint8, but cifar10 has (3, 32, 32) and uint8"
    )
    path = save(tmp_path / "b.npz", images | {"y_train": np.arange(30)})
    assert message("mnist", path).endswith("has labels 0 to 29, but mnist has 0 to 9")
    path = save(tmp_path / "c.npz", images | {"y_train": np.arange(30) + 20})
    assert message("femnist-digits", path).endswith("has no training rows of femnist-digits")


def test_where_named_data_is_missing(tmp_path):
    assert message("mnist", str(tmp_path)).endswith(
        "holds no 'mnist'; allowed: a folder with mnist.npz or torchvision's MNIST/raw, or an npz file"
    )
    assert message("femnist-digits", str(tmp_path)).endswith(
        "a folder with femnist.npz or LEAF's *train*.json, or an npz file"
    )
    assert "no such file or folder" in message("cifar10", str(tmp_path / "none"))
    assert message("digits", "x") == (
        "data-path = 'x': 'digits' comes with scikit-learn; only an empty data-path is allowed"
    )
    assert message("cifar") == f"dataset = 'cifar': unknown; allowed: {', '.join(DATASETS)}, {FORMS}"


def leaf_file(folder: Path, part: str, users: dict[str, tuple[np.ndarray, list[int]]]) -> Path:
    """Write a file as LEAF's preprocessing does: 784 numbers in [0, 1] an image."""
    path = folder / part / f"all_data_0_niid_1_keep_0_{part}_9.json"
    path.parent.mkdir(exist_ok=True)
    data = {user: {"x": (x.reshape(-1, 784) / 255).tolist(), "y": y} for user, (x, y) in users.items()}
    sizes = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": [*users], "num_samples": sizes, "user_data": data}))
    return path


def test_femnist_as_leaf_writes_it(tmp_path, images):
    x, test = images["x_train"], images["x_test"]
    users = {"f0001_41": (x[:3], [61, 0, 9]), "f0000_14": (x[3:5], [10, 4]), "f0002_01": (x[:0], [])}
    file = leaf_file(tmp_path, "train", users)
    leaf_file(tmp_path, "test", {"f0000_14": (test[:1], [3]), "f0001_41": (test[1:2], [60])})
    data = load_dataset("femnist", str(tmp_path))
    assert (data.num_train, data.num_classes, data.x.dtype) == (5, 62, np.uint8)
    np.testing.assert_array_equal(data.x[:, 0], np.concatenate([x[:5], test[:2]]))
    assert data.y.tolist() == [61, 0, 9, 10, 4, 3, 60]
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert data.group_names == ("f0001_41", "f0000_14")
    digits = load_dataset("femnist-digits", str(file))
    assert digits.y.tolist() == [0, 9, 4]
    np.testing.assert_array_equal(digits.x[:, 0], x[[1, 2, 4]])
    assert digits.group_names == data.group_names


@pytest.mark.parametrize(
    ("rows", "labels", "said"),
    [
        ([[0.5] * 783], [0], "user 'a': ValueError: images must be 784 numbers in [0, 1] each"),
        ([[2.0] * 784], [0], "user 'a': ValueError: images must be 784 numbers in [0, 1] each"),
        ([[0.5] * 784], [0.5], "user 'a': ValueError: labels must be whole numbers"),
        ([[0.5] * 784], [62], "has labels 62 to 62, but femnist has 0 to 61"),
        ([], [], "has no samples; at least one is needed"),
    ],
)
def test_leaf_files_that_hold_other_images(tmp_path, rows, labels, said):
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"users": ["a"], "user_data": {"a": {"x": rows, "y": labels}}}))
    assert message("femnist", str(path)) == f"data-path = {str(path)!r}: {said}"


def test_mnist_raw_files(tmp_path, images):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        x, y = images[f"x_{part}"], images[f"y_{part}"]
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 0x803, len(x), 28, 28) + x.tobytes()
        )
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(y)) + y.tobytes())
    mnist = load_dataset("mnist", str(tmp_path))
    assert np.array_equal(mnist.x[:30, 0], images["x_train"])
    assert mnist.y.tolist() == [*images["y_train"], *images["y_test"]]
    assert mnist.num_train == 30
    (raw / "t10k-labels-idx1-ubyte").unlink()
    assert "torchvision can't read mnist there (RuntimeError: Dataset not found" in message(
        "mnist", str(tmp_path)
    )


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_batches(tmp_path, monkeypatch, name):
    from torchvision import datasets

    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    key = {"cifar10": "labels", "cifar100": "fine_labels"}[name]
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    # No checksums: these aren't the published files.
    monkeypatch.setattr(reader, "train_list", [(file, None) for file, _ in reader.train_list])
    monkeypatch.setattr(reader, "test_list", [(file, None) for file, _ in reader.test_list])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": None})
    rng = np.random.default_rng(0)
    files = [file for file, _ in reader.train_list + reader.test_list]
    batches = [
        {"data": rng.integers(0, 256, (4, 3072), np.uint8), key: [i, 1, 2, 3]} for i in range(len(files))
    ]
    for file, batch in zip(files, batches, strict=True):
        (folder / file).write_bytes(pickle.dumps(batch))
    (folder / reader.meta["filename"]).write_bytes(pickle.dumps({reader.meta["key"]: ["a", "b"]}))
    data = load_dataset(name, str(tmp_path))
    assert data.num_train == len(data.y) - 4
    assert np.array_equal(data.x.reshape(-1, 3072), np.concatenate([batch["data"] for batch in batches]))
    assert data.y.tolist() == [label for batch in batches for label in batch[key]]
    (folder / files[0]).unlink()
    assert f"torchvision can't read {name} there" in message(name, str(tmp_path))


# The hub, on local folders of the same shape ---------------------------------------------------------------


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def write_hub(folder: Path, split: str, columns: dict[str, Any], image: str = "") -> None:
    from datasets import Dataset, Image

    folder.mkdir(exist_ok=True)
    table = Dataset.from_dict({key: value for key, value in columns.items() if key != image})
    if image:
        from datasets import Features
        from PIL import Image as PILImage

        pictures = [PILImage.fromarray(pixels) for pixels in columns[image]]
        features = Features({image: Image(), **table.features})
        table = Dataset.from_dict(columns | {image: pictures}, features=features)
    table.to_parquet(str(folder / f"{split}.parquet"))


@pytest.mark.usefixtures("hf_cache")
def test_hub_images(tmp_path, images):
    folder = tmp_path / "mnist"
    for split in ("train", "test"):
        write_hub(folder, split, {"image": images[f"x_{split}"], "label": images[f"y_{split}"]}, "image")
    raw = hub_data("mnist", HubSource(str(folder), "image", "label"))
    assert np.array_equal(
        np.concatenate(raw.blocks)[:, 0], np.concatenate([images["x_train"], images["x_test"]])
    )
    assert raw.y.tolist() == [*images["y_train"], *images["y_test"]]
    assert (raw.num_train, raw.groups) == (30, None)


@pytest.mark.usefixtures("hf_cache")
def test_hub_colour_images_through_load_dataset(tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    for split in ("train", "test"):
        write_hub(tmp_path / "c", split, {"img": x, "fine_label": range(6), "coarse_label": [0] * 6}, "img")
    monkeypatch.setitem(HUB_SOURCES, "cifar100", HubSource(str(tmp_path / "c"), "img", "fine_label"))
    data = load_dataset("cifar100")
    assert data.x.shape == (12, 3, 32, 32)
    assert np.array_equal(data.x[:6], x.transpose(0, 3, 1, 2))


@pytest.mark.usefixtures("hf_cache")
@pytest.mark.parametrize(("ids", "numbers"), [(["f9", "f10", "f9"], [0, 1, 0]), ([10, 9, 10], [1, 0, 1])])
def test_hub_writers(tmp_path, images, ids, numbers):
    columns = {"image": images["x_train"][:3], "writer_id": ids, "hsf_id": [0] * 3, "character": [3, 61, 5]}
    write_hub(tmp_path / "f", "train", columns, "image")
    source = HubSource(str(tmp_path / "f"), "image", "character", "writer_id", ("train",))
    assert hub_data("femnist", source).groups.tolist() == numbers
    digits = hub_data("femnist-digits", source)
    assert digits.y.tolist() == [3, 5]
    assert digits.groups.tolist() == [numbers[0], numbers[2]]


@pytest.mark.usefixtures("hf_cache")
def test_hub_shakespeare(tmp_path):
    columns = {"character_id": ["B", "A"], "x": ["a" * 80, "b" * 80], "y": ["c", "!"]}
    write_hub(tmp_path / "s", "train", columns)
    raw = hub_data("shakespeare", HubSource(str(tmp_path / "s"), "x", "y", "character_id", ("train",)))
    assert (raw.kind, raw.num_classes, raw.num_train) == ("text", 80, 2)
    assert raw.groups.tolist() == [1, 0]
    assert raw.y.tolist() == [55, 2]
    write_hub(tmp_path / "t", "train", columns | {"x": ["a" * 79, "b" * 80]})
    with pytest.raises(DataError, match="samples must be 80 characters"):
        hub_data("shakespeare", HubSource(str(tmp_path / "t"), "x", "y", "character_id", ("train",)))


@pytest.mark.usefixtures("hf_cache")
def test_hub_with_other_columns(tmp_path, images):
    write_hub(tmp_path / "m", "train", {"image": images["x_train"], "digit": images["y_train"]}, "image")
    with pytest.raises(
        DataError, match=r"dataset = 'mnist': .* has other columns than image, label \(ValueError"
    ):
        hub_data("mnist", HubSource(str(tmp_path / "m"), "image", "label", splits=("train",)))
    with pytest.raises(
        DataError, match=r"can't be had from the Hugging Face hub .*; give a local copy with data-path"
    ):
        hub_data("mnist", HubSource(str(tmp_path / "m"), "image", "digit"))  # has no test split


def test_a_failing_download(monkeypatch):
    def fail(**_: Any) -> None:
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", fail)
    for name, source in HUB_SOURCES.items():
        assert message(name) == (
            f"dataset = '{name}': {source.repository} can't be had from the Hugging Face hub "
            "(ConnectionError: no route to host); give a local copy with data-path"
        )
