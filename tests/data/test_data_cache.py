"""The cache: shared memory maps, safe with several processes, rebuilt when damaged or out of date."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedapp.cache import default_cache_dir
from fedapp.data import DataError, load_dataset
from fedapp.data.dataset import RawData
from fedapp.data.loading import cached_dataset

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, env=environment)


def small(value: float = 1.0) -> RawData:
    x = np.full((4, 2), value, np.float32)
    return RawData([x, x[:1]], np.arange(5) % 2, np.arange(5), 4, 2, "vector", 1.0)


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_arrays_are_read_only_memory_maps(cache):
    dataset = load_dataset("synthetic")
    for array in (dataset.x, dataset.y, dataset.groups):
        assert isinstance(array, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert dataset.y.dtype == dataset.groups.dtype == np.int64
    assert str(dataset.x.filename).startswith(str(cache))


def test_second_load_reads_nothing(cache):
    first = cached_dataset("npz", {}, small)
    second = cached_dataset("npz", {}, lambda: pytest.fail("was read again"))
    assert first.x.filename == second.x.filename
    assert (second.num_train, second.num_classes, second.kind, second.scale) == (4, 2, "vector", 1.0)
    assert second.groups.tolist() == [0, 1, 2, 3, 4]
    assert len(folders(cache)) == 1


def test_import_and_second_load_need_no_heavy_library():
    load_dataset("digits")
    code = (
        "import sys, fedapp.data; fedapp.data.load_dataset('digits');"
        "heavy = {'sklearn', 'torch', 'torchvision', 'datasets', 'flwr_datasets'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert python(code).communicate()[0].strip() == "[]"


def test_two_processes_prepare_at_once(cache):
    # Both readers wait for the other one, so that both find the cache empty and both write.
    code = f"""
import time, numpy as np
from pathlib import Path
from fedapp.data.loading import cached_dataset
from fedapp.data.dataset import RawData
flags = Path({str(cache.parent)!r})
def read():
    (flags / ("flag" + NAME)).touch()
    deadline = time.time() + 30
    while len(list(flags.glob("flag*"))) < 2 and time.time() < deadline:
        time.sleep(0.01)
    x = np.full((2000, 50), 7.0, np.float32)
    return RawData([x], np.zeros(2000, np.int64), None, 2000, 1, "vector", 1.0)
dataset = cached_dataset("npz", {{}}, read)
print(float(dataset.x.sum()), len(list(flags.glob("flag*"))))
"""
    for flag in cache.parent.glob("flag*"):
        flag.unlink()
    processes = [python(f"NAME = '{i}'\n{code}") for i in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert outputs == [["700000.0", "2"]] * 2
    assert len(folders(cache)) == 1  # the loser removed its own copy


@pytest.mark.parametrize("file", ["x.npy", "y.npy", "groups.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_a_damaged_folder_is_rebuilt(cache, file, damage):
    cached_dataset("npz", {}, small)
    path = cache / folders(cache)[0] / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] if damage == "cut" else b"\x00nonsense")
    dataset = cached_dataset("npz", {}, lambda: small(2.0))
    assert dataset.x.tolist() == [[2.0, 2.0]] * 5
    assert len(folders(cache)) == 1


def test_a_changed_source_is_read_again(tmp_path):
    file = tmp_path / "own.npz"
    np.savez(file, x_train=np.zeros((3, 2)), y_train=np.arange(3))
    first = load_dataset("npz", str(file))
    np.savez(file, x_train=np.ones((3, 2)), y_train=np.arange(3))
    os.utime(file, ns=(1, 1))  # same size; the time alone tells
    second = load_dataset("npz", str(file))
    assert first.x.sum() == 0  # an open map of the old one stays as it is
    assert second.x.sum() == 6


def test_a_failing_reader_leaves_nothing_behind(cache):
    def read() -> RawData:
        raise DataError("no")

    with pytest.raises(DataError):
        cached_dataset("npz", {}, read)
    assert folders(cache) == []


def test_cache_folder_is_taken_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FEDAPP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "fedapp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "fedapp"


def test_cache_dir_argument(tmp_path):
    dataset = load_dataset("digits", cache_dir=tmp_path / "given")
    assert str(dataset.x.filename).startswith(str(tmp_path / "given"))


def test_a_cache_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DataError, match=r"FEDAPP_CACHE = '.*file': the dataset can't be prepared there"):
        load_dataset("digits", cache_dir=file)
