"""Whether two processes run the same app: the bundle that Flower delivered, and what the worker has imported.

The run config's defaults in pyproject.toml don't matter: every key comes with the message.
"""

import hashlib
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("custom", "fedapp", "strategies")
LIBRARIES = ("flwr", "numpy", "torch")


def digest_of_sources() -> str:
    """Return a digest of the app's sources on this process's import path, and of the libraries that it works with."""
    digest = hashlib.sha256(repr((sys.version, [_version(name) for name in LIBRARIES])).encode())
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{package}/{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
