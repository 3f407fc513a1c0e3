"""Operators on record: added, signed, removed; the proxy's files that follow, and its log as entries of the audit."""

import gzip
import json
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from fedapp.deploy import keys, tunnel
from fedapp.deploy.certificates import WARN_BEFORE, read
from fedapp.deploy.operators.records import LOOK_METHODS, START_METHODS, Operators, serial_of
from fedapp.deploy.plan import DeployError
from fedapp.deploy.proxy import CONTROL
from fedapp.deploy.run_files import LIST, READ
from fedapp.deploy.shared_logs import TELL
from tests.deploy.command import contents, deploy

# What changes something else than runs, or belongs to Flower's logins, which a SuperLink of ours hasn't.
MANAGE_METHODS = {
    *("update-run-series-description", "start-automation", "stop-automation", "get-login-details"),
    *(
        "get-auth-tokens",
        "refresh-auth-tokens",
        "list-connectors",
        "disconnect-connector",
        "begin-connector-oauth",
    ),
    *(
        "complete-connector-oauth",
        "register-node",
        "unregister-node",
        "add-app",
        "remove-app",
        "set-federation-icon",
    ),
    *("create-federation", "archive-federation", "add-node-to-federation", "remove-node-from-federation"),
    *("remove-account-from-federation", "create-invitation", "list-invitations", "accept-invitation"),
    *("reject-invitation", "revoke-invitation", "configure-simulation-federation"),
}


def added(made: Path, name: str = "anna", role: str = "start") -> x509.Certificate:
    result = deploy("operator", "add", made, name, "--role", role)
    assert result.exit_code == 0, result.output
    return read(made / "operators" / name / "operator.crt")


def requested(folder: Path, name: str = "carl") -> Path:
    result = deploy("operator", "request", name, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder / "operator.csr"


def signed(made: Path, file: Path, *options: object) -> x509.Certificate:
    result = deploy("operator", "sign", file, made, *options)
    assert result.exit_code == 0, result.output
    return read(made / "operators" / "carl" / "operator.crt")


def assert_refused(made: Path, text: str, *command: object) -> None:
    """One line says what is wrong, it is in the audit, and nothing else is written."""
    before = {name: content for name, content in contents(made).items() if name != "audit.jsonl"}
    result = deploy("operator", *command)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")
    assert text in line
    assert {name: content for name, content in contents(made).items() if name != "audit.jsonl"} == before
    assert json.loads((made / "audit.jsonl").read_text().splitlines()[-1])["outcome"].startswith("failed: ")


def site(made: Path) -> str:
    return (made / "proxy" / "nginx.conf").read_text()


def caddyfile(made: Path) -> str:
    return (made / "proxy" / "Caddyfile").read_text()


# Roles ---------------------------------------------------------------------------------------------------------


def test_every_method_of_flower_has_the_role_that_was_thought_of():
    """A new method is for the role manage alone, and is to be looked at here."""
    methods = {path.removeprefix(CONTROL) for _, path in PROTOBUF_REQUEST_TYPES if path.startswith(CONTROL)}
    ours = {path.removeprefix(CONTROL) for path in (LIST, READ, TELL)}
    assert MANAGE_METHODS.isdisjoint({*LOOK_METHODS, *START_METHODS})
    assert methods | ours == {*LOOK_METHODS, *START_METHODS} | MANAGE_METHODS


# Added ---------------------------------------------------------------------------------------------------------


def test_an_operator_has_a_folder_a_key_and_a_certificate_for_a_client_alone(made):
    before = os.umask(0)
    try:
        certificate = added(made)
    finally:
        os.umask(before)
    folder = made / "operators" / "anna"
    assert set(contents(folder)) == {"ca.crt", "deployment.toml", "operator.crt", "operator.key"}
    assert stat.S_IMODE((folder / "operator.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "operator.crt").stat().st_mode) == 0o644
    key = load_pem_private_key((folder / "operator.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()
    assert certificate.subject.rfc4514_string() == "CN=anna"
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate.verify_directly_issued_by(read(made / "ca.crt"))
    assert f"    {serial_of(certificate)}  anna;\n" in site(made)
    assert "    anna  start;\n" in site(made)
    assert f"@start vars {{http.request.tls.client.serial}} {certificate.serial_number}\n" in caddyfile(made)


def test_the_files_name_the_first_operator_as_long_as_it_is_there(made):
    assert '"SUCCESS:CN=fedapp operator"  operator;' in site(made)
    assert '@first vars {http.request.tls.client.subject} "CN=fedapp operator"' in caddyfile(made)
    assert_refused(made, "'operator': is the only one with the role manage", "remove", made, "operator")
    added(made, "anna", "start")
    assert_refused(made, "'operator': is the only one with the role manage", "remove", made, "operator")
    added(made, "dora", "manage")
    assert deploy("operator", "remove", made, "operator").exit_code == 0
    assert "fedapp operator" not in site(made) + caddyfile(made)
    assert not (made / "operator.key").exists()
    assert len([*made.glob("removed/operators-operator-*/operator.key")]) == 1
    # The deployment's folder goes on with the other's certificate.
    assert tunnel._own_certificate(made) == made / "operators" / "dora" / "operator.crt"
    assert_refused(made, "'dora': is the only one with the role manage", "remove", made, "dora")
    assert_refused(made, "'dora': is the only one with", "add", made, "dora", "--role", "look")
    (made / "operators" / "dora" / "operator.key").unlink()
    with pytest.raises(DeployError, match="has no operator's key, as 'operator' was removed"):
        tunnel._own_certificate(made)


def test_adding_again_keeps_the_certificate_and_changes_the_role_that_is_said(made):
    added(made, role="look")
    before = {name: text for name, text in contents(made).items() if name != "audit.jsonl"}
    again = deploy("operator", "add", made, "anna", "--role", "look").output
    assert again.startswith("anna: is there already, role look; the certificate stays\n")
    assert {name: text for name, text in contents(made).items() if name != "audit.jsonl"} == before
    changed = deploy("operator", "add", made, "anna", "--role", "start").output
    assert changed.startswith("anna: is there already, role look, now start; the certificate stays\n")
    assert contents(made)["operators/anna/operator.crt"] == before["operators/anna/operator.crt"]
    assert "    anna  start;\n" in site(made)
    assert "@look" not in caddyfile(made)


def test_what_an_operator_reaches_the_server_with_is_kept_up_to_date(made):
    added(made)
    assert deploy("add", made, "lima=/data").exit_code == 0
    (made / "nodes.json").write_text('{"nodes": []}')
    assert deploy("refresh", made).exit_code == 0
    folder = contents(made / "operators" / "anna")
    assert folder["deployment.toml"] == (made / "deployment.toml").read_bytes()
    assert folder["nodes.json"] == (made / "nodes.json").read_bytes()
    assert "  anna;\n" in site(made)


def test_an_operators_folder_changes_no_deployment(made):
    added(made)
    own = made / "operators" / "anna"
    for command in (
        ("operator", "add", own, "eve", "--role", "manage"),
        ("add", own, "lima=/data"),
        ("refresh", own),
    ):
        result = deploy(*command)
        assert result.output.startswith(
            f"error: {own}: is an operator's folder, and only the deployment's own"
        )
        assert set(contents(own)) == {
            "ca.crt",
            "deployment.toml",
            "operator.crt",
            "operator.key",
            "audit.jsonl",
        }
    assert deploy("status", own).output.splitlines()[0].startswith("SuperLink 127.0.0.1:1: NOT REACHED")


@pytest.mark.parametrize(
    "name", ["", "Anna", "a b", "-a", "../a", "a;b", "a" * 33, "operator", "fedapp operator"]
)
def test_a_name_that_is_none_is_refused(name, made):
    assert_refused(
        made, f"operator {name!r}: a name is 1 to 32 of a-z", "add", "--role", "look", made, "--", name
    )


def test_a_role_that_is_none_is_refused(made):
    text = "--role 'boss': must be one of look, start, manage"
    assert_refused(made, text, "add", made, "anna", "--role", "boss")


def test_without_a_proxy_there_are_no_operators(tmp_path):
    out = tmp_path / "d"
    assert deploy("init", out, "--host", "10.0.0.5", "--device", "oslo=/a", "--no-proxy").exit_code == 0
    assert_refused(out, "has no proxy, which asks for certificates", "add", out, "anna", "--role", "look")
    assert deploy("operator", "list", out).output.startswith(f"error: {out}: has no proxy")


def test_without_the_authority_or_with_records_that_cannot_be_read_there_is_one_line(made):
    (made / "ca.key").unlink()
    assert_refused(made, "without it no certificate can be made", "add", made, "anna", "--role", "look")
    (made / "operators.json").write_text(
        '{"operators": [{"name": "x", "role": "boss", "serials": [], "keys": []}]}'
    )
    assert "operators.json: can't be read (role = 'boss')" in deploy("operator", "list", made).output


def test_new_keys_for_all_forget_the_operators(made):
    added(made)
    arguments = ("--host", "127.0.0.1", "--device", "oslo=/a", "--force")
    assert deploy("init", made, *arguments).exit_code == 0
    assert not (made / "operators.json").exists()
    assert "anna" not in site(made)


# By request ----------------------------------------------------------------------------------------------------


def test_a_request_brings_a_certificate_and_no_private_key_travels(made, tmp_path):
    file = requested(tmp_path / "carl")
    assert set(contents(tmp_path / "carl")) == {".gitignore", "operator.csr", "operator.key"}
    assert stat.S_IMODE((tmp_path / "carl" / "operator.key").stat().st_mode) == 0o600
    certificate = signed(made, file, "--role", "manage")
    assert set(contents(made / "operators" / "carl")) == {
        "ca.crt",
        "deployment.toml",
        "operator.crt",
        "operator.csr",
    }
    own = load_pem_private_key((tmp_path / "carl" / "operator.key").read_bytes(), None)
    assert own.public_key() == certificate.public_key()
    assert f"    {serial_of(certificate)}  carl;\n" in site(made)
    shown = deploy("operator", "request", "dora", "--out", tmp_path / "dora").output
    answer = deploy("operator", "sign", tmp_path / "dora" / "operator.csr", made, "--role", "look").output
    assert shown.splitlines()[-1].partition(": ")[0] == answer.partition(": the key's fingerprint")[0]


def test_a_new_certificate_by_request_keeps_the_role_and_the_former_until_it_expires(made, tmp_path):
    first = signed(made, requested(tmp_path / "carl"), "--role", "start")
    file = requested(tmp_path / "carl-2")
    assert_refused(
        made, "'carl': is there already; without --role a new", "sign", file, made, "--role", "manage"
    )
    second = signed(made, file)
    for certificate in (first, second):
        assert f"    {serial_of(certificate)}  carl;\n" in site(made)
    assert "    carl  start;\n" in site(made)
    assert deploy("operator", "remove", made, "carl").exit_code == 0
    assert "carl" not in site(made)
    assert serial_of(first) not in site(made)


def test_a_request_that_cannot_be_signed_is_refused(made, tmp_path):
    file = requested(tmp_path / "carl")
    assert_refused(made, "--role '': must be one of look, start, manage", "sign", file, made)
    added(made, "anna")
    key = load_pem_private_key((made / "operators" / "anna" / "operator.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    stolen = csr(tmp_path / "stolen.csr", "carl", key)
    assert_refused(made, "key is that of operator 'anna'", "sign", stolen, made, "--role", "look")
    signed(made, file, "--role", "look")
    assert deploy("operator", "remove", made, "carl").exit_code == 0
    assert_refused(
        made, "'carl': was removed on ", "sign", requested(tmp_path / "again"), made, "--role", "look"
    )


def csr(file: Path, name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Path:
    builder = x509.CertificateSigningRequestBuilder().subject_name(keys.common_name(name))
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return file


def test_a_file_that_is_no_request_is_one_line(made, tmp_path):
    file = tmp_path / "operator.csr"
    refused = ("sign", file, made, "--role", "look")
    assert_refused(made, "can't be read (No such file", *refused)
    file.write_text("no request")
    assert_refused(made, "is no request of an operator: ", *refused)
    file.write_bytes(bytes(20_000))
    assert_refused(made, "it has more than 16384 bytes", *refused)
    csr(file, "carl", rsa.generate_private_key(65537, 2048))
    assert_refused(made, "its key isn't of the curve P-256", *refused)
    key = ec.generate_private_key(ec.SECP256R1())
    csr(file, "fedapp operator", key)
    assert_refused(made, "operator 'fedapp operator': a name is 1 to 32", *refused)
    names = [
        x509.NameAttribute(NameOID.COMMON_NAME, "carl"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "x"),
    ]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    assert_refused(made, "its subject must be the operator's name as the common name", *refused)
    content = bytearray(
        x509.load_pem_x509_csr(csr(file, "carl", key).read_bytes()).public_bytes(Encoding.DER)
    )
    content[content.index(b"carl") : content.index(b"carl") + 4] = b"anna"
    file.write_bytes(x509.load_der_x509_csr(bytes(content)).public_bytes(Encoding.PEM))
    assert_refused(made, "its signature isn't of this content by this key", *refused)


def test_no_key_is_replaced_or_made_in_a_deployments_folder(made, tmp_path):
    requested(tmp_path / "carl")
    again = deploy("operator", "request", "carl", "--out", tmp_path / "carl").output
    assert (
        again
        == f"error: {tmp_path}/carl/operator.key: is there already, and no key is replaced; choose another --out\n"
    )
    inside = deploy("operator", "request", "carl", "--out", made / "carl").output
    assert inside.startswith(f"error: {made}/carl: is in a deployment's folder")
    assert not (made / "carl").exists()


# Removed, and renewed ------------------------------------------------------------------------------------------


def test_a_removed_operator_is_in_no_file_of_the_proxy_and_never_returns(made):
    certificate = added(made)
    result = deploy("operator", "remove", made, "anna")
    assert result.output.splitlines()[0] == "anna: removed; the name never returns"
    assert "sudo systemctl reload nginx" in result.output.splitlines()[1]
    for text in (site(made), caddyfile(made)):
        assert "anna" not in text
        assert str(certificate.serial_number) not in text
    assert not (made / "operators" / "anna").exists()
    assert_refused(made, "'anna': was removed on ", "add", made, "anna", "--role", "look")
    again = deploy("operator", "remove", made, "anna")
    assert (again.exit_code, again.output.partition(" on ")[0]) == (0, "anna: was removed")
    assert_refused(made, "operator 'eve': isn't one of operator", "remove", made, "eve")
    listed = deploy("operator", "list", made).output.splitlines()
    assert listed[0].startswith("anna: REMOVED 2")
    assert listed[1] == "operator: manage, certificates: operator.crt"


def test_a_certificate_that_expires_soon_is_renewed_and_the_former_holds(made, tmp_path, monkeypatch):
    added(made, "ben", "look")
    signed(made, requested(tmp_path / "carl"), "--role", "look")
    monkeypatch.setattr(keys, "CERTIFICATE_VALID_FOR", WARN_BEFORE)
    short = added(made)
    monkeypatch.undo()
    (line,) = [line for line in deploy("status", made).output.splitlines() if "WARNING: operators/" in line]
    assert line.startswith("WARNING: operators/anna/operator.crt: valid until ")
    before = contents(made)
    result = deploy("renew", made)
    assert result.exit_code == 0, result.output
    assert f"{made}/operators/anna to operator anna" in result.output
    new = read(made / "operators" / "anna" / "operator.crt")
    key = load_pem_private_key((made / "operators" / "anna" / "operator.key").read_bytes(), None)
    assert key.public_key() == new.public_key()
    for certificate in (short, new):
        assert f"    {serial_of(certificate)}  anna;\n" in site(made)
    assert (
        contents(made / "operators" / "ben").items()
        <= {name.removeprefix("operators/ben/"): content for name, content in before.items()}.items()
    )
    record = Operators.read(made).of_name("anna")
    assert record
    assert record.serials == (serial_of(short), serial_of(new))


def test_a_backup_has_the_operators(made, tmp_path):
    added(made)
    before = site(made)
    assert deploy("backup", made, tmp_path / "b.tar.gz").exit_code == 0
    assert deploy("restore", tmp_path / "b.tar.gz", tmp_path / "back").exit_code == 0
    assert (
        contents(tmp_path / "back")["operators/anna/operator.key"]
        == contents(made)["operators/anna/operator.key"]
    )
    assert site(tmp_path / "back") == before


# The audit -----------------------------------------------------------------------------------------------------


def logged(operator: str, method: str, status: int, about: str = "", serial: str = "0A", **more: str) -> str:
    said = {
        "fedapp": "control",
        "at": "2026-11-29T12:00:00+02:00",
        "id": "1",
        "operator": operator,
        "role": "start",
    }
    said |= {
        "role": "start" if operator else "",
        "serial": serial,
        "uri": f"/v1/control/{method}",
        "status": str(status),
        "about": about,
    }
    return json.dumps({**said, "address": "192.0.2.7", **more})


@pytest.fixture
def shown(made, monkeypatch):
    """Take a log over, and return what the audit then shows."""
    statuses = {"18": "running", "17": "finished:completed"}
    monkeypatch.setattr("fedapp.deploy.runs.statuses", lambda _: statuses)

    def show(*lines: str, name: str = "access.log") -> list[str]:
        file = made.parent / name
        text = "".join(f"{line}\n" for line in lines).encode()
        file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        result = deploy("audit", made, "--access-log", file)
        assert result.exit_code == 0, result.output
        return [str(line) for line in result.output.splitlines()]

    return show


def test_the_audit_names_who_started_a_run_and_says_where_it_does_not_know(shown, made):
    lines = shown(
        '192.0.2.9 - - [29/Nov/2026:12:00:00 +0000] "POST /v1/fleet/pull-messages HTTP/1.1" 200 12',
        logged("anna", "list-runs", 200),
        logged("anna", "start-run", 200, "run 17"),
        "proxy-1  | " + logged("anna", "stop-run", 502, "run 18"),
        logged("anna", "register-node", 403),
        logged("", "start-run", 403, serial=""),
        logged("", "start-run", 403, serial="FF"),
        logged("eve", "../x", 404, id="2"),
        '{"request": {"uri": 3}, "ts": "x"}',
        '{"fedapp": "control"}',
    )
    assert lines[0].startswith("4 new requests of operators in ")
    assert [line for line in lines if line.startswith("2026-11-29T10:00:00+00:00 operator")] == [
        "2026-11-29T10:00:00+00:00 operator anna (start) start-run run 17: done",
        "2026-11-29T10:00:00+00:00 operator anna (start) stop-run run 18: failed: HTTP status 502",
        "2026-11-29T10:00:00+00:00 operator anna (start) register-node: refused: permission denied",
        "2026-11-29T10:00:00+00:00 operator unknown (unknown) start-run: refused: permission denied",
    ]
    assert [line for line in lines if "isn't known" in line] == [
        "run 18: who started it isn't known, no line above names the run; a copy of the proxy's log may tell: "
        "--access-log FILE"
    ]
    assert "3 of them signed" in deploy("audit", made, "--verify").output


def test_a_log_is_taken_over_once_also_compressed(shown):
    line = logged("anna", "start-run", 200, "run 17")
    assert shown(line)[0].startswith("1 new")
    assert shown(line, logged("anna", "stop-run", 200, "run 17"), name="access.log.2.gz")[0].startswith(
        "1 new"
    )
    assert shown(line)[0].startswith("0 new")


def test_a_removed_operator_who_tries_again_is_named(shown, made):
    serial = serial_of(added(made))
    assert deploy("operator", "remove", made, "anna").exit_code == 0
    lines = shown(logged("", "list-runs", 403, serial=serial))
    assert "operator anna (removed) list-runs: refused: permission denied" in "\n".join(lines)


def test_caddys_log_tells_the_same(shown, made):
    certificate = added(made)

    def line(status: int, uri: str, **tls: str) -> str:
        request = {"remote_ip": "192.0.2.7", "uri": uri, "tls": tls}
        headers = {"Fedapp-About": ["run 17"]} if status == 200 else {}
        return json.dumps({"ts": 1796000000.5, "request": request, "status": status, "resp_headers": headers})

    number = str(certificate.serial_number)
    lines = shown(
        line(200, "/v1/control/start-run", client_serial=number, client_common_name="anna"),
        line(403, "/v1/control/register-node", client_serial=number, client_common_name="anna"),
        line(200, "/v1/control/stop-run", client_serial="5", client_common_name="fedapp operator"),
        line(200, "/v1/fleet/pull-messages"),
        line(403, "/v1/control/start-run"),
    )
    assert lines[0].startswith("3 new requests")
    assert [each.partition(" ")[2] for each in lines if each.startswith("2026-11-30")] == [
        "operator anna (start) start-run run 17: done",
        "operator anna (start) register-node: refused: permission denied",
        "operator operator (manage) stop-run run 17: done",
    ]


def test_a_log_that_cannot_be_read_is_one_line(made, tmp_path):
    for name, text in (("none.log", "No such file"), ("broken.gz", "Not a gzipped file")):
        if name == "broken.gz":
            (tmp_path / name).write_text("x")
        result = deploy("audit", made, "--access-log", tmp_path / name)
        assert result.output.startswith(f"error: {tmp_path / name}: can't be read (")
        assert text in result.output
    result = deploy("audit", made, "--verify", "--access-log", tmp_path / "x")
    assert result.output == "error: --access-log: isn't read with --verify\n"
