"""constraints.txt can be installed: no pinned version is one that an installed package refuses."""

from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = [
    Requirement(line) for line in (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
]


def test_no_pinned_version_is_refused_by_what_is_installed():
    pinned = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in PINS
        if pin.marker is None or pin.marker.evaluate()
    }
    refused = []
    for package in distributions():
        if pinned.get(canonicalize_name(package.name)) != package.version:
            continue  # a version that is not ours asks for what it likes
        for wanted in map(Requirement, package.requires or []):
            version = pinned.get(canonicalize_name(wanted.name))
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if version and applies and not wanted.specifier.contains(version, prereleases=True):
                refused.append(f"{package.name} {package.version} asks for {wanted}; pinned is {version}")
    assert refused == []
