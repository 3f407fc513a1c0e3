"""``fedapp deploy renew``: new certificates by the same authority, which a device takes that trusts the old one."""

import datetime
import json
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedapp.deploy import keys
from fedapp.deploy.certificates import WARN_BEFORE, read, validities
from tests.deploy.command import contents, deploy, shake_hands

DAY = datetime.timedelta(days=1)


def lifetime(path: Path) -> datetime.timedelta:
    certificate = read(path)
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc


def matches(path: Path) -> bool:
    key = load_pem_private_key(path.with_suffix(".key").read_bytes(), None)
    return key.public_key() == read(path).public_key()


def short_lived(out: Path, valid_for: datetime.timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew the authority's certificate, and so all others, with one that expires soon."""
    monkeypatch.setattr(keys, "AUTHORITY_VALID_FOR", valid_for)
    assert deploy("renew", out, "--authority").exit_code == 0
    monkeypatch.undo()


def test_a_server_has_two_years_and_its_authority_ten(made):
    assert lifetime(made / "superlink" / "server.crt") == 731 * DAY  # from yesterday on
    assert lifetime(made / "ca.crt") == 3651 * DAY


def test_a_renewed_server_is_taken_and_nothing_else_has_changed(made):
    own = made / "superlink" / "server.crt"
    before, certificate = contents(made), read(own)
    result = deploy("renew", made)
    assert result.exit_code == 0, result.output
    assert [
        line for line in result.output.splitlines() if line.startswith("superlink/server.crt: valid until 2")
    ]
    changed = {name for name, content in contents(made).items() if content != before[name]}
    new = {"operator.crt", "operator.key", "superlink/server.crt", "superlink/server.key"}
    assert changed == {*new, "audit.jsonl"}
    assert stat.S_IMODE((made / "superlink" / "server.key").stat().st_mode) == 0o600
    renewed = read(own)
    assert matches(own)
    assert renewed.public_key() != certificate.public_key()
    assert renewed.serial_number != certificate.serial_number
    names = x509.SubjectAlternativeName
    assert renewed.extensions.get_extension_for_class(
        names
    ) == certificate.extensions.get_extension_for_class(names)
    for name in ("fl.example.org", "127.0.0.1"):
        assert shake_hands(made, name) is None
    assert "mismatch" in str(shake_hands(made, "other.example.org"))
    entry = json.loads((made / "audit.jsonl").read_text().splitlines()[-1])
    assert (entry["command"], entry["outcome"]) == ("renew", "new: operator.crt, superlink/server.crt")


def test_whoever_else_has_a_certificate_here_gets_a_new_one_of_its_kind(made):
    authority = keys.Authority.read(made)
    key, server = authority.server_certificate(["someone"])
    client = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = x509.CertificateBuilder(
        server.issuer,
        server.subject,
        key.public_key(),
        7,
        server.not_valid_before_utc,
        server.not_valid_after_utc,
    ).add_extension(client, critical=False)
    keys.replace_pair(
        made / "operator.crt", key, builder.sign(authority.key, server.signature_hash_algorithm)
    )
    assert deploy("renew", made).exit_code == 0
    renewed = read(made / "operator.crt")
    assert renewed.serial_number != 7
    assert renewed.subject == server.subject
    assert renewed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value == client
    assert matches(made / "operator.crt")
    renewed.verify_directly_issued_by(authority.certificate)


def test_what_another_authority_signed_is_left_alone(made):
    other = keys.Authority.create()
    keys.replace_pair(made / "oslo" / "local.crt", *other.server_certificate(["127.0.0.1"]))
    before = contents(made)
    assert deploy("renew", made).exit_code == 0
    assert contents(made)["oslo/local.crt"] == before["oslo/local.crt"]
    assert "oslo/local.crt" in [certificate.name for certificate in validities(made)]


def test_with_a_certificate_that_cannot_be_read_none_is_renewed(made):
    (made / "superlink" / "server.crt").write_text("no certificate")
    before = contents(made)
    result = deploy("renew", made)
    assert result.output.startswith(f"error: {made / 'superlink' / 'server.crt'}: can't be read as a cert")
    assert {name for name, content in contents(made).items() if content != before[name]} == {"audit.jsonl"}
    assert "failed: " in (made / "audit.jsonl").read_text().splitlines()[1]


def test_a_key_of_another_authority_signs_nothing(made):
    keys.replace_pair(made / "other.crt", *keys.Authority.create().server_certificate(["127.0.0.1"]))
    (made / "ca.key").write_bytes((made / "other.key").read_bytes())
    with pytest.raises(ValueError, match=r"ca\.key: isn't the key of ca\.crt$"):
        keys.Authority.read(made)


def test_an_authority_is_prolonged_with_its_key(made):
    former = (made / "ca.crt").read_bytes()
    result = deploy("renew", made, "--authority")
    assert result.exit_code == 0, result.output
    new = (made / "ca.crt").read_bytes()
    assert new != former
    for folder in ("superlink", "oslo", "bern"):
        assert (made / folder / "ca.crt").read_bytes() == new
    (made / "former.pem").write_bytes(former)
    for trusted in (made / "former.pem", made / "ca.crt"):  # a device that has it, and one that doesn't yet
        assert shake_hands(made, "fl.example.org", trusted) is None
    assert "before the authority's former certificate expires" in result.output


def test_nothing_outlives_its_authority_and_an_expired_one_signs_nothing(made, monkeypatch):
    short_lived(made, 90 * DAY, monkeypatch)
    assert lifetime(made / "superlink" / "server.crt") <= 91 * DAY
    short_lived(made, 10 * DAY, monkeypatch)
    authority, before = keys.Authority.read(made), contents(made)
    expired = keys.Authority._self_signed
    monkeypatch.setattr(keys, "AUTHORITY_VALID_FOR", datetime.timedelta(hours=-1))
    keys.replace_certificate(made / "ca.crt", expired(authority.key).certificate)
    monkeypatch.undo()
    result = deploy("renew", made)
    assert result.output == (
        f"error: {made / 'ca.crt'}: the authority has expired; 'fedapp deploy renew --authority'\n"
    )
    assert contents(made)["superlink/server.crt"] == before["superlink/server.crt"]
    assert deploy("renew", made, "--authority").exit_code == 0
    assert shake_hands(made, "fl.example.org") is None


def test_status_warns_sixty_days_before(made, monkeypatch):
    short_lived(made, WARN_BEFORE + DAY, monkeypatch)
    assert not any(certificate.is_due for certificate in validities(made))
    short_lived(made, WARN_BEFORE, monkeypatch)
    result = deploy("status", made)  # nobody listens on its port: what this machine has is told all the same
    assert result.exit_code == 1
    lines = [line.partition(":")[2] for line in result.output.splitlines() if line.startswith("WARNING")]
    assert [line.partition(":")[0] for line in lines] == [" ca.crt", " operator.crt", " superlink/server.crt"]
    assert lines[0].endswith(f"'fedapp deploy renew {made} --authority' makes a new one")
    assert lines[1].endswith(f"'fedapp deploy renew {made}' makes a new one")


def test_a_devices_own_certificate_is_made_anew_when_it_is_time(made, monkeypatch):
    monkeypatch.setattr(keys, "AUTHORITY_VALID_FOR", WARN_BEFORE)
    keys.write_loopback(made / "oslo")
    monkeypatch.undo()
    (warning,) = [line for line in deploy("status", made).output.splitlines() if line.startswith("WARNING")]
    assert warning.startswith("WARNING: oslo/local.crt: valid until ")
    assert warning.endswith(f"'fedapp deploy renew {made}' makes a new one")
    before = contents(made)
    result = deploy("renew", made)
    assert result.exit_code == 0, result.output
    assert (
        "copy local.crt and local.key in oslo/ there, and restart fedapp-oslo and its superexec\n"
        in result.output
    )
    changed = {name for name, content in contents(made).items() if content != before[name]}
    assert {name for name in changed if name.startswith(("oslo/", "bern/"))} == {
        "oslo/local.crt",
        "oslo/local.key",
    }
    assert matches(made / "oslo" / "local.crt")
    assert lifetime(made / "oslo" / "local.crt") == 3651 * DAY
    assert "WARNING" not in deploy("status", made).output


@pytest.mark.parametrize("spoil", ["missing", "other", "garbage"])
def test_without_the_authoritys_key_there_is_one_line(made, spoil, tmp_path):
    key = made / "ca.key"
    if spoil == "missing":
        key.unlink()
    elif spoil == "garbage":
        key.write_text("no key")
    else:
        os.mkdir(tmp_path / "other")
        keys.write_authority(tmp_path / "other")
        key.write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    before = contents(made)
    result = deploy("renew", made)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: {made}")
    assert line.endswith("without it no certificate can be made")
    after = contents(made)
    assert {name for name in after if after[name] != before[name]} == {"audit.jsonl"}


@pytest.mark.parametrize("spoil", ["missing", "garbage"])
@pytest.mark.parametrize("command", [["status"], ["register"], ["add", "lima=/data"]])
def test_without_the_authoritys_certificate_there_is_one_line(made, spoil, command):
    authority = made / "ca.crt"
    if spoil == "missing":
        authority.unlink()
    else:
        authority.write_text("no certificate")
    before = contents(made)
    result = deploy(command[0], made, *command[1:])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: {authority}: can't be read")
    assert line.endswith("superlink/ and each device's folder have a copy of it")
    after = contents(made)
    assert {name for name in after if after[name] != before.get(name)} <= {"audit.jsonl"}
