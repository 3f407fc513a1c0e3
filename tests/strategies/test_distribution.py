"""The library installs by itself: a wheel from this repository, typed, with a version, and no torch."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import strategies

STRATEGIES = Path(strategies.__file__).parent
# Built where it can be without a network; what is imported then comes from the wheel, and torch can't be.
BUILD = """
import os, sys
from hatchling.build import build_wheel
os.chdir(sys.argv[1])
print(build_wheel(sys.argv[2]))
"""
IMPORT = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
for name in ("torch", "fedapp", "torchvision"):
    sys.modules[name] = None
import strategies
for module in pkgutil.iter_modules(strategies.__path__):
    importlib.import_module(f"strategies.{module.name}")
from strategies import FedBuff, REGISTRY
assert FedBuff(FedBuff.Config(buffer_size=3)).config.buffer_size == 3
assert REGISTRY
print(strategies.__file__)
"""


def run(code: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds the wheel, isn't installed"
)
def test_the_wheel_is_imported_without_torch_or_the_app(tmp_path):
    name = run(BUILD, str(STRATEGIES), str(tmp_path), cwd=tmp_path)
    assert name.startswith(f"fedapp_strategies-{strategies.__version__}-py3")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = {path for path in wheel.namelist() if not path.startswith("fedapp_strategies-")}
        info = f"fedapp_strategies-{strategies.__version__}.dist-info"
        assert wheel.read(f"{info}/licenses/LICENSE") == (STRATEGIES.parent / "LICENSE").read_bytes()
        told = wheel.read(f"{info}/METADATA").decode()
        wheel.extractall(tmp_path / "site")
    assert all(f"\n{line}: " in told for line in ("Author", "Project-URL", "License-Expression"))
    assert "\nRequires-Dist: flwr<2,>=1.41\n" in told
    own = {path.relative_to(STRATEGIES.parent).as_posix() for path in STRATEGIES.rglob("*.py")}
    assert files == own | {"strategies/py.typed"}
    assert run(IMPORT, str(tmp_path / "site"), cwd=tmp_path).startswith(str(tmp_path / "site"))


def test_its_readme_is_its_own():
    own = tomllib.loads((STRATEGIES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (STRATEGIES / own["readme"]).read_text(encoding="utf-8")
    assert readme.startswith(f"# {own['name']}\n")
    assert {kind.__name__ for kind in strategies.REGISTRY.values()} <= set(re.findall(r"`(\w+)`", readme))


def test_it_asks_for_flower_numpy_and_scipy_as_the_app_does():
    own = tomllib.loads((STRATEGIES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    app = tomllib.loads((STRATEGIES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {requirement.replace("[simulation]", "") for requirement in app["dependencies"]}
    # the app has been tried with these versions of Flower only
    assert {entry.replace(",<2", ",<1.44") for entry in own["dependencies"]} <= wanted
    assert [requirement.partition(">")[0] for requirement in own["dependencies"]] == [
        "flwr",
        "numpy",
        "scipy",
    ]
    assert own["requires-python"] == app["requires-python"]
