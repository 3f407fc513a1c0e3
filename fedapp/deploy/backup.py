"""What must outlive the operator's disk: the deployment's folder, with the authority's key that nothing replaces."""

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedapp.deploy.files import REMOVED, read_deployment, write_startup
from fedapp.deploy.plan import DeployError, Deployment

# What processes write.
_OTHER_FILES = (".log", ".db", ".db-wal", ".db-shm", ".new")
_OTHER_FOLDERS = ("cache", "results", REMOVED)


def backup(out: Path, file: Path) -> list[str]:
    """Write a deployment's folder into one compressed file that only its owner may read.

    Left out are databases, logs, caches, runs and removed devices.

    Returns
    -------
    list of str
        What is in it.

    Raises
    ------
    DeployError
        If `out` holds no deployment, or the file is there already or can't be written.
    """
    read_deployment(out)
    kept = sorted(
        path.relative_to(out)
        for path in out.rglob("*")
        if path.is_file() and _is_kept(path.relative_to(out)) and file.absolute() != path.absolute()
    )
    with _new_private_file(file) as content, tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name in kept:
            archive.add(out / name, str(name))
    return [str(name) for name in kept]


def restore(file: Path, out: Path) -> Deployment:
    """Make a deployment's folder of a backup; start-up files are written anew.

    Raises
    ------
    DeployError
        If the file is no backup, or `out` is there already and not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DeployError(f"{out}: is there already; a backup is restored into a new folder")
    try:
        with tarfile.open(file) as archive:
            if "deployment.toml" not in archive.getnames():
                raise DeployError(f"{file}: is no backup of a deployment, there is no deployment.toml in it")
            out.mkdir(parents=True, exist_ok=True)
            archive.extractall(out, filter="data")  # nothing outside the folder
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DeployError(f"{file}: can't be restored ({str(error).splitlines()[0].rstrip(':')})") from None
    deployment = read_deployment(out)
    write_startup(out, deployment)  # Flower's config.toml holds the folder's path
    return deployment


def _is_kept(name: Path) -> bool:
    folders = name.parts[:-1]
    # The operator's own flower/ holds config.toml; those of machines, what their processes write.
    others = bool(set(folders) & set(_OTHER_FOLDERS)) or "flower" in folders[1:]
    return not others and name.suffix not in _OTHER_FILES


@contextmanager
def _new_private_file(file: Path) -> Iterator[io.BufferedWriter]:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise DeployError(f"{file}: is there already, and a backup replaces nothing") from None
    except OSError as error:
        raise DeployError(f"{file}: can't be written ({error.strerror})") from None
    try:
        with os.fdopen(descriptor, "wb") as content:
            yield content
    except OSError as error:
        file.unlink()
        raise DeployError(f"{file}: can't be written ({error.strerror})") from None
