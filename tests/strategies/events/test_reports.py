"""What the loop reports and when: diagnostics, evaluations, budgets, stops."""

import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from strategies import Progress
from strategies.flower import messages
from tests.strategies.events.runs import KINDS, losses

pytestmark = pytest.mark.timeout(600)


def test_every_diagnostic_of_a_small_run_by_hand(federation, start, model):
    # p = (1, 2, 5)/8, τ = (.2, .6, 1): 0@.2 0@.4 0@.6 1@.6 | 0@.8 0@1. d = 23/3 τ p = (.575/3, 1.15, 14.375/3).
    run = start("async", federation(), 6, eval_every=4, evaluate=losses)
    assert [p.evaluated for p in run.seen] == [True, False, False, False, True, False, True]
    assert [p.time for p in run.seen] == pytest.approx([0, 0.2, 0.4, 0.6, 0.6, 0.8, 1.0])
    four, last = run.seen[4], run.seen[6]
    assert set(four.clients) == {
        "participation",
        "weight",
        "task-time",
        "importance",
        "expected-share",
        "observed-share",
        "loss",
        "bytes",
        "device-seconds",
        "wasted-seconds",
    }
    assert four.clients["loss"] == [8, 4, 0]
    assert four.clients["participation"] == [3, 1, 0]
    assert four.clients["weight"] == pytest.approx([0.575 / 3, 1.15, 14.375 / 3])
    assert four.clients["task-time"] == pytest.approx([0.2, 0.6, 1.0])
    assert four.clients["importance"] == [0.125, 0.25, 0.625]
    assert four.clients["expected-share"] == pytest.approx([0.125, 0.25, 0.625])
    assert four.clients["observed-share"] == pytest.approx([1 / 3, 2 / 3, 0])  # .575 : 1.15 : 0
    assert last.clients["participation"] == [5, 1, 0]
    assert last.clients["observed-share"] == pytest.approx([2.875 / 6.325, 3.45 / 6.325, 0])
    # Staleness 0, 0, 0 and 3; then 0@.8 had model 3 (n = 4) and 0@1 model 5 (n = 5).
    assert (four.metrics["staleness-mean"], four.metrics["staleness-max"]) == (0.75, 3)
    assert (last.metrics["staleness-mean"], last.metrics["staleness-max"]) == (0.5, 1)
    assert (four.metrics["contributions"], last.metrics["contributions"]) == (4, 2)
    # Down: three at the start and one after each aggregation but the last; up: one per contribution.
    size = messages.num_bytes(model(1.0))
    assert [p.metrics["bytes-down"] for p in (four, last)] == [7 * size, 1 * size]
    assert [p.metrics["bytes-up"] for p in (four, last)] == [4 * size, 2 * size]
    assert (four.metrics["failures"], four.metrics["loss"]) == (0, 1.5)
    assert four.metrics["weights-distance"] == pytest.approx(0, abs=1e-12)
    # p: 1 + 1 + 0 = 2, and 36/8 + 2·4/8 + 5·4/8 = 8. Here q̃ = p.
    for name in ("federated-loss", "surrogate-loss"):
        assert four.metrics[name] == pytest.approx(2.0)
        assert four.metrics[f"{name}-std"] == pytest.approx(8**0.5)
    assert "client-losses" not in four.metrics
    # The mean of the losses that the clients trained from: ½ (1 − c)² at model 1 for client 0's first and client 1.
    before = [run.values[k] for k in (0, 1, 2)]
    expected = [0.5 * (w - 3) ** 2 for w in before] + [0.5 * (1 - 2) ** 2]
    assert four.metrics["train-loss"] == pytest.approx(np.mean(expected))


def test_the_surrogate_loss_is_that_of_the_expected_shares(federation, start):
    run = start("async", federation(), 1, evaluate=losses, aggregation_weights="identical", lr=0.1)
    # q̃ = (15, 5, 3)/23: (120 + 20)/23; Σ q̃ f² = (960 + 80)/23.
    mean = 140 / 23
    assert run.seen[1].metrics["surrogate-loss"] == pytest.approx(mean)
    assert run.seen[1].metrics["surrogate-loss-std"] == pytest.approx((1040 / 23 - mean**2) ** 0.5)
    assert run.seen[1].metrics["federated-loss"] == pytest.approx(2.0)
    # ½ (|15/23 − 1/8| + |5/23 − 1/4| + |3/23 − 5/8|) = 15/23 − 1/8
    assert run.seen[1].metrics["weights-distance"] == pytest.approx(15 / 23 - 1 / 8)


def test_client_evaluation_is_the_federated_objective(federation, start):
    run = start("async", federation(), 2, fraction_evaluate=1.0, aggregation_weights="identical")
    # 0@.2: 1 + .5·2 = 2, 0@.4: 2.5. f = ½ Σ p (w − c)²: ½ (1/8 + 0 + 5·9/8), ½ (1/32 + 1/16 + 5·12.25/8).
    assert run.values == [1.0, 2.0, 2.5]
    assert run.metric("client-loss") == pytest.approx([2.875, 0.5 * (1 / 32 + 1 / 16 + 5 * 12.25 / 8)])


@pytest.mark.parametrize(("scheme", "expected"), [("async", [0, 3, 6, 7]), ("fedbuff", [0, 2, 4, 6, 7])])
def test_by_default_a_model_is_evaluated_after_as_many_contributions_as_clients(
    federation, start, scheme, expected
):
    run = start(scheme, federation(), 7, eval_every=0, lr=0.1)  # of three clients; fedbuff waits for two
    assert [p.aggregation for p in run.evaluations] == expected


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize(
    ("eval_every", "rounds", "expected"),
    [(1, 3, [0, 1, 2, 3]), (2, 4, [0, 2, 4]), (2, 5, [0, 2, 4, 5]), (10, 3, [0, 3]), (1, 0, [0])],
)
def test_rounds_and_evaluations(federation, start, recwarn, scheme, eval_every, rounds, expected):
    evaluated = []

    def evaluate(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append((aggregation, float(arrays["w"].numpy()[0])))
        return MetricRecord({"loss": 0.5})

    run = start(scheme, federation(), rounds, eval_every=eval_every, evaluate=evaluate, lr=0.1)
    assert [p.aggregation for p in run.seen] == list(range(rounds + 1))  # observed every one
    assert [aggregation for aggregation, _ in evaluated] == expected
    assert [p.aggregation for p in run.evaluations] == expected
    assert [value for _, value in evaluated] == [run.values[n] for n in expected]  # each of its own model
    assert run.arrays is not None
    assert run.arrays["w"].data == run.seen[-1].arrays["w"].data
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]  # no 0/0
    if rounds == 0:
        assert run.grid.asked() == []  # nobody works for nothing


@pytest.mark.parametrize(
    ("scheme", "budget", "times"),
    [
        ("async", 0.75, [0, 0.2, 0.4, 0.6, 0.6]),  # 0@.8 is too late
        ("async", 0.6, [0, 0.2, 0.4, 0.6, 0.6]),  # what ends with the budget counts
        ("async", 0.1, [0]),
        ("fedfix", 1.4, [0, 0.5, 1.0]),
        ("fedfix", 1.0, [0, 0.5, 1.0]),
        ("fedbuff", 1.0, [0, 0.6, 1.0]),  # 0@.2 1@.6, 0@.8 2@1
    ],
)
def test_time_budget(federation, start, scheme, budget, times):
    evaluated: list[int] = []
    run = start(
        scheme,
        federation(),
        100,
        time_budget=budget,
        eval_every=100,
        lr=0.1,
        evaluate=lambda n, _: evaluated.append(n) or MetricRecord({"loss": 1.0}),
    )
    aggregations = [p for p in run.seen if p.aggregation or not p.time]
    assert sorted({p.aggregation for p in aggregations}) == list(range(len(times)))
    assert run.strategy.session.clock.now() <= budget
    assert [p.time for p in run.seen][: len(times)] == pytest.approx(times)
    assert evaluated == ([0, len(times) - 1] if len(times) > 1 else [0])  # the last model, and once


@pytest.mark.parametrize("scheme", KINDS)
def test_stopped_in_the_middle(federation, start, scheme):
    count = [0]

    def observe(progress: Progress) -> None:
        count[0] = progress.aggregation

    run = start(scheme, federation(), 1000, observe=observe, should_stop=lambda: count[0] >= 3, eval_every=2)
    assert [p.aggregation for p in run.seen] == [0, 1, 2, 3, 3]  # and the last complete model is evaluated
    assert run.seen[-1].evaluated
    assert run.arrays is not None
    assert run.arrays["w"].data == run.seen[3].arrays["w"].data


@pytest.mark.parametrize("scheme", KINDS)
def test_stopped_before_any_client_answered(federation, start, scheme, model):
    run = start(scheme, federation(), 5, should_stop=lambda: True)
    assert run.arrays is not None
    assert run.arrays["w"].data == model(1.0)["w"].data


def test_stopped_while_waiting_for_a_reply(federation, start):
    grid, began = federation(), time.monotonic()
    grid.node(0).delay = 30.0
    start("async", grid, 5, should_stop=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 20.0


def test_clients_without_a_description_are_weighted_by_the_sizes_in_their_replies(federation, start):
    # As strategies/clients/roster.py promises; the order is by node id, so only the set of weights is known.
    run = start("fedfix", federation(describes=False, node_ids=[5, 6, 7]), 4, fedfix_interval=1.0, lr=0.1)
    assert sorted(run.seen[-1].clients["importance"]) == [0.125, 0.25, 0.625]
