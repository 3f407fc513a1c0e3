"""The source of a part is in the key of a run: of whatever kind the part is, and of what its module imports."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapp.data.given.function import digest_of
from fedapp.own import changed_since, imported, register, source_digest, source_files

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files of modules, as they are in a new process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def written(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        _forget()

    yield written
    _forget()


def _forget() -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in ("mine", "pieces", "bare")]:
        del sys.modules[module]
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    "text",
    [
        "class Focal:\n    def __init__(self, by): self.by = by\n    def __call__(self, o, t): return o\n"
        "part = Focal({})",
        "from functools import partial\ndef made(width): return width\npart = partial(made, width={})",
        "from functools import lru_cache\n@lru_cache\ndef part(): return {}",
        "import torch\n@torch.no_grad()\ndef part(o, t): return {}",
        "from math import hypot as part\nnumber = {}",
    ],
    ids=["object", "partial", "cached", "decorated", "another's"],
)
def test_a_part_of_any_kind_has_the_source_of_its_module(write, text):
    digests = []
    for number in (2, 4, 2):
        write(mine=text.format(number))
        digests.append(source_digest("mine:part"))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    "line",
    [
        "from pieces.blocks import block",
        "import pieces.blocks",
        "from pieces import blocks",
        "def part():\n    from pieces import within",
    ],
)
def test_what_a_module_imports_counts_in_turn(write, line):
    digests = []
    for number in (1, 2):
        write(
            pieces__within="from .blocks import block",
            pieces__blocks=f"block = {number}",
            bare=f"n = {number}",
        )
        write(mine=f"import torch\n{line}\ndef part(): return 1\n")
        digests.append((source_digest("mine:part"), digest_of(imported("", "mine:part"), "mine:part")))  # type: ignore[arg-type]
    (one, data), (other, other_data) = digests
    assert one != other
    assert data != other_data
    write(bare="n = 3")  # beside it, and not imported: a script that compares runs, say
    assert source_digest("mine:part") == other
    assert {file.name for file in source_files("mine:part")} >= {"mine.py", "blocks.py"}
    assert "torch" not in {file.parent.name for file in source_files("mine:part")}


def test_a_module_alone_has_the_digest_of_its_file(write):
    write(mine="def part(): return 1\n")
    assert len(source_digest("mine:part")) == 10
    assert [file.name for file in source_files("mine:part")] == ["mine.py"]
    assert source_files("custom.nets:ConvNet")[-1].name == "nets.py"
    assert source_digest("mine:nothing") == ""


def test_other_processes_would_import_what_a_module_imports_otherwise(write, tmp_path):
    write(pieces__blocks="block = 1", mine="from pieces.blocks import block\nclass Of: pass\npart = Of()\n")
    parts = {"loss": "mine:part"}
    assert changed_since(parts) == ""
    (tmp_path / "pieces" / "blocks.py").write_text("block = 2")
    assert "loss = 'mine:part': blocks.py has changed since" in changed_since(parts)


SCRIPT = """
from fedapp.own import source_digest
from fedapp.sweeps.point import PlannedRun
from fedapp.api.values import as_values

def net(num_outputs): return {}

print(PlannedRun.of({{}}, as_values({{"model": net, "num-clients": 2}})).key)
"""


@pytest.mark.thorough
def test_of_a_script_counts_the_part_alone(tmp_path):
    script, keys = tmp_path / "script.py", []
    for text in (SCRIPT.format(1), SCRIPT.format(1) + "# a line more\n", SCRIPT.format(2)):
        script.write_text(text)
        ran = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=Path.cwd()
        )
        keys.append(ran.stdout)
    assert keys[0] == keys[1] != keys[2]


def test_a_part_that_no_module_has_is_known_by_its_name():
    assert source_files(register(lambda outputs, targets: 1.0)) == []
