"""FedAWE: its algorithm in numpy, where it is FedAvg, the objective that it has, and what the server keeps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from strategies import FedAU, FedAvg, FedAWE, SynchronousStrategy

CENTRES, SIZES, A = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4), (1.0, 2.0, 0.5, 1.5, 0.7)
STEPS, GAMMA, C = (1, 2, 5, 3, 4), 0.1, 5
P, START = np.array(SIZES) / sum(SIZES), np.array([1.0, -2.0])

DRAWN: list[dict[str, Any]] = [
    {},
    {"participation": "uniform", "fraction_train": 0.4},
    {"participation": "md", "fraction_train": 0.6},
    {"participation": "poisson", "fraction_train": 0.3},
    {"participation": "fixed:1,3,4"},
    {"participation": "paired"},
]
NAMES = [str(options.get("participation", "full")) for options in DRAWN]


@pytest.fixture
def go(federation, model, train_config, values_of):
    """Run a method on five quadratics; return who was asked in each round, the models, and the strategy."""

    def run(
        kind: Any, rounds: int = 12, observe: Any = None, grid: Any = None, **options: Any
    ) -> tuple[list[list[int]], np.ndarray, Any]:
        grid, seen = grid or federation(CENTRES, SIZES, A), []
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
        asked = [sorted(grid.asked("train", number)) for number in range(1, rounds + 1)]
        return asked, np.array(seen), strategy

    return run


def update(i: int, W: np.ndarray) -> np.ndarray:
    """Δ_i of client i, by its gradient steps."""
    w = W.copy()
    for _ in range(STEPS[i]):
        w = w - GAMMA * A[i] * (w - CENTRES[i])
    return w - W


def importances(scheme: str) -> np.ndarray:
    """The p_i of the objective that a scheme has by design."""
    if scheme == "paired":
        return np.array([0.125] * 4 + [0.5])
    listed = np.isin(np.arange(C), [1, 3, 4]) if scheme.startswith("fixed") else np.full(C, fill_value=True)
    return np.where(listed, P, 0) / P[listed].sum()


class Reference:
    """Algorithm 1 of the paper: every client keeps x_i and τ_i, and the server keeps nothing."""

    def __init__(self, p: np.ndarray, eta: float = 1.0):
        self.scale, self.eta, self.t = np.count_nonzero(p) * p, eta, 0
        self.x, self.tau = [START] * C, [0] * C

    def round(self, A_t: Sequence[int]) -> np.ndarray:
        self.t += 1
        echoes = []
        for i in A_t:
            echo = self.eta * (self.t - self.tau[i]) * self.scale[i] * update(i, self.x[i])
            echoes.append(self.x[i] + echo)
        W = np.mean(echoes, axis=0)
        for i in A_t:
            self.x[i], self.tau[i] = W, self.t
        return W


# ---- Against the algorithm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [1.0, 0.3])
@pytest.mark.parametrize("options", DRAWN, ids=NAMES)
def test_a_run_is_the_papers_algorithm(go, options, eta):
    asked, models, _ = go(FedAWE, rounds=16, server_lr=eta, **options)
    reference = Reference(importances(options.get("participation", "full")), eta)
    W = START
    for found, A_t in zip(models[1:], asked, strict=True):
        W = reference.round(A_t) if A_t else W
        reference.t += not A_t  # a round in which nobody takes part is missed by all
        assert found == pytest.approx(W, rel=1e-12)
    assert max(map(len, asked)) > 0
    assert not np.allclose(models[-1], models[0])


def test_the_papers_importances_are_equal(go):
    """With 1/C the update's factor is t − τ_i alone, as the paper writes it."""
    asked, models, _ = go(FedAWE, client_weights="uniform", **DRAWN[1])
    x, tau = [START] * C, [0] * C
    for t, (found, A_t) in enumerate(zip(models[1:], asked, strict=True), 1):
        W = np.mean([x[i] + (t - tau[i]) * update(i, x[i]) for i in A_t], axis=0)
        for i in A_t:
            x[i], tau[i] = W, t
        assert found == pytest.approx(W, rel=1e-12)


def test_by_hand(go, federation, model, train_config, values_of):
    # Two quadratics of curvature 1 with c = (0, 8), p = (½, ½), and γ = ½: an update is half of the way to c_i.
    #   round 1, both:     W = 4 + (½ 2 (0 − 4)/2 + ½ 2 (8 − 4)/2) / 2 = 4
    #   round 2, client 0: x_0 = 4, 4 + 1 · 1 · (−2) = 2, which client 0 alone gets
    #   round 3, client 0: 2 − 1 = 1
    #   round 4, both:     x_0† = 1 − ½ = ½, and client 1, which missed two rounds, 4 + 3 · 2 = 10; W = 5.25
    class Listed(FedAWE):
        def select(self, clients: Any, rng: Any) -> Any:
            alone = self.session.aggregations in (1, 2)
            return [client for client in clients if client.index == 0 or not alone], None

    seen: list[float] = []
    grid = federation([0.0, 8.0], [1, 1])
    Listed(observer=lambda progress: seen.append(values_of(progress.arrays)[0]), fraction_evaluate=0.0).start(
        grid, model(4.0), num_rounds=4, train_config=train_config(lr=0.5)
    )
    assert seen == [4.0, 4.0, 2.0, 1.0, 5.25]
    sent = [request.content.array_records["arrays"]["w"].numpy().item() for request in grid.requests()]
    assert sent == [4.0, 4.0, 4.0, 2.0, 1.0, 4.0]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
def test_with_all_clients_it_is_fedavg_bit_for_bit(go, optimizer):
    common = {"server_optimizer": optimizer, "server_lr": 0.1}
    assert go(FedAWE, **common)[1].tobytes() == go(FedAvg, **common)[1].tobytes()


# ---- Which objective it has --------------------------------------------------------------------------------------


def uneven(kind: type[SynchronousStrategy]) -> type[SynchronousStrategy]:
    """A method whose client 0 is in every round and whose client 1 is in one of four, drawn anew."""

    class Uneven(kind):  # type: ignore[misc, valid-type]
        def select(self, clients: Any, rng: np.random.Generator) -> Any:
            return [client for client in clients if client.index == 0 or rng.random() < 0.25], None

    return Uneven


@pytest.mark.parametrize(("kind", "expected"), [(FedAvg, 1.0), (FedAWE, 4.0)])
def test_who_takes_part_rarely_counts_in_full_where_fedavg_has_another_mean(
    kind, expected, federation, model, train_config, values_of
):
    # Two quadratics of curvature 1 with c = (0, 8) and p = (½, ½), whose minimum is 4; π = (1, ¼). FedAvg goes to 0
    # in ¾ of the rounds, and to the mean of both in ¼: Σ π-weighted, (¾ + ⅛) 0 + ⅛ 8 = 1. A round of FedAWE with
    # both is every fourth: until then client 0 goes on alone, and client 1's update counts as many rounds.
    seen: list[float] = []
    strategy = uneven(kind)(
        observer=lambda progress: seen.append(values_of(progress.arrays)[0]), fraction_evaluate=0.0
    )
    strategy.start(
        federation([0.0, 8.0], [1, 1]), model(4.0), num_rounds=500, train_config=train_config(lr=0.02)
    )
    assert np.mean(seen[100:]) == pytest.approx(expected, abs=0.5)


def test_the_shares_are_those_of_the_data_whoever_is_there(go, tmp_path):
    # Client 0 is never there for as long as a task takes, client 1 in two rounds of three, the others always. A round
    # lasts a second.
    path, told = tmp_path / "there.csv", []
    rows = ["0,0,0.5,3", "1,0,2.99,3", *(f"{client},0,3,3" for client in (2, 3, 4))]
    path.write_text("\n".join(["client,start,end,period", *rows]))
    there = {"availability": f"trace:{path}", "time_scenario": "F0"}
    go(FedAWE, rounds=30, observe=lambda progress, _: told.append(progress.clients), **there)
    expected = np.where(np.arange(C) > 0, P, 0) / P[1:].sum()
    assert told[-1]["expected-share"] == pytest.approx(expected, rel=1e-9)
    assert told[-1]["observed-share"] == pytest.approx(expected, abs=0.02)


# ---- Clients that fail, or join late, or lie ---------------------------------------------------------------------


def test_who_fails_keeps_its_model_and_makes_up_for_the_rounds(go):
    def observe(progress: Any, grid: Any) -> None:
        for client in (2, 4):
            grid.spoil(client, "raise" if progress.aggregation in (1, 2) else None)

    models = go(FedAWE, rounds=5, observe=observe)[1]
    reference = Reference(P)
    for found, A_t in zip(models[1:], (range(C), (0, 1, 3), (0, 1, 3), range(C), range(C)), strict=True):
        assert found == pytest.approx(reference.round(A_t), rel=1e-12)


def test_who_joins_late_begins_with_the_model_of_that_time(
    federation, add_node, model, train_config, values_of
):
    grid, seen = federation(CENTRES[:2], (1, 1)), []

    def observe(progress: Any) -> None:
        seen.append(values_of(progress.arrays)[0])
        if progress.aggregation == 3:
            add_node(grid, 0, 2, 99, centre=-1.0)

    FedAWE(observer=observe, fraction_evaluate=0.0).start(
        grid, model(1.0), num_rounds=5, train_config=train_config()
    )
    # Half the way to the mean of c in each round: (3 + 2)/2 three times, then 4/3 twice.
    W = 1.0
    for found, centre in zip(seen[1:], (2.5, 2.5, 2.5, 4 / 3, 4 / 3), strict=True):
        W = (W + centre) / 2
        assert found == pytest.approx(W, rel=1e-12)


@pytest.mark.parametrize(("mode", "longest"), [("on", 4.0), ("off", 40.0)])
def test_with_safeguards_an_absence_counts_at_most_four_times_the_usual(mode, longest, go):
    """Client 4 is away from round 2 to round 40, the others take part in every round."""

    class Away(FedAWE):
        def select(self, clients: Any, rng: Any) -> Any:
            away = 1 <= self.session.aggregations < 40
            return [client for client in clients if client.index != 4 or not away], None

    _, _, strategy = go(Away, rounds=40, safeguards=mode, norm_ratio_bound=0.0)
    assert strategy._missed() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: longest}


# ---- What the server keeps ---------------------------------------------------------------------------------------


def test_a_model_is_kept_once_as_long_as_a_client_has_it(go):
    kept, had = [], []

    class Counting(FedAWE):
        def extra_vectors(self, clients: Any) -> Any:
            vectors = super().extra_vectors(clients)
            kept.append(self._sent.num_bytes // 8)  # of two float32 or float64
            had.append(len(set(self._sent.rounds.values())))
            return vectors

    asked, _, strategy = go(Counting, rounds=40, **DRAWN[1])
    last = dict.fromkeys(range(C), 0)
    for number, A_t in enumerate(asked, 1):
        assert had[number - 1] == len(set(last.values()))
        last |= dict.fromkeys(A_t, number)
    size = 4 if strategy.session.run.layout.narrow == np.float32 else 8
    assert [count * 8 for count in kept] == [2 * size * number for number in had]
    assert max(had) > 2
    assert go(FedAWE)[2].session.client_state_bytes() == 2 * size


def test_fedau_is_another_method(go):
    assert not np.allclose(go(FedAWE, **DRAWN[1])[1][-1], go(FedAU, **DRAWN[1])[1][-1])
