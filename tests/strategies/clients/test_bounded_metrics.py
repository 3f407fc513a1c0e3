"""What one client's metrics do to those of all: what isn't finite nothing, and with safeguards no value much."""

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from strategies import FedAvg, FedBuff, RunError, Scaffold
from strategies.clients.client_metrics import MetricsMean, weighted_median
from strategies.events.statistics import IntervalStatistics
from strategies.flower import messages

CENTRES, SIZES = [0.0, 1.0, 2.0, 3.0, 4.0], [1] * 5


def mean_of(values: list[Any], weights: list[float], **options: Any) -> Any:
    found = MetricsMean(**options)
    for weight, value in zip(weights, values, strict=True):
        found.add(weight, RecordDict({"metrics": MetricRecord({"x": value})}))
    return found.result()["x"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_value_that_is_not_finite_does_not_count(bad, place):
    values, weights = [1.0, 4.0], [1.0, 2.0]
    values.insert(place, bad)
    weights.insert(place, 7.0)
    assert mean_of(values, weights) == 3.0
    columns = MetricsMean()
    columns.add_columns(weights, {"x": values})
    assert columns.result() == {"x": 3.0}
    assert math.isnan(mean_of([math.nan, math.nan], [1.0, 1.0]))  # all have diverged


def test_the_weighted_median_is_what_half_of_the_weight_is_below():
    assert weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert weighted_median([1.0, 2.0, 3.0, 4.0], [0.25] * 4) == 2.5
    assert weighted_median([1.0, 2.0, 100.0], [1.0, 2.0, 2.9]) == 2.0
    assert weighted_median([1.0, 100.0], [1.0, 1.1]) == 100.0
    assert mean_of([1.0, 2.0, -1e9], [1.0, 1.0, 1.0], robust=True) == 1.0
    assert mean_of([[1.0, 5.0], [2.0, 6.0], [1e9, -1e9]], [1.0] * 3, robust=True) == [2.0, 5.0]


def test_a_client_that_contributes_often_has_one_value_of_the_median():
    since = IntervalStatistics()
    for owner, values in enumerate(([1.0, 3.0], [4.0], [1e9] * 50)):
        since.add_values("x", values, owner)
    assert since.metrics_of_clients(robust=True) == {"x": 4.0}
    since.add_values("x", [math.nan], 3)
    assert since.metrics_of_clients()["x"] == pytest.approx((8 + 50e9) / 53)


def lying(grid: Any, value: float) -> Any:
    """Let client 4 report a training loss."""
    plain = grid.app

    def answer(message: Message, context: Any) -> Message:
        reply = plain(message, context)
        if context.node_config["partition-id"] == 4 and messages.METRICS in reply.content:
            reply.content[messages.METRICS]["train-loss"] = value
        return reply

    grid.app = answer
    return grid


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
@pytest.mark.parametrize("said", [-1e9, math.nan])
def test_one_client_does_not_end_a_run_by_its_loss(kind, said, federation, model, train_config):
    honest, lied = (
        kind(safeguards="on", stop_at="train-loss<=-1", fraction_evaluate=0.0, eval_every=1).start(
            grid, model(1.0, 1.0), num_rounds=4, train_config=train_config()
        )
        for grid in (federation(CENTRES, SIZES), lying(federation(CENTRES, SIZES), said))
    )
    assert max(lied.train_metrics_clientapp) == max(honest.train_metrics_clientapp) == 4
    assert np.isfinite([metrics["train-loss"] for metrics in lied.train_metrics_clientapp.values()]).all()


@pytest.mark.parametrize("metric", ["client-loss-worst-tenth", "client-loss-mean", "client-loss-best"])
def test_with_safeguards_a_spread_decides_nothing(metric, federation, model, train_config):
    strategy = FedAvg(safeguards="on", keep="best", best_of=f"min:{metric}")
    with pytest.raises(RunError, match=f"best_of = '{metric}': .*allowed with safeguards is 'client-loss'"):
        strategy.start(federation(CENTRES, SIZES), model(1.0), num_rounds=1, train_config=train_config())


def test_the_one_client_that_reports_a_path_does_not_make_the_mean_of_all(
    federation, model, train_config, caplog
):
    grid = federation(CENTRES, SIZES)
    plain = grid.app

    def answer(message: Message, context: Any) -> Message:
        reply = plain(message, context)
        if context.node_config["partition-id"] != 4:
            reply.content.pop(messages.APPLIED, None)
        return reply

    grid.app = answer
    strategy = Scaffold(safeguards="on", fraction_evaluate=0.0)
    strategy.start(grid, model(1.0), num_rounds=2, train_config=train_config())
    assert not np.any(strategy._variates.mean)
    assert "only 1 of 5 clients report their path: with safeguards no c_i is updated" in caplog.text
