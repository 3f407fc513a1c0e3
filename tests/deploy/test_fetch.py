"""A run brought home from a real SuperLink: every file as it is there, nothing else, and from where it broke off."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from fedapp.deploy.fetch import fetch
from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import DeployError
from fedapp.deploy.run_files import RunFiles, RunFilesError
from tests.deploy.command import contents, deploy

LARGE = 3_000_000  # bytes: several pieces


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The folder of the code of runs on a server, with a run, and a secret outside of the run."""
    root = tmp_path / "superexec"
    run = root / "results" / "run-001"
    (run / "checkpoint").mkdir(parents=True)
    (run / "config.toml").write_text("seed = 1\n")
    (run / "model.safetensors").write_bytes(bytes(range(250)) * (LARGE // 250))
    (run / "checkpoint" / "état.json").write_text("{}")
    (run / "log.txt").write_text("")
    (run / "summary.json").write_text("{}")
    (root / "superexec.secret").write_text("secret")
    (root / "flower").mkdir()
    (root / "flower" / "config.toml").write_text("")
    return root


def read(files: RunFiles, run: str, path: str, offset: int = 0, size: int = 1 << 30) -> bytes:
    return b"".join(files.pieces(run, path, offset, size))


def test_files_are_listed_and_read_in_parts(server):
    files, run = RunFiles(server), server / "results" / "run-001"
    listed = files.listed("run-001")
    assert listed == files.listed(str(run))
    assert {each["path"]: each["bytes"] for each in listed} == {
        "config.toml": 9,
        "log.txt": 0,
        "summary.json": 2,
        "model.safetensors": LARGE,
        "checkpoint/état.json": 2,
    }
    hashes = {each["path"]: each["sha256"] for each in listed}
    assert (
        hashes["log.txt"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )  # of nothing
    assert hashes["model.safetensors"] == sha256((run / "model.safetensors").read_bytes()).hexdigest()
    assert read(files, "run-001", "config.toml", 5, 3) == b"= 1"


@pytest.mark.parametrize(
    "run", ["", "../flower", "../superexec", "/etc", ".", "run-002", "run-001/checkpoint"]
)
def test_what_is_no_runs_folder_isnt_handed_out(run, server):
    with pytest.raises(RunFilesError, match="isn't the folder of a run below"):
        RunFiles(server).listed(run)


def test_no_way_leads_out_of_a_runs_folder(server):
    files, run = RunFiles(server), server / "results" / "run-001"
    (run / "link").symlink_to(server / "superexec.secret")
    (run / "folder").symlink_to(server)
    os.mkfifo(run / "pipe")
    assert len(files.listed("run-001")) == 5
    for path in (
        "link",
        "folder/superexec.secret",
        "../../superexec.secret",
        str(server / "superexec.secret"),
        "pipe",
        "checkpoint",
        "nothing",
        "a\0b",
    ):
        with pytest.raises(RunFilesError):
            read(files, "run-001", path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_is_fetched_from_a_superlink(server, tmp_path):
    with LocalDeployment(tmp_path / "d", [{"partition-id": 0, "num-partitions": 1}]) as deployment:
        out, into = deployment.folder, tmp_path / "home"
        (server / "results").rename(out / "superlink" / "superexec" / "results")
        there = out / "superlink" / "superexec" / "results" / "run-001"
        deployment.start_superlink()
        deployment.wait_for_superlink()
        # As an earlier call left it that broke off.
        (into / "run-001").mkdir(parents=True)
        begun = (there / "model.safetensors").read_bytes()[: LARGE // 3]
        (into / "run-001" / "model.safetensors.part").write_bytes(begun)
        fetched = fetch(out, "run-001", into)
        assert contents(into / "run-001") == contents(there)
        assert (fetched.files, fetched.bytes, fetched.new) == (5, LARGE + 13, LARGE + 13 - LARGE // 3)
        (there / "config.toml").write_text("seed = 2\n")
        result = deploy("fetch", out, "run-001", "--into", into)
        assert result.output == (
            f"{into / 'run-001'}: 5 files, {LARGE + 13} bytes, {LARGE + 4} of them here before, as on the server by "
            "their SHA-256\n"
        )
        assert contents(into / "run-001") == contents(there)
        # A part that isn't a part of the file.
        (into / "run-001" / "config.toml").unlink()
        (into / "run-001" / "config.toml.part").write_text("other")
        with pytest.raises(
            DeployError, match=r"config.toml isn't what the server said, perhaps because the "
        ):
            fetch(out, "run-001", into)
        fetch(out, "run-001", into)
        with pytest.raises(DeployError, match=r"^run 'run-002': isn't the folder of a run below "):
            fetch(out, "run-002", into)
        with pytest.raises(DeployError, match=r"^the SuperLink has no run$"):
            fetch(out, "", into)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_fetched_with_its_model_and_log(tmp_path, repository):
    nodes = [{"partition-id": part, "num-partitions": 2} for part in range(2)]
    with LocalDeployment(tmp_path / "d", nodes) as deployment:
        deployment.start()
        results = deployment.folder / "superlink" / "superexec" / "results"
        assert deployment.run(
            repository,
            {"num-server-rounds": 2, "min-clients": 2, "results-dir": str(results), "run-name": "run"},
        )
        assert deploy("fetch", deployment.folder, "--into", tmp_path / "home").exit_code == 0
        home = contents(tmp_path / "home" / "run")
        assert "Recording this run in" in home.pop("superlink.log").decode()
        assert home == contents(results / "run")
        assert "model.safetensors" in home
