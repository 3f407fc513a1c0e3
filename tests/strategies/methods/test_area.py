"""AREA: the server's model is the mean of the last local models of all clients, whoever comes when."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import AREA, Contribution
from strategies.clock import WallClock

CENTRES, SIZES, GAMMA = (4.0, 0.0, -2.0, 6.0), (1, 2, 3, 4), 0.25
P = np.array(SIZES) / 10


class Noted(AREA):
    """AREA that notes after each aggregation Σ p_i × client i's last model, beside the model that it made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last, self.means, self.models = dict.fromkeys(range(4), 1.0), [], []

    def aggregate(self, model: Any, contributions: Sequence[Contribution], weights: Sequence[float]) -> Any:
        self.last |= {c.client.index: float(c.base[0] + c.update[0]) for c in contributions}
        moved = super().aggregate(model, contributions, weights)
        self.means.append(sum(p * self.last[i] for i, p in self.session.client_weights().items()))
        self.models.append(float(moved[0]))
        return moved


@pytest.fixture
def go(federation, model, train_config):
    def run(rounds: int, *, grid: Any = None, clock: Any = None, **options: Any) -> Noted:
        strategy = Noted(
            AREA.Config(**{"min_clients": 1, "buffer_size": 1} | options),
            clock=clock,
            observer=lambda progress: None,
            fraction_evaluate=0.0,
        )
        grid = grid or federation(CENTRES, SIZES)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(1, GAMMA))
        return strategy

    return run


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    buffer=st.integers(1, 4),
    places=st.integers(0, 4),
    scenario=st.sampled_from(["F0", "F80", "exponential"]),
    availability=st.sampled_from(["always", "bernoulli:0.7", "diurnal:0.5,3"]),
    failure=st.sampled_from([0.0, 0.3]),
    fails=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_model_is_the_mean_of_the_last_models_after_every_aggregation(
    go, federation, buffer, places, scenario, availability, failure, fails, seed
):
    grid = federation(CENTRES, SIZES)
    if fails:
        grid.spoil(2, "raise")  # dropped after its third failure: then the others share its weight
    run = go(
        20,
        grid=grid,
        buffer_size=buffer,
        concurrency=places and max(places, buffer),
        time_scenario=scenario,
        availability=availability,
        task_failure=failure,
        seed=seed,
    )
    assert run.models == pytest.approx(run.means, rel=1e-6, abs=1e-6)
    assert len(run.models) == 20


def test_two_clients_by_hand(go, federation, tmp_path):
    # γ = ¼, p = (½, ½), c = (4, 0), W_0 = y = 1. Tasks of client 0 take 2 s, of client 1 take 3 s.
    #   0@2   w = 1 + ¼ (4 − 1) = 1.75        W_1 = (1.75 + 1) / 2 = 1.375
    #   1@3   w = 1 + ¼ (0 − 1) = 0.75        W_2 = (1.75 + 0.75) / 2 = 1.25
    #   0@4   from W_1: 1.375 + ¼ 2.625 = 2.03125    W_3 = (2.03125 + 0.75) / 2 = 1.390625
    path = tmp_path / "times.csv"
    path.write_text("client,seconds\n0,2\n1,3\n")
    run = go(3, grid=federation([4.0, 0.0], [1, 1]), time_scenario=f"trace:{path}")
    assert run.models == [1.375, 1.25, 1.390625]


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_all_count_by_their_importance_however_fast_they_are(go, server_lr):
    run = go(400, time_scenario="F80", eval_every=400, server_lr=server_lr)
    # The model at which Σ p_i (c_i − w) = 0.
    assert run.models[-1] == pytest.approx(P @ CENTRES, abs=1e-3)
    shares = run.session.client_columns()
    assert shares["expected-share"] == pytest.approx(P.tolist(), rel=1e-9)
    assert shares["observed-share"] == pytest.approx(P.tolist(), abs=0.06)


def test_who_joins_moves_nothing_until_it_contributes(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.node(3).joins_after = 3
    for node in grid.nodes.values():
        node.delay = 0.02
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.02)
        run = go(60, grid=grid, clock=WallClock(), safeguards="off", server_lr=1.0)
    joined = run.session.memory.client_vectors["models"].clients.index(3)
    assert joined == 3  # after the others, which had rows from the first aggregation on
    assert run.session.task_table.members[3].contributions > 0
    assert run.models[-1] == pytest.approx(run.means[-1], rel=1e-6)
