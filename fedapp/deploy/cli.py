"""Deploy the app on real devices, or all of it on this machine to try out."""

import signal
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource

from fedapp.config import RunConfig, Value
from fedapp.deploy import operate
from fedapp.deploy.audit import Audit, audited
from fedapp.deploy.files import add_device, add_requested, read_deployment, write_deployment
from fedapp.deploy.flower import run_flwr
from fedapp.deploy.given import Given, read_given
from fedapp.deploy.key_request import FILE as REQUEST
from fedapp.deploy.key_request import make_request, read_request
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.nodes import registered_nodes
from fedapp.deploy.operate import Out, one_line_errors
from fedapp.deploy.operators import cli as operators
from fedapp.deploy.plan import (
    HOME,
    ORCHESTRATORS,
    SUPERLINK_PORT,
    DeployError,
    Deployment,
    device_of,
    devices_of,
    relay_of,
)
from fedapp.deploy.runs import ended_runs, keep_going, region_config
from fedapp.deploy.seal import ANEW, sign_ends
from fedapp.deploy.startup import check_home

IsRelay = Annotated[bool, typer.Option("--relay", help="it is a relay, and the argument its NAME")]

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command()
def init(
    out: Out = Path("deployment"),
    host: Annotated[
        list[str] | None, typer.Option(help="host name or IP address of the server; repeat")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="NAME=DATA-PATH: a device, and where its data is there; repeat")
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=0, help="instead: devices that divide the run's dataset among them")
    ] = 0,
    relay_names: Annotated[
        list[str] | None,
        typer.Option(
            "--relay", help="instead: NAME, a relay, which answers for a deployment of its own; repeat"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="the server's port")] = 8000,
    proxy: Annotated[
        bool,
        typer.Option(
            help="nginx or Caddy in front of the SuperLink; without it, whoever reaches the port runs code everywhere"
        ),
    ] = True,
    home: Annotated[str, typer.Option(help="folder for all this on every machine, with .venv")] = HOME,
    orchestrators: Annotated[
        list[str] | None,
        typer.Option("--for", help=f"start-up files for {' or '.join(ORCHESTRATORS)}, too; repeat"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a deployment, its keys included")] = False,
) -> None:
    """Make certificates, a key pair per device, and start-up files for systemd and compose."""
    with one_line_errors():
        members = devices_of(device or [], partitions, relay_names or [], home)
        backend = SUPERLINK_PORT if proxy else 0
        further = tuple(dict.fromkeys(orchestrators or ()))
        deployment = Deployment(tuple(host or ()), port, home, members, backend, further)
        check_home(home)
        write_deployment(out, deployment, force=force)
        Audit(out, ANEW if force else "init").record("done", signed=True)
    print(f"{out / 'superlink'}: to {deployment.hosts[0]}, as {home}/superlink")
    if proxy:
        print(f"{out / 'proxy'}: there, into nginx or Caddy")
    where = "its region's server" if deployment.has_relays else "that device"
    for member in deployment.devices:
        print(f"{out / member.name}: to {where}, as {home}/{member.name}")
    for orchestrator in further:
        print(f"{out / orchestrator}: the same for {orchestrator.capitalize()}; no key is in it")
    if proxy:
        print(
            f"{out / 'operator.key'}: starts runs; keep it to yourself ('fedapp deploy operator add' adds others)"
        )
    print(f"{out / 'ca.key'}: signs certificates; keep it to yourself")


@app.command()
def add(
    out: Out,
    device: Annotated[str, typer.Argument(metavar="NAME=DATA-PATH")],
    is_relay: IsRelay = False,
) -> None:
    """Add a device to a deployment; what the others have stays as it is."""
    with one_line_errors():
        name, node_config = relay_of(device, read_deployment(out).home) if is_relay else device_of(device)
        with audited(out, "add", device=name) as audit:
            deployment = add_device(out, name, node_config)
            audit.record("done", device=name)
    where = "its region's server" if is_relay else "that device"
    print(f"{out / name}: to {where}, as {deployment.home}/{name}; then 'fedapp deploy register {out}'")


@app.command()
def request(
    device: Annotated[str, typer.Argument(metavar="NAME=DATA-PATH")],
    is_relay: IsRelay = False,
    out: Annotated[Path | None, typer.Option(help="folder for the keys; by default NAME")] = None,
) -> None:
    """On a device: make its keys, and a request to be added to a deployment; no private key leaves it."""
    with one_line_errors():
        folder, made = make_request(device, relay=is_relay, folder=out)
    print(f"{folder}: the device's keys; they stay here")
    print(f"{folder / REQUEST}: to the operator, for 'fedapp deploy sign'")
    print(f"{made.fingerprint}: the key's fingerprint; tell it to the operator by another way")


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="the device's request.json")],
    out: Out = Path("deployment"),
) -> None:
    """Add a device that made its keys itself, by its request; what the others have stays as it is."""
    with one_line_errors(), audited(out, "sign", arguments=str(file)) as audit:
        made = read_request(file)
        name, deployment = add_requested(out, made)
        audit.record(f"key {made.fingerprint}", device=name)
    print(
        f"{made.fingerprint}: the key's fingerprint; compare it with the one that was printed on the device"
    )
    print(
        f"{out / name}: to that device, over the folder of its keys, which then is {deployment.home}/{name}"
    )
    print(f"no private key is in it; then 'fedapp deploy register {out}'")


@app.command()
def relay(
    out: Annotated[Path, typer.Argument(help="folder of the region's deployment")] = Path("deployment"),
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="keys of the region's run: 'KEY=VALUE …' or a TOML file"),
    ] = None,
    source: Annotated[Path, typer.Option("--app", help="the app's source folder")] = Path("."),
) -> None:
    """Let a deployment's devices answer as one device of another, by a run that is kept going until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        config = region_config(out, run_config)
        keep_going(out, source.absolute(), config, partial(print, flush=True))


@app.command("flwr", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def flwr_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--deployment", help="folder of the deployment")] = Path("deployment"),
) -> None:
    """Run one of Flower's commands on the deployment, through its proxy: flwr run . --stream, flwr list, …"""
    with one_line_errors(), audited(out, "flwr") as audit:
        code = run_flwr(out, context.args)
        audit.record(f"ended with {code}", arguments=" ".join(context.args))
        if code == 0 and context.args[:1] in (["run"], ["stop"]):
            sign_ends(out, ended_runs(out))
    raise SystemExit(code)


@app.command()
def local(
    context: typer.Context,
    num_devices: Annotated[
        int, typer.Option("--num-devices", "-n", min=1, help="devices, a part each; or num-clients")
    ] = 3,
    data_path: Annotated[
        list[str] | None, typer.Option(help="instead: the data of a device; once per device")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="keys of the run config: 'KEY=VALUE …' or a TOML file"),
    ] = None,
    source: Annotated[Path, typer.Option("--app", help="the app's source folder")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="keep keys and logs in this new folder")] = None,
    workers: Annotated[
        bool, typer.Option("--workers", help="a process per device that keeps PyTorch, data and model loaded")
    ] = False,
) -> None:
    """Run the app on a SuperLink and SuperNodes of this machine, and end them all."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors():
        counted = context.get_parameter_source("num_devices") == ParameterSource.COMMANDLINE
        if data_path and counted:
            raise DeployError("--num-devices and --data-path: give one of the two")
        given = read_given(run_config)
        if not counted and given.num_clients is not None:
            num_devices = given.num_clients
        nodes = _node_configs(data_path or [], num_devices)
        _say_given(given, len(nodes))
        values = {"min-clients": len(nodes), **given.values}
        RunConfig.load(values)
        if not (source / "pyproject.toml").is_file():
            raise DeployError(
                f"--app = {str(source)!r}: must be the app's source folder, with its pyproject.toml"
            )
        with tempfile.TemporaryDirectory(prefix="fedapp-") as temporary:
            folder = out or Path(temporary) / "deployment"
            try:
                with LocalDeployment(folder, nodes, workers=workers) as deployment:
                    completed = _run_once(deployment, source, values, signed=out is not None)
            except KeyboardInterrupt:
                raise SystemExit("interrupted; everything that was started is ended") from None
            if not completed:
                where = f"{folder}/*.log" if out else "--out FOLDER keeps the logs"
                raise DeployError(f"the run didn't complete; {where}")


def _node_configs(data_paths: list[str], num_devices: int) -> list[dict[str, int | str]]:
    """Return the node config of each device: its data, or its part of the run's dataset."""
    if data_paths:
        return [{"data-path": str(Path(path).absolute())} for path in data_paths]
    return [{"partition-id": part, "num-partitions": num_devices} for part in range(num_devices)]


def _say_given(given: Given, num_devices: int) -> None:
    """Print which values of ``--run-config`` don't apply to a run on this number of devices."""
    for line in given.lines:
        print(line)
    if given.num_clients not in (None, num_devices):
        print(f"num-clients = {given.num_clients}: isn't read, here are {num_devices} devices")
    if given.of_a_run not in (None, num_devices):
        print(f"the run to repeat had {given.of_a_run} clients, here are {num_devices} devices")


def _run_once(local: LocalDeployment, source: Path, values: Mapping[str, Value], *, signed: bool) -> bool:
    """Start a deployment and run the app on it; return whether it completed. With ``signed`` its end is signed."""
    deployment = local.deployment
    try:
        print(f"starting a SuperLink and {len(deployment.devices)} SuperNodes on {deployment.address}")
        Audit(local.folder, "local").record("started")
        local.start()
        told = registered_nodes(local.folder, deployment)
        completed = local.run(source.absolute(), {"registered-nodes": told, **values})
        if signed:
            sign_ends(local.folder, ended_runs(local.folder))
        return completed
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # first end what was started


app.add_typer(operators.app, name="operator")
for command in operate.COMMANDS:
    app.command()(command)
