"""Commands for a deployment that is there: its devices, its runs, its certificates, and what must outlive a disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapp.config import ConfigError, RunConfig
from fedapp.deploy import backup as backups
from fedapp.deploy import certificates, database, runs, seal
from fedapp.deploy import fetch as fetching
from fedapp.deploy import status as statuses
from fedapp.deploy.audit import Audit, audited
from fedapp.deploy.files import read_deployment, remove_device, without_device, write_startup
from fedapp.deploy.given import read_given
from fedapp.deploy.key_request import read_request
from fedapp.deploy.keys import LOOPBACK_CERTIFICATE
from fedapp.deploy.nodes import NodeRecords, registered_nodes
from fedapp.deploy.operators import access_log as requests
from fedapp.deploy.operators.folders import renew_operators
from fedapp.deploy.operators.records import FOLDER as OPERATORS
from fedapp.deploy.plan import DeployError
from fedapp.deploy.registration import check_new_key, new_key, retire
from fedapp.deploy.registration import register as register_keys
from fedapp.deploy.seal import sign_ends
from fedapp.deploy.startup import check_home

Out = Annotated[Path, typer.Argument(help="folder of the deployment")]
DeviceName = Annotated[str, typer.Argument(metavar="DEVICE", help="name of the device")]
NodeId = Annotated[str, typer.Option(help="the device's number at the SuperLink, where it isn't on record")]
File = Annotated[Path, typer.Argument(metavar="FILE")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line that says what is wrong."""
    try:
        yield
    except (ConfigError, DeployError) as error:
        raise SystemExit(f"error: {error}") from None


def register(
    out: Out = Path("deployment"),
    new_keys: Annotated[
        bool, typer.Option("--new-keys", help="make a new key for each device whose key was unregistered")
    ] = False,
) -> None:
    """Make the devices' public keys known to the running SuperLink; one line says what became of each."""
    refused = 0
    with one_line_errors(), audited(out, "register") as audit:
        for answer in register_keys(out, read_deployment(out), new_keys=new_keys):
            print(answer.line)
            audit.record(answer.state, device=answer.device, node=answer.node_id)
            refused += answer.refused
    if refused:
        raise SystemExit(1)


def tag(
    out: Out,
    device: DeviceName,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="none: it has no tags")] = None,
) -> None:
    """Give a device these tags, in place of those it had: participation = "tag:TAG" addresses all that have one."""
    words = tags or []
    with one_line_errors(), audited(out, "tag", device=device) as audit:
        read_deployment(out).device(device)
        NodeRecords.read(out).tag(device, words)
        audit.record(" ".join(words) or "none", device=device)
    print(f"{device}: {', '.join(words) or 'no tags'}")


def rekey(
    out: Out,
    device: DeviceName,
    node_id: NodeId = "",
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the device's own request, with the key that it made")
    ] = None,
) -> None:
    """Give a device a new key; the SuperLink refuses the one it had from now on."""
    with one_line_errors(), audited(out, "rekey", device=device) as audit:
        deployment = read_deployment(out)
        requested = read_request(request) if request else None
        check_new_key(out, deployment, device, requested)
        audit.record("unregistered", device=device, node=retire(out, device, node_id))
        answer = new_key(out, deployment, device, requested)
        audit.record(answer.state, device=device, node=answer.node_id)
    print(answer.line)


def remove(out: Out, device: DeviceName, node_id: NodeId = "") -> None:
    """Take a device out of a deployment; the SuperLink refuses its key from now on, and for ever."""
    with one_line_errors(), audited(out, "remove", device=device) as audit:
        without_device(out, device)  # raises the error if it can't be removed
        number = retire(out, device, node_id)
        audit.record("unregistered", device=device, node=number)
        moved = remove_device(out, device)
        NodeRecords.read(out).tag(device, ())  # a later device may have the same name
        audit.record("removed", device=device, node=number)
    node = f" (node {number})" if number else ""
    print(f"{device}: unregistered{node}, its key can never return; what it had is in {moved}")


def status(
    out: Out = Path("deployment"),
    superlink_database: Annotated[
        Path | None,
        typer.Option("--database", help="superlink.db, on the server: tells what each device works on"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show devices, runs and certificates as they are now."""
    with one_line_errors():
        found = statuses.status(out, superlink_database or _own_database(out))
        try:
            sign_ends(out, [(run.run_id, run.status) for run in found.runs if run.is_over])
        except DeployError as error:  # who can't read the server's key sees the status all the same
            found = replace(found, warnings=[*found.warnings, f"the end of a run isn't signed: {error}"])
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(found.lines()))
    if found.error:
        raise SystemExit(1)


def audit(
    out: Out = Path("deployment"),
    verify: Annotated[
        bool, typer.Option("--verify", help="check hashes and signatures; audit.jsonl, audit.seal, ca.crt do")
    ] = False,
    head: Annotated[
        str, typer.Option(help="with --verify: the head of an earlier check, which must still be there")
    ] = "",
    access_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="a copy of the proxy's log: what each operator changed goes into the audit"
        ),
    ] = None,
) -> None:
    """Sign the ends of runs, and show who did what; or check that this is as it was written."""
    with one_line_errors():
        if head and not verify:
            raise DeployError("--head: is read with --verify alone")
        if access_log and verify:
            raise DeployError("--access-log: isn't read with --verify")
        if verify:
            print("\n".join(seal.verify(out, head).said()))
            return
        has_proxy = bool(read_deployment(out).backend)
        if access_log:
            print(f"{requests.take_over(out, access_log)} new requests of operators in {access_log}")
        known = runs.statuses(out)
        ended = [(run_id, said) for run_id, said in reversed(known.items()) if said.startswith("finished")]
        sign_ends(out, ended)
        found = seal.entries(out)
        for entry in found:
            if entry.get("command") == requests.COMMAND and "log-line" in entry:
                print(requests.line_of(entry))
                continue
            time, user, host, command, outcome = (
                entry.get(name, "?") for name in ("time", "user", "host", "command", "outcome")
            )
            about = [
                f" {entry[name]}" for name in ("device", "operator", "run", "arguments") if name in entry
            ]
            print(f"{time} {user}@{host} {command}{''.join(about)}: {outcome}")
        starters = requests.starters(found)
        hint = "; a copy of the proxy's log may tell: --access-log FILE" if has_proxy else ""
        for run_id in reversed(known):
            if run_id not in starters:
                print(f"run {run_id}: who started it isn't known, no line above names the run{hint}")


def run(
    out: Out = Path("deployment"),
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="keys of the run config: 'KEY=VALUE …' or a TOML file"),
    ] = None,
    source: Annotated[Path, typer.Option("--app", help="the app's source folder")] = Path("."),
) -> None:
    """Start a run on the deployment, in real time; paths in its config are the server's."""
    with one_line_errors(), audited(out, "run") as audit:
        read, deployment = read_given(run_config), read_deployment(out)
        given = {
            "clock": "wall",
            "registered-nodes": registered_nodes(out, deployment),
            **({"tiers": "relays"} if deployment.has_relays else {}),
            **read.values,
        }
        # A run to resume is in a folder of the server, which checks the run's files itself.
        (RunConfig.recorded if given.get("resume") else RunConfig.load)(given)
        for line in read.lines:
            print(line)
        num_clients = read.of_a_run if read.num_clients is None else read.num_clients
        if num_clients is not None:
            least = given.get("min-clients", RunConfig.defaults()["min-clients"])
            print(
                f"num-clients = {num_clients}: isn't read on devices; the run has those that are connected when it "
                f"begins, and waits for min-clients = {least}"
            )
        run_id = runs.start(out, source.absolute(), given)
        audit.record("started", run=run_id)
    print(f"run {run_id} started; 'fedapp deploy status {out}' shows how far it is")


def stop(
    out: Out = Path("deployment"),
    run_id: Annotated[str, typer.Option("--run", help="its number; by default the one that goes")] = "",
) -> None:
    """Stop a run."""
    with one_line_errors(), audited(out, "stop") as audit:
        run_id = runs.stop(out, run_id)
        audit.record("stopped", run=run_id)
        sign_ends(out, runs.ended_runs(out))
    print(f"run {run_id} stopped")


def fetch(
    out: Out,
    run_id: Annotated[
        str, typer.Argument(metavar="[RUN]", help="number or folder's name; by default the last")
    ] = "",
    into: Annotated[Path, typer.Option(help="where runs' folders are here")] = Path("results"),
) -> None:
    """Copy a run's folder, with model and log, from the server; each file is checked by its hash."""
    with one_line_errors(), audited(out, "fetch") as audit:
        fetched = fetching.fetch(out, run_id, into)
        audit.record(f"to {fetched.folder.absolute()}", run=run_id or fetched.folder.name)
    here = fetched.bytes - fetched.new
    known = f", {here} of them here before" if here else ""
    print(
        f"{fetched.folder}: {fetched.files} files, {fetched.bytes} bytes{known}, as on the server by their SHA-256"
    )


def logs(out: Out, device: DeviceName) -> None:
    """Show the last lines of a device's log, if its site shares it, half a minute old at most."""
    with one_line_errors(), audited(out, "logs", device=device) as audit:
        lines = fetching.device_log(out, device)
        audit.record(f"{len(lines)} lines", device=device)
    print("\n".join(lines))


def renew(
    out: Out = Path("deployment"),
    authority: Annotated[
        bool, typer.Option("--authority", help="the authority's certificate, too; its key stays")
    ] = False,
) -> None:
    """Make new certificates, and keys to them, by the same authority; the devices keep what they have."""
    with one_line_errors(), audited(out, "renew --authority" if authority else "renew") as audit:
        made = [*certificates.renew(out, authority=authority), *renew_operators(out)]
        new = [str(path.relative_to(out)) for path in made]
        audit.record(f"new: {', '.join(new)}")
        lines = [certificate.line for certificate in certificates.validities(out)]
    print("\n".join(lines))
    print(f"new: {', '.join(new)}; copy what is in superlink/ to the server")
    print("there, reload nginx or restart Caddy, and restart fedapp-superlink")
    for folder in [path.parent.name for path in made if path.name == LOOPBACK_CERTIFICATE]:
        print(
            f"copy local.crt and local.key in {folder}/ there, and restart fedapp-{folder} and its superexec"
        )
    for place in [path.parent for path in made if path.parent.parent.name == OPERATORS]:
        print(f"copy proxy/nginx.conf to the server before it reloads, and {place} to operator {place.name}")
    if authority:
        print("copy each device's ca.crt to it before the authority's former certificate expires")


def refresh(out: Out = Path("deployment")) -> None:
    """Write start-up files as this version of the app does; keys and certificates stay."""
    with one_line_errors(), audited(out, "refresh") as audit:
        deployment = read_deployment(out)
        check_home(deployment.home)
        write_startup(out, deployment)
        audit.record("done")
    print(f"{out}: start-up files are new; copy to the machines what differs")


def backup(out: Out, file: File) -> None:
    """Write the deployment's folder, private keys included, into one file with mode 0600."""
    with one_line_errors(), audited(out, "backup") as audit:
        kept = backups.backup(out, file)
        audit.record(f"{len(kept)} files to {file.absolute()}")
    key = (
        "the authority's key among them"
        if "ca.key" in kept
        else "the authority's key, ca.key, not among them"
    )
    print(f"{file}: {len(kept)} files, {key}; keep it as you keep that")


def restore(file: File, out: Out) -> None:
    """Make a deployment's folder of a backup."""
    with one_line_errors():
        deployment = backups.restore(file, out)
        Audit(out, "restore").record(f"from {file.absolute()}")
    print(f"{out}: {len(deployment.devices)} devices; 'fedapp deploy status {out}' shows whether all is well")


def backup_server(
    file: File,
    superlink_database: Annotated[Path, typer.Option("--database", help="the SuperLink's database")] = Path(
        "superlink.db"
    ),
) -> None:
    """On the server: copy the SuperLink's database, which may be in use, into one file with mode 0600."""
    with one_line_errors():
        nodes = database.copy(superlink_database, file)
    print(f"{file}: sound, {nodes} registered devices")


def _own_database(out: Path) -> Path | None:
    """Return the database of a SuperLink that runs in the deployment's own folder, as with ``deploy local``."""
    file = out / "superlink" / "superlink.db"
    return file if file.is_file() else None


COMMANDS: tuple[Callable[..., Any], ...] = (
    register,
    tag,
    rekey,
    remove,
    status,
    audit,
    run,
    stop,
    fetch,
    logs,
    renew,
    refresh,
    backup,
    restore,
    backup_server,
)
