"""Random streams: one for each seed, purpose and list of ids, and one module that makes them."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest, norm

from strategies import streams

ROOT = Path(__file__).parents[2]

seeds = st.integers(0, 2**63 - 1)
purposes = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)
# Small numbers and zeros often: those that a list of words loses or runs together.
ids = st.lists(st.integers(0, 3) | st.integers(0, 2**64), max_size=4)
names = st.tuples(seeds | st.integers(0, 3), purposes | st.sampled_from(["batches", "participants"]), ids)


def first(name: tuple[int, str, list[int]]) -> list[int]:
    seed, purpose, numbers = name
    return streams.generator(seed, purpose, *numbers).integers(2**63, size=2).tolist()


@given(names, names)
def test_two_names_are_one_stream_only_if_they_are_equal(one, other):
    assert (first(one) == first(other)) == (one == other)


@given(seeds, purposes, ids)
def test_no_list_of_ids_is_another_one_lengthened_or_split(seed, purpose, numbers):
    variants = [numbers, [*numbers, 0], [0, *numbers], [*numbers, 2**32]]
    variants += [[*numbers[:-1], numbers[-1] % 2**32, numbers[-1] // 2**32]] if numbers else []
    distinct = {tuple(variant) for variant in variants}
    assert len({tuple(first((seed, purpose, list(variant)))) for variant in distinct}) == len(distinct)


def test_participants_and_tasks_of_any_client_are_drawn_apart():
    # With one list of numbers as the seed, [seed, 1, round] was both round's participants and client 1's batches.
    rounds = {tuple(first((7, "participants", [number]))) for number in range(1, 200)}
    tasks = {tuple(first((7, "batches", [1, number]))) for number in range(1, 200)}
    assert not rounds & tasks
    assert first((7, "local-work", [])) != first((7, "batches", [202, 0]))


def test_a_stream_is_the_same_in_every_process_and_version():
    # The name is 7/participants/3; printf 7/participants/3 | b2sum -l 128
    entropy = 0x062A1DBB06DB7E833D36D2AA165C36B0
    assert streams.whole_number(7, "participants", 3) == entropy >> 97
    expected = np.random.Generator(np.random.PCG64(entropy)).random(4)
    assert np.array_equal(streams.generator(7, "participants", np.int64(3)).random(4), expected)


@pytest.mark.parametrize(
    ("seed", "purpose", "numbers"),
    [
        (0, "", ()),
        (0, "7/a", ()),
        (0, "A", ()),
        (0, "a b", ()),
        (0.5, "a", ()),
        (0, "a", ("1",)),
        (0, "a", (1.0,)),
    ],
)
def test_what_is_no_name_is_refused(seed, purpose, numbers):
    with pytest.raises((ValueError, TypeError)):
        streams.generator(seed, purpose, *numbers)


@given(seeds, purposes, st.lists(ids, max_size=20))
def test_streams_of_many_are_those_of_each(seed, purpose, lists):
    found = [rng.bit_generator.state for rng in streams.generators(seed, purpose, lists)]
    assert found == [streams.generator(seed, purpose, *numbers).bit_generator.state for numbers in lists]


@given(st.lists(st.integers(0, 2**128 - 1) | st.sampled_from([0, 1, 2**32, 2**64 - 1, 2**96, 2**127])))
def test_seeds_are_numpys(entropies):
    found = streams._seeded(b"".join(entropy.to_bytes(16, "big") for entropy in entropies))
    expected = [np.random.SeedSequence(entropy).generate_state(4, np.uint64) for entropy in entropies]
    assert found.tolist() == [words.tolist() for words in expected]


def test_what_is_no_name_of_many_is_refused():
    for purpose, numbers in (("A", [[1]]), ("a", [[1.0]])):
        with pytest.raises((ValueError, TypeError)):
            list(streams.generators(0, purpose, numbers))  # type: ignore[arg-type]


def test_unpredictable_streams_differ():
    assert streams.unpredictable().random() != streams.unpredictable().random()


def test_unpredictable_draws_have_their_distributions():
    rng, size = streams.unpredictable(), 20_000
    assert kstest(rng.normal(3.0, 2.0, size), norm(3.0, 2.0).cdf).pvalue > 1e-6
    assert kstest(rng.random(size), "uniform").pvalue > 1e-6
    assert chisquare(np.bincount(rng.integers(5, size=size), minlength=5)).pvalue > 1e-6
    assert chisquare(np.bincount(rng.integers(2, size=size), minlength=2)).pvalue > 1e-6
    assert set(rng.integers(1, size=9)) == {0}
    assert 0 <= rng.integers(2**62) < 2**62
    assert 1 <= rng.integers(1, 2**63 - 1) < 2**63 - 1
    assert set(rng.integers(7, 9, size=99)) == {7, 8}
    assert sorted(rng.permutation(50)) == list(range(50))
    assert rng.normal(size=(2, 3)).shape == (2, 3)


def test_a_draw_that_would_be_of_another_generator_is_refused():
    with pytest.raises(NotImplementedError, match="no draw 'choice'"):
        streams.unpredictable().choice(3)
    with pytest.raises(NotImplementedError, match="no draw 'bit_generator'"):
        _ = streams.unpredictable().bit_generator


@cache
def calls() -> dict[str, list[tuple[str, str, int]]]:
    """Every purpose that the project draws for, its file and line, by the function that it calls."""
    found: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for folder in ("strategies", "fedapp", "custom", "studies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            for node in ast.walk(ast.parse(text)) if "streams." in text else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    name = ast.unparse(node.func)
                    if name in ("streams.generator", "streams.generators", "streams.whole_number"):
                        purpose = node.args[1]
                        assert isinstance(purpose, ast.Constant), f"{path}:{node.lineno} hides its purpose"
                        found[name].append((purpose.value, str(path.relative_to(ROOT)), node.lineno))
    return found


def test_a_purpose_belongs_to_one_place():
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for purpose, *place in calls()["streams.generator"] + calls()["streams.whole_number"]:
        places[purpose].append(tuple(place))
    assert len(places) > 10
    shared = {purpose: where for purpose, where in places.items() if len(where) > 1}
    assert not shared


def test_what_is_drawn_for_many_is_drawn_for_one_in_the_same_file():
    single = calls()["streams.generator"] + calls()["streams.whole_number"]
    files = {purpose: file for purpose, file, _ in single}
    several = calls()["streams.generators"]
    assert several
    assert all(files[purpose] == file for purpose, file, _ in several)
