"""Who changed what in a deployment, and when: ``audit.jsonl`` in its folder, to which our commands append.

It is a diary, not a seal: whoever may write to the folder may edit it, and what is done with plain ``flwr`` isn't
in it.
"""

import json
import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedapp.deploy.plan import DeployError

FILE = "audit.jsonl"


class Audit:
    """The entries of one command.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    command : str
        What was asked for, such as ``register``.
    """

    def __init__(self, out: Path, command: str) -> None:
        self.path = out / FILE
        self.command = command

    def note(self, outcome: str, **details: str) -> None:
        """Append an entry.

        Parameters
        ----------
        outcome : str
            What became of it; one line.
        details : str
            What it was about, such as the device.

        Raises
        ------
        DeployError
            If it can't be written.
        """
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **_who(), "command": self.command}
        self._append(json.dumps({**entry, **details, "outcome": outcome}, ensure_ascii=False) + "\n")

    def _append(self, text: str) -> None:
        try:
            # One write to the end of the file: entries of two commands don't mix.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DeployError(f"{self.path}: can't be written ({error.strerror})") from None


@contextmanager
def audited(out: Path, command: str, **details: str) -> Iterator[Audit]:
    """Do what changes a deployment, and note how it ended if it failed; what was done the command notes itself.

    Raises
    ------
    DeployError
        If there is no deployment, or its diary can't be written; before anything is done.
    """
    if not (out / "deployment.toml").is_file():
        raise DeployError(f"{out}: holds no deployment; 'fedapp deploy init' makes one")
    audit = Audit(out, command)
    audit._append("")
    try:
        yield audit
    except BaseException as error:
        said = str(error) or type(error).__name__
        audit.note(f"failed: {said.splitlines()[0]}", **details)
        raise


def _who() -> dict[str, str]:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name  # not what the environment says
    except KeyError:
        user = str(os.getuid())
    behind = {"sudo-user": os.environ["SUDO_USER"]} if "SUDO_USER" in os.environ else {}
    return {"user": user, **behind, "host": socket.gethostname()}
