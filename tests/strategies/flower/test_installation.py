"""What an import says of a Flower that lacks what the library uses, and of another module of the library's name."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import strategies
from strategies.flower import internals
from strategies.flower.namesakes import namesakes

# An import in a process of its own, of a Flower that lacks one thing: as a later version may.
LACKING = """
import {module}
del {module}.{name}
import strategies
"""


def imported(code: str, *folders: Path) -> str:
    """Return the last line that an import writes to stderr."""
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("module", "name", "gone", "what"),
    [
        (
            "flwr.common.serde",
            "message_to_proto",
            "cannot import name 'message_to_proto' from 'flwr.common.serde'",
            "strategies.simulate, compression, and a worker that stays on a device",
        ),
        (
            "flwr.common.constant",
            "ErrorCode.MOD_FAILED_PRECONDITION",
            "type object 'ErrorCode' has no attribute 'MOD_FAILED_PRECONDITION'",
            "the reasons for which a reply is missing",
        ),
    ],
)
def test_an_import_names_what_flower_lacks(module, name, gone, what):
    code = LACKING.format(module=module, name=name)
    if name.startswith("ErrorCode"):  # Flower uses it too, when it is imported
        code = code.replace("import strategies", "from strategies.flower import internals")
    tested = " and ".join(internals.TESTED)
    assert imported(code) == (
        f"ImportError: flwr {version('flwr')}: {gone}, so {what} can't work; "
        f"strategies is tested with flwr {tested}"
    )


def test_classes_that_are_known_by_their_names_are_there():
    for module, name in (
        ("flwr.superlink.grid.inmemory_grid", "InMemoryGrid"),
        ("flwr.compat.client.run_info_store", "DeprecatedRunInfoStore"),
    ):
        assert hasattr(importlib.import_module(module), name)
    assert internals.is_simulation(type("InMemoryGrid", (), {})())  # type: ignore[arg-type]


def test_another_module_of_the_name_is_named_and_the_library_itself_is_not(tmp_path):
    library = Path(strategies.__file__).parent
    assert namesakes([str(library.parent), str(tmp_path)]) == []
    (tmp_path / "strategies.py").write_text("", "utf-8")
    (tmp_path / "deep" / "strategies").mkdir(parents=True)
    (tmp_path / "deep" / "strategies" / "__init__.py").write_text("", "utf-8")
    found = namesakes([str(library.parent), str(tmp_path), str(tmp_path), str(tmp_path / "deep")])
    assert found == [tmp_path / "strategies.py", tmp_path / "deep" / "strategies" / "__init__.py"]


def test_a_clash_is_one_line_at_import(tmp_path):
    (tmp_path / "strategies.py").write_text("", "utf-8")
    library = Path(strategies.__file__).parent
    line = imported("import strategies", library.parent, tmp_path)
    assert f"import strategies is the library in {library}, and hides the module of the same name in" in line
    assert line.endswith(f"{tmp_path / 'strategies.py'}: rename one's own module")
    assert imported("import strategies", library.parent) == ""
    assert str(tmp_path / "strategies.py") in imported(
        "from strategies import FedFix", tmp_path, library.parent
    )
