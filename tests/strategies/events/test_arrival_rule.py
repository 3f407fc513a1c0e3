"""Robust rules without rounds: over a buffer, and over the last updates of the clients that answered last."""

from typing import Any

import numpy as np
import pytest

from strategies import AsyncFedAvg, AsynchronousConfig, AsynchronousStrategy, DelayAdaptive, FedBuff, FedFix
from strategies.core.conflicts import ConflictError
from strategies.events.arrival_rule import ArrivalRule
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.updates.aggregation import robust_rule
from strategies.updates.buffers import Buffers
from tests.strategies.events.runs import CENTRES, SIZES, bits, losses, text_of

EQUAL: dict[str, Any] = {"client_weights": "uniform", "aggregation_weights": "identical"}
MEDIAN: dict[str, Any] = {**EQUAL, "aggregation_rule": "median"}


def test_the_median_of_a_buffer_by_hand(federation, start):
    # F80: the first five of six arrive first. From w = 1 with lr .5, Δ = (c − 1) / 2 = 1, −2, .5, 4, −1: median .5.
    grid = federation((3.0, -3.0, 2.0, 9.0, -1.0, 99.0), (1,) * 6)
    assert start("fedbuff", grid, 1, buffer_size=5, **MEDIAN).values == [1.0, 1.5]


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "bulyan"])
def test_a_buffer_of_all_clients_is_a_round(rule, federation, start, small):
    centres, sizes = (4.0, 0.0, -2.0, 6.0, 1.5, -7.0, 2.5), (1, 2, 3, 4, 1, 1, 2)
    options = {"client_weights": "uniform", "aggregation_rule": rule, "faulty_clients": 1, "server_lr": 0.0}
    options |= {"time_scenario": "F0", "eval_every": 1}
    buffered = {**options, "aggregation_weights": "identical", "buffer_size": 7}
    rounds = start("fedavg", federation(centres, sizes), 5, arrays=small, **options)
    assert bits(start("fedbuff", federation(centres, sizes), 5, arrays=small, **buffered)) == bits(rounds)
    mean = {**options, "aggregation_rule": "mean"}
    assert bits(start("fedavg", federation(centres, sizes), 5, arrays=small, **mean)) != bits(rounds)


@pytest.mark.parametrize("faulty", [0, 1])
def test_every_arrival_steps_by_the_median_of_the_last_clients_last_updates(faulty, federation, start):
    options = {**MEDIAN, "faulty_clients": faulty, "server_lr": 0.5}
    run = start("async", federation(CENTRES, SIZES), 25, lr=0.25, **options)
    window, least = (3, 1) if faulty == 0 else (5, 3)
    models, latest = [1.0], dict[int, float]()
    for n, (_, came) in enumerate(run.events()):
        ((client, staleness),) = came.items()
        latest.pop(client, None)
        latest[client] = 0.25 * (CENTRES[client] - models[n - staleness])
        latest = dict([*latest.items()][-window:])
        moves = float(np.median([*latest.values()])) if len(latest) >= least else 0.0
        models.append(models[-1] + 0.5 * moves)
    assert len({*models}) > 20
    assert run.values == pytest.approx(models, rel=1e-12)


@pytest.mark.parametrize(("scheme", "more"), [("fedbuff", {"buffer_size": 5}), ("async", {})])
def test_one_liar_of_five_with_a_reversed_update_ten_times_as_long_does_not_matter(
    scheme, more, federation, start
):
    # Of curvature −10, the liar's update is −10 times an honest one.
    grids = [federation((3.0,) * 5, (1,) * 5, (-10.0, 1.0, 1.0, 1.0, 1.0)) for _ in range(2)]
    options = {**EQUAL, "faulty_clients": 1, "server_lr": 0.0, **more}
    held_replies = start(scheme, grids[0], 60, aggregation_rule="trimmed-mean", lr=0.2, **options)
    assert held_replies.values[-1] == pytest.approx(3.0, abs=0.05)
    options["faulty_clients"] = 0
    assert abs(start(scheme, grids[1], 60, lr=0.2, **options).values[-1] - 3) > 100


def test_a_buffer_that_a_lost_client_leaves_too_small_keeps_the_model(federation, start, caplog):
    grid = federation()
    grid.spoil(1, "raise")
    with pytest.raises(RunError, match=r"^no client's work was accepted in 2 aggregations"):
        start("fedbuff", grid, 2, buffer_size=3, faulty_clients=1, **MEDIAN)
    assert (
        "aggregation 1: 2 contributions are fewer than the 3 for aggregation_rule = 'median', faulty_clients = 1, "
        "the model stays as it is"
    ) in text_of(caplog)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (FedBuff, {"aggregation_weights": "identical"}, "client_weights"),
        (FedBuff, {"client_weights": "uniform"}, "aggregation_weights"),
        (FedBuff, {**EQUAL, "staleness_discount": "polynomial:0.5"}, "staleness_discount"),
        (DelayAdaptive, EQUAL, "strategy"),
        (FedFix, {"client_weights": "uniform"}, "strategy"),
    ],
)
def test_contributions_that_are_not_equals_are_refused(kind, options, key):
    with pytest.raises(ConflictError) as raised:
        kind(aggregation_rule="median", **options)
    assert raised.value.keys[:2] == ("aggregation_rule", key)


@pytest.mark.parametrize(
    ("strategy", "clients", "text"),
    [
        (
            FedBuff(buffer_size=4, aggregation_rule="krum", faulty_clients=1, **EQUAL),
            9,
            "5 contributions in the",
        ),
        (
            AsyncFedAvg(aggregation_rule="krum", faulty_clients=1, **EQUAL),
            4,
            "5 clients or more, there are 4",
        ),
    ],
)
def test_too_few_are_refused_before_any_client_starts(strategy, clients, text):
    with pytest.raises(ValueError, match=rf"^aggregation_rule = 'krum', faulty_clients = 1: needs {text}"):
        strategy.check(clients)


def updates(**numbers: float) -> dict[int, tuple[Vector, Vector | None]]:
    return {int(name[1:]): (np.array([value]), np.array([10 * value])) for name, value in numbers.items()}


def test_a_window_has_one_update_of_each_client_that_counts_and_survives_a_checkpoint():
    rule = robust_rule("median", 0)
    assert rule is not None
    buffers = Buffers(np.array([0]), np.array([False]), np.array([False]))

    def medians(part: ArrivalRule) -> tuple[float, float]:
        update, model = part.result(1.0), np.zeros(1)
        part.buffer_average(buffers).put_into(model)
        assert update is not None
        return float(update[0]), float(model[0])

    part, other = ArrivalRule(rule, 3), ArrivalRule(rule, 3)
    assert part.state() == {}
    for came in (updates(c0=1.0), updates(c0=2.0), updates(c1=8.0), updates(c2=4.0)):
        part.take(came, lambda index: True)
    assert medians(part) == (4.0, 40.0)  # of 2, 8, 4: client 0 counts once
    assert part.nbytes == 3 * 8
    other.restore(part.state())
    for each in (part, other):
        each.take(updates(c3=1.0), lambda index: True)
        assert medians(each) == (4.0, 40.0)  # of 8, 4, 1
        each.take(updates(c4=0.5), lambda index: index != 2)
        assert medians(each) == (1.0, 10.0)  # of 8, 1, 0.5: client 2 is gone


def test_a_buffer_is_forgotten_when_it_has_counted():
    rule = robust_rule("median", 1)
    assert rule is not None
    part = ArrivalRule(rule)
    part.take(updates(c0=1.0, c1=2.0, c2=4.0), lambda index: True)
    assert part.result(1 / 3) == pytest.approx([2.0])
    assert (part.state(), part.nbytes) == ({}, 0)
    part.take(updates(c0=1.0, c3=2.0), lambda index: True)
    assert part.result(1 / 3) is None


def test_nothing_is_said_of_shares_in_a_sum_that_there_is_not(federation, start, caplog):
    mean, rule = (
        start("async", federation(CENTRES, SIZES), 9, evaluate=losses, server_lr=0.1, **{**EQUAL, **own})
        for own in ({}, {"aggregation_rule": "median"})
    )
    of_a_sum = {"expected-share", "observed-share"}
    assert set(mean.evaluations[-1].clients) - set(rule.evaluations[-1].clients) == of_a_sum
    missing = set(mean.evaluations[-1].metrics) - set(rule.evaluations[-1].metrics)
    assert {"weights-distance", "surrogate-loss"} <= missing
    assert "federated-loss" in rule.evaluations[-1].metrics
    assert text_of(caplog).count("this run minimised") == 1


class Twice(AsynchronousStrategy):
    """Aggregates every four contributions, and clients go on working meanwhile."""

    Config = AsynchronousConfig
    trains_while_waiting = True

    def ready(self, arrived: int) -> bool:
        return arrived == 4


def test_a_client_whose_work_is_in_the_buffer_twice_counts_once(federation, model, train_config):
    # F80: client 0 arrives at 3, 6 and 9 fifteenths of a second, client 1 at 7: Δ = 1, 1, 1, and 2 of w = 1.
    strategy = Twice(aggregation_rule="median", server_lr=1.0, fraction_evaluate=0.0, **EQUAL)
    grid = federation((3.0, 5.0, 9.0, 9.0), (1,) * 4)
    arrays = strategy.start(
        grid, model(1.0), num_rounds=1, timeout=10.0, train_config=train_config(1, 0.5)
    ).arrays
    assert arrays["w"].numpy() == [4.0]  # by 2 × the median of 1 and 2
