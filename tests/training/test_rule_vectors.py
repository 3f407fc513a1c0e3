"""The vector space, representation by representation: each does what plain matrices in float64 do."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedapp.training.rule import Parameters, Stack, Tensors
from fedapp.training.span import Basis, Columns, Network, Span

seeds, numbers = st.integers(0, 2**32 - 1), st.floats(-3, 3, width=32)
SHAPES = {"weight": (3, 4), "bias": (3,), "scale": ()}


def named(generator: torch.Generator) -> Parameters:
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def norm(parameters: Parameters) -> float:
    return float(torch.cat([value.double().flatten() for value in parameters.values()]).norm())


def assert_close(found: Parameters, expected: Parameters) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-6, atol=1e-6)


@given(seed=seeds, factor=numbers)
def test_tensors_are_added_scaled_and_moved_by_name(seed, factor):
    generator = torch.Generator().manual_seed(seed)
    a, b = named(generator), named(generator)
    other = {name: b[name] for name in reversed(b)}  # by name, not by place
    before = {name: value.clone() for name, value in a.items()}
    assert_close((Tensors(a) + Tensors(other)).named, {name: a[name] + b[name] for name in a})
    assert_close((Tensors(a) - Tensors(other)).named, {name: a[name] - b[name] for name in a})
    assert_close((factor * Tensors(a)).named, {name: factor * a[name] for name in a})
    assert all(torch.equal(a[name], before[name]) for name in a)
    Tensors(a).descend(factor, Tensors(other))
    assert_close(a, {name: before[name] - factor * b[name] for name in a})


@given(seed=seeds, limit=st.floats(0.01, 20))
def test_a_vector_is_cut_to_its_norm_and_a_shorter_one_left(seed, limit):
    a = named(torch.Generator().manual_seed(seed))
    cut = Tensors(a).clipped(limit).named
    assert_close(cut, {name: value * min(1.0, limit / norm(a)) for name, value in a.items()})
    assert norm(cut) <= limit * (1 + 1e-5)


def test_a_zero_vector_survives_clipping():
    zeros = {"weight": torch.zeros(2, 2)}
    assert torch.equal(Tensors(zeros).clipped(1.0).named["weight"], zeros["weight"])
    stacked = Stack.of([zeros, {"weight": torch.full((2, 2), 2.0)}]).clipped(1.0).named["weight"]
    # the other's norm is √(4 · 2²) = 4
    assert torch.equal(stacked, torch.stack([torch.zeros(2, 2), torch.full((2, 2), 0.5)]))


@given(seed=seeds, factor=numbers, clients=st.integers(1, 4))
def test_a_stack_is_its_clients_side_by_side(seed, factor, clients):
    generator = torch.Generator().manual_seed(seed)
    rates = torch.rand(clients, generator=generator)
    many, others = ([named(generator) for _ in range(clients)] for _ in range(2))
    a, b = Stack.of(many), Stack.of(others)
    parts = [(Tensors(one), Tensors(other)) for one, other in zip(many, others, strict=True)]
    for stack, expected in [
        (a + b, [one + other for one, other in parts]),
        (a - b, [one - other for one, other in parts]),
        (factor * a, [factor * one for one, _ in parts]),
        (a.clipped(2.0), [one.clipped(2.0) for one, _ in parts]),
    ]:
        assert type(stack) is Stack
        assert_close(stack.named, Stack.of([vector.named for vector in expected]).named)
    # the first move, each at its own rate; the rest stay
    moving = (clients + 1) // 2
    a.first(moving).descend(rates[:moving], b.first(moving))
    for (one, other), rate in zip(parts[:moving], rates.tolist(), strict=False):
        one.descend(rate, other)
    assert_close(a.named, Stack.of([one.named for one, _ in parts]).named)


# The span of known models and a client's rows ----------------------------------------------------------------


def worked_out(vector: Span, known: list[Tensor], x: Tensor) -> Tensor:
    """Σ k_j W_j + A X, in float64."""
    a = torch.zeros(known[0].shape[0], len(x), dtype=torch.float64)
    for matrix, factor in vector.rows.items():
        if isinstance(matrix, Columns):
            a[:, matrix.index] += factor * matrix.values
        else:
            a += factor * matrix
    return sum((k * w for k, w in zip(vector.known, known, strict=True)), start=a @ x)


@given(seed=seeds, factor=numbers, rate=st.floats(0.01, 1), steps=st.integers(1, 3))
def test_a_span_is_what_it_works_out_to(seed, factor, rate, steps):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    known, x = [random(3, 4), random(3, 4)], random(5, 4)
    basis = Basis(known, [w @ x.T for w in known], x @ x.T)

    def full(vector: Span) -> Tensor:
        return worked_out(vector, known, x)

    w = Span((1.0, 0.0), {random(3, 5): 1.0}, basis)
    sent, velocity = Span((1.0, 0.0), {}, basis), Span((0.2, 0.3), {random(3, 5): 1.0}, basis)
    for _ in range(steps):
        batch = torch.randperm(5, generator=generator)[:2]
        g = Span((0.0, 0.0), {Columns(batch, random(3, 2)): 0.5}, basis)
        for vector, expected in [
            (g + w, full(g) + full(w)),
            (w - sent, full(w) - full(sent)),
            (w - w, torch.zeros(3, 4, dtype=torch.float64)),
            (factor * (w + g), factor * (full(w) + full(g))),
        ]:
            torch.testing.assert_close(full(vector), expected)
        for vector in (g, 3.0 * g, w, g + factor * w, factor * sent + velocity):
            torch.testing.assert_close(vector.square(), full(vector).square().sum())
        v = 0.9 * velocity + (g + factor * w)
        direction, moved, before = full(v), full(w) - rate * full(v), full(velocity)
        w.descend(rate, v)
        torch.testing.assert_close(full(w), moved)
        torch.testing.assert_close(full(v), direction)
        torch.testing.assert_close(full(velocity), before)
        assert len(v.rows) == 1
        velocity = v


def test_a_network_is_clipped_as_a_whole():
    # One row (3, 4) and δ = (1): the first layer's gradient is (3, 4), of norm 5; above it (12), so 13 in all.
    x = torch.tensor([[3.0, 4.0]])
    basis = Basis([], [], x @ x.T)
    first = Span((), {Columns(torch.tensor([0]), torch.tensor([[1.0]])): 1.0}, basis)
    network = Network(first, Tensors({"above": torch.tensor([12.0])}))
    assert network.clipped(13.0) is network
    cut = network.clipped(6.5)
    assert list(cut.first.rows.values()) == [0.5]
    assert cut.above.named["above"].tolist() == [6.0]
