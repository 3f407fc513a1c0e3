"""What is counted from one evaluation to the next, alone: by hand, and saved."""

import json

from flwr.app import MetricRecord

from strategies import messages
from strategies.events.statistics import IntervalStatistics
from tests.strategies.parts import contribution


def filled() -> IntervalStatistics:
    tally = IntervalStatistics(bytes_down=7, failures=1, lost=2, clipped=3)
    tally.take(
        [
            contribution(0, staleness=1, metrics=MetricRecord({"num-examples": 2, "train-loss": 1.0})),
            contribution(1, staleness=4, metrics=MetricRecord({"num-examples": 6, "train-loss": 2.0})),
        ]
    )
    tally.discard(contribution(2))
    return tally


def test_means_are_plain_over_contributions_and_bytes_count_what_was_discarded():
    metrics = filled().metrics()
    assert metrics["contributions"] == 2
    assert (metrics["staleness-mean"], metrics["staleness-max"]) == (2.5, 4)
    assert filled().metrics_of_clients() == {"train-loss": 1.5}  # not weighed by the 2 and 6 examples
    assert (metrics[messages.BYTES_UP], metrics[messages.BYTES_DOWN]) == (24, 7)
    assert [metrics[key] for key in (messages.FAILURES, messages.CLIPPED, messages.LOST_TASKS)] == [1, 3, 2]
    assert metrics[messages.DISCARDED] == 1


def test_what_is_zero_is_left_out_but_for_failures():
    assert dict(IntervalStatistics().metrics()) == {
        "contributions": 0,
        messages.FAILURES: 0,
        messages.BYTES_DOWN: 0,
        messages.BYTES_UP: 0,
    }


def test_it_comes_back_from_json():
    tally = filled()
    again = IntervalStatistics.restored(json.loads(json.dumps(tally.state())))
    assert dict(again.metrics()) == dict(tally.metrics())
    assert again.metrics_of_clients() == tally.metrics_of_clients()
    assert again.unevaluated
