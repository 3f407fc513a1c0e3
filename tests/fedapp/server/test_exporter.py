"""What Prometheus is told: by a real request to a real run, in its own format."""

import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedapp.config import ConfigError, RunConfig
from fedapp.deploy.dashboard import dashboard
from fedapp.server import Observer, prepare
from fedapp.server.exporter import MOST_CLIENTS, _bounded
from fedapp.server.record import Entry
from strategies.clients.client_statistics import ClientRecord
from tests.fedapp.server.conftest import Devices

Numbers = dict[tuple[str, tuple[str, ...]], float]


def ask(port: int, host: str = "127.0.0.1") -> Numbers:
    """Return what is answered: values by name and labels' values."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Scraper(Observer):
    """Asks after every aggregation, as a Prometheus that has been told to would."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: list[Numbers] = []

    def record(self, entry: Entry) -> None:
        self.answers.append(ask(self.port))


class Lossy(Devices):
    """The third device never answers."""

    def push_messages(self, messages: Any) -> Any:
        kept = [m for m in messages if m.metadata.message_type != "train" or m.metadata.dst_node_id != 3]
        return super().push_messages(kept)


@pytest.fixture
def scraper(free_port):
    return Scraper(free_port)


def test_a_round_by_round_run_is_told_by_device(go, scraper):
    go(
        ("oslo", "bern", ""),
        [scraper],
        Lossy(("oslo", "bern", "")),
        num_server_rounds=4,
        clock="wall",
        metrics_port=scraper.port,
    )
    last = scraper.answers[-1]  # when the fourth aggregation was done, and not noted yet
    assert last["fedapp_run", ("deployment", "run", "fedavg")] == 1  # labels by name
    assert last["fedapp_aggregations", ()] == last["fedapp_aggregations_planned", ()] == 4
    assert (last["fedapp_clients_connected", ()], last["fedapp_clients_at_work", ()]) == (3, 0)
    assert last["fedapp_updates_total", ("accepted",)] == 8
    assert last["fedapp_updates_total", ("late",)] == 4
    assert last["fedapp_updates_total", ("refused",)] == 0
    assert last["fedapp_client_updates_total", ("0", "oslo", "accepted")] == 4
    assert last["fedapp_client_updates_total", ("2", "", "late")] == 4
    assert 0 < last["fedapp_number", ("loss",)] < scraper.answers[1]["fedapp_number", ("loss",)]
    assert last["fedapp_number", ("accuracy",)] > 0.2
    assert last["fedapp_bytes_total", ("down",)] > last["fedapp_bytes_total", ("up",)] > 0
    assert last["fedapp_aggregation_seconds_count", ()] == 3
    assert last["fedapp_run_seconds", ()] >= last["fedapp_aggregation_seconds_sum", ()] > 0
    shares = [last["fedapp_client_importance", who] for who in (("0", "oslo"), ("1", "bern"), ("2", ""))]
    assert sum(shares) == pytest.approx(1)


def test_an_asynchronous_run_tells_staleness_weights_and_task_times(go, scraper):
    go(
        observers=[scraper],
        strategy="async-fedavg",
        server_lr=0.5,
        num_server_rounds=8,
        metrics_port=scraper.port,
    )
    last = scraper.answers[-1]
    assert last["fedapp_number", ("staleness-mean",)] >= 0
    for name in ("weight", "task_seconds", "importance", "at_work"):
        assert {labels for found, labels in last if found == f"fedapp_client_{name}"} == {
            ("0", "oslo"),
            ("1", "bern"),
            ("2", "lima"),
        }
    assert last["fedapp_clients_at_work", ()] >= 1
    accepted = [
        value
        for (name, labels), value in last.items()
        if name == "fedapp_client_updates_total" and "accepted" in labels
    ]
    assert sum(accepted) == last["fedapp_updates_total", ("accepted",)] == 8


def test_the_dashboard_shows_what_a_run_tells_and_nothing_else(go, scraper):
    go(
        observers=[scraper],
        strategy="async-fedavg",
        server_lr=0.5,
        num_server_rounds=4,
        metrics_port=scraper.port,
    )
    told = {name for name, _ in scraper.answers[-1]}
    panels = json.loads(dashboard())["panels"]
    shown = {
        name
        for panel in panels
        for each in panel["targets"]
        for name in re.findall(r"fedapp_\w+", each["expr"])
    }
    assert shown == told - {name for name in told if name.endswith("_created")}
    # A grid of 24 columns, of which no two panels have one place.
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) == 23
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_simulation_can_be_asked_too(go, scraper):
    grid = Devices(("", "", ""))
    grid.engine = "sequential"
    go(("", "", ""), [scraper], grid, metrics_port=scraper.port)
    assert scraper.answers[-1]["fedapp_client_updates_total", ("2", "", "accepted")] == 3


def test_with_the_run_it_ends(go, scraper):
    go(metrics_port=scraper.port, num_server_rounds=1)
    with pytest.raises(urllib.error.URLError):
        ask(scraper.port)
    go(metrics_port=scraper.port, num_server_rounds=1, run_name="next")  # and the port is free


def test_many_clients_have_no_more_series_than_a_hundred_and_one():
    client_stats = {index: ClientRecord(tasks=1, accepted=index) for index in range(1000)}
    bounded = _bounded(client_stats)
    assert len(bounded) == MOST_CLIENTS + 1
    assert bounded[None].accepted == sum(range(MOST_CLIENTS, 1000))
    assert sum(account.tasks for account in bounded.values()) == 1000
    assert None not in _bounded({index: ClientRecord() for index in range(MOST_CLIENTS)})


@pytest.fixture
def refused(tmp_path):
    """Return why a run can't begin; none is recorded."""

    def refuse(**values: Any) -> str:
        given = {key.replace("_", "-"): value for key, value in values.items()}
        with pytest.raises(ConfigError) as caught:
            prepare(RunConfig.load({"results-dir": str(tmp_path / "results"), **given}), 3)
        assert not (tmp_path / "results").exists()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuse


def test_a_port_that_is_taken_is_one_line_before_anything_starts(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert refused(metrics_port=port) == (
            f"metrics-port = {port}, metrics-host = '127.0.0.1': can't be listened on (Address already in use); "
            "allowed are a free port of this machine, or 0 for none"
        )


def test_an_address_of_another_machine_is_refused(refused, free_port):
    text = refused(metrics_port=free_port, metrics_host="192.0.2.1")
    assert text.startswith(f"metrics-port = {free_port}, metrics-host = '192.0.2.1': can't be listened on (")
    assert "can't be listened on (" in refused(metrics_port=free_port, metrics_host="not a host")


def test_without_the_package_it_says_how_to_get_it(refused, monkeypatch):
    monkeypatch.setattr("fedapp.server.exporter.find_spec", lambda name: None)
    assert refused(metrics_port=9100) == (
        "metrics-port = 9100: prometheus-client isn't installed; pip install '.[prometheus]', or metrics-port = 0"
    )
