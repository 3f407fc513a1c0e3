"""The direction that a ClientApp of anybody's tells the server."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapp.data.direction import principal_direction
from strategies import RunError, Spectral
from strategies.client import direction_of
from strategies.testing import MemoryGrid
from tests.strategies.flower.test_stock_app import grid, model, stock


def test_it_is_the_top_right_singular_vector_by_hand():
    # XᵀX = [[2, 1], [1, 2]]: eigenvalue 3 of (1, 1)/√2
    assert direction_of([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) == pytest.approx([2**-0.5] * 2)
    # One row is its own direction; the sum of its entries decides the sign, and then the first of the largest.
    assert direction_of([[-3.0, 1.0]]).tolist() == pytest.approx([3 / 10**0.5, -1 / 10**0.5])
    assert direction_of([[-1.0, 1.0]]) == pytest.approx([2**-0.5, -(2**-0.5)])


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([1e-200, 1.0, 1e200]),
)
def test_it_is_the_apps_direction_for_wide_and_tall_data(rows, columns, positive, seed, scale):
    x = np.random.default_rng(seed).normal(size=(rows, columns))
    x = np.abs(x) if positive else x
    x[:, 0] += 3.0  # one singular value stands out
    m = direction_of(scale * x.reshape(rows, columns, 1))
    assert m == pytest.approx(principal_direction(x), abs=1e-8)
    assert np.linalg.norm(m) == pytest.approx(1.0)
    assert m.sum() >= 0
    assert not positive or m.min() >= 0


@given(hnp.arrays(np.float64, (3, 4), elements=st.floats(-1, 1)).filter(lambda g: np.abs(g).max() > 1e-3))
def test_a_gradient_keeps_its_sign(gradient):
    m = direction_of(gradient=gradient)
    assert m == pytest.approx(gradient.ravel() / np.linalg.norm(gradient))
    assert direction_of(gradient=-gradient) == pytest.approx(-m)


def test_what_is_no_data_is_refused_in_one_line():
    with pytest.raises(TypeError, match=r"^direction_of\(\) takes either features or gradient$"):
        direction_of()
    with pytest.raises(TypeError, match="takes either"):
        direction_of([[1.0]], gradient=[1.0])
    with pytest.raises(ValueError, match=r"^features of shape \(3,\): must be rows, \(n, …\)$"):
        direction_of([1.0, 2.0, 3.0])
    for values in (np.zeros((2, 3)), np.empty((0, 3)), np.array([[1.0, np.nan]]), np.array([[1.0, np.inf]])):
        with pytest.raises(
            ValueError, match=r"^features of shape \(\d, \d\): must be finite and not all zero$"
        ):
            direction_of(values)


@pytest.mark.parametrize("by", ["features", "gradient"])
def test_three_lines_in_a_stock_app_make_the_graph(by):
    app = stock()

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        own = np.eye(3)[[0, 0, 2][int(context.node_config["partition-id"])]] + 0.1
        m = direction_of(own[None]) if by == "features" else direction_of(gradient=own)
        return Message(RecordDict({"direction": ArrayRecord([m])}), reply_to=message)

    strategy = Spectral(perturbation_beta=1.0)
    # Nodes by their ids, as the app has no handler of query.describe: 0 and 1 have the same data.
    nodes = MemoryGrid(app, [{"partition-id": i} for i in range(3)], node_ids=[10, 20, 30])
    result = strategy.start(nodes, model(), num_rounds=2)
    assert strategy.session.graph is not None
    a = strategy.session.graph.adjacency
    assert a[0, 1] > 10 * a[0, 2] > 0
    # Clients 0 and 1 weigh more than client 2, whose centre is the lowest.
    p = a.sum(0) / a.sum()
    w = 1.0
    for _ in range(2):
        w += float(p @ (np.array([3.0, 2.0, -1.0]) - w)) / 2
    assert result.arrays["w"].numpy() == pytest.approx([w, w], abs=1e-6)


def test_without_the_handler_the_error_names_what_makes_one():
    with pytest.raises(RunError, match=r"strategies\.client\.direction_of makes a ClientApp's handler"):
        Spectral().start(grid(), ArrayRecord({"w": Array(np.zeros(2, np.float32))}), num_rounds=1)
