"""The audit as a seal: what somebody changed, removed, moved or cut off is found, and its line named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapp.deploy import keys
from fedapp.deploy.audit import Audit, digest, text_of
from fedapp.deploy.seal import sign_ends
from tests.deploy.command import deploy

Change = Callable[[list[str]], list[str]]


@pytest.fixture
def sealed(made):
    """An audit of five lines: init, two devices, and a run that began and ended; 1 and 5 are signed."""
    for device in ("lima=/c", "rome=/d"):
        assert deploy("add", made, device).exit_code == 0
    Audit(made, "run").record("started", run="17")
    sign_ends(made, [("17", "finished:completed")])
    return made


def lines(out: Path) -> list[str]:
    return (out / "audit.jsonl").read_text().splitlines()


def verify(out: Path, *options: str) -> list[str]:
    result = deploy("audit", out, "--verify", *options)
    assert result.exit_code == result.output.startswith("error: ")
    return result.output.splitlines()


def edited(place: int, **values: object) -> Change:
    return lambda found: [
        text_of({**json.loads(line), **values}).decode() if at == place else line
        for at, line in enumerate(found)
    ]


def test_a_whole_audit_is_as_it_was_written_and_an_auditor_needs_no_key(sealed, tmp_path):
    (said,) = verify(sealed)
    assert said.startswith("5 lines are as they were written, 2 of them signed by the server's key; head ")
    sign_ends(sealed, [("17", "finished:completed")])  # is noted already
    copy = tmp_path / "auditor"
    copy.mkdir()
    for name in ("audit.jsonl", "audit.seal", "ca.crt"):
        shutil.copy(sealed / name, copy)
    assert verify(copy) == [said]
    # What comes after the signature is said, and so is a run without an end; the former head stays.
    Audit(sealed, "run").record("started", run="18")
    more = verify(sealed, "--head", said.split()[-1])
    assert more[1:] == [
        "line 6: run 18 began, and its end isn't signed",
        "lines 6 to 6: held by hashes alone, there is no signature after them",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (edited(1, device="oslo"), "line 2: isn't as it was when line 3 was written"),
        (edited(0, user="somebody"), "line 1: its signature isn't the server's"),
        (edited(4, outcome="finished:failed"), "line 5: its signature isn't the server's"),
        (edited(2, line=4), "line 3: was written as line 4"),
        (lambda found: [*found[:1], *found[2:]], "line 2: was written as line 3"),
        (lambda found: [found[0], found[2], found[1], *found[3:]], "line 2: was written as line 3"),
        (lambda found: [*found[:2], '{"command": "stop"}', *found[2:]], "line 3: carries no hash"),
        (lambda found: [*found[:2], found[1], *found[2:]], "line 3: was written as line 2"),
        (lambda found: [*found[:2], "no entry", *found[3:]], "line 3: isn't as it was when line 4"),
        (lambda found: found[:4], "line 5: is missing"),
        (lambda found: found[:1], "line 2: is missing"),
        (lambda found: [*found[:-1], "broken"], "line 5: is no entry, and none was written after it"),
    ],
)
def test_the_first_broken_line_is_named(sealed, change, named):
    found = change(lines(sealed))
    (sealed / "audit.jsonl").write_text("".join(f"{line}\n" for line in found))
    (said,) = verify(sealed)
    assert f"audit.jsonl: {named}" in said


def test_who_writes_the_chain_anew_lacks_the_servers_key(sealed):
    """Line 2 edited, and all hashes after it made to fit: the signature of line 5 is of another hash."""
    found = [json.loads(line) for line in edited(1, device="oslo")(lines(sealed))]
    for place in range(2, 5):
        found[place]["previous"] = digest(text_of(found[place - 1]) + b"\n")
    (sealed / "audit.jsonl").write_bytes(b"".join(text_of(entry) + b"\n" for entry in found))
    assert "line 5: its signature isn't the server's" in verify(sealed)[0]
    # Another server's key, or the operator's, signs nothing here.
    for certificate, key in (("operator.crt", "operator.key"), ("other.crt", "other.key")):
        if certificate == "other.crt":
            keys.replace_pair(sealed / certificate, *keys.Authority.create().server_certificate(["x"]))
        forged = sealed / f"forged-{key}" / "superlink"
        forged.mkdir(parents=True)
        shutil.copy(sealed / certificate, forged / "server.crt")
        shutil.copy(sealed / key, forged / "server.key")
        (forged.parent / "audit.jsonl").touch()
        sign_ends(forged.parent, [("17", "finished:completed")])
        shutil.copy(sealed / "ca.crt", forged.parent)
        assert "line 1: " in verify(forged.parent)[0]


def test_lines_cut_off_with_the_seal_are_found_by_an_earlier_head(sealed):
    head = verify(sealed)[0].split()[-1]
    cut = lines(sealed)[:1]
    (sealed / "audit.jsonl").write_text(cut[0] + "\n")
    (sealed / "audit.seal").unlink()
    assert "audit.seal: is missing, and line 1 of " in verify(sealed)[0]
    (sealed / "audit.seal").write_text(cut[0] + "\n")
    assert verify(sealed)[0].startswith("1 lines are")
    assert verify(sealed, "--head", head)[0].startswith(f"error: --head = {head}: no line of ")


def test_the_chain_goes_on_after_a_killed_command_and_with_new_keys(sealed):
    with (sealed / "audit.jsonl").open("a") as file:
        file.write('{"line": 6, "previ')  # killed as it wrote
    assert "line 6: is no entry, and none was written after it" in verify(sealed)[0]
    assert deploy("renew", sealed, "--authority").exit_code == 0  # other keys of the same authority
    sign_ends(sealed, [("18", "finished:stopped")])
    said = verify(sealed)
    assert said[0].startswith("8 lines are as they were written, 3 of them signed")
    assert said[1:] == ["line 6: is no entry, a command was ended as it wrote"]
    # Another authority: its first line holds what there was, signatures of the former server included.
    arguments = ("init", sealed, "--host", "fl.example.org", "--device", "oslo=/a", "--force")
    assert deploy(*arguments).exit_code == 0
    assert verify(sealed)[0].startswith("9 lines are as they were written, 4 of them signed")
    without = lines(sealed)[:8]
    (sealed / "audit.jsonl").write_text("".join(f"{line}\n" for line in without))
    (sealed / "audit.seal").write_text(without[7] + "\n")
    assert "line 1: is signed by another authority's server" in verify(sealed)[0]


def test_a_first_line_without_a_hash_was_added_by_hand(made):
    first = '{"time": "t", "user": "u", "host": "h", "command": "init", "outcome": "done"}\n'
    (made / "audit.jsonl").write_text(first + (made / "audit.jsonl").read_text())
    (said,) = verify(made)
    assert "line 1: carries no hash of the line before; it was added by hand" in said


def test_a_seal_that_cannot_be_read_or_written_is_one_line(made):
    (made / "audit.seal").unlink()
    (made / "audit.seal").mkdir()
    assert verify(made) == [f"error: {made / 'audit.seal'}: can't be read (Is a directory)"]
    (made / "audit.new").mkdir()
    with pytest.raises(ValueError, match=r"audit\.new: can't be written \(Is a directory\)$"):
        sign_ends(made, [("17", "finished:completed")])


def test_without_the_servers_key_nothing_is_signed(made):
    os.unlink(made / "superlink" / "server.key")
    before = lines(made)
    with pytest.raises(ValueError, match=r"server\.key: can't be read to sign the audit \(No such file"):
        sign_ends(made, [("17", "finished:completed")])
    assert lines(made) == before
    assert deploy("audit", made, "--head", "x").output == "error: --head: is read with --verify alone\n"
