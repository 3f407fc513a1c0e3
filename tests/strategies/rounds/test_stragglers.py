"""Stragglers: who they are, what they get done, and what becomes of it."""

import math
from collections import Counter

import numpy as np
import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from strategies import REGISTRY, FedAvg
from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.methods.fedavg import FedAvgConfig
from strategies.rounds.stragglers import Stragglers

CLIENTS = [Client(100 + index, index, 10, MetricRecord()) for index in range(10)]


def drawn(share: float, server_round: int = 1, seed: int = 0) -> dict[int, float]:
    """Return the part of each straggler of a round of ten."""
    stragglers = Stragglers(FedAvgConfig(stragglers=share, seed=seed))
    kept, weights = stragglers.without_stragglers(CLIENTS, [0.1] * 10, server_round)
    assert (list(kept), weights) == (CLIENTS, [0.1] * 10)  # all are asked, with their own weights
    asked = {client.index: stragglers.request_fields(client) for client in CLIENTS}
    return {index: fields[messages.PART] for index, fields in asked.items() if fields}


@pytest.mark.parametrize(
    ("share", "number"), [(0, 0), (0.04, 0), (0.05, 1), (0.5, 5), (0.9, 9), (0.99, 9), (1, 10)]
)
def test_a_share_of_each_round_straggles(share, number):
    assert [len(drawn(share, server_round)) for server_round in (1, 2, 3)] == [number] * 3


def test_stragglers_are_drawn_anew_in_each_round_evenly_and_from_the_seed():
    rounds = [drawn(0.5, number) for number in range(1, 401)]
    assert rounds[7] == drawn(0.5, 8)
    assert rounds[7] != drawn(0.5, 8, seed=1)
    often = Counter(index for parts in rounds for index in parts)
    # Each is one of five in ten: 200 of 400 ± 10.
    assert min(often.values()) > 155
    assert max(often.values()) < 245


def test_of_e_epochs_a_straggler_does_one_to_e_alike():
    parts = [part for number in range(1, 401) for part in drawn(0.9, number).values()]
    assert 0 < min(parts) <= max(parts) <= 1
    done = Counter(math.ceil(20 * part) for part in parts)  # what the client makes of it
    assert sorted(done) == list(range(1, 21))
    # 3600 / 20 = 180 ± 13
    assert min(done.values()) > 125
    assert max(done.values()) < 235


@given(share=st.floats(0, 0.999), number=st.integers(1, 50), server_round=st.integers(1, 9))
def test_dropped_stragglers_leave_their_weight_to_the_others(share, number, server_round):
    clients = [Client(index, index, None, MetricRecord()) for index in range(number)]
    weights = [float(index + 1) for index in range(number)]
    stragglers = Stragglers(FedAvgConfig(stragglers=share, drop_stragglers=True))
    kept, given_weights = stragglers.without_stragglers(clients, weights, server_round)
    assert len(kept) == stragglers.num_active(number) >= 1
    assert all(stragglers.request_fields(client) == {} for client in clients)
    assert given_weights is not None
    assert sum(given_weights) == pytest.approx(sum(weights))
    own = np.array([client.index + 1 for client in kept])
    assert np.array(given_weights) / own == pytest.approx(given_weights[0] / own[0])
    assert stragglers.without_stragglers(clients, None, server_round) == (
        kept,
        None,
    )  # weights by the sizes in replies


def test_senseless_shares_are_refused():
    with pytest.raises(ValueError, match=r"stragglers = 1.5: must be a number in \[0, 1\]"):
        FedAvg(stragglers=1.5)
    strategy = FedAvg(
        FedAvgConfig(
            stragglers=0.5,
            drop_stragglers=True,
            aggregation_rule="trimmed-mean",
            faulty_clients=1,
            client_weights="uniform",
        )
    )
    with pytest.raises(ValueError, match=r"needs 3 clients a round or more, 2 take part"):
        strategy.check(4)


@pytest.mark.parametrize(
    "name", [name for name, kind in REGISTRY.items() if hasattr(kind.Config(), "stragglers")]
)
def test_a_round_goes_on_with_those_on_time(federation, model, train_config, values_of, name):
    """Of three equal clients at 1, 2 and −4, one counts: the model goes halfway to it."""
    grid = federation((1.0, 2.0, -4.0), (1, 1, 1))
    strategy = REGISTRY[name](stragglers=0.67, drop_stragglers=True, fraction_evaluate=0.0)
    result = strategy.start(grid, model(0.0), num_rounds=1, train_config=train_config())
    (asked,) = grid.asked()
    if name in ("fedavg", "fednova", "scaffold"):
        assert values_of(result.arrays) == pytest.approx([[0.5], [1.0], [-2.0]][asked])
    assert result.train_metrics_clientapp[1]["participants"] == 1


def test_requests_tell_stragglers_alone_and_who_ignores_it_is_named(federation, model, train_config, caplog):
    grid = federation()  # of clients that know nothing of it
    FedAvg(stragglers=0.67).start(grid, model(1.0), num_rounds=2, train_config=train_config())
    parts = [
        [
            message.content.config_records["config"].get(messages.PART)
            for message in grid.requests(server_round=n)
        ]
        for n in (1, 2)
    ]
    assert [sum(part is not None for part in each) for each in parts] == [2, 2]
    assert f"clients don't say that their local steps go by {messages.PART}" in caplog.text


def test_without_stragglers_nothing_is_asked(federation, model, train_config):
    grid = federation()
    FedAvg().start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert all(messages.PART not in message.content.config_records["config"] for message in grid.requests())
