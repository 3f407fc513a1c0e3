"""The reporter alone: what an observer is given and what is logged, with per-client statistics by hand."""

import logging
import math
from typing import Any

import pytest
from flwr.app import MetricRecord

from strategies import messages
from strategies.clients.client_statistics import ACCEPTED, ClientStatistics
from strategies.clients.roster import Roster
from strategies.core.config import SynchronousConfig
from strategies.core.reporter import Progress, Reporter
from strategies.core.stability import StabilityMonitor
from tests.strategies.parts import begun, client

OF_CLIENTS = {"weight": [0.25, 0.75]}


def reporter(observer: Any, unit: str = "round", config: Any = None, kept: int = 0) -> Reporter:
    client_stats = ClientStatistics()
    client_stats.add_task_time(0, 2.0, ACCEPTED)
    client_stats.add_task_time(1, 3.0, messages.LATE)
    client_stats[1].bytes, client_stats[1].lost = 40, 2
    run = begun([client(0), client(1)], config)
    run.clock.wait_until(7.0)
    run.options.observer = observer
    return Reporter(run, client_stats, Roster(), unit, lambda: kept, lambda: 40, StabilityMonitor(str))


def seen_of(part: Any, **options: Any) -> Progress:
    seen: list[Progress] = []
    made = reporter(seen.append, **part)
    report = made.report_evaluation if options else made.report
    report(3, made._run.result, {"failures": 1, "text": "no number"}, **options)
    return seen[0]


def test_an_observer_gets_the_numbers_the_costs_and_the_time():
    seen = seen_of({"kept": 16})
    assert (seen.aggregation, seen.time, seen.evaluated, dict(seen.clients)) == (3, 7.0, False, {})
    assert seen.metrics == {
        "failures": 1,
        messages.DEVICE_SECONDS: 5.0,
        messages.WASTED_SECONDS: 3.0,
        messages.BYTES_KEPT: 16,
        messages.BYTES_SERVER: 56,
    }


def test_an_evaluation_adds_the_servers_metrics_the_spread_over_clients_and_the_shares():
    part, seen = reporter(None), []
    part._run.options.observer = seen.append
    part.by_client = {"acc": {1: 0.5}}
    told = MetricRecord({"loss": 0.5, messages.CLIENT_LOSSES: [1.0, 3.0]})
    part.report_evaluation(
        3,
        part._run.result,
        {},
        evaluate_fn=lambda number, arrays: told,
        shares=lambda: OF_CLIENTS,
        losses=lambda losses: {"federated-loss": sum(losses.values())},
    )
    assert part.stability.state()["losses-before"] == [4.0, 4.0]
    metrics = seen[0].metrics
    assert (part._run.evaluated, part._run.result.evaluate_metrics_serverapp[3]) == (3, told)
    assert (metrics["loss"], metrics["federated-loss"], metrics["client-loss-mean"]) == (0.5, 4.0, 2.0)
    assert (metrics["client-loss-std"], metrics["client-acc-best"]) == (1.0, 0.5)
    clients = seen[0].clients
    assert (clients["weight"], clients["loss"]) == ([0.25, 0.75], [1.0, 3.0])
    assert clients["acc"] == pytest.approx([float("nan"), 0.5], nan_ok=True)
    assert part.by_client == {}  # told once


def test_a_client_without_a_value_counts_in_no_mean():
    part, seen = reporter(None), []
    part._run.options.observer = seen.append
    without = {
        f"{messages.WITHOUT}{messages.CLIENT_LOSSES}": [0],
        f"{messages.WITHOUT}{messages.PER_CLIENT}acc": [0],
    }
    nan = float("nan")
    told = {messages.CLIENT_LOSSES: [nan, 3.0, nan], f"{messages.PER_CLIENT}acc": [nan, 0.5, 0.25], **without}
    part.report_evaluation(
        3,
        part._run.result,
        {},
        evaluate_fn=lambda number, arrays: MetricRecord(told),
        shares=lambda: OF_CLIENTS,
        losses=lambda losses: {"federated-loss": float(len(losses))},
    )
    metrics = seen[0].metrics
    assert (metrics["client-acc-mean"], metrics["federated-loss"]) == (0.375, 2)
    assert math.isnan(metrics["client-loss-mean"])  # client 2's is one that diverged
    assert not any(name.startswith(messages.WITHOUT) for name in (*metrics, *seen[0].clients))


def test_lost_tasks_of_each_client_are_told_where_clients_come_and_go_and_joules_are_summed():
    config = SynchronousConfig(task_failure=0.5)
    shares = {"weight": [0.5, 0.5], messages.JOULES: [2.0, 5.0]}
    seen = seen_of({"config": config}, shares=lambda: shares)
    assert (seen.clients[messages.LOST], seen.metrics[messages.JOULES]) == ([0.0, 2.0], 7.0)


def test_costs_of_each_client():
    costs = reporter(None).costs_of_clients(3)
    assert costs == {
        "bytes": [0.0, 40.0, 0.0],
        messages.DEVICE_SECONDS: [2.0, 3.0, 0.0],
        messages.WASTED_SECONDS: [0.0, 3.0, 0.0],
    }


@pytest.mark.parametrize(("unit", "lines"), [("round", 3), ("aggregation", 1)])
def test_without_an_observer_every_round_is_logged_and_an_aggregation_once_a_second(unit, lines, caplog):
    part = reporter(None, unit)
    with caplog.at_level(logging.INFO, "flwr"):
        for number in range(3):
            part.report(number, part._run.result, {"loss": 0.25, "bytes-up": 8})
    assert [r.getMessage() for r in caplog.records] == [f"{unit} {n}: loss 0.25" for n in range(lines)]
