"""A stock app under ``flwr run``, with our line in place of Flower's: no line in its log that helps nobody."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.processes import home_of_processes
from tests.examples import apps
from tests.examples.test_apps_run import flwr_run

# What our FedAvg says in place of Flower's words: its unusual settings, the order of its clients, and each round.
OURS = [
    r"FedAvg: default settings",
    r"3 clients: no answer to query\.describe \(the app has no handler of it, which may be left out\): ordered by .*",
    r"round \d+: participants 3, failures 0, client-eval_acc [\d.]+, .*",
]


def log_of(app: Path, home: Path, port: int) -> list[str]:
    """Return the lines that the ServerApp's process has logged, with their levels and without their colours."""
    federation = "num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    with home_of_processes(home):
        output = flwr_run(
            app, home, "--federation-config", federation, FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port)
        )
    plain = re.sub(r"\x1b\[\d+m", "", output)
    assert "Accuracy on the clients" in plain, plain
    started = plain.partition("Successfully installed")[2]
    return [re.sub(r"\s+", " ", line) for line in re.findall(r"^[A-Z]+ *:.*\S", started, re.M)]


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_stock_app_logs_no_line_that_helps_nobody(tmp_path, free_port):
    ours = apps.with_strategy("own_scheme", "fedavg", tmp_path / "ours")
    theirs = apps.with_strategy("own_scheme", "fedavg", tmp_path / "theirs")
    server = theirs / "own_scheme" / "server_app.py"
    server.write_text(
        server.read_text("utf-8").replace("from strategies import", "from flwr.serverapp.strategy import")
    )
    known = set(log_of(theirs, tmp_path / "flower-theirs", free_port))
    added = [line for line in log_of(ours, tmp_path / "flower-ours", free_port) if line not in known]
    assert any("round 1" in line for line in added)
    for line in added:
        assert any(re.fullmatch(f"INFO : {pattern}", line) for pattern in OURS), added
