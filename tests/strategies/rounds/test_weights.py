"""Participation schemes: E[Σ d_i Δ_i] by enumeration of every possible draw, with its probability."""

from collections.abc import Iterator
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.clients.weights import restricted_weights
from strategies.core.population import importances
from strategies.rounds.participation import Draw, Participation

P = np.array([0.1, 0.2, 0.3, 0.4])  # C = 4, unequal
DELTA = np.array([[1.0, -2.0], [5.0, 0.5], [-3.0, 4.0], [2.0, 7.0]])  # Δ_i in R²

SCHEMES = {
    "full": Participation("full"),
    "uniform": Participation("uniform", 0.5),  # L = 2
    "uniform, three of four": Participation("uniform", 0.75),
    "md": Participation("md", 0.75),  # L = 3
    "poisson": Participation("poisson", 0.3),  # q
    "paired": Participation("paired"),
    "fixed": Participation("fixed", fixed=(0, 2, 3)),
}


def every_draw(participation: Participation, p: np.ndarray) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Enumerate (probability, drawn clients) of a scheme, from its definition."""
    C, L = len(p), participation.sample_size(len(p))
    if participation.scheme == "full":
        yield 1.0, tuple(range(C))
    elif participation.scheme == "fixed":
        yield 1.0, participation.fixed
    elif participation.scheme == "uniform":
        subsets = list(combinations(range(C), L))
        yield from ((1 / len(subsets), subset) for subset in subsets)
    elif participation.scheme == "poisson":
        q = participation.fraction
        for coins in product((False, True), repeat=C):
            yield prod(q if coin else 1 - q for coin in coins), tuple(i for i in range(C) if coins[i])
    elif participation.scheme == "md":
        yield from ((prod(p[i] for i in drawn), drawn) for drawn in product(range(C), repeat=L))
    else:
        yield from ((1 / (C - 1), (i, C - 1)) for i in range(C - 1))


def expected_update(participation: Participation, p: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """E[Σ d_i Δ_i]."""
    total = np.zeros(delta.shape[1])
    for probability, drawn in every_draw(participation, p):
        draw = participation.weigh(drawn, p)
        total += probability * np.array(draw.weights) @ delta[list(draw.clients)]
    return total


@pytest.mark.parametrize("name", ["full", "uniform", "uniform, three of four", "md", "poisson"])
def test_unbiased_schemes_move_by_the_federated_update_on_average(name: str) -> None:
    # Σ p_i Δ_i = .1 (1, −2) + .2 (5, .5) + .3 (−3, 4) + .4 (2, 7) = (1.0, 3.9)
    np.testing.assert_allclose(expected_update(SCHEMES[name], P, DELTA), [1.0, 3.9], rtol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_expected_weights_are_those_of_the_enumeration(name: str) -> None:
    # With Δ_i the unit vectors, E[Σ d_i Δ_i] is E[d].
    enumerated = expected_update(SCHEMES[name], P, np.eye(4))
    np.testing.assert_allclose(SCHEMES[name].expected_weights(P), enumerated, rtol=1e-12)


def test_expected_weights_of_the_biased_schemes() -> None:
    # paired: 1/2 for the last, 1/2 shared by the first C − 1 = 3.
    np.testing.assert_allclose(SCHEMES["paired"].expected_weights(P), [1 / 6, 1 / 6, 1 / 6, 1 / 2])
    # fixed: p over the list (0, 2, 3), by its sum .1 + .3 + .4 = .8.
    np.testing.assert_allclose(SCHEMES["fixed"].expected_weights(P), [1 / 8, 0, 3 / 8, 1 / 2])


@pytest.mark.parametrize(
    ("name", "drawn", "expected"),
    [
        ("full", (0, 1, 2, 3), Draw((0, 1, 2, 3), (0.1, 0.2, 0.3, 0.4))),
        ("uniform", (3, 1), Draw((1, 3), (0.2 * 4 / 2, 0.4 * 4 / 2))),  # p_i C / L
        ("md", (2, 0, 3), Draw((0, 2, 3), (1 / 3, 1 / 3, 1 / 3))),  # 1 / L per draw
        ("poisson", (1, 3), Draw((1, 3), (0.2 / 0.3, 0.4 / 0.3))),  # p_i / q, whoever else came
        ("poisson", (), Draw((), ())),
        ("paired", (1, 3), Draw((1, 3), (0.5, 0.5))),
        ("fixed", (0, 2, 3), Draw((0, 2, 3), (0.1 / 0.8, 0.3 / 0.8, 0.4 / 0.8))),
    ],
)
def test_weights_by_hand(name: str, drawn: tuple[int, ...], expected: Draw) -> None:
    draw = SCHEMES[name].weigh(drawn, P)
    assert draw.clients == expected.clients
    assert draw.weights == pytest.approx(expected.weights, rel=1e-12)


def test_md_trains_a_client_drawn_twice_once_and_counts_it_twice() -> None:
    assert SCHEMES["md"].weigh((3, 1, 3), P) == Draw((1, 3), (1 / 3, 2 / 3))


@pytest.mark.parametrize("name", SCHEMES)
def test_draw_returns_what_weigh_says(name: str) -> None:
    participation, L = SCHEMES[name], SCHEMES[name].sample_size(4)
    possible = {participation.weigh(drawn, P) for _, drawn in every_draw(participation, P)}
    drawn = {participation.draw(P, np.random.default_rng(seed)) for seed in range(500)}
    assert drawn <= possible
    if name in ("uniform", "poisson", "paired"):  # every subset, and every partner, comes up in 500 draws
        assert drawn == possible
    if name == "md":  # L draws in all
        assert {round(sum(w * L for w in draw.weights)) for draw in drawn} == {L}


@pytest.mark.parametrize("name", SCHEMES)
def test_draw_depends_on_the_seed_alone(name: str) -> None:
    def draws(seed: int) -> list[Draw]:
        rng = np.random.default_rng(seed)
        return [SCHEMES[name].draw(P, rng) for _ in range(20)]

    assert draws(1) == draws(1)
    if name in ("uniform", "md", "poisson", "paired"):
        assert draws(1) != draws(2)


@pytest.mark.parametrize("name", ["uniform", "md", "poisson", "paired"])
def test_mean_of_many_draws_approaches_the_expected_weights(name: str) -> None:
    rng, number = np.random.default_rng(0), 4000
    weights = np.zeros((number, 4))
    for row in weights:
        draw = SCHEMES[name].draw(P, rng)
        row[list(draw.clients)] = draw.weights
    error = np.abs(weights.mean(axis=0) - SCHEMES[name].expected_weights(P))
    # Five standard errors of the mean; a constant weight has none.
    assert (error <= 5 * weights.std(axis=0) / np.sqrt(number) + 1e-12).all()


def test_variance_of_sampling_without_replacement_is_that_of_lemma_5_1() -> None:
    """004, lemma 5.1: E‖â − ā‖² = Σ σ_k² / (C L) + (C−L)/(C−1) Σ ‖ā − ā_k‖² / (C L), by enumeration.

    a_k = ā_k ± σ_k with probability 1/2 each, so that every subset and every sign can be listed.
    """
    C, L, uniform = 4, 2, np.full(4, 0.25)
    mean_k, sigma = np.array([1.0, 4.0, -2.0, 7.0]), np.array([0.5, 2.0, 1.0, 3.0])
    mean = mean_k.mean()
    participation = Participation("uniform", L / C)
    measured = 0.0
    for probability, drawn in every_draw(participation, uniform):
        draw = participation.weigh(drawn, uniform)
        clients = list(draw.clients)
        for signs in product((-1, 1), repeat=L):
            a_hat = np.array(draw.weights) @ (mean_k[clients] + np.array(signs) * sigma[clients])
            measured += probability / 2**L * (a_hat - mean) ** 2
    # Σ σ² = .25 + 4 + 1 + 9 = 14.25; ā = 2.5; Σ (ā − ā_k)² = 2.25 + 2.25 + 20.25 + 20.25 = 45
    # 14.25 / 8 + (2/3) 45 / 8 = 1.78125 + 3.75
    assert measured == pytest.approx(5.53125, rel=1e-12)


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=12),
    scheme=st.sampled_from(["full", "uniform", "md", "paired", "fixed"]),
    fraction=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
)
def test_any_draw_is_ascending_distinct_and_in_range(
    sizes: list[int], scheme: str, fraction: float, seed: int
) -> None:
    p = importances("samples", sizes)
    participation = Participation(scheme, fraction, (0, len(sizes) - 1) if scheme == "fixed" else ())
    draw = participation.draw(p, np.random.default_rng(seed))
    assert list(draw.clients) == sorted(set(draw.clients))
    assert 0 <= draw.clients[0] <= draw.clients[-1] < len(sizes)
    assert len(draw.weights) == len(draw.clients)
    assert min(draw.weights) > 0
    if scheme != "uniform":  # whose weights p_i C / L sum to 1 on average only
        assert sum(draw.weights) == pytest.approx(1.0, rel=1e-12)


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_importances_sum_to_one_and_follow_the_sizes(sizes: list[int]) -> None:
    by_samples, by_client = importances("samples", sizes), importances("uniform", sizes)
    assert by_samples.sum() == pytest.approx(1.0, rel=1e-12)
    assert by_client.sum() == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(
        by_samples * sizes[0], by_samples[0] * np.array(sizes)
    )  # p_i / p_0 = n_i / n_0
    assert len(set(by_client)) == 1


def test_importances_by_hand() -> None:
    assert importances("samples", [1, 2, 5]).tolist() == [0.125, 0.25, 0.625]
    assert importances("uniform", [1, 2, 5, 9]).tolist() == [0.25] * 4


def test_importances_among_some_sum_to_one() -> None:
    some = np.array([True, False, True])
    assert restricted_weights([0.125, 0.25, 0.625], some).tolist() == pytest.approx([1 / 6, 0, 5 / 6])
    assert restricted_weights([0.0, 1.0, 0.0], some).tolist() == [0, 0, 0]


def test_importances_of_an_unknown_kind_name_key_value_and_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"client_weights = 'size'.*samples, uniform"):
        importances("size", [1, 2])


def test_importances_by_samples_of_clients_without_any_are_refused() -> None:
    # 0 / 0 would make every weight, and then the model, NaN.
    with pytest.raises(ValueError, match="samples"):
        importances("samples", [0, 0])


@pytest.mark.parametrize(
    ("text", "fraction", "expected"),
    [
        ("full", 1.0, Participation("full")),
        ("uniform", 0.5, Participation("uniform", 0.5)),
        ("md", 0.2, Participation("md", 0.2)),
        ("poisson", 0.2, Participation("poisson", 0.2)),
        ("paired", 1.0, Participation("paired")),
        ("fixed:5,0,3", 1.0, Participation("fixed", 1.0, (0, 3, 5))),
    ],
)
def test_parse(text: str, fraction: float, expected: Participation) -> None:
    assert Participation.parse(text, fraction) == expected


LISTED = "distinct client indices, such as fixed:0,3"


UNKNOWN = ("", "half", "Full", "fixed", "full:1", "uniform:0.5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "full, uniform, md, poisson, turns, paired, flower, fixed:I,J") for text in UNKNOWN),
        *((f"fixed:{rest}", LISTED) for rest in ("", "a", "0,,1", "-1", "2,2", "1.5")),
    ],
)
def test_parse_names_key_value_and_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        Participation.parse(text)
    assert f"participation = {text!r}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "enough", "said"),
    [
        ("fixed:0,3", 4, "client 3: there are 3 clients, allowed are 0 to 2"),
        ("paired", 2, "needs 2 clients or more, there are 1"),
    ],
)
def test_a_scheme_wants_enough_clients(text: str, enough: int, said: str) -> None:
    Participation.parse(text).check(enough)
    with pytest.raises(ValueError, match=said):
        Participation.parse(text).check(enough - 1)


@pytest.mark.parametrize(
    ("fraction", "clients", "expected", "flowers"),
    [(1.0, 7, 7, 7), (0.1, 20, 2, 2), (0.28, 10, 3, 2), (0.01, 5, 1, 1), (0.66, 3, 2, 1)],
)
def test_sample_size_is_the_rounded_share_which_flower_rounds_down_and_at_least_one(
    fraction: float, clients: int, expected: int, flowers: int
) -> None:
    assert Participation("uniform", fraction).sample_size(clients) == expected
    assert Participation("flower", fraction).sample_size(clients) == flowers
    assert Participation("flower", fraction, least=3).sample_size(clients) == min(max(flowers, 3), clients)
