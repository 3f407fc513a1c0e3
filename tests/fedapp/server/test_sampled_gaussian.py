"""The account of sampled Gaussian releases: published values, brute force on one dimension, and its limits."""

from itertools import combinations

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism
from scipy.stats import norm

from fedapp.gaussian_mechanism import gaussian_epsilon
from fedapp.server.sampled_gaussian import (
    Sampling,
    as_releases,
    poisson_loss_epsilon,
    poisson_renyi_epsilon,
    sampled_epsilon,
    without_replacement_epsilon,
)
from strategies.secure.discrete_gaussian import ROUNDING

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise", "releases", "renyi", "loss", "unsampled"),
    [(1.0, 3000, 3.51, 3.19, 1733), (0.8, 1000, 3.70, 3.14, 949)],
)
def test_published_values_of_one_percent(noise, releases, renyi, loss, unsampled):
    assert poisson_renyi_epsilon(noise, 0.01, DELTA, releases) == pytest.approx(renyi, abs=0.01)
    spent = sampled_epsilon(noise, DELTA, releases, Sampling(0.01))
    assert spent == poisson_loss_epsilon(noise, 0.01, DELTA, releases) == pytest.approx(loss, abs=0.01)
    assert gaussian_epsilon(noise, DELTA, releases) == pytest.approx(unsampled, rel=1e-3)


@pytest.mark.parametrize("releases", [1, 4])
def test_noise_of_clients_costs_what_gaussian_noise_does(releases):
    """6 parts of σ = 9, for sums that differ by 30; dp-accounting's discrete Gaussian is that of one value."""
    variance, sensitivity = 6 * 9**2, 30
    one = from_discrete_gaussian_mechanism(variance**0.5, sensitivity, value_discretization_interval=1e-3)
    spent = one.self_compose(releases).get_epsilon_for_delta(DELTA)
    assert spent == pytest.approx(gaussian_epsilon(variance**0.5 / sensitivity, DELTA, releases), rel=1e-3)
    assert spent < gaussian_epsilon((variance - ROUNDING**2) ** 0.5 / sensitivity, DELTA, releases)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float, cell: float) -> float:
    """Return the larger of the two ∫ max(0, p − e^ε q), by sums over a grid of cells."""
    return float(max(np.maximum(a - np.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p))))


@pytest.mark.parametrize(
    ("noise", "probability", "releases", "delta"),
    [(1.0, 0.1, 1, 1e-3), (0.7, 0.5, 2, 1e-2), (2.0, 0.2, 2, 1e-4)],
)
def test_poisson_sampling_by_brute_force(noise, probability, releases, delta):
    x, step = np.linspace(-10 * noise, 10 * noise + 1, 2001, retstep=True)
    without = norm.pdf(x, 0, noise)
    with_ = (1 - probability) * without + probability * norm.pdf(x, 1, noise)
    if releases == 2:
        with_, without = np.multiply.outer(with_, with_), np.multiply.outer(without, without)
    spent, cell = sampled_epsilon(noise, delta, releases, Sampling(probability)), step**releases
    assert hockey_stick(with_, without, spent, cell) <= delta * (1 + 1e-4)  # the error of the sum at the kink
    assert hockey_stick(with_, without, 0.99 * spent, cell) > delta


def mean_of_some(values: tuple[float, ...], drawn: int, noise: float, x: np.ndarray) -> np.ndarray:
    """Return the density at x of the mean of so many of the values, drawn without replacement, with its noise."""
    means = [sum(some) / drawn for some in combinations(values, drawn)]
    return np.asarray(np.mean([norm.pdf(x, mean, noise / drawn) for mean in means], axis=0))


@pytest.mark.parametrize(("clients", "drawn"), [(4, 1), (6, 2), (8, 3)])
@pytest.mark.parametrize("noise", [2.0, 4.0])
def test_without_replacement_by_brute_force(clients, drawn, noise):
    # Of updates ±1, one is replaced by zero, or by the opposite: for all that the others may be.
    sampling, delta = Sampling(drawn=drawn, clients=clients), 1e-2
    spent = without_replacement_epsilon(noise, sampling, delta, 1)
    x, step = np.linspace(-1 - 10 * noise / drawn, 1 + 10 * noise / drawn, 4001, retstep=True)
    worst = 0.0
    for positive in range(clients):
        others = (1.0,) * positive + (-1.0,) * (clients - 1 - positive)
        densities = [mean_of_some((*others, own), drawn, noise, x) for own in (1.0, 0.0, -1.0)]
        worst = max(worst, *(hockey_stick(p, q, spent, step) for p, q in combinations(densities, 2)))
    assert 0 < worst <= delta


def test_samples_without_replacement_are_told_by_the_smaller_of_what_holds():
    few, half = Sampling(drawn=10, clients=1000), Sampling(drawn=50, clients=100)
    assert sampled_epsilon(1.0, DELTA, 3000, few) == pytest.approx(42.7, abs=0.1)
    assert sampled_epsilon(1.0, DELTA, 3000, half) == gaussian_epsilon(1.0, DELTA, 3000)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (2.0, 100), (0.2, 10)])
def test_with_probability_one_it_is_the_exact_gaussian(noise, releases):
    exact = gaussian_epsilon(noise, DELTA, releases)
    assert sampled_epsilon(noise, DELTA, releases, Sampling(1.0)) == exact
    assert exact <= poisson_loss_epsilon(noise, 1.0, DELTA, releases) <= exact * 1.002
    assert sampled_epsilon(noise, DELTA, releases, Sampling(0.999)) <= exact


def test_a_delta_below_the_truncation_has_the_renyi_account():
    spent = sampled_epsilon(1.0, 1e-16, 100, Sampling(0.01))
    assert spent == poisson_renyi_epsilon(1.0, 0.01, 1e-16, 100) < gaussian_epsilon(1.0, 1e-16, 100)


def nodes_of(rounds: int, restart: int) -> list[range]:
    """Return the rounds of each complete node of the trees, one by one."""
    found = []
    for start in range(0, rounds, restart or rounds):
        end = min(start + (restart or rounds), rounds)
        for level in range(rounds.bit_length()):
            first = range(start, end - 2**level + 1, 2**level)
            found += [range(node, node + 2**level) for node in first]
    return found


@pytest.mark.parametrize("restart", [0, 1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("num_turns", [1, 2, 3, 20])
def test_a_trees_sensitivity_is_the_sum_over_its_nodes(num_turns, restart):
    for rounds in (1, 2, 3, 7, 8, 20, 33):
        expected = max(
            sum(sum(each % num_turns == slot for each in node) ** 2 for node in nodes_of(rounds, restart))
            for slot in range(num_turns)
        )
        assert as_releases(rounds, num_turns, restart) == expected


@pytest.mark.parametrize("restart", [0, 1, 5])
@pytest.mark.parametrize("num_turns", [1, 3])
def test_nodes_that_are_released_twice_count_twice(num_turns, restart):
    def squares(slot: int, nodes: list[range]) -> int:
        return sum(sum(each % num_turns == slot for each in node) ** 2 for node in nodes)

    repeats = ((4, 3), (7, 2))
    again = [
        node for first, number in repeats for node in nodes_of(first + number, restart) if node[-1] >= first
    ]
    expected = max(squares(slot, nodes_of(12, restart) + again) for slot in range(num_turns))
    assert as_releases(12, num_turns, restart, repeats) == expected
    sampling = Sampling(num_turns=num_turns, restart=restart, repeats=repeats)
    assert sampled_epsilon(2.0, DELTA, 12, sampling) == gaussian_epsilon(2.0, DELTA, expected)


def test_a_tree_is_one_gaussian_release_by_brute_force():
    """A client that is in every other of 4 rounds: the nodes' sums, of 7 nodes, with and without it."""
    slot = np.array([[each % 2 == 0 for each in node] for node in nodes_of(4, 0)], dtype=object)
    change = np.array([sum(node) for node in slot], dtype=float)
    noise, rng = 3.0, np.random.default_rng(0)
    # The privacy loss is normal with mean μ²/2 and variance μ², where μ is what the nodes' vector moves by, over σ.
    outcomes = change + noise * rng.normal(size=(200_000, len(change)))
    loss = (2 * outcomes @ change - change @ change) / (2 * noise**2)
    equal = as_releases(4, 2, 0)
    assert change @ change == equal
    assert loss.mean() == pytest.approx(equal / (2 * noise**2), abs=4 * loss.std() / 200_000**0.5)
    spent, delta = sampled_epsilon(noise, 1e-2, 4, Sampling(num_turns=2, restart=0)), 1e-2
    assert np.maximum(1 - np.exp(spent - loss), 0).mean() == pytest.approx(delta, rel=0.1)


@pytest.mark.parametrize(("noise", "published"), [(1.13, 19.74), (8.83, 2.04)])
def test_a_tree_is_that_of_the_paper_and_of_dp_accounting(noise, published):
    """Kairouz et al. 2021, Stack Overflow: 1,600 rounds, no client twice, δ = 1e-6; theirs is a Rényi account."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    def renyi(steps: int, trees: int = 1) -> float:
        relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = RdpAccountant(neighboring_relation=relation)
        accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(noise, steps), trees)
        return float(accountant.get_epsilon(1e-6))

    once = sampled_epsilon(noise, 1e-6, 1600, Sampling(num_turns=1600, restart=0))
    assert as_releases(1600, 1600, 0) == 11 == np.ceil(np.log2(1601))  # theorem 4.1's
    assert 0.75 * published < once <= renyi(1600) < published
    # Each pass of 20 rounds a tree of its own: the Rényi divergences of 10 trees add up, and so do the squares.
    ten = sampled_epsilon(noise, 1e-6, 200, Sampling(num_turns=20, restart=20))
    assert as_releases(200, 20, 20) == 50
    assert 0.8 * renyi(20, trees=10) < ten <= renyi(20, trees=10)


def test_with_a_tree_for_each_round_it_is_the_gaussian_mechanism():
    assert sampled_epsilon(2.0, DELTA, 30, Sampling(restart=1)) == gaussian_epsilon(2.0, DELTA, 30)
    # In turns of 10 a client sends 3 times.
    assert sampled_epsilon(2.0, DELTA, 30, Sampling(num_turns=10)) == gaussian_epsilon(2.0, DELTA, 3)


@pytest.mark.parametrize(
    ("sampling", "noise", "last"),
    [
        (Sampling(0.05), 1.34, 26.8),
        (Sampling(num_turns=20, restart=0), 24.3, 42.2),
        (Sampling(num_turns=20, restart=20), 10.8, 68.4),
        (Sampling(num_turns=20), 4.83, 96.7),
    ],
)
def test_the_noise_of_the_last_model_as_docs_privacy_says(sampling, noise, last):
    """400 rounds with ε = 4: of each tree the last model has as many nodes as its rounds have binary digits 1."""
    assert (
        sampled_epsilon(1.005 * noise, DELTA, 400, sampling)
        <= 4
        <= sampled_epsilon(0.995 * noise, DELTA, 400, sampling)
    )
    rounds = sampling.restart or 400
    nodes = rounds.bit_count() * 400 // rounds
    assert noise * nodes**0.5 == pytest.approx(last, rel=3e-3)


def test_turns_are_accounted_as_docs_privacy_says():
    assert sampled_epsilon(1.0, DELTA, 3000, Sampling(num_turns=100)) == pytest.approx(37.6, abs=0.1)
    # Of full participation: a tree's node over all 8 rounds costs 64, and the Gaussian mechanism's 8 rounds 8.
    tree, gaussian = as_releases(8, 1, 0), as_releases(8, 1, 1)
    assert (tree * 1) ** 0.5 > (gaussian * 8) ** 0.5  # times the nodes of the last model: 1, and 8
