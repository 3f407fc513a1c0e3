"""m where the config doesn't say it, ``buffer_size = 0``: it follows from the number of clients at the start."""

from typing import Any

import pytest

from strategies import AREA, CA2FL, FedBuff, Rennala
from tests.strategies.events.runs import bits

EQUAL = {"client_weights": "uniform", "aggregation_weights": "identical"}
RULE: dict[str, Any] = {"aggregation_rule": "trimmed-mean", "faulty_clients": 2, **EQUAL}


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (FedBuff, {1: 1, 2: 2, 10: 2, 29: 2, 30: 3, 99: 9, 100: 10, 5000: 10}),
        (CA2FL, {30: 3}),
        (lambda: FedBuff(**RULE), {5: 5, 30: 5, 100: 10}),  # which a trimmed mean of 2 at each end needs
        (Rennala, {1: 1, 30: 30}),
        (AREA, {1: 1, 30: 1}),
        (lambda: FedBuff(buffer_size=4), {4: 4, 100: 4}),
    ],
)
def test_m_of_so_many_clients(strategy, sizes):
    for num_clients, m in sizes.items():
        made = strategy()
        made.check(num_clients)
        assert made.m == m


def test_a_run_has_it_and_logs_it_once(federation, start, caplog):
    def lines() -> list[str]:
        return [message for message in caplog.messages if "m = 3 contributions" in message]

    clients = [float(i % 7) for i in range(30)], [1] * 30
    caplog.set_level("INFO")
    run = start("fedbuff", federation(*clients), 12, lr=0.25, server_lr=0.0, buffer_size=0)
    assert lines() == ["buffer_size = 0: m = 3 contributions make a model, for 30 clients"]
    assert run.metric("contributions") == [3] * 12
    # As an app does, which checks its config before it starts the run.
    run.strategy.check(30)
    assert len(lines()) == 1
    assert bits(run) == bits(
        start("fedbuff", federation(*clients), 12, lr=0.25, server_lr=0.0, buffer_size=3)
    )
    assert len(lines()) == 1


def test_fedbuff_of_two_is_said_to_be_fedavg_once(caplog):
    caplog.set_level("INFO")
    strategy = FedBuff()
    for num_clients in (2, 2, 3):
        strategy.check(num_clients)
    assert [line for line in caplog.messages if "as in FedAvg" in line] == [
        "buffer_size = 2 is the number of clients: every model waits for all of them, and no work is stale, as in "
        "FedAvg"
    ]
