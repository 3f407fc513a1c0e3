"""Every dataset from a small file in its published format, and every way that such a file can be wrong."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data import DATASETS, DataError, load_dataset
from fedapp.data.hub import HUB_SOURCES, HubSource, hub_data

Arrays = dict[str, np.ndarray]


def save(path: Path, arrays: dict[str, Any]) -> str:
    np.savez(path, **arrays)
    return str(path)


def message(*arguments: Any, **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Embedded and generated ------------------------------------------------------------------------------------


def test_digits() -> None:
    digits = load_dataset("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == np.uint8
    assert digits.input_shape == (1, 8, 8)
    assert (digits.num_train, digits.num_classes, digits.kind, digits.groups) == (1797, 10, "image", None)
    assert digits.inputs(np.arange(1797)).max() == 1.0


def test_synthetic_is_the_problem_of_the_paper() -> None:
    data = load_dataset("synthetic", seed=3)
    assert data.x.shape == (2400, 2)
    assert data.x.dtype == np.float32
    assert (data.num_train, data.num_classes, data.kind, data.scale) == (2000, 2, "vector", 1.0)
    assert np.bincount(data.groups[:2000]).tolist() == [100] * 20
    assert np.bincount(data.groups[2000:]).tolist() == [20] * 20
    means = {
        (client, label): (data.groups == client) & (data.y == label) for client in (0, 19) for label in (0, 1)
    }
    for (client, label), centre in zip(means, (0, 1, 0, 4), strict=True):
        points = data.x[means[client, label]]
        assert points.mean(axis=0) == pytest.approx(centre, abs=0.15)  # 4.6 deviations of a mean of 60
    others = (data.groups < 19) & (data.y == 1)
    assert data.x[others].std(axis=0) == pytest.approx(0.25, rel=0.1)


def test_synthetic_follows_seed_and_number_of_clients() -> None:
    one, two, three = (load_dataset("synthetic", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.x, two.x)
    assert not np.array_equal(one.x, three.x)
    assert load_dataset("synthetic", num_clients=7).groups.max() == 6
    assert message("synthetic", num_clients=-1).startswith("num-supernodes = -1: ")
    assert message("synthetic", seed=-1) == "seed = -1: must be an integer >= 0"


def test_synthetic_files(tmp_path: Path) -> None:
    def write(part: str, users: list[str], x: Any, y: Any) -> None:
        content = {"users": users, "user_data": {user: {"x": x, "y": y} for user in users}}
        (tmp_path / f"{part}.json").write_text(json.dumps(content))

    write("train", ["b", "a"], [[0.5, 1], [2, 3]], [0.0, 1.0])
    assert "train.json and test.json is needed" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5]], [1.0])
    data = load_dataset("synthetic", str(tmp_path))
    assert data.x.tolist() == [[0.5, 1], [2, 3], [0.5, 1], [2, 3], [4, 5]]
    assert data.y.tolist() == [0, 1, 0, 1, 1]
    assert data.groups.tolist() == [0, 0, 1, 1, 1]
    assert data.num_train == 4
    write("test", ["c"], [[4, 5]], [1.0])
    assert "has the user 'c', who is not in train.json" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5, 6]], [1.0])
    assert "has points of shape (1, 3)" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, "five"]], [1.0])
    assert "points that aren't pairs of numbers" in message("synthetic", str(tmp_path))
    write("test", ["a"], [[4, 5]], [])
    assert "user 'a' has 1 x and 0 y; they must match" in message("synthetic", str(tmp_path))
    write("test", [], [], [])
    assert "has no samples" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text("[1]")
    assert "holds a JSON list; an object is needed" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text("{")
    assert "can't be read as JSON" in message("synthetic", str(tmp_path))
    (tmp_path / "test.json").write_text('{"users": ["a"]}')
    assert "isn't LEAF's users and user_data" in message("synthetic", str(tmp_path))


# Inputs ----------------------------------------------------------------------------------------------------


def test_inputs_are_fresh_scaled_and_contiguous(tmp_path: Path, images: Arrays) -> None:
    mnist = load_dataset("mnist", save(tmp_path / "mnist.npz", images))
    rows = np.array([3, 0, 3])
    x = mnist.inputs(rows)
    assert x.dtype == np.float32
    assert x.shape == (3, 1, 28, 28)
    assert x.flags.c_contiguous
    assert type(x) is np.ndarray
    assert x[1, 0] == pytest.approx(images["x_train"][0] / 255)
    x[:] = 9  # a copy, not the file
    assert mnist.inputs(slice(0, 2)).max() <= 1
    normal = mnist.inputs(rows, normalize=True)
    assert normal == pytest.approx((mnist.inputs(rows) - 0.1307) / 0.3081, rel=1e-5)


def test_symmetric_inputs_go_from_minus_one_to_one(tmp_path: Path) -> None:
    x = np.zeros((2, 32, 32, 3), np.uint8)
    x[0, 0, 0], x[0, 0, 1] = (255, 0, 51), (0, 102, 255)
    cifar = load_dataset("cifar10", save(tmp_path / "c.npz", {"x_train": x, "y_train": np.array([0, 9])}))
    # 51/255 = 0.2 → 2 × 0.2 − 1 = −0.6; 102/255 = 0.4 → −0.2
    found = cifar.inputs([0], normalize="symmetric")[0, :, 0, :3]
    assert found == pytest.approx(np.array([[1, -1, -1], [-1, -0.2, -1], [-0.6, 1, -1]]), abs=1e-6)
    assert load_dataset("digits").inputs(slice(0, 9), "symmetric").min() == -1


def test_symmetric_inputs_need_a_range() -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("synthetic", num_clients=2).inputs([0], normalize="symmetric")
    assert str(caught.value) == (
        "normalize = 'symmetric': dataset 'synthetic' has no known range; "
        "allowed for images, and for your own data as uint8"
    )


def test_normalize_is_per_channel(tmp_path: Path) -> None:
    x = np.full((2, 32, 32, 3), 255, np.uint8)
    cifar = load_dataset("cifar10", save(tmp_path / "c.npz", {"x_train": x, "y_train": np.array([0, 9])}))
    expected = [(1 - mean) / std for mean, std in zip(cifar.mean, cifar.std, strict=True)]
    assert cifar.inputs([0], normalize=True)[0, :, 0, 0] == pytest.approx(expected, rel=1e-5)


def test_normalize_needs_published_values() -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("digits").inputs([0], normalize=True)
    assert str(caught.value) == (
        "normalize = true: dataset 'digits' has no published mean and deviation; "
        "allowed for mnist, cifar10, cifar100"
    )


# npz -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected", "kind"),
    [
        ((4, 5), (5,), "vector"),
        ((4, 6, 7), (1, 6, 7), "image"),
        ((4, 6, 7, 3), (3, 6, 7), "image"),
        ((4, 6, 7, 1), (1, 6, 7), "image"),
        ((4, 3, 6, 7), (3, 6, 7), "image"),
        ((4, 1, 6, 3), (1, 6, 3), "image"),
        ((4, 8, 6, 7), (8, 6, 7), "image"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.int16, np.float16])
def test_npz_shapes_and_types(
    tmp_path: Path, shape: tuple[int, ...], expected: Any, kind: str, dtype: Any
) -> None:
    x = (np.arange(np.prod(shape)) % 200).reshape(shape).astype(dtype)
    arrays = {"x_train": x[:3], "y_train": np.array([0, 4, 1]), "x_test": x[3:], "y_test": np.array([2])}
    data = load_dataset("npz", save(tmp_path / "own.npz", arrays))
    assert data.input_shape == expected
    assert (data.kind, data.num_train, data.num_classes, len(data.x)) == (kind, 3, 5, 4)
    assert data.x.dtype == (np.uint8 if dtype is np.uint8 else np.float32)
    assert data.scale == (1 / 255 if dtype is np.uint8 else 1.0)
    assert data.x.sum() == x.sum(dtype=np.float64)
    if expected == (3, 6, 7) and shape[-1] == 3:
        assert np.array_equal(data.x[0, 2], x[0, :, :, 2])


@pytest.mark.parametrize("key", ["group", "writer"])
def test_npz_groups(tmp_path: Path, images: Arrays, key: str) -> None:
    groups = {f"{key}_train": np.arange(30) // 3, f"{key}_test": np.arange(10, dtype=np.int16)}
    data = load_dataset("npz", save(tmp_path / "own.npz", images | groups))
    assert data.groups.tolist() == [*(np.arange(30) // 3), *range(10)]


X, Y = np.zeros((3, 2)), np.arange(3)
BAD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"y_train": Y}, "has no array x_train; x_train and y_train are needed (found: y_train)"),
    ({"x_train": X}, "has no array y_train; x_train and y_train are needed (found: x_train)"),
    ({"x_train": X, "y_train": np.arange(4)}, "x_train has 3 rows, y_train has 4; they must match"),
    (
        {"x_train": X, "y_train": Y, "x_test": X},
        "has no array y_test; x_test and y_test are allowed only together",
    ),
    (
        {"x_train": X, "y_train": Y, "y_test": Y},
        "has no array x_test; x_test and y_test are allowed only together",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": np.zeros((3, 4)), "y_test": Y},
        "x_train has rows of shape (2,) and type float32, x_test rows of shape (4,) and type float32; "
        "they must match",
    ),
    (
        {"x_train": X, "y_train": Y, "x_test": X.astype(np.uint8), "y_test": Y},
        "x_train has rows of shape (2,) and type float32, x_test rows of shape (2,) and type uint8; "
        "they must match",
    ),
    (
        {"x_train": X[:0], "y_train": Y[:0]},
        "x_train has shape (0, 2); at least one row and one value per row are needed",
    ),
    (
        {"x_train": Y, "y_train": Y},
        "x_train has shape (3,); at least one row and one value per row are needed",
    ),
    (
        {"x_train": np.zeros((3, 1, 1, 1, 1)), "y_train": Y},
        "x_train has shape (3, 1, 1, 1, 1); allowed: (N, D), (N, H, W), (N, C, H, W), (N, H, W, C)",
    ),
    (
        {"x_train": X.astype(complex), "y_train": Y},
        "x_train has type complex128; uint8, another integer type or floats are allowed",
    ),
    (
        {"x_train": X + np.nan, "y_train": Y},
        "x_train has values that are not finite in float32; all must be finite",
    ),
    (
        {"x_train": X + 1e300, "y_train": Y},
        "x_train has values that are not finite in float32; all must be finite",
    ),
    ({"x_train": X, "y_train": Y.astype(float)}, "y_train has type float64; integers are needed"),
    (
        {"x_train": X, "y_train": Y[:, None]},
        "y_train has shape (3, 1); one value per row, shape (N,), is needed",
    ),
    ({"x_train": X, "y_train": Y - 1}, "y_train has the label -1; labels must be integers >= 0"),
    (
        {"x_train": X, "y_train": Y, "group_train": Y[:2]},
        "x_train has 3 rows, group_train has 2; they must match",
    ),
    ({"x_train": X, "y_train": Y, "group_train": X}, "group_train has type float64; integers are needed"),
    (
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, "group_train": Y},
        "natural ids are given for only one of train and test; give both or neither",
    ),
    (
        {"x_train": np.array([None] * 3), "y_train": Y},
        "can't be read as an npz file (ValueError: Object arrays cannot be loaded when allow_pickle=False)",
    ),
]


@pytest.mark.parametrize(("arrays", "problem"), BAD_FILES, ids=[problem[:40] for _, problem in BAD_FILES])
def test_npz_errors(tmp_path: Path, arrays: dict[str, Any], problem: str) -> None:
    path = save(tmp_path / "x.npz", arrays)
    assert message("npz", path) == f"data-path = {path!r}: {problem}"


def test_files_that_are_no_npz(tmp_path: Path, images: Arrays) -> None:
    assert message("npz") == "data-path = '': 'npz' needs the path of an npz file with x_train and y_train"
    assert "no such file or folder; 'npz' is to be read from there" in message(
        "npz", str(tmp_path / "none.npz")
    )
    assert "no such file; an npz file with x_train and y_train is needed" in message("npz", str(tmp_path))
    path = tmp_path / "x.npz"
    path.write_bytes(pickle.dumps([1]))
    assert "is not an npz file (a zip of arrays, as numpy.savez writes it), or is damaged" in message(
        "npz", str(path)
    )
    np.savez_compressed(path, **images)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is not an npz file" in message("npz", str(path))
    middle = len(whole) // 4
    path.write_bytes(whole[:middle] + bytes(200) + whole[middle + 200 :])
    assert "can't be read as an npz file (" in message("npz", str(path))


# Named image datasets --------------------------------------------------------------------------------------


def test_named_npz_in_a_folder(tmp_path: Path, images: Arrays) -> None:
    save(tmp_path / "mnist.npz", images)
    mnist = load_dataset("mnist", str(tmp_path))
    assert mnist.x.shape == (40, 1, 28, 28)
    assert (mnist.num_train, mnist.num_classes, mnist.kind) == (30, 10, "image")
    assert np.array_equal(mnist.x[30:, 0], images["x_test"])
    assert mnist.y.tolist() == [*images["y_train"], *images["y_test"]]


def test_femnist_and_its_digits(tmp_path: Path, images: Arrays) -> None:
    labels = {"y_train": np.arange(30) * 2, "writer_train": np.arange(30) % 4, "writer_test": np.arange(10)}
    save(tmp_path / "femnist.npz", images | labels)
    femnist, digits = (load_dataset(name, str(tmp_path)) for name in ("femnist", "femnist-digits"))
    assert (femnist.num_classes, len(femnist.y), femnist.num_train) == (62, 40, 30)
    assert (digits.num_classes, len(digits.y), digits.num_train) == (10, 15, 5)
    assert digits.y.tolist() == [0, 2, 4, 6, 8, *range(10)]
    assert digits.groups.tolist() == [0, 1, 2, 3, 0, *range(10)]
    assert np.array_equal(digits.x[5:], femnist.x[30:])


def test_a_file_of_another_dataset(tmp_path: Path, images: Arrays) -> None:
    path = save(tmp_path / "a.npz", images)
    assert message("cifar10", path).endswith(
        "has rows of shape (1, 28, 28) and type uint8, but cifar10 has (3, 32, 32) and uint8"
    )
    path = save(tmp_path / "b.npz", images | {"y_train": np.arange(30)})
    assert message("mnist", path).endswith("has labels 0 to 29, but mnist has 0 to 9")
    path = save(tmp_path / "c.npz", images | {"y_train": np.arange(30) + 20})
    assert message("femnist-digits", path).endswith("has no training rows of femnist-digits")


def test_where_named_data_is_missing(tmp_path: Path) -> None:
    assert message("mnist", str(tmp_path)).endswith(
        "holds no 'mnist'; allowed: a folder with mnist.npz or torchvision's MNIST/raw, or an npz file"
    )
    assert message("femnist-digits", str(tmp_path)).endswith("a folder with femnist.npz, or an npz file")
    assert "no such file or folder" in message("cifar10", str(tmp_path / "none"))
    assert message("digits", "x") == (
        "data-path = 'x': 'digits' comes with scikit-learn; only an empty data-path is allowed"
    )
    assert message("cifar") == f"dataset = 'cifar': unknown; allowed: {', '.join(DATASETS)}"


def test_mnist_raw_files(tmp_path: Path, images: Arrays) -> None:
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
def test_cifar_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
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
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_hub_images(tmp_path: Path, images: Arrays) -> None:
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
def test_hub_colour_images_through_load_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    for split in ("train", "test"):
        write_hub(tmp_path / "c", split, {"img": x, "fine_label": range(6), "coarse_label": [0] * 6}, "img")
    monkeypatch.setitem(HUB_SOURCES, "cifar100", HubSource(str(tmp_path / "c"), "img", "fine_label"))
    data = load_dataset("cifar100")
    assert data.x.shape == (12, 3, 32, 32)
    assert np.array_equal(data.x[:6], x.transpose(0, 3, 1, 2))


@pytest.mark.usefixtures("hf_cache")
@pytest.mark.parametrize(("ids", "numbers"), [(["f9", "f10", "f9"], [1, 0, 1]), ([9, 10, 9], [0, 1, 0])])
def test_hub_writers(tmp_path: Path, images: Arrays, ids: list[Any], numbers: list[int]) -> None:
    columns = {"image": images["x_train"][:3], "writer_id": ids, "hsf_id": [0] * 3, "character": [3, 61, 5]}
    write_hub(tmp_path / "f", "train", columns, "image")
    source = HubSource(str(tmp_path / "f"), "image", "character", "writer_id", ("train",))
    assert hub_data("femnist", source).groups.tolist() == numbers
    digits = hub_data("femnist-digits", source)
    assert digits.y.tolist() == [3, 5]
    assert digits.groups.tolist() == [numbers[0], numbers[2]]


@pytest.mark.usefixtures("hf_cache")
def test_hub_shakespeare(tmp_path: Path) -> None:
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
def test_hub_with_other_columns(tmp_path: Path, images: Arrays) -> None:
    write_hub(tmp_path / "m", "train", {"image": images["x_train"], "digit": images["y_train"]}, "image")
    with pytest.raises(
        DataError, match=r"dataset = 'mnist': .* has other columns than image, label \(ValueError"
    ):
        hub_data("mnist", HubSource(str(tmp_path / "m"), "image", "label", splits=("train",)))
    with pytest.raises(
        DataError, match=r"can't be had from the Hugging Face hub .*; give a local copy with data-path"
    ):
        hub_data("mnist", HubSource(str(tmp_path / "m"), "image", "digit"))  # has no test split


def test_a_failing_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", fail)
    for name, source in HUB_SOURCES.items():
        assert message(name) == (
            f"dataset = '{name}': {source.repository} can't be had from the Hugging Face hub "
            "(ConnectionError: no route to host); give a local copy with data-path"
        )


# Real data -------------------------------------------------------------------------------------------------


def test_real_mnist(real_data: Path) -> None:
    if not (real_data / "mnist.npz").is_file():
        pytest.skip("no mnist.npz")
    mnist = load_dataset("mnist", str(real_data))
    assert mnist.x.shape == (70_000, 1, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # as published
    assert np.bincount(mnist.y[:60_000]).tolist() == counts
    x = mnist.inputs(slice(0, 60_000))
    assert x.mean() == pytest.approx(mnist.mean[0], abs=5e-5)
    assert x.std() == pytest.approx(mnist.std[0], abs=5e-5)


def test_real_femnist(real_data: Path) -> None:
    if not (real_data / "femnist.npz").is_file():
        pytest.skip("no femnist.npz")
    femnist, digits = (load_dataset(name, str(real_data)) for name in ("femnist", "femnist-digits"))
    assert len(np.unique(femnist.groups)) == 307
    assert (digits.num_train, len(digits.y), femnist.num_classes) == (29_605, 32_950, 62)


def test_real_cifar10(real_data: Path) -> None:
    if not (real_data / "cifar10.npz").is_file():
        pytest.skip("no cifar10.npz")
    cifar = load_dataset("cifar10", str(real_data))
    assert cifar.x.shape == (60_000, 3, 32, 32)
    x = cifar.inputs(slice(0, 50_000, 5))
    assert x.mean(axis=(0, 2, 3)) == pytest.approx(cifar.mean, abs=5e-3)
    assert x.std(axis=(0, 2, 3)) == pytest.approx(cifar.std, abs=5e-3)


def test_real_synthetic(real_data: Path) -> None:
    if not (real_data / "synthetic_000").is_dir():
        pytest.skip("no synthetic_000")
    data = load_dataset("synthetic", str(real_data / "synthetic_000"))
    assert (data.x.shape, data.num_train) == ((2400, 2), 2000)
    assert data.x[(data.groups == 19) & (data.y == 1)].mean() == pytest.approx(4, abs=0.1)
