"""FedStale (FedVARP) and FedAU: their formulas in numpy, where they are FedAvg, and the objective that they have."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from strategies import FedAU, FedAvg, FedStale, SynchronousStrategy
from strategies.methods.fedau import INTERVALS, after_absence

CENTRES, SIZES, A = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4), (1.0, 2.0, 0.5, 1.5, 0.7)
STEPS, GAMMA, C = (1, 2, 5, 3, 4), 0.1, 5
P, START = np.array(SIZES) / sum(SIZES), np.array([1.0, -2.0])

DRAWN: list[dict[str, Any]] = [
    {},
    {"participation": "uniform", "fraction_train": 0.4},
    {"participation": "flower", "fraction_train": 0.6},
    {"participation": "fixed:1,3,4"},
    {"participation": "paired"},
]
NAMES = [str(options.get("participation", "full")) for options in DRAWN]


@pytest.fixture
def go(federation, model, train_config, values_of):
    """Run a method on five quadratics; return who was asked in each round, and the model after each."""

    def run(
        kind: Any, rounds: int = 12, observe: Any = None, **options: Any
    ) -> tuple[list[list[int]], np.ndarray]:
        grid, seen = federation(CENTRES, SIZES, A), []
        for client, steps in enumerate(STEPS):
            grid.node(client).context.node_config["local-steps"] = steps

        def observer(progress: Any) -> None:
            seen.append(values_of(progress.arrays))
            if observe is not None:
                observe(progress, grid)

        strategy = kind(observer=observer, fraction_evaluate=0.0, **{"seed": 3} | options)
        strategy.start(
            grid, model(*START), num_rounds=rounds, timeout=9.0, train_config=train_config(lr=GAMMA)
        )
        return [grid.asked("train", number) for number in range(1, rounds + 1)], np.array(seen)

    return run


def update(i: int, W: np.ndarray) -> np.ndarray:
    """Δ_i of client i, by its gradient steps."""
    w = W.copy()
    for _ in range(STEPS[i]):
        w = w - GAMMA * A[i] * (w - CENTRES[i])
    return w - W


def drawn_weights(scheme: str, asked: Sequence[int]) -> np.ndarray:
    if scheme == "paired":
        return np.full(2, 0.5)
    if scheme in ("full", "uniform"):
        return P[asked] * (C / len(asked) if scheme == "uniform" else 1)
    return P[asked] / P[asked].sum()


def importances(scheme: str) -> np.ndarray:
    """The p_i of the objective that a scheme has by design."""
    if scheme == "paired":
        return np.array([0.125] * 4 + [0.5])
    listed = np.isin(np.arange(C), [1, 3, 4]) if scheme.startswith("fixed") else np.full(C, fill_value=True)
    return np.where(listed, P, 0) / P[listed].sum()


# ---- Against the formulas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.4])
@pytest.mark.parametrize("options", DRAWN, ids=NAMES)
def test_fedstale_is_its_formula(go, options, beta):
    scheme = options.get("participation", "full")
    asked, models = go(FedStale, stale_weight=beta, **options)
    W, h, p = START, np.zeros((C, 2)), importances(scheme)
    for found, S in zip(models[1:], asked, strict=True):
        deltas = np.array([update(i, W) for i in S])
        W = W + drawn_weights(scheme, S) @ (deltas - beta * h[S]) + beta * p @ h
        h[S] = deltas
        assert found == pytest.approx(W, rel=1e-6, abs=1e-6)  # h_i are kept in float32
    assert not np.allclose(models[-1], models[0])


@pytest.mark.parametrize("cutoff", [2, 50])
@pytest.mark.parametrize("options", DRAWN, ids=NAMES)
def test_fedau_is_its_algorithm(go, options, cutoff):
    asked, models = go(FedAU, rounds=16, participation_cutoff=cutoff, **options)
    W, p = START, importances(options.get("participation", "full"))
    # Algorithm 2 of the paper, line by line: after each round the intervals grow, and end.
    omega, number, length = np.ones(C), np.zeros(C), np.zeros(C)
    for found, S in zip(models[1:], asked, strict=True):
        W = W + sum(p[i] * omega[i] * update(i, W) for i in S)
        assert found == pytest.approx(W, rel=1e-12)
        for i in range(C):
            length[i] += 1
            if i in S or length[i] == cutoff:
                mean = (number[i] * omega[i] + length[i]) / (number[i] + 1)
                omega[i], number[i], length[i] = mean, number[i] + 1, 0
    assert omega.max() <= cutoff
    assert (omega[p > 0] > 1).any() == (len(asked[0]) < np.count_nonzero(p))


def test_an_absence_counts_in_intervals_of_the_cutoff():
    # The interval began in round 4. Before round 12 seven rounds have passed: two intervals of 3, and one round.
    assert after_absence(np.array([4.0, 2.0, 9.0]), 12, 3).tolist() == [10.0, 4.0, 15.0]
    assert after_absence(np.array([4.0, 2.0, 9.0]), 7, 3).tolist() == [4.0, 2.0, 9.0]  # two rounds: none
    assert after_absence(np.array([4.0, 2.0, 9.0]), 8, 3).tolist() == [7.0, 3.0, 12.0]  # three: one


# ---- Where they are FedAvg ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", DRAWN, ids=NAMES)
def test_without_stale_updates_fedstale_is_fedavg_bit_for_bit(go, options):
    one, other = (
        go(kind, **more, **options)[1] for kind, more in ((FedStale, {"stale_weight": 0.0}), (FedAvg, {}))
    )
    assert one.tobytes() == other.tobytes()


def test_with_all_clients_they_are_fedavg(go):
    plain = go(FedAvg)[1]
    assert go(FedAU)[1].tobytes() == plain.tobytes()
    for beta in (0.3, 1.0):
        assert go(FedStale, stale_weight=beta)[1] == pytest.approx(plain, rel=1e-12)


# ---- Which objective they have -----------------------------------------------------------------------------------


def uneven(kind: type[SynchronousStrategy]) -> type[SynchronousStrategy]:
    """A method whose client 0 is in every round and whose client 1 is in one of four, drawn anew."""

    class Uneven(kind):  # type: ignore[misc, valid-type]
        def select(self, clients: Any, rng: np.random.Generator) -> Any:
            return [client for client in clients if client.index == 0 or rng.random() < 0.25], None

    return Uneven


@pytest.mark.parametrize(("kind", "expected"), [(FedAvg, 1.0), (FedAU, 4.0), (FedStale, 4.0)])
def test_who_takes_part_rarely_counts_in_full_where_fedavg_has_another_mean(
    kind, expected, federation, model, train_config, values_of
):
    # Two quadratics of curvature 1 with c = (0, 8) and p = (½, ½), whose minimum is 4; π = (1, ¼).
    # FedAvg: W goes to 0 in ¾ of the rounds, and to the mean of both in ¼: Σ π-weighted, (¾ + ⅛) 0 + ⅛ 8 = 1.
    # FedAU: ω = (1, 4) in the mean, ½ 1 (0 − W) + ¼ ½ 4 (8 − W) = 0 at W = 4.
    # FedVARP: the last updates stand in for the absent, ½ (0 − W) + ½ (8 − W) = 0 at W = 4.
    seen: list[float] = []
    strategy = uneven(kind)(
        observer=lambda progress: seen.append(values_of(progress.arrays)[0]), fraction_evaluate=0.0
    )
    strategy.start(
        federation([0.0, 8.0], [1, 1]), model(4.0), num_rounds=500, train_config=train_config(lr=0.04)
    )
    assert np.mean(seen[100:]) == pytest.approx(expected, abs=0.4)


@pytest.mark.parametrize(
    ("kind", "own", "beta"), [(FedAU, {}, 1.0), (FedStale, {}, 1.0), (FedStale, {"stale_weight": 0.25}, 0.25)]
)
@pytest.mark.parametrize("closes", [{}, {"round_deadline": 2.0}], ids=["all", "deadline"])
def test_what_is_told_of_the_shares(kind, own, beta, closes, go, tmp_path):
    # Client 0 is never there for as long as a task takes, client 1 for two rounds of three, the others always. A
    # round lasts a second.
    path, told = tmp_path / "there.csv", []
    rows = ["0,0,0.5,3", "1,0,2.99,3", *(f"{client},0,3,3" for client in (2, 3, 4))]
    path.write_text("\n".join(["client,start,end,period", *rows]))
    there = {"availability": f"trace:{path}", "time_scenario": "F0"}
    go(kind, rounds=30, observe=lambda progress, _: told.append(progress.clients), **own, **there, **closes)
    # Of two rounds with clients 1 to 4 and one with 2 to 4: the others share the weight of a task that is lost.
    both, three = np.where(np.arange(C) > 0, P, 0), np.where(np.arange(C) > 1, P, 0)
    q = (2 * both / both.sum() + three / three.sum()) / 3
    expected = (1 - beta) * q + beta * both / both.sum()
    if closes:  # which tasks are in time isn't known beforehand
        assert "expected-share" not in told[-1]
        return
    assert told[-1]["expected-share"] == pytest.approx(expected, abs=0.01)
    assert told[-1]["observed-share"] == pytest.approx(expected, abs=0.02)


# ---- Clients that fail, or join late -----------------------------------------------------------------------------


def test_rounds_without_any_reply_count_as_rounds_of_absence(go):
    # All fail in rounds 2 and 3: in round 4 ω is still 1, as the intervals before it are, and in round 5 (1 + 3)/2.
    def observe(progress: Any, grid: Any) -> None:
        for client in range(C):
            grid.spoil(client, "raise" if progress.aggregation in (1, 2) else None)

    models = go(FedAU, rounds=5, observe=observe)[1]
    W = START
    for found, omega in zip(models[1:], (1, 0, 0, 1, 2), strict=True):
        W = W + omega * P @ np.array([update(i, W) for i in range(C)])
        assert found == pytest.approx(W, rel=1e-12)


def test_who_fails_counts_by_its_last_update_and_the_others_share_its_weight(go):
    def observe(progress: Any, grid: Any) -> None:
        if progress.aggregation == 1:
            grid.spoil(2, "raise")

    models = go(FedStale, rounds=3, observe=observe)[1]
    W, h = START, np.zeros((C, 2))
    for found, S in zip(models[1:], ([0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 1, 3, 4]), strict=True):
        deltas = np.array([update(i, W) for i in S])
        W, h[S] = W + P[S] / P[S].sum() @ (deltas - h[S]) + P @ h, deltas
        assert found == pytest.approx(W, rel=1e-6)


def test_the_first_interval_of_a_client_that_joins_late_begins_there(
    federation, add_node, model, train_config, values_of
):
    grid, seen = federation(CENTRES[:2], (1, 1)), []

    def observe(progress: Any) -> None:
        seen.append(values_of(progress.arrays)[0])
        if progress.aggregation == 3:
            add_node(grid, 0, 2, 99, centre=-1.0)

    FedAU(observer=observe, fraction_evaluate=0.0).start(
        grid, model(1.0), num_rounds=5, train_config=train_config()
    )
    # Half the way to the mean of c in each round, as all weights are p_i: (3 + 2)/2 three times, then 4/3 twice.
    W = 1.0
    for found, centre in zip(seen[1:], (2.5, 2.5, 2.5, 4 / 3, 4 / 3), strict=True):
        W = (W + centre) / 2
        assert found == pytest.approx(W, rel=1e-12)


def test_with_safeguards_an_absence_counts_at_most_four_times_the_usual():
    """Client 4 was away for 40 rounds before its second participation; the others took part in every second one."""
    for mode, longest in (("on", 4 * 2.0), ("off", 40.0)):
        strategy = FedAU(safeguards=mode, fraction_evaluate=0.0)
        strategy.session.memory[INTERVALS] = np.array([[40.0, 20, 40]] * 4 + [[40.0, 1, 40]])
        assert min(strategy._longest(strategy.session.memory[INTERVALS]), 40.0) == longest
