"""Data from a function of one's own: what it is given, what it may return, and when it is called again."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data import DataError, Dataset, load_dataset
from fedapp.data.dataset import DataColumns

Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module with a function ``load``; return its name as a value of ``dataset``."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    written: list[str] = []

    def write(source: str) -> str:
        name = f"own_data_{len(written)}"
        written.append(name)
        (folder / f"{name}.py").write_text(f"import numpy as np\n{source}\n")
        return f"{name}:load"

    yield write
    for name in written:
        sys.modules.pop(name, None)


def returning(module: Write, expression: str) -> Dataset:
    return load_dataset(module(f"def load():\n    return {expression}"))


def refused(name: str, *arguments: Any, **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(name, *arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What it may return ------------------------------------------------------------------------------------------

X, Y = "np.arange(12.0).reshape(4, 3)", "np.array([0, 1, 1, 2])"


def test_inputs_and_labels(module):
    data = returning(module, f"{X}, {Y}")
    assert data.x.tolist() == np.arange(12.0).reshape(4, 3).tolist()
    assert (data.y.tolist(), data.y.dtype, data.targets) == ([0, 1, 1, 2], np.int64, "classes")
    assert (data.num_train, data.num_classes, data.num_outputs, data.kind) == (4, 3, 3, "vector")


def test_four_arrays_and_a_dict_of_them(module):
    four = returning(module, f"({X}, {Y}, {X}[:2], {Y}[:2])")
    named = returning(
        module,
        f"{{'x_train': {X}, 'y_train': {Y}, 'x_test': {X}[:2], 'y_test': {Y}[:2],"
        " 'group_train': ['b', 'a', 'b', 'c'], 'group_test': ['c', 'a']}",
    )
    for data in (four, named):
        assert (data.num_train, data.y.tolist()) == (4, [0, 1, 1, 2, 0, 1])
    assert four.groups is None
    assert named.groups is not None
    assert named.groups.tolist() == [1, 0, 1, 2, 2, 0]


def test_numbers_and_several_of_them(module):
    one = returning(module, f"{X}, {Y} / 2")
    assert (one.targets, one.num_classes, one.num_outputs, one.y.dtype) == ("numbers", 0, 1, np.float32)
    assert one.y.tolist() == [[0.0], [0.5], [0.5], [1.0]]
    two = returning(module, f"{X}, np.stack([{Y}, {Y}], 1) / 1")
    assert (two.targets, two.num_outputs, two.y.shape) == ("numbers", 2, (4, 2))


def test_lists_and_tensors(module):
    assert returning(module, "[[0, 1], [2, 3]], [1, 0]").x.tolist() == [[0, 1], [2, 3]]
    source = (
        "import torch\ndef load():\n    return torch.zeros(2, 5, requires_grad=True), torch.tensor([1, 0])"
    )
    assert load_dataset(module(source)).x.shape == (2, 5)


def test_torch_datasets(module):
    source = """
import torch
from torch.utils.data import TensorDataset
from PIL import Image

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, row): return Image.new("RGB", (4, 5), (row, 0, 0)), row % 2

def load(): return TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1]))
def pair(): return Pictures(), Pictures()
"""
    name = module(source)
    alone = load_dataset(name)
    assert (alone.x.tolist(), alone.y.tolist(), alone.num_train) == ([[0, 1], [2, 3], [4, 5]], [0, 1, 1], 3)
    pictures = load_dataset(name.replace(":load", ":pair"))
    assert (pictures.kind, pictures.scale, pictures.input_shape, pictures.num_train) == (
        "image",
        1 / 255,
        (3, 5, 4),
        3,
    )
    assert pictures.x[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_hugging_face_data(module):
    name = module("""
from datasets import Dataset, DatasetDict
def load(): return Dataset.from_dict({"a": [1.0, 2.0], "b": [3, 4], "kind": ["x", "w"], "who": ["u", "v"]})
def none(): return Dataset.from_dict({"a": [], "label": []})
def parts(): return DatasetDict({"train": load(), "test": load()})
def pair(): return load(), load()
""")
    columns = DataColumns("", "kind", "who")
    data = load_dataset(name, columns=columns)
    assert (data.x.tolist(), data.y.tolist(), data.classes) == ([[1, 3], [2, 4]], [1, 0], ("w", "x"))
    assert (data.columns, data.groups.tolist()) == (("a", "b"), [0, 1])  # type: ignore[union-attr]
    for function in (":parts", ":pair"):
        assert load_dataset(name.replace(":load", function), columns=columns).num_train == 2
    assert refused(name.replace(":load", ":none")).endswith(
        "has no rows in train or test; at least one is needed"
    )


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("3", "is a int; allowed are (x, y), "),
        ("(1, 2, 3)", "is a tuple of 3; allowed are (x, y), "),
        ("{'x': 1}", "is a dict with 'x'; allowed are x_train, y_train, "),
        ("{}", "has no array x_train; x_train and y_train are needed (found: none)"),
        (f"({X}, {Y}[:2])", "x_train has 4 rows, y_train has 2; they must match"),
        (f"({X} * np.nan, {Y})", "x_train has values that are not finite in float32; all must be finite"),
        (f"({X}, -{Y})", "y_train has a label below 0; whole numbers from 0 are needed"),
        (f"({X}, [None] * 4)", "has y_train of type list, which can't be an array of numbers"),
        (f"(np.ma.masked_greater({X}, 2), {Y})", "x_train has 9 masked entries; none are allowed"),
        (f"({X}, np.ma.masked_equal({Y}, 1))", "y_train has 2 masked entries; none are allowed"),
        ("iter([1])", "is a list_iterator; allowed are (x, y), "),
    ],
)
def test_what_it_may_not_return(module, expression, text):
    name = module(f"def load():\n    return {expression}")
    assert refused(name).startswith(f"dataset = {name!r}: what the function returned {text}")


def test_rows_that_differ(module):
    name = module("""
class Rows:
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, row): return self.rows[row]
def load(): return Rows([([1, 2], 0), ([1, 2, 3], 0)])
def single(): return Rows([1, 2])
def none(): return Rows([])
""")
    assert (
        "has inputs of shape (3,), the first one's is (2,); they must match, and the collate_fn"
        in refused(name)
    )
    assert refused(name.replace("load", "single")).endswith("has rows of type int; (input, target) is needed")
    assert refused(name.replace("load", "none")).endswith("is a dataset without rows; at least one is needed")


def test_rows_that_are_drawn_anew_each_time_are_refused(module):
    name = module("""
from torch.utils.data import DataLoader
class Rows:
    def __init__(self): self.drawn = np.random.default_rng(0)
    def __len__(self): return 40
    def __getitem__(self, row): return np.ones(2) * (row if row < 35 else self.drawn.random()), row % 2
class Several(Rows):
    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return (x, np.ones(3)), y
class Named(Rows):
    def __getitem__(self, row): return {"x": super().__getitem__(row)[0].tolist(), "name": "a", "rest": None}
def load(): return Rows()
def several(): return Several()
def loader(): return DataLoader(Rows())
def named(): return DataLoader(Named(), collate_fn=len)
""")
    for function in ("load", "several", "loader", "named"):
        said = refused(name.replace(":load", f":{function}"))
        assert "has a row 35 that differs when it is read again; rows are read once" in said


def test_loaders_read_each_row_once_or_are_refused(module):
    name = module("""
import torch
from torch.utils.data import *
rows = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1]))
class Endless(IterableDataset):
    def __len__(self): return 3
    def __iter__(self): return iter(rows)
class Backwards(SequentialSampler):
    def __iter__(self): return iter([2, 2, 2])
def load(): return DataLoader(rows, batch_size=2, shuffle=True, drop_last=True)
def chosen(): return DataLoader(Subset(rows, [2, 0])), DataLoader(Subset(rows, [1]), sampler=SequentialSampler([0]))
def subset(): return DataLoader(rows), DataLoader(rows, sampler=SubsetRandomSampler([1]))
def again(): return DataLoader(rows, sampler=RandomSampler(rows, replacement=True))
def few(): return DataLoader(rows, sampler=RandomSampler(rows, num_samples=2))
def first(): return DataLoader(rows, sampler=SequentialSampler(range(2)))
def own(): return DataLoader(rows, sampler=Backwards(rows))
def batches(): return DataLoader(rows, batch_sampler=[[2], [1]])
def endless(): return DataLoader(Endless())
def alone(): return Endless()
""")
    assert load_dataset(name).y.tolist() == [0, 1, 1]
    chosen = load_dataset(name.replace(":load", ":chosen"))
    assert (chosen.x[:, 0].tolist(), chosen.num_train) == ([4, 0, 2], 2)
    for function, sampler in (
        ("subset", "SubsetRandomSampler"),
        ("again", "RandomSampler"),
        ("few", "RandomSampler"),
        ("first", "SequentialSampler"),
        ("own", "Backwards"),
        ("batches", "list"),
    ):
        assert refused(name.replace(":load", f":{function}")).endswith(
            f"is a DataLoader whose {sampler} doesn't count, as all rows of its dataset are read once; "
            "torch.utils.data.Subset chooses rows of a dataset"
        )
    for function in ("endless", "alone"):
        assert refused(name.replace(":load", f":{function}")).endswith(
            "is an IterableDataset, whose rows have no numbers by which they are divided over clients; a Dataset "
            "with __getitem__ and __len__, or (x, y) of all its rows, is needed"
        )


def test_natural_ids_of_rows_and_of_a_batch(module):
    name = module("""
import torch
from torch.utils.data import DataLoader, Subset
sites = ["b", "a", "b"]
def rows(site):
    return Subset([({"u": np.ones(2) * k, "v": np.ones(3), **site(k)}, k % 2) for k in range(3)], range(3))
def load(): return rows(lambda k: {"site": sites[k]})
def pair(): return load(), DataLoader(Subset(load(), [0]), collate_fn=lambda rows: (
    {key: torch.tensor(np.stack([x[key] for x, _ in rows])) for key in "uv"}, torch.tensor([y for _, y in rows])))
def batch(): return DataLoader([(k, site) for k, site in enumerate(sites)], collate_fn=lambda rows: {
    "u": torch.tensor([[k, 1.0] for k, _ in rows]), "v": torch.ones(3, 1), "labels": torch.tensor([0, 1, 0]),
    "site": [site for _, site in rows]})
def some(): return rows(lambda k: {"site": 1} if k else {})
def whole(): return rows(lambda k: {"site": torch.tensor(7 - k)})
""")
    columns = DataColumns(group="site")
    for function, ids in (
        ("load", [1, 0, 1]),
        ("pair", [1, 0, 1, 1]),
        ("batch", [1, 0, 1]),
        ("whole", [7, 6, 5]),
    ):
        data = load_dataset(name.replace(":load", f":{function}"), columns=columns)
        assert data.groups.tolist() == ids
        assert [part.name for part in data.parts] == ["u", "v"]
    assert "has a natural id, group-column = 'site', in 2 of 3 rows" in refused(
        name.replace(":load", ":some"), columns=columns
    )


def test_labels_that_are_names(module):
    name = module(f"def load():\n    return {X}, ['a', 'b', 'a', 'c']")
    assert (load_dataset(name).classes, load_dataset(name).y.tolist()) == (("a", "b", "c"), [0, 1, 0, 2])


def test_rows_of_several_types_are_of_one_that_fits_all(module):
    name = module("""
class Rows:
    def __init__(self, *rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, row): return self.rows[row]
def load(): return Rows(([0, 1], 3), ([0.5, 1.75], 1.5), ([2, 3], 2.5))
def bytes_too(): return Rows((np.zeros(2), 0), (np.zeros(2, np.uint8), 1))
def dates(): return Rows(([0, 1], 3), ([0, 1], np.datetime64("2020-01-01")))
""")
    data = load_dataset(name, targets="numbers")
    assert (data.y.ravel().tolist(), data.x.tolist()) == ([3, 1.5, 2.5], [[0, 1], [0.5, 1.75], [2, 3]])
    assert refused(name.replace("load", "bytes_too")).endswith(
        "has inputs of type uint8 and of type float64; they must match"
    )
    assert refused(name.replace("load", "dates")).endswith(
        "has rows of type int64 and of type datetime64[D]; they must match"
    )


def test_columns_that_nobody_reads_are_refused(module):
    name = module(f"def load():\n    return {X}, {Y}")
    assert refused(name, columns=DataColumns(label="y")) == (
        f"label-column = 'y': {name} returned no data with columns"
    )
    assert refused(name, columns=DataColumns(group="w")).startswith("group-column = 'w': ")


# What it is given --------------------------------------------------------------------------------------------


def test_it_is_given_what_it_takes(module, tmp_path):
    name = module("""
def load(seed, num_clients=3, *, data_path="?"):
    return np.array([[seed, num_clients, len(data_path)]]), np.array([0])
def everything(**given): return np.array([[given["seed"], given["num_clients"]]]), np.array([0])
def nothing(): return np.zeros((1, 1)), np.array([0])
""")
    where = str(tmp_path)
    assert load_dataset(name, where, seed=7, num_clients=5).x.tolist() == [[7, 5, len(where)]]
    assert load_dataset(name, seed=7).x.tolist() == [[7, 0, 0]]
    assert load_dataset(name.replace("load", "everything"), seed=2, num_clients=4).x.tolist() == [[2, 4]]
    nothing = name.replace("load", "nothing")
    assert refused(nothing, where) == (
        f"data-path = {where!r}: {nothing} takes no data_path; allowed is an empty one"
    )
    assert "no such file or folder" in refused(name, where + "/none")


def test_what_can_not_be_called(module):
    name = module("load = 3\ndef more(size, seed): pass\ndef places(seed, /): pass\ndef bad():\n    [][1]")
    assert refused(name) == f"dataset = {name!r}: is of type int; a function is needed"
    more = name.replace("load", "more")
    assert refused(more) == (
        f"dataset = {more!r}: the function needs size; it is given num_clients, seed, data_path, by name"
    )
    assert "the function needs seed; " in refused(name.replace("load", "places"))
    assert refused("no_such_module:load").startswith(
        "dataset = 'no_such_module:load': can't be imported (ModuleNotFoundError: "
    )
    assert "(there is no 'none' in own_data_0)" in refused(name.replace("load", "none"))
    assert refused("no module").startswith("dataset = 'no module': unknown; allowed: digits, ")


def test_what_can_be_called_and_is_no_function(module):
    name = module("""
import functools
def make(rows, seed): return np.full((rows, 1), seed), np.arange(rows) % 2
class Maker:
    def __call__(self, seed): return make(5, seed)
load, maker = functools.partial(make, 3), Maker()
""")
    for called, rows in ((name, 3), (name.replace("load", "maker"), 5)):
        for _ in range(2):  # the second from the cache
            assert load_dataset(called, seed=4).x.tolist() == [[4]] * rows
    assert refused("builtins:max").startswith("dataset = 'builtins:max': doesn't tell what it takes; ")


def test_no_message_quotes_what_it_raised(module, caplog):
    name = module("def load():\n    raise ValueError('Smith, born 1970')")
    file = name.split(":")[0] + ".py"
    assert refused(name) == (
        f"dataset = {name!r}: the function raised ValueError ({file}, line 3); the log says more where it ran"
    )
    assert "Smith" in caplog.text


# When it is called again -------------------------------------------------------------------------------------


def test_it_is_called_again_when_what_it_depends_on_changes(module, tmp_path):
    calls, data = tmp_path / "calls", tmp_path / "data"
    data.mkdir()
    name = module(f"""
def load(seed, data_path):
    with open({str(calls)!r}, "a") as file:
        file.write("x")
    return np.zeros((2, 1)), np.array([0, 1])
""")

    def called(**more: Any) -> int:
        load_dataset(name, str(data), **{"seed": 1, **more})
        return len(calls.read_text())

    assert called() == 1
    assert called() == 1
    assert called(num_clients=9) == 1  # which it doesn't take
    assert called(seed=2) == 2
    (data / "more.txt").write_text("1")
    assert called() == 3
    assert called() == 3
    source = Path(sys.modules[name.split(":")[0]].__file__ or "")
    (source.parent / "helper.py").write_text("SIZE = 3")  # beside it, and maybe imported
    assert called() == 4
    source.write_text(source.read_text() + "\n# changed\n")
    assert called() == 4  # what is imported is as it was
    importlib.reload(sys.modules[name.split(":")[0]])
    assert called() == 5
    assert called() == 5


def in_another_process(name: str) -> int:
    """Return how many rows a new process finds."""
    code = f"from fedapp.data import load_dataset; print(len(load_dataset({name!r}).y))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_was_imported_before_an_edit_is_not_taken_for_what_is_there_after(
    module, caplog, monkeypatch, at_once
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # there Python notes what it has imported
    name = module("def load():\n    return np.zeros((3, 2)), np.array([0, 1, 0])")
    own = name.split(":")[0]
    imported = importlib.import_module(own)
    if not at_once:
        assert len(load_dataset(name).y) == 3
    source = Path(imported.__file__ or "")
    source.write_text(source.read_text().replace("(3, 2)", "(5, 2)").replace("[0, 1, 0]", "[0, 1, 0, 1, 0]"))
    for _ in range(2):
        assert len(load_dataset(name).y) == 3
    said = [record.getMessage() for record in caplog.records if record.name == "fedapp.own"]
    assert [line.partition(":")[0] for line in said] == [
        f"{own}.py has changed since it was imported, and is used as it was"
    ]
    assert in_another_process(name) == 5
    importlib.reload(imported)
    assert len(load_dataset(name).y) == 5


def test_a_module_that_is_imported_by_the_function_counts_as_it_was_then(module):
    helper = module("SIZE = 3").split(":")[0]
    name = module(
        f"def load():\n    from {helper} import SIZE\n    return np.zeros((SIZE, 1)), np.arange(SIZE)"
    )
    assert len(load_dataset(name).y) == 3
    source = Path(sys.modules[helper].__file__ or "")
    source.write_text(source.read_text().replace("3", "12"))
    assert len(load_dataset(name).y) == 3
    assert in_another_process(name) == 12


def test_the_example(monkeypatch):
    data = load_dataset("custom.diabetes:load")
    assert (data.x.shape, data.y.shape, data.targets, data.kind) == ((442, 10), (442, 1), "numbers", "vector")
    assert 0.2 < data.y.min() < data.y.max() < 4
    assert sorted(os.listdir(os.environ["FEDAPP_CACHE"]))[0].startswith("custom.diabetes-load-")
