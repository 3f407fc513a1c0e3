"""Malenia by hand, its limits, clients that fail or go, and the length of a run."""

import numpy as np
import pytest

from strategies import FedAvg, Malenia
from strategies.timing.time_scenario import TimeScenario

CENTRES, SIZES, GAMMA = (4.0, 0.0, -2.0, 6.0), (1, 2, 3, 4), 0.25
P = np.array(SIZES) / 10


def test_the_models_by_hand(go, federation, tmp_path):
    # Tasks of client 0 take 2 s, of client 1 take 5 s; S = 3, so that (1/B_0 + 1/B_1) / 2 must be 2/3 or less.
    #   0@2, 0@4     B = (2, 0)
    #   1@5          B = (2, 1): 3/4 is too much
    #   0@6          B = (3, 1): 2/3; model 1, which client 0 is sent
    #   0@8          B = (1, 0)
    #   0@10, 1@10   B = (2, 0); client 1's is of model 0, and it is sent model 1
    #   0@12, 0@14   B = (4, 0)
    #   1@15         B = (4, 1): 5/8; model 2, which client 1 is sent
    path = tmp_path / "times.csv"
    path.write_text("client,seconds\n0,2\n1,5\n")
    grid = federation([8.0, 0.0], [1, 3])
    models, grid, strategy = go(Malenia, 2, grid=grid, buffer_size=3, time_scenario=f"trace:{path}")
    # A client's updates of one model are equal, and so is their mean: W + (1/4 (8 − W) + 3/4 (0 − W)) / 4.
    assert models == pytest.approx([1.0, 1.25, 1.4375], rel=1e-7)
    shares = strategy.session.client_columns()
    assert shares["participation"] == [7, 2]
    assert shares["observed-share"] == pytest.approx([0.25, 0.75], rel=1e-12)
    assert strategy.session.scheduler.now() == 15.0


class Growing(Malenia):
    """Client i's b-th update of the run counts b."""

    def begin(self, layout, model):
        super().begin(layout, model)
        self.seen = {}

    def on_contribution(self, contribution):
        index = contribution.client.index
        self.seen[index] = self.seen.get(index, 0) + 1
        contribution.update[:] = self.seen[index]
        return super().on_contribution(contribution)


def test_a_model_is_moved_by_the_mean_of_the_clients_means(go, federation, tmp_path):
    # The schedule above; client 1's second update is its third task's.
    #   model 1: 1/4 (1 + 2 + 3)/3 + 3/4 · 1 = 1.25
    #   model 2: 1/4 (4 + 5 + 6 + 7)/4 + 3/4 · 2 = 2.875
    path = tmp_path / "times.csv"
    path.write_text("client,seconds\n0,2\n1,5\n")
    options = {"buffer_size": 3, "time_scenario": f"trace:{path}"}
    models, _, strategy = go(Growing, 2, grid=federation([4.0, 0.0], [1, 3]), **options)
    assert models == pytest.approx([1.0, 2.25, 5.125], rel=1e-7)
    halved = go(Growing, 2, grid=federation([4.0, 0.0], [1, 3]), server_lr=0.5, **options)[0]
    assert halved == pytest.approx([1.0, 1.625, 3.0625], rel=1e-7)
    assert strategy.session.client_state_bytes() == 2 * 4
    assert all(contribution.update.size == 0 for contribution in strategy.session.task_table.buffer)


def test_the_first_step_is_fedavgs_and_with_equal_speeds_all_are(go):
    assert go(Malenia, 1)[0] == pytest.approx(go(FedAvg, 1)[0], rel=1e-6)
    for optimizer in ("sgd", "momentum", "adam"):
        common = {"time_scenario": "F0", "server_optimizer": optimizer, "server_lr": 0.1}
        assert go(Malenia, 8, **common)[0] == pytest.approx(go(FedAvg, 8, **common)[0], rel=1e-6)


def test_all_count_by_their_importance_however_fast_they_are(go):
    _, _, strategy = go(Malenia, 20, buffer_size=8, time_scenario="F95")
    shares = strategy.session.client_columns()
    assert shares["participation"][0] > 3 * shares["participation"][3]
    for share in ("importance", "expected-share", "observed-share"):
        assert shares[share] == pytest.approx(P, rel=1e-9)
    assert strategy.session.contribution_weights.total_variation() < 1e-9


# ---- Clients that fail, come and go ------------------------------------------------------------------------------


def test_who_fails_is_waited_for_until_it_is_dropped(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.spoil(3, "raise")  # the slowest: its third task in vain ends at 3 s
    models, _, strategy = go(Malenia, 30, grid=grid)
    assert strategy.session.task_table.members[3].dropped
    assert models[-1] == pytest.approx(P[:3] @ CENTRES[:3] / P[:3].sum(), abs=0.01)
    assert strategy.session.client_columns()["participation"][3] == 0


@pytest.mark.parametrize("most", [0, 40])
def test_who_is_gone_for_good_is_not_waited_for(go, tmp_path, most):
    """With S = 40 the harmonic mean is to be 10; one update of a client that is gone would keep it below 4."""
    path = tmp_path / "there.csv"
    path.write_text("client,start,end\n0,0,1e9\n1,0,1e9\n2,0,3.9\n3,0,1e9\n")
    models, _, strategy = go(Malenia, 30, availability=f"trace:{path}", buffer_size=most, time_budget=2000.0)
    rest = [0, 1, 3]
    assert len(models) == 31
    assert models[-1] == pytest.approx(P[rest] @ np.array(CENTRES)[rest] / P[rest].sum(), abs=0.01)
    participation = strategy.session.client_columns()["participation"]
    assert 0 < participation[2] < participation[3]


def test_who_is_never_there_for_long_enough_is_not_waited_for(go, tmp_path):
    # One of clients 2 and 3 is always at work, on a task of 1 s that it leaves after half a second.
    path = tmp_path / "there.csv"
    path.write_text("client,start,end,period\n0,0,1,1\n1,0,1,1\n2,0,0.5,1\n3,0.5,1,1\n")
    there = {"availability": f"trace:{path}", "time_scenario": "F0", "time_budget": 200.0}
    models, _, _ = go(Malenia, 20, buffer_size=7, **there)
    assert len(models) == 21
    assert models[-1] == pytest.approx(P[:2] @ CENTRES[:2] / P[:2].sum(), abs=0.1)


def test_few_at_work_at_once(go):
    models, grid, strategy = go(Malenia, 20, concurrency=2, buffer_size=6)
    assert set(grid.asked()) == {0, 1, 2, 3}
    assert models[-1] == pytest.approx(P @ CENTRES, abs=0.05)
    # Σ τ / M = 6, and 1 + 1/2 + 1/3 + 1/4 = 25/12: a turn of all takes 12.5 s.
    assert strategy.predict_num_aggregations(np.array([1.0, 2.0, 3.0, 6.0]), 60.0) == 4


# ---- The length of a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["F0", "F49", "F80", "F95"])
@pytest.mark.parametrize("most", [0, 9, 30])
def test_a_run_of_a_time_has_as_many_models_as_foreseen(go, scenario, most):
    times = TimeScenario(scenario, 4, 0).means
    foreseen = Malenia(buffer_size=most).predict_num_aggregations(times, 20.0)
    assert (
        len(go(Malenia, 1000, time_scenario=scenario, buffer_size=most, time_budget=20.0)[0]) == 1 + foreseen
    )


def test_the_slowest_makes_each_model_if_the_others_are_twice_as_fast():
    assert Malenia().predict_num_aggregations(np.array([0.2, 0.5, 1.0]), 40.0) == 40
    # All are equal: who has answered goes on with the model that it has, so that of the first model
    #   at 1 s client 2 is the last, and at 2 s clients 0 and 1, too late, are sent model 1;
    #   at 3 s client 1 is the last, and clients 2, at 3 s, and 0, at 4 s, are too late;
    #   at 5 s client 0 is the last, and all are sent model 3.
    assert Malenia().predict_num_aggregations(np.array([1.0, 1.0, 1.0]), 40.0) == 3 * 8
