"""What every client gets of a model, and how unequal it is; how much each counts in rounds."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord

from strategies import FedAvg
from strategies.clients import client_metrics
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.higher_is_better import higher_is_better

Make = Callable[..., Any]


def test_the_spread_by_hand():
    losses = client_metrics.spread("loss", [1.0] * 8 + [4.0, 3.0, 2.0])  # 11 clients: the worst tenth are two
    assert losses["client-loss-worst-tenth"] == 3.5
    assert losses["client-loss-best"] == 1.0
    assert losses["client-loss-mean"] == pytest.approx(17 / 11)
    assert losses["client-loss-std"] == pytest.approx(np.std([1.0] * 8 + [4.0, 3.0, 2.0]))
    hits = client_metrics.spread("accuracy", [0.9, 0.1, 0.5])
    assert (hits["client-accuracy-worst-tenth"], hits["client-accuracy-best"]) == (0.1, 0.9)
    assert client_metrics.spread("loss", []) == {}
    assert all(math.isnan(value) for value in client_metrics.spread("loss", [1.0, math.nan]).values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(client_metrics.spread("loss", [1.0, math.inf])["client-loss-std"])


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        ("loss", True),
        ("rmse", True),
        ("hinge-loss", True),
        ("accuracy", False),
        ("f1", False),
        ("top5", False),
        ("client-loss-worst-tenth", True),
        ("client-accuracy-best", False),
        ("client-accuracy-std", True),
    ],
)
def test_which_way_is_worse(metric, less):
    assert higher_is_better(metric) is (not less)


def started(
    federation: Make, model: Make, train_config: Make, evaluate_fn: Any = None, **options: Any
) -> Any:
    told: list[Any] = []
    grid = federation(node_ids=[10, 20, 30], num_partitions=3)
    if options.pop("devices", False):
        grid.engine = DEPLOYMENT
    strategy = FedAvg(observer=told.append, **options)
    strategy.start(
        grid,
        model(1.0),
        num_rounds=4,
        timeout=5.0,
        train_config=train_config(1, 0.1),
        evaluate_fn=evaluate_fn,
    )
    return told


def test_metrics_of_an_evaluation_are_told_client_by_client(federation, model, train_config):
    def evaluate(server_round: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"loss": 1.0, "client-losses": [3.0, 1.0, 2.0], "per-client.f1": [0.1, 0.2, 0.6]})

    last = started(federation, model, train_config, evaluate)[-1]
    assert last.clients["loss"] == [3, 1, 2]
    assert last.clients["f1"] == [0.1, 0.2, 0.6]
    assert last.metrics["client-loss-worst-tenth"] == 3
    assert last.metrics["client-f1-worst-tenth"] == 0.1
    assert last.metrics["client-f1-mean"] == pytest.approx(0.3)


def test_a_metric_of_unknown_direction_has_no_worst_clients_and_that_is_said_once(
    federation, model, train_config, caplog
):
    def evaluate(server_round: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"loss": 1.0, "per-client.score": [0.1, 0.2, 0.6]})

    last = started(federation, model, train_config, evaluate)[-1].metrics
    assert {name for name in last if "score" in name} == {"client-score-mean", "client-score-std"}
    said = [
        record.getMessage() for record in caplog.records if "higher value is better" in record.getMessage()
    ]
    assert [
        line.startswith("clients' score: the worst tenth and the best aren't reported") for line in said
    ] == [True]


def test_clients_that_evaluate_themselves_are_told_one_by_one(federation, model, train_config):
    last = started(federation, model, train_config, fraction_evaluate=1.0, devices=True)[-1]
    losses = last.clients["loss"]
    assert len(losses) == 3
    assert len(set(losses)) == 3
    p = last.clients["importance"]
    assert last.metrics["client-loss"] == pytest.approx(np.dot(p, losses))
    assert last.metrics["client-loss-mean"] == pytest.approx(np.mean(losses))


def test_in_rounds_shares_are_as_asked_for_where_all_take_part(federation, model, train_config):
    last = started(federation, model, train_config)[-1].clients
    assert last["importance"] == last["expected-share"] == pytest.approx(last["observed-share"])
    assert last["participation"] == [4, 4, 4]
    assert min(last["bytes"]) == max(last["bytes"]) > 0


def test_fixed_participants_have_all_of_it(federation, model, train_config):
    last = started(federation, model, train_config, participation="fixed:0,2")[-1].clients
    assert last["participation"] == [4, 0, 4]
    assert last["expected-share"][1] == last["observed-share"][1] == 0
    assert last["expected-share"] == pytest.approx(last["observed-share"])
    assert last["importance"][1] > 0


def test_a_robust_rule_says_nothing_of_shares(federation, model, train_config):
    last = started(federation, model, train_config, client_weights="uniform", aggregation_rule="median")[
        -1
    ].clients
    assert not {"expected-share", "observed-share"} & last.keys()
    assert last["participation"] == [4, 4, 4]
