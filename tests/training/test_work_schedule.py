"""The learning rate of a round, by hand."""

import math

import pytest

from fedapp.training.work import scheduled_lr


@pytest.mark.parametrize(
    ("schedule", "by_round"),
    [
        ("constant", {1: 0.8, 2: 0.8, 4: 0.8}),
        ("inverse", {1: 0.8, 2: 0.4, 4: 0.2}),
        ("inverse-sqrt", {1: 0.8, 4: 0.4, 16: 0.2}),
        # T = 4: ½ γ (1 + cos(0)), (1 + cos(π/4)), (1 + cos(π/2)), (1 + cos(3π/4)); round 5 would be 0
        ("cosine", {1: 0.8, 2: 0.4 * (1 + math.sqrt(0.5)), 3: 0.4, 4: 0.4 * (1 - math.sqrt(0.5)), 5: 0.0}),
        ("exponential:0.5", {1: 0.8, 2: 0.4, 3: 0.2, 4: 0.1}),
        ("exponential:1", {1: 0.8, 9: 0.8}),
        ("exponential:.25", {1: 0.8, 2: 0.2}),
    ],
)
def test_learning_rate_by_round(schedule, by_round):
    for server_round, expected in by_round.items():
        assert scheduled_lr(0.8, schedule, server_round, 4) == pytest.approx(expected, abs=1e-15)
