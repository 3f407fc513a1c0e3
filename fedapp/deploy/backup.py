"""What must outlive the operator's disk: the deployment's folder, with the authority's key that nothing replaces."""

import gzip
import io
import os
import shutil
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fedapp.deploy.files import REMOVED, deployment_of, read_deployment, write_startup
from fedapp.deploy.plan import PLAN, DeployError, Deployment

# Suffixes and folders of what processes write.
_OTHER_FILES = (".log", ".db", ".db-wal", ".db-shm", ".new")
_OTHER_FOLDERS = ("cache", "results", REMOVED)


def backup(out: Path, file: Path) -> list[str]:
    """Write a deployment's folder into one compressed file that only its owner may read.

    Left out are databases, logs, caches, runs and removed devices. A link is replaced by the file that it leads to.

    Returns
    -------
    list of str
        The paths of the files in the backup, relative to `out`.

    Raises
    ------
    DeployError
        If `out` holds no deployment, a link to a folder or a file that can't be read, or `file` is there already or
        can't be written.
    """
    devices = {device.name for device in read_deployment(out).devices}
    for path in out.rglob("*"):
        if path.is_symlink() and path.is_dir() and _is_kept(path.relative_to(out) / PLAN, devices):
            raise DeployError(
                f"{path}: is a link to a folder, of which a backup would have nothing; link its files"
            )
    kept = sorted(
        path.relative_to(out)
        for path in out.rglob("*")
        if path.is_file() and _is_kept(path.relative_to(out), devices) and file.absolute() != path.absolute()
    )
    with (
        _new_private_file(file) as content,
        # A link, symbolic or hard, is stored as its file's content: ca.key may lie on an encrypted volume.
        tarfile.open(fileobj=content, mode="w:gz", dereference=True) as archive,
    ):
        for name in kept:
            archive.add(out / name, str(name))
    return [str(name) for name in kept]


def restore(file: Path, out: Path) -> Deployment:
    """Make a deployment's folder of a backup; start-up files are written anew.

    Raises
    ------
    DeployError
        If the file is no backup, is damaged or lacks a machine's files, or `out` is there already and not empty; in
        none of these cases is anything written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DeployError(f"{out}: is there already; a backup is restored into a new folder")
    try:
        _read_to_the_end(file)
        with tarfile.open(file, "r:gz") as archive:
            deployment = _deployment_in(archive, file)
            out.mkdir(parents=True, exist_ok=True)
            _unpack(archive, out)
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise DeployError(f"{file}: can't be restored ({str(error).splitlines()[0].rstrip(':')})") from None
    write_startup(out, deployment)  # Flower's config.toml holds the folder's path
    return deployment


def _read_to_the_end(file: Path) -> None:
    """Raise an error if any byte of a compressed file isn't as it was written: its checksum comes last."""
    with gzip.open(file) as content:
        while content.read(2**20):
            pass


def _deployment_in(archive: tarfile.TarFile, file: Path) -> Deployment:
    """Return the deployment in an archive; refuse it if it lacks a machine's files, or a path leads out of it."""
    members = archive.getmembers()
    if PLAN not in [member.name for member in members]:
        raise DeployError(f"{file}: is no backup of a deployment, there is no {PLAN} in it")
    if foreign := [member.name for member in members if not _is_within(member)]:
        raise DeployError(f"{file}: can't be restored ({foreign[0]} in it isn't a file of this folder)")
    plan = archive.extractfile(PLAN)
    deployment = deployment_of(plan.read() if plan else b"", f"{file}: {PLAN}")
    there = {member.name.partition("/")[0] for member in members if member.isfile() and "/" in member.name}
    machines = dict.fromkeys(service.machine for service in deployment.services)
    if missing := [machine for machine in machines if machine not in there]:
        raise DeployError(f"{file}: can't be restored (nothing in it is of {', '.join(missing)})")
    return deployment


def _is_within(member: tarfile.TarInfo) -> bool:
    """Return True for a file or folder whose path doesn't lead out of the archive."""
    path = PurePosixPath(member.name)
    return (member.isfile() or member.isdir()) and not path.is_absolute() and ".." not in path.parts


def _unpack(archive: tarfile.TarFile, out: Path) -> None:
    """Write an archive's files. (Python 3.11 has tarfile's own filters from 3.11.4 on, and Debian 12 has 3.11.2.)"""
    for member in archive.getmembers():
        if (content := archive.extractfile(member)) is None:
            continue  # a folder
        path = out / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
            shutil.copyfileobj(content, target)
        path.chmod(member.mode & 0o755)


def _is_kept(name: Path, devices: Collection[str]) -> bool:
    # A device may be called results.
    folders = name.parts[1:-1] if name.parts[0] in devices else name.parts[:-1]
    # The operator's own flower/ holds config.toml; those of machines, what their processes write.
    others = bool(set(folders) & set(_OTHER_FOLDERS)) or "flower" in name.parts[1:-1]
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
    except BaseException as error:
        file.unlink()
        if not isinstance(error, OSError):
            raise
        # Opening a file of the deployment names it in the error; writing to an open file names none.
        said = f"{error.filename}: can't be read" if error.filename else f"{file}: can't be written"
        raise DeployError(f"{said} ({error.strerror})") from None
