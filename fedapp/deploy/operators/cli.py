"""Operators of a deployment: each has a certificate of its own, and a role that the proxy enforces."""

from pathlib import Path
from typing import Annotated

import typer

from fedapp.deploy.audit import audited
from fedapp.deploy.files import NGINX
from fedapp.deploy.operate import Out, one_line_errors
from fedapp.deploy.operators.folders import add_operator, read_operators, remove_operator, sign_operator
from fedapp.deploy.operators.records import FIRST, FOLDER, REQUEST, ROLES
from fedapp.deploy.operators.request import make_request, read_request

Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the operator")]
ROLE_HELP = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.command()
def add(out: Out, name: Name, role: Annotated[str, typer.Option(help=ROLE_HELP)]) -> None:
    """Add an operator, with a key that is made here; or change the role of one that is there."""
    with one_line_errors(), audited(out, "operator add", operator=name) as audit:
        operator, before = add_operator(out, name, role)
        change = f"role {before}, now {role}" if before and before != role else f"role {role}"
        audit.record(change, operator=name)
    if before:
        print(f"{name}: is there already, {change}; the certificate stays")
    else:
        print(f"{name}: {change}, certificate {operator.serials[-1]}")
        print(
            f"{out / FOLDER / name}: to that operator, whose folder for 'fedapp deploy' it is; a key is in it"
        )
    _say_reload(out)


@app.command()
def request(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="folder for the key; by default NAME")] = None,
) -> None:
    """On an operator's own machine: make a key, and a request for a certificate; the private key doesn't leave it."""
    with one_line_errors():
        folder, made = make_request(name, out)
    print(f"{folder}: the operator's key; it stays here")
    print(f"{folder / REQUEST}: to whoever has the deployment's folder, for 'fedapp deploy operator sign'")
    print(f"{made.fingerprint}: the key's fingerprint; tell it by another way")


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help=f"the operator's {REQUEST}")],
    out: Out = Path("deployment"),
    role: Annotated[str, typer.Option(help=f"{ROLE_HELP}; only for a new operator")] = "",
) -> None:
    """Add an operator who made the key, by the request; or give one who is there a new certificate."""
    with one_line_errors(), audited(out, "operator sign", arguments=str(file)) as audit:
        made = read_request(file)
        operator = sign_operator(out, made, role)
        audit.record(f"role {operator.role}, key {made.fingerprint}", operator=operator.name)
    print(f"{made.fingerprint}: the key's fingerprint; compare it with the one that was printed there")
    print(f"{operator.name}: role {operator.role}, certificate {operator.serials[-1]}")
    print(
        f"{out / FOLDER / operator.name}: to that operator, over the folder of the key; no private key is in it"
    )
    _say_reload(out)


@app.command("list")
def list_command(out: Out = Path("deployment")) -> None:
    """Show all operators, also those who were removed, with roles and serial numbers of certificates."""
    with one_line_errors():
        _, operators = read_operators(out)
        for each in sorted(
            [*operators.present, *(o for o in operators.all if o.removed)], key=lambda o: o.name
        ):
            numbers = ", ".join(each.serials) or ("operator.crt" if each.name == FIRST else "none")
            state = f"REMOVED {each.removed}" if each.removed else each.role
            print(f"{each.name}: {state}, certificates: {numbers}")


@app.command()
def remove(out: Out, name: Name) -> None:
    """Revoke all certificates of an operator; the name never returns."""
    with one_line_errors(), audited(out, "operator remove", operator=name) as audit:
        operator, is_new = remove_operator(out, name)
        audit.record(
            f"removed {operator.removed}" if is_new else f"was removed {operator.removed}", operator=name
        )
    print(f"{name}: {'removed' if is_new else 'was removed on ' + operator.removed}; the name never returns")
    _say_reload(out)


def _say_reload(out: Path) -> None:
    print(
        f"in force when the proxy reloads: copy {out / NGINX} to the server, as /etc/nginx/conf.d/fedapp.conf, "
        "and there 'sudo nginx -t && sudo systemctl reload nginx' (or proxy/Caddyfile, and restart caddy)"
    )
