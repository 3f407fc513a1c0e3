"""Methods that correct who takes part, where nodes come and go: quadratics whose common minimum is known by hand."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from strategies import FedDyn, FedStale, Mifa, Scaffold
from strategies.core.run_state import Memory
from strategies.methods.shared.latest_updates import LatestUpdates

CENTRES, SIZES = (3.0, 2.0, -1.0, 0.5), (1, 2, 5, 3)
P = np.array(SIZES) / 11
BEST = float(P @ np.array(CENTRES))  # 0.3182
BEST_OF_THE_REST = float(P[1:] @ np.array(CENTRES[1:]) / P[1:].sum())  # without client 0, 0.05
METHODS: list[tuple[Any, dict[str, Any]]] = [
    (Scaffold, {}),
    (FedDyn, {"feddyn_alpha": 1.0}),
    (Mifa, {}),
    (FedStale, {}),
]
EACH = pytest.mark.parametrize(("kind", "own"), METHODS, ids=["scaffold", "feddyn", "mifa", "fedstale"])


@pytest.fixture
def go(federation, model, train_config, values_of):
    """Run a method, which ``after`` each round may do something to the grid; return its models, and itself."""

    def run(
        kind: Any, rounds: int, after: Any = None, *, grid: Any = None, state: Any = None, **options: Any
    ) -> tuple[np.ndarray, Any]:
        grid, seen = grid or federation(CENTRES, SIZES), []

        def observe(progress: Any) -> None:
            seen.append(values_of(progress.arrays)[0])
            if after is not None:
                after(progress.aggregation, grid, strategy)

        strategy = kind(observer=observe, seed=3, fraction_evaluate=0.0, **options)
        if state is not None:
            strategy.restore(state)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(3, 0.2))
        return np.array(seen), strategy

    return run


def every_third_round(number: int, grid: Any, strategy: Any) -> None:
    grid.node(2).present = number % 3 == 0


# ---- FedDyn's sum, when p changes ----------------------------------------------------------------------------------


def test_feddyn_ends_at_the_minimum_by_the_sizes_that_replies_tell(go, federation):
    # Who hasn't told counts as the mean of the others, so that p changes while clients are drawn for the first time.
    grid = federation(CENTRES, SIZES, describes=False)
    own = {"participation": "flower", "fraction_train": 0.5, "feddyn_alpha": 1.0}
    models, _ = go(FedDyn, 50, grid=grid, **own)
    assert models[-1] == pytest.approx(BEST, abs=1e-4)  # with a sum of what was added by other p_i 0.3431


def test_feddyn_ends_at_the_minimum_when_all_stay_who_have_come_and_gone(go):
    def then_it_stays(number: int, grid: Any, strategy: Any) -> None:
        grid.node(2).present = number > 20 or number % 3 == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.core.population.ABSENCE", 0)  # p changes with every round
        models, _ = go(FedDyn, 55, then_it_stays, feddyn_alpha=1.0)
    assert models[-1] == pytest.approx(BEST, abs=1e-4)


def test_the_sum_moves_with_its_parts_and_is_made_anew_when_p_changes():
    memory = Memory()
    strategy = FedDyn()
    strategy.session.run.model = np.zeros(2)
    vectors = strategy.session.client_vectors("gradients")
    latest = LatestUpdates(memory, vectors, {0: 0.25, 1: 0.75})
    latest.add(0, -2.0, np.array([1.0, 3.0]))
    latest.add(1, -2.0, np.array([0.1, 0.0]))
    assert latest.mean.tolist() == [-0.5 - 2 * 0.75 * 0.1, -1.5]  # in float64, h_i in float32
    assert latest.get(1)[0] == np.float32(-0.2)
    again = LatestUpdates(memory, vectors, {0: 0.5, 1: 0.5})
    assert again.mean == pytest.approx([-1.1, -3.0])


# ---- Who is away counts for a while --------------------------------------------------------------------------------


@EACH
def test_a_device_that_is_there_every_third_round_counts_like_any_other(go, kind, own):
    models, strategy = go(kind, 60, every_third_round, **own)
    assert models[-3:] == pytest.approx([BEST] * 3, abs=1e-3)  # FedAvg swings between 0.8 and 1.3
    assert strategy.session.client_weights() == pytest.approx(dict(enumerate(P)), rel=1e-12)
    assert [client.index for client in strategy.session.clients] == [0, 1, 3]
    assert strategy.session.client_columns()["expected-share"] == pytest.approx(P.tolist(), rel=1e-12)


@EACH
def test_a_device_that_is_gone_for_good_counts_no_longer(go, kind, own, monkeypatch, caplog):
    counts: list[bool] = []

    def leaves(number: int, grid: Any, strategy: Any) -> None:
        grid.node(0).present = number < 5
        counts.append(0 in strategy.session.client_weights())

    monkeypatch.setattr("strategies.core.population.ABSENCE", 4)
    models, strategy = go(kind, 45, leaves, **own)
    # It trains in rounds 1 to 5, and is away in 6 to 9 and counts.
    assert counts[1:] == [True] * 9 + [False] * 36
    assert models[-1] == pytest.approx(BEST_OF_THE_REST, abs=1e-4)
    said = [r.getMessage() for r in caplog.records if "has been away" in r.getMessage()]
    assert said == ["client 0 has been away for 4 rounds: it doesn't count until it is back"]
    assert strategy.session.client_columns()["expected-share"] == pytest.approx([0, *P[1:] / P[1:].sum()])


def test_it_counts_again_when_it_is_back(go, monkeypatch):
    counts: list[bool] = []

    def leaves(number: int, grid: Any, strategy: Any) -> None:
        grid.node(0).present = not 2 <= number < 6
        counts.append(0 in strategy.session.client_weights())

    monkeypatch.setattr("strategies.core.population.ABSENCE", 2)
    go(Mifa, 8, leaves)
    assert counts[1:] == [True] * 4 + [False] * 2 + [True] * 2


def test_one_that_was_never_of_use_does_not_count_when_it_is_away(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.spoil(0, "raise")

    def leaves(number: int, grid: Any, strategy: Any) -> None:
        grid.node(0).present = number < 2

    models, strategy = go(Mifa, 4, leaves, grid=grid)
    assert (models[:3] == 1.0).all()
    assert models[3] != 1.0
    assert list(strategy.session.client_weights()) == [1, 2, 3]


def test_by_a_graph_those_count_that_are_there(go):
    models, strategy = go(Mifa, 5, every_third_round, client_weights="adjacency")
    assert np.isfinite(models).all()
    assert list(strategy.session.client_weights()) == [0, 1, 3]


@EACH
def test_a_run_that_goes_on_knows_who_is_away_and_for_how_long(go, federation, kind, own, monkeypatch):
    states: list[Any] = []

    def leaves(number: int, grid: Any, strategy: Any) -> None:
        states.append(deepcopy(strategy.state()))
        grid.node(0).present = number < 2

    monkeypatch.setattr("strategies.core.population.ABSENCE", 4)
    whole, _ = go(kind, 9, leaves, **own)
    for cut in (2, 4):  # it leaves between two runs; it is away at the end of the first
        grid = federation(CENTRES, SIZES)
        grid.node(0).present = False
        rest, strategy = go(kind, 9, grid=grid, state=states[cut], **own)
        assert rest.tolist() == whole[cut + 1 :].tolist()
        assert list(strategy.session.client_weights()) == [1, 2, 3]


def test_a_state_of_an_earlier_version_has_nobody_away(go):
    states: list[Any] = []
    go(Mifa, 2, lambda number, grid, strategy: states.append(deepcopy(strategy.state())))
    del states[1]["counting"]
    models, _ = go(Mifa, 2, state=states[1])
    assert len(models) == 1
