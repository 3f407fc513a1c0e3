"""Each client's share of work, E_k: how it is decided and written into messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.training.work import local_work, of_client, to_text

F80 = np.linspace(0.2, 1, 5)


@pytest.mark.parametrize(
    ("kind", "usual", "times", "expected"),
    [
        ("none", 4, F80, [4, 4, 4, 4, 4]),
        ("list:3,1,5,1,2", 4, F80, [3, 1, 5, 1, 2]),
        ("list:3", 4, [1.0], [3]),
        ("range:1-9", 4, F80, [1, 3, 5, 7, 9]),
        ("range:9-1", 4, F80, [9, 7, 5, 3, 1]),
        ("range:2-7", 4, [1.0], [2]),
        # τ = 0.2, 0.4, … 1: in 0.2 s a client does 0.2/τ of its E = 10: 10, 5, 3.3, 2.5, 2
        ("speed", 10, F80, [10, 5, 3, 2, 2]),
        ("speed", 2, F80, [2, 1, 1, 1, 1]),  # 0.67, 0.5, 0.4 steps: never less than one
        ("speed", 3, [0.1 + 0.2, 0.3], [3, 3]),  # 0.30000000000000004 isn't slower
        ("lognormal:0", 4, F80, [4, 4, 4, 4, 4]),
        ("uniform:6-6", 4, F80, [6, 6, 6, 6, 6]),
    ],
)
def test_work_by_hand(kind, usual, times, expected):
    assert local_work(kind, usual, np.asarray(times), seed=0) == expected


def test_drawn_work_has_its_distribution():
    uniform = local_work("uniform:1-4", 1, np.ones(40_000), seed=3)
    assert np.bincount(uniform).tolist()[1:] == pytest.approx([10_000] * 4, rel=0.03)  # σ ≈ 87 of 10,000
    drawn = np.array(local_work("lognormal:0.25", 1000, np.ones(40_000), seed=3))
    assert drawn.mean() == pytest.approx(1000, rel=0.01)  # σ ≈ 533/200 = 2.7
    assert np.log(drawn).var() == pytest.approx(0.25, rel=0.03)


@given(
    st.sampled_from(
        ["none", "range:1-50", "range:50-1", "uniform:2-9", "uniform:2-2", "lognormal:2", "speed"]
    ),
    st.integers(1, 1000),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30),
    st.integers(0, 2**63 - 1),
)
def test_everyone_works_and_the_same_whenever_asked(kind, usual, times, seed):
    work = local_work(kind, usual, np.array(times), seed)
    assert work == local_work(kind, usual, np.array(times), seed)
    assert len(work) == len(times)
    assert min(work) >= 1
    if kind == "speed":
        assert work[int(np.argmin(times))] == usual == max(work)
    for client, own in enumerate(work):  # what a client reads from its message
        assert of_client(to_text(work), 0, usual, client) == (0, own)
        assert of_client(to_text(work), usual, 0, client) == (own, 0)
    assert of_client(to_text(work), usual, 0, len(work) + 5) == (work[-1], 0)


def test_seeds_differ():
    assert len({tuple(local_work("uniform:1-100", 1, np.ones(5), seed)) for seed in range(20)}) == 20
