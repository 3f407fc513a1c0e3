"""The state of a deployment: its devices, what they do, its runs, its certificates.

All of it is asked for anew, and nothing is guessed: Flower's command line says who is online and which runs there
are, a run's log how far the run is, the server's port which certificate it shows. What each device works on is in the
SuperLink's database alone, and is shown where the database can be read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedapp.deploy import database as superlink_database
from fedapp.deploy.certificates import Validity, read, shown_by_server, validities
from fedapp.deploy.files import read_deployment
from fedapp.deploy.nodes import NodeRecord, NodeRecords
from fedapp.deploy.operators.records import FOLDER as OPERATORS
from fedapp.deploy.plan import DeployError, Deployment, is_operators
from fedapp.deploy.registration import is_gone, listed_nodes
from fedapp.deploy.runs import NONE, DeployedRun, present_runs

UNKNOWN = "unknown"


@dataclass(frozen=True)
class DeviceStatus:
    """A device, as the SuperLink sees it.

    Attributes
    ----------
    name, node_id : str
        The number is empty if none is on record.
    state : str
        ``online``, ``offline``, ``registered`` (and never seen), ``unregistered`` (its key is refused for ever),
        ``not registered`` or ``unknown``.
    since : str
        When the state began, UTC; a SuperNode that says nothing for a minute is offline from then on.
    doing : str
        The device's task, ``nothing``, or ``unknown``.
    remark : str
        The last line about the device in the log of a run that hasn't ended.
    """

    name: str
    node_id: str
    state: str
    since: str = ""
    doing: str = UNKNOWN
    remark: str = ""


@dataclass(frozen=True)
class Status:
    """The state of a deployment.

    Attributes
    ----------
    superlink : str
        Address of the SuperLink.
    error : str
        Why the SuperLink couldn't be asked; empty if it could.
    devices : sequence of DeviceStatus
    runs : sequence of DeployedRun
        The runs that haven't ended; if all have, the last one.
    certificates : sequence of Validity
    warnings : sequence of str
        What somebody should look at.
    """

    superlink: str
    error: str
    devices: Sequence[DeviceStatus]
    runs: Sequence[DeployedRun]
    certificates: Sequence[Validity]
    warnings: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON can hold, with keys in kebab-case."""
        return {
            "superlink": self.superlink,
            "error": self.error,
            "devices": [_kebab(asdict(device)) for device in self.devices],
            "runs": [_run_as_json(run) for run in self.runs],
            "certificates": [{"name": c.name, "valid-until": c.until.isoformat()} for c in self.certificates],
            "warnings": list(self.warnings),
        }

    def lines(self) -> Iterator[str]:
        """Yield it as lines to be read."""
        yield f"SuperLink {self.superlink}" + (f": NOT REACHED ({self.error})" if self.error else "")
        yield from _table(
            ("device", "state", "since", "doing", "node"),
            [(d.name, d.state, d.since, d.doing, d.node_id) for d in self.devices],
        )
        for device in self.devices:
            if device.remark:
                yield f"{device.name}: the run's log says: {device.remark}"
        for run in self.runs:
            yield from _run_lines(run)
        for certificate in self.certificates:
            yield certificate.line
        for warning in self.warnings:
            yield f"WARNING: {warning}"


def status(out: Path, database: Path | None = None) -> Status:
    """Return the state of a deployment.

    Parameters
    ----------
    out : Path
        The deployment's folder.
    database : Path, optional
        The SuperLink's database, if this machine has it.

    Raises
    ------
    DeployError
        If there is no deployment, or one of its files on this machine can't be read.
    """
    deployment = read_deployment(out)
    records = NodeRecords.read(out)
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    runs: Sequence[DeployedRun] = ()
    error = ""
    try:
        nodes, runs = listed_nodes(out), present_runs(out)
    except DeployError as failure:
        error = str(failure)
    going = [run for run in runs if not run.is_over]
    tasks = superlink_database.tasks(database) if database and nodes is not None else None
    if not error and not going:
        tasks = {}  # without a run nobody has anything to do
    devices = [_device(out, device.name, records, nodes, tasks, going) for device in deployment.devices]
    certificates = validities(out)
    warnings = [*_certificate_warnings(out, deployment, certificates), *_node_warnings(records, nodes or {})]
    return Status(deployment.address, error, devices, runs, certificates, warnings)


def _device(
    out: Path,
    name: str,
    records: NodeRecords,
    nodes: Mapping[str, Mapping[str, Any]] | None,
    tasks: Mapping[str, str] | None,
    going: Sequence[DeployedRun],
) -> DeviceStatus:
    node = records.of_device(out, name)
    number = node.node_id if node else ""
    if nodes is None:
        return DeviceStatus(name, number, UNKNOWN)
    if number not in nodes:
        return DeviceStatus(name, number, "not registered", doing="nothing")
    said = nodes[number]
    state = str(said["status"])
    since = {"online": "online-at", "offline": "offline-at", "unregistered": "deleted-at"}.get(
        state, "created-at"
    )
    remark = next((text for run in going if (text := run.remark(number))), "")
    if state == "online" and tasks is not None:
        doing = tasks.get(number, "nothing")
    else:  # a device that can't be reached may still be at work
        doing = UNKNOWN if going else "nothing"
    return DeviceStatus(name, number, state, str(said[since]).replace(NONE, ""), doing, remark)


def _certificate_warnings(
    out: Path, deployment: Deployment, certificates: Sequence[Validity]
) -> Iterator[str]:
    for certificate in certificates:
        if certificate.is_due:
            yield f"{certificate.line}; {_how_to_renew(out, certificate.name)}"
    shown, own = shown_by_server(deployment), out / "superlink" / "server.crt"
    if shown and own.is_file() and shown != read(own):
        yield (
            f"the server shows another certificate, valid until {shown.not_valid_after_utc:%Y-%m-%d}, than "
            "superlink/server.crt: copy server.crt and server.key there, and restart what uses them"
        )


def _how_to_renew(out: Path, name: str) -> str:
    if is_operators(out):
        return "who has the deployment's own folder makes a new one"
    if name.startswith(OPERATORS) and not (out / name).with_suffix(".key").is_file():
        return f"a new one is asked for there ('fedapp deploy operator request'), and signed for {out}"
    option = " --authority" if name == "ca.crt" else ""
    return f"'fedapp deploy renew {out}{option}' makes a new one"


def _node_warnings(records: NodeRecords, nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    known: dict[str, NodeRecord] = {node.node_id: node for node in records.nodes}
    for number, said in nodes.items():
        if is_gone(said):
            continue
        if number not in known:
            yield f"node {number} ({said['status']}) is none of this folder's devices"
        elif known[number].unregistered:
            yield (
                f"node {number} ({said['status']}) was {known[number].device}, and was unregistered on "
                f"{known[number].unregistered}; the SuperLink takes its key (an older database?)"
            )


def _run_as_json(run: DeployedRun) -> dict[str, Any]:
    content = _kebab(asdict(run))
    del content["log"]
    return {**content, "folder": run.folder, "progress": _kebab(asdict(run.progress))}


def _run_lines(run: DeployedRun) -> Iterator[str]:
    progress = run.progress
    parts = [run.status]
    if run.is_waiting:
        parts = [f"{run.status} since {run.asked_for}"]
    elif not run.is_over:
        parts = [f"{run.status} for {timedelta(seconds=round(run.elapsed))}"]
    if progress.of:
        parts.append(f"aggregation {progress.aggregation} of {progress.of}")
    if progress.devices and not run.is_over:
        parts.append(f"{progress.num_busy} of {progress.devices} devices at work")
    if progress.time_left and not run.is_over:
        parts.append(f"{progress.time_left} left")
    if run.details:
        parts.append(run.details)
    yield f"run {run.run_id}: {', '.join(parts)}"
    if run.is_waiting:
        yield "  if that lasts, the server's `journalctl -u fedapp-superexec` says what it waits for"
    if run.folder:
        yield f"  on the server in {run.folder}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _kebab(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in content.items()}
