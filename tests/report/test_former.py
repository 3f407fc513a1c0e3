"""Runs of former versions: without files and keys that came later they are listed, compared, shown and resumed."""

import json
import shutil
import zlib
from pathlib import Path

from typer.testing import CliRunner

from fedapp import federation, server
from fedapp.cli import app
from fedapp.config import RunConfig
from fedapp.engine.run import make_grid
from fedapp.report import read_metrics
from fedapp.report.client_tables import read_tasks
from fedapp.report.page.content import page_content
from tests.runs import summary_of

LATER_FILES = ("clients.parquet", "tasks.parquet", "log.txt")
LATER_KEYS = ("clients-rows", "tasks-ended", "rounds-without-reply", "unread-keys", "sources")


def go(**values: object) -> Path:
    federation.forget()
    experiment = server.prepare(RunConfig.load({k.replace("_", "-"): v for k, v in values.items()}), 3)
    return server.run(make_grid("vectorized", 3, 1), experiment).path


def as_formerly(run: Path) -> int:
    """Take away what there wasn't: rows of clients stood in metrics.jsonl. Return the checkpoint's aggregation."""
    for name in LATER_FILES:
        (run / name).unlink()
    lines = [{**line, "clients": {"participation": [1.0] * 3}} for line in read_metrics(run)]
    texts = [json.dumps(line) + "\n" for line in lines]
    (run / "metrics.jsonl").write_text("".join(texts))
    (folder,) = (run / "checkpoint").glob("[0-9]*")
    state = json.loads((folder / "state.json").read_text())
    saved = int(state["strategy"]["aggregations"])
    # Its own line comes when the run goes on, unless it was saved at its end.
    size = sum(map(len, texts[: saved + (state["observers"]["line"] is None)]))
    observers = {key: each for key, each in state["observers"].items() if key not in LATER_KEYS}
    (folder / "state.json").write_text(
        json.dumps({**state, "observers": {**observers, "metrics-size": size}})
    )
    sums = json.loads((folder / "checksums.json").read_text())
    sums["state.json"] = zlib.crc32((folder / "state.json").read_bytes())
    (folder / "checksums.json").write_text(json.dumps(sums))
    summary = summary_of(run)
    del summary["unread-keys"]
    (run / "summary.json").write_text(json.dumps(summary))
    return saved


def test_a_run_of_a_former_version(tmp_path):
    keys = {"model": "logistic", "num_server_rounds": 3, "checkpoint_every": 1, "results_dir": str(tmp_path)}
    run = go(**keys, run_name="run")
    saved = as_formerly(run)
    shutil.copytree(run, tmp_path / "other")
    listed = CliRunner().invoke(app, ["list", str(tmp_path)])
    assert listed.output.count("finished") == 2, listed.output
    compared = CliRunner().invoke(
        app, ["compare", str(run), str(tmp_path / "other"), "-o", str(tmp_path / "c")]
    )
    assert compared.exit_code == 0, compared.output
    (shown,) = page_content([run])["runs"]
    assert shown["tasks"] == {}
    assert len(shown["curves"]["columns"]["loss"]) == 4
    assert go(resume=str(run), num_server_rounds=5) == run
    assert [line["aggregation"] for line in read_metrics(run)] == [0, 1, 2, 3, 4, 5]
    assert len(read_tasks(run)) == 3 * (5 - saved)
    whole = go(**keys | {"num_server_rounds": 5}, run_name="whole")
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
