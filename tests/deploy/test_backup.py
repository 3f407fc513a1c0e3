"""``fedapp deploy backup`` and ``restore``; and the record of who did what."""

import getpass
import io
import json
import os
import pwd
import shutil
import socket
import sqlite3
import stat
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.command import contents, deploy, shake_hands
from tests.full_disk import files_of_at_most


def entries(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]


def test_a_folder_is_restored_as_it_was(made, tmp_path):
    (made / "oslo" / "own").mkdir()
    (made / "oslo" / "own" / "secret").write_text("kept, however deep")
    written = {
        "superlink/superlink.db",
        "oslo/flower/apps/x.py",
        "bern/cache/x",
        "bern.log",
        "results/run/model",
    }
    for name in written:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("what processes write")
    before = contents(made)
    file = tmp_path / "backup.tar.gz"
    assert deploy("backup", made, file).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    result = deploy("restore", file, tmp_path / "restored")
    assert result.output.startswith(f"{tmp_path / 'restored'}: 2 devices")
    after = contents(tmp_path / "restored")
    assert {name for name in before if name not in after} == written
    assert set(after) <= set(before)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"audit.jsonl"}
    for name in ("ca.key", "superlink/server.key", "oslo/device.key", "superlink/superexec.secret"):
        assert stat.S_IMODE((tmp_path / "restored" / name).stat().st_mode) == 0o600, name
    # What it is for: the restored authority makes certificates that devices take.
    assert deploy("renew", tmp_path / "restored").exit_code == 0
    assert shake_hands(tmp_path / "restored", "fl.example.org", made / "oslo" / "ca.crt") is None


def test_a_linked_file_is_backed_up_with_its_content(made, tmp_path):
    before, volume = contents(made), tmp_path / "encrypted"
    volume.mkdir()
    (made / "ca.key").rename(volume / "ca.key")
    (made / "ca.key").symlink_to(volume / "ca.key")
    (made / "bern" / "ca.crt").unlink()
    (made / "bern" / "ca.crt").hardlink_to(made / "oslo" / "ca.crt")
    said = deploy("backup", made, tmp_path / "backup.tar.gz").output
    assert f"{len(before)} files, the authority's key among them" in said
    assert deploy("restore", tmp_path / "backup.tar.gz", tmp_path / "restored").exit_code == 0
    restored = contents(tmp_path / "restored")
    assert {name for name in before if restored.get(name) != before[name]} == {"audit.jsonl"}
    assert not any(path.is_symlink() for path in (tmp_path / "restored").rglob("*"))
    assert stat.S_IMODE((tmp_path / "restored" / "ca.key").stat().st_mode) == 0o600
    (volume / "ca.key").unlink()  # the volume isn't mounted
    said = deploy("backup", made, tmp_path / "without.tar.gz").output
    assert "the authority's key, ca.key, not among them" in said


def test_a_linked_folder_is_refused_unless_it_is_left_out_anyway(made, tmp_path):
    (tmp_path / "disk").mkdir()
    (made / "results").symlink_to(tmp_path / "disk")
    assert deploy("backup", made, tmp_path / "backup.tar.gz").exit_code == 0
    (made / "bern").rename(tmp_path / "bern")
    (made / "bern").symlink_to(tmp_path / "bern")
    said = deploy("backup", made, tmp_path / "other.tar.gz").output
    assert said.startswith(f"error: {made / 'bern'}: is a link to a folder")
    assert not (tmp_path / "other.tar.gz").exists()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "d/ca.key"), KeyboardInterrupt()])
def test_a_backup_that_breaks_off_leaves_no_file_and_names_the_one_that_cannot_be_read(
    made, tmp_path, monkeypatch, error
):
    def add(*_: object) -> None:
        raise error

    monkeypatch.setattr(tarfile.TarFile, "add", add)
    result = deploy("backup", made, tmp_path / "backup.tar.gz")
    assert not (tmp_path / "backup.tar.gz").exists()
    if isinstance(error, OSError):
        assert result.output == "error: d/ca.key: can't be read (Permission denied)\n"


def test_a_backup_replaces_nothing_and_a_restore_neither(made, tmp_path):
    file = tmp_path / "backup.tar.gz"
    assert deploy("backup", made, file).exit_code == 0
    content = file.read_bytes()
    assert deploy("backup", made, file).output == (
        f"error: {file}: is there already, and a backup replaces nothing\n"
    )
    assert file.read_bytes() == content
    before = contents(made)
    assert deploy("restore", file, made).output == (
        f"error: {made}: is there already; a backup is restored into a new folder\n"
    )
    assert contents(made) == before
    inside = made / "backup.tar.gz"  # not a part of itself
    assert deploy("backup", made, inside).exit_code == 0
    with tarfile.open(inside) as archive:
        assert "backup.tar.gz" not in archive.getnames()


def test_what_is_no_backup_is_refused_in_one_line(made, tmp_path):
    file = tmp_path / "x.tar.gz"
    file.write_text("no archive")
    with tarfile.open(tmp_path / "plain.tar", "w") as archive:  # has no checksum
        archive.add(made, ".")
    with tarfile.open(tmp_path / "other.tar", "w:gz") as archive:
        archive.add(made / "ca.crt", "ca.crt")
    link = tarfile.TarInfo("outside.crt")
    link.type, link.linkname = tarfile.SYMTYPE, "../outside.crt"
    for name, evil in (("up", "../outside.crt"), ("root", f"{tmp_path}/outside.crt"), ("link", "")):
        with tarfile.open(tmp_path / f"{name}.tar", "w:gz") as archive:
            for each in ("deployment.toml", "superlink", "oslo", "bern"):
                archive.add(made / each, each)
            if evil:
                info = tarfile.TarInfo(evil)  # `add` would make it relative
                archive.addfile(info, io.BytesIO())
            else:
                archive.addfile(link)
    with tarfile.open(tmp_path / "less.tar", "w:gz") as archive:
        archive.add(made / "deployment.toml", "deployment.toml")
        archive.add(made / "oslo", "oslo")
    others = [tmp_path / f"{name}.tar" for name in ("plain", "other", "up", "root", "link", "less")]
    for given in (file, *others, tmp_path / "missing"):
        result = deploy("restore", given, tmp_path / f"restored-{given.stem}")
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith(f"error: {given}: ")
        assert not (tmp_path / f"restored-{given.stem}").exists()
        assert ("nothing in it is of superlink, bern" in line) is (given.stem == "less")
        assert ("outside" in line) is (given.stem in ("up", "root", "link"))
    assert not (tmp_path / "outside.crt").exists()
    result = deploy("backup", made, tmp_path / "no" / "folder")
    assert (
        result.output
        == f"error: {tmp_path / 'no' / 'folder'}: can't be written (No such file or directory)\n"
    )


def test_a_damaged_backup_is_refused_in_one_line_and_nothing_is_restored(made, tmp_path):
    file, bad, out = tmp_path / "backup.tar.gz", tmp_path / "bad.tar.gz", tmp_path / "restored"
    assert deploy("backup", made, file).exit_code == 0
    whole = file.read_bytes()
    # Behind gzip's own head, which holds a date and the file's name, and no content.
    places = np.random.default_rng(0).integers(40, len(whole), 40)
    flipped = [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in places]
    cut = [whole[:at] for at in np.linspace(0, len(whole) - 1, 15).astype(int)]
    for content in [*flipped, *cut]:
        bad.write_bytes(content)
        result = deploy("restore", bad, out)
        assert result.exit_code == 1
        (line,) = result.output.splitlines()
        assert line.startswith(f"error: {bad}: can't be restored (")
        assert not out.exists()


def test_a_device_may_be_called_as_a_folder_that_is_left_out(tmp_path):
    out, file = tmp_path / "d", tmp_path / "backup.tar.gz"
    assert deploy("init", out, "--host", "fl.example.org", "--device", "results=/a").exit_code == 0
    (out / "results" / "superexec" / "results").mkdir()
    (out / "results" / "superexec" / "results" / "model").write_text("what a run wrote")
    before = contents(out)
    assert deploy("backup", out, file).exit_code == 0
    assert deploy("restore", file, tmp_path / "restored").exit_code == 0
    left_out = set(before) - set(contents(tmp_path / "restored"))
    assert left_out == {"results/superexec/results/model"}


def test_a_database_that_is_none_is_refused_in_one_line(made, tmp_path):
    sqlite3.connect(tmp_path / "empty.db").execute("CREATE TABLE other (x)").connection.close()
    for database in (tmp_path / "missing.db", made / "ca.crt", tmp_path / "empty.db"):
        for arguments in (("backup-server", tmp_path / "copy", "--database", database),):
            result = deploy(*arguments)
            assert result.exit_code == 1
            (line,) = result.output.splitlines()
            assert line.startswith(f"error: {database}: can't be read as a SuperLink's database (")
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_is_named_and_leaves_no_half_copy(tmp_path):
    database, copy = tmp_path / "superlink.db", tmp_path / "copy"
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE TABLE node (status TEXT)")
        made.executemany("INSERT INTO node VALUES (?)", [("online" * 1000,)] * 100)
    with files_of_at_most(100_000):
        result = deploy("backup-server", copy, "--database", database)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: {copy}: can't be written (")
    assert not copy.exists()
    assert deploy("backup-server", copy, "--database", database).exit_code == 0


def test_the_audit_log_says_who_did_what_and_how_it_ended(made):
    assert deploy("add", made, "lima=/c").exit_code == 0
    assert deploy("add", made, "lima=/c").exit_code == 1
    assert deploy("remove", made, "rome").exit_code == 1
    assert stat.S_IMODE((made / "audit.jsonl").stat().st_mode) == 0o600
    found = entries(made)
    assert [(e["command"], e.get("device"), e["outcome"]) for e in found] == [
        ("init", None, "done"),
        ("add", "lima", "done"),
        ("add", "lima", "failed: --device 'lima': is there twice; names must differ"),
        ("remove", "rome", "failed: device 'rome': isn't one of oslo, bern, lima"),
    ]
    for entry in found:
        assert entry["user"] == pwd.getpwuid(os.getuid()).pw_name
        assert entry["host"] == socket.gethostname()
        assert entry["time"].endswith("+00:00")
    # A new deployment in its place doesn't erase what was.
    again = ("--host", "fl.example.org", "--device", "oslo=/a", "--force")
    assert deploy("init", made, *again).exit_code == 0
    assert entries(made)[:-1] == found
    assert entries(made)[-1]["command"] == "init --force"


def test_a_line_that_lacks_what_an_entry_has_is_shown_as_far_as_it_goes(made, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.runs.statuses", lambda _: {})
    with (made / "audit.jsonl").open("a") as file:
        file.write('{"command": "by hand", "device": "oslo"}\n')
    shown = deploy("audit", made).output.splitlines()
    assert len(shown) == 2
    assert shown[0].endswith(f"{entries(made)[0]['user']}@{socket.gethostname()} init: done")
    assert shown[1] == "? ?@? by hand oslo: ?"


def test_the_user_is_not_who_the_environment_says(made, monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert getpass.getuser() == "somebody-else"
    deploy("add", made, "lima=/c")
    assert entries(made)[-1]["user"] != "somebody-else"


def test_without_an_audit_log_nothing_is_changed(made):
    (made / "audit.jsonl").unlink()
    (made / "audit.jsonl").mkdir()
    before = contents(made)
    assert deploy("add", made, "lima=/c").output == (
        f"error: {made / 'audit.jsonl'}: can't be written (Is a directory)\n"
    )
    assert contents(made) == before


def test_start_up_files_are_written_anew_and_nothing_else(made):
    before = contents(made)
    for name in ("oslo/fedapp-oslo.service", "compose.yaml"):
        (made / name).write_text("as an earlier version wrote it")
    assert deploy("refresh", made).exit_code == 0
    assert {**contents(made), "audit.jsonl": b""} == {**before, "audit.jsonl": b""}


def test_start_up_files_that_cannot_be_written_are_one_line(made):
    shutil.rmtree(made / "oslo")
    assert deploy("refresh", made).output == (
        f"error: {made / 'oslo' / 'node.toml'}: can't be written (No such file or directory)\n"
    )


def test_start_up_files_of_a_folder_that_no_unit_can_hold_are_refused(made):
    plan = made / "deployment.toml"
    plan.write_text(plan.read_text().replace("/opt/fedapp", "/opt/my app"))
    before = contents(made)
    said = deploy("refresh", made).output
    assert said == "error: --home = '/opt/my app': must be an absolute path without spaces, quotes, % or $\n"
    assert {**contents(made), "audit.jsonl": b""} == {**before, "audit.jsonl": b""}


def test_the_last_device_cannot_be_removed(made):
    from fedapp.deploy.files import remove_device

    remove_device(made, "oslo")
    result = deploy("remove", made, "bern")
    assert result.exit_code == 1
    assert result.output.startswith("error: --device: at least one")
    assert (made / "bern" / "device.key").is_file()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-c", "lr=-1.0"), "error: lr = -1.0: must be a number > 0\n"),
        (("-c", "lrr=0.1"), "error: unknown key 'lrr'"),
        (("-c", 'resume="/only/on/the/server"', "--app", "/nowhere"), "error: flwr run /nowhere: "),
        (("--app", "/nowhere"), "error: flwr run /nowhere: "),
    ],
)
def test_a_run_that_cannot_begin_is_one_line(made, arguments, text):
    result = deploy("run", made, *arguments)
    assert result.exit_code == 1
    assert result.output.startswith(text)
    assert len(result.output.splitlines()) == 1
    assert entries(made)[-1]["command"] == "run"
    assert entries(made)[-1]["outcome"].startswith("failed: ")


def test_a_runs_number_of_clients_and_clock_are_not_dropped_without_a_word(made, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        'lr = 0.2\nmin-clients = 3\nclock = "virtual"\nnum-clients = 20\n[versions]\nflwr = "1"\n'
    )
    clock, *said = deploy("run", made, "-c", str(config), "--app", "/nowhere").output.splitlines()
    assert clock.startswith("clock = virtual: was the simulation's, and isn't taken over")
    assert said[0].startswith("num-clients = 20: isn't read on devices; ")
    assert said[0].endswith("waits for min-clients = 3")
    assert said[1].startswith("error: flwr run /nowhere: ")
