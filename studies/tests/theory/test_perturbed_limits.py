"""What the spectral method minimises if not everybody takes part: derived, and where its mean really ends up."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import Spectral
from strategies.clients import graph
from strategies.flower import messages
from strategies.testing import MemoryGrid
from studies.theory.perturbed_limits import Perturbed, surrogate

C, D = 5, 3
RNG = np.random.default_rng(5)
DIRECTIONS = np.abs(RNG.normal(size=(C, 4)))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=1, keepdims=True)
A = graph.adjacency(graph.misalignment(DIRECTIONS))
P, IMPORTANCE = graph.neighbour_matrix(A), graph.client_weights(A)
MINIMA, INITIAL = RNG.normal(size=(C, D)), np.array([3.0, -2.0, 1.0])
CURVATURES = np.array([0.5, 1.0, 0.3, 1.4, 0.8])
FACTORS = RNG.normal(size=(C, D, D))
HESSIANS = FACTORS @ FACTORS.transpose(0, 2, 1) / 4 + 0.2 * np.eye(D)

# Each set of participants, its probability, and the weights of those in it.
Draws = list[tuple[float, dict[int, float]]]


def uniform(number: int) -> Draws:
    sets = list(combinations(range(C), number))
    return [(1 / len(sets), {i: IMPORTANCE[i] * C / number for i in each}) for each in sets]


def only(*clients: int) -> Draws:
    total = sum(IMPORTANCE[i] for i in clients)
    return [(1.0, {i: IMPORTANCE[i] / total for i in clients})]


def rare() -> Draws:
    """Clients 0 and 1 in every round, the others in turn, the last one in a hundredth of the rounds."""
    chances = {2: 0.79, 3: 0.2, 4: 0.01}
    return [
        (chance, {0: IMPORTANCE[0], 1: IMPORTANCE[1], other: IMPORTANCE[other] / chance})
        for other, chance in chances.items()
    ]


def mean_weights(draws: Draws) -> np.ndarray:
    q = np.zeros(C)
    for chance, weights in draws:
        for i, weight in weights.items():
            q[i] += chance * weight
    return q


def expected_round(method: Perturbed, draws: Draws, w_bar: np.ndarray, last: np.ndarray) -> tuple[Any, Any]:
    """Return the mean of a round's outcome, by the method's own steps: every draw, client and local step."""
    moved, models = np.zeros(D), np.zeros((C, D))
    for chance, weights in draws:
        after = last.copy()
        for i, weight in weights.items():
            u, w = P[i] @ last, w_bar
            for _ in range(method.local_steps):
                at = method.beta * w + (1 - method.beta) * u
                w = w - method.lr * method.hessians[i] @ (at - MINIMA[i])
            after[i] = w
            moved = moved + chance * weight * (w - w_bar)
        models += chance * after
    return w_bar + moved, models


DRAWS = {
    "full": only(*range(C)),
    "uniform": uniform(2),
    "rare": rare(),
    "absent": only(0, 2, 3),
}


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_the_mean_ends_at_the_limit(draws: Draws, beta: float) -> None:
    method = Perturbed(HESSIANS, MINIMA, P, mean_weights(draws), INITIAL, beta, 0.1, 3)
    w_bar, last = INITIAL, np.tile(INITIAL, (C, 1))
    for _ in range(6000):
        w_bar, last = expected_round(method, draws, w_bar, last)
        step = method.limit()[0] - w_bar
        if np.abs(step).max() < 1e-8:
            break
    assert w_bar == pytest.approx(method.limit()[0], abs=1e-6)
    again = expected_round(method, draws, *method.limit())
    assert again[0] == pytest.approx(method.limit()[0], abs=1e-12)
    assert again[1] == pytest.approx(method.limit()[1], abs=1e-12)


def test_how_often_clients_take_part_changes_nothing_and_absence_does() -> None:
    limits = {
        name: Perturbed(HESSIANS, MINIMA, P, mean_weights(draws), INITIAL, 0.4, 0.1, 3).limit()[0]
        for name, draws in DRAWS.items()
    }
    assert limits["uniform"] == pytest.approx(limits["full"], abs=1e-12)
    assert limits["rare"] == pytest.approx(limits["full"], abs=1e-12)
    assert np.abs(limits["absent"] - limits["full"]).max() > 0.1


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_the_limit_minimises_the_surrogate(draws: Draws, beta: float) -> None:
    q, isotropic = mean_weights(draws), CURVATURES[:, None, None] * np.eye(D)
    method = Perturbed(isotropic, MINIMA, P, q, INITIAL, beta, 0.2, 4)
    weights, kappa = surrogate(CURVATURES, P, q, beta=beta, lr=0.2, local_steps=4)
    pull = weights * CURVATURES
    expected = (pull @ MINIMA - kappa * INITIAL) / (pull.sum() - kappa)
    assert method.limit()[0] == pytest.approx(expected, abs=1e-12)
    assert pull.sum() > kappa  # a minimum, not a maximum
    assert (kappa > 0) == bool((q == 0).any() and beta < 1)


def test_with_equal_curvatures_it_is_the_federated_objective_whatever_beta() -> None:
    for beta in (0.0, 0.3, 1.0):
        weights, kappa = surrogate(np.full(C, 0.7), P, IMPORTANCE, beta=beta, lr=0.3, local_steps=5)
        assert weights / weights.sum() == pytest.approx(IMPORTANCE, rel=1e-12)
        assert kappa == 0
    other, _ = surrogate(CURVATURES, P, IMPORTANCE, beta=0.3, lr=0.3, local_steps=5)
    assert np.abs(other / other.sum() - IMPORTANCE).sum() > 0.05


def test_short_steps_make_up_for_local_work_but_not_for_absence() -> None:
    everybody, some = IMPORTANCE, mean_weights(DRAWS["absent"])
    for q, lr in ((everybody, 1e-6), (some, 1e-6)):
        there, r = q > 0, P[:, q == 0].sum(axis=1)
        b = 0.6 * r
        method = Perturbed(HESSIANS, MINIMA, P, q, INITIAL, 0.4, lr, 3)
        w = method.limit()[0]
        # Eq. 4: the mean gradient is that at points drawn to the initial model.
        points = (1 - b[:, None]) * w + b[:, None] * INITIAL
        gradients = np.einsum("cij,cj->ci", HESSIANS, points - MINIMA)
        assert q @ gradients == pytest.approx(np.zeros(D), abs=1e-4)
        plain = np.einsum("cij,cj->ci", HESSIANS, w - MINIMA)
        assert (np.abs(q @ plain).max() < 1e-4) == bool(there.all())


def app() -> ClientApp:
    """Return clients with these quadratics, for the strategy itself."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        i, config = context.node_config["partition-id"], message.content.config_records["config"]
        w = message.content.array_records["arrays"]["w"].numpy()
        u = message.content.array_records["neighbours"]["w"].numpy()
        for _ in range(3):
            w = w - 0.1 * HESSIANS[i] @ (
                config[messages.BETA] * w + (1 - config[messages.BETA]) * u - MINIMA[i]
            )
        content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    @made.query("describe")
    def describe(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"partition-id": context.node_config["partition-id"], "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @made.query("direction")
    def direction(message: Message, context: Context) -> Message:
        m = ArrayRecord([DIRECTIONS[context.node_config["partition-id"]]])
        return Message(RecordDict({"direction": m}), reply_to=message)

    return made


@pytest.mark.parametrize(("participation", "draws"), [("full", "full"), ("fixed:0,2,3", "absent")])
def test_the_strategy_ends_there(participation: str, draws: str) -> None:
    grid = MemoryGrid(app(), [{"partition-id": i} for i in range(C)])
    strategy = Spectral(perturbation_beta=0.4, participation=participation, fraction_evaluate=0.0)
    initial = ArrayRecord({"w": Array(INITIAL)})
    result = strategy.start(grid, initial, num_rounds=300, train_config=ConfigRecord())
    method = Perturbed(HESSIANS, MINIMA, P, mean_weights(DRAWS[draws]), INITIAL, 0.4, 0.1, 3)
    assert result.arrays["w"].numpy() == pytest.approx(method.limit()[0], abs=1e-6)
