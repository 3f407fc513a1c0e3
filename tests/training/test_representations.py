"""The contract of every representation: each trains by the rule as the same formulas in float64 do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapp.names import WAYS, Way
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.trainer import can
from tests.selection import covering
from tests.training.cases import (
    RULES,
    assert_equals_reference,
    by_way,
    make_tasks,
    plan,
    three_clients,
)

MODELS = {
    "logistic": WAYS,
    "mlp": WAYS,
    "three layers": WAYS,
    "cnn": ("vmapped", "single"),
}
IMAGES = {"cnn": (1, 8, 8)}
EACH_RULE = pytest.mark.parametrize(("way", "rule"), covering(WAYS, RULES, together=1, rest=False))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_way_can_train(way):
    for model, ways in MODELS.items():
        for rule in RULES.values():
            (task, *_) = three_clients(model, rule, IMAGES.get(model, (1, 2, 3)))
            assert can(way, task) == (way in ways)


@pytest.mark.parametrize(
    ("model", "way", "rule", "constant", "anchor"),
    covering(
        MODELS,
        WAYS,
        RULES,
        [False, True],
        [False, True],
        rest=False,
        possible=lambda model, way, rule, constant, anchor: (
            way in MODELS[model] and not (model == "cnn" and constant and anchor)
        ),
    ),
)
def test_every_rule_is_that_of_the_formulas(model, way, rule, constant, anchor):
    """The anchor is another model than the first, as a client's own is pulled to the global one (Ditto)."""
    shape = IMAGES.get(model, (1, 2, 3))
    tasks = three_clients(model, RULES[rule], shape, constant=constant, anchor=anchor)
    for task, (w, loss) in zip(tasks, by_way(way, tasks), strict=True):
        assert_equals_reference(task, w, loss)


@EACH_RULE
def test_a_pull_to_where_it_starts_is_the_rule_itself_to_the_bit_but_for_the_dual_form(way, rule):
    tasks = three_clients("mlp", RULES[rule])
    anchored = by_way(way, [replace(task, anchor=task.start) for task in tasks])
    for (w, _), (v, _) in zip(anchored, by_way(way, tasks), strict=True):
        for name in w:
            assert torch.allclose(w[name], v[name], rtol=0, atol=1e-5 if way == "dual" else 0)


@EACH_RULE
def test_all_that_a_task_is_made_of_stays_as_it_is(way, rule):
    tasks = three_clients("mlp", RULES[rule], constant=True)

    def inputs(task: LocalTask) -> list[torch.Tensor]:
        vectors = (task.start, task.neighbours or {}, task.constant or {})
        return [*(value for one in vectors for value in one.values()), task.x[task.rows], task.y]

    before = [[value.clone() for value in inputs(task)] for task in tasks]
    trained = by_way(way, tasks)
    for task, values, (w, _) in zip(tasks, before, trained, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(inputs(task), values, strict=True))
        assert not any(value.requires_grad for value in task.start.values())
        assert all(not torch.equal(w[name], value) for name, value in task.start.items())


@pytest.mark.parametrize("way", WAYS)
def test_a_vector_that_the_rule_does_not_read_changes_no_bit(way):
    with_u = [replace(task, rule=LocalRule()) for task in three_clients("logistic", RULES["beta"])]
    without = [replace(task, neighbours=None) for task in with_u]
    for (w, loss), (v, other_loss) in zip(by_way(way, with_u), by_way(way, without), strict=True):
        assert all(torch.equal(w[name], v[name]) for name in w)
        assert loss == other_loss


@EACH_RULE
def test_a_constant_of_zero_changes_no_bit(way, rule):
    # SCAFFOLD's first round, with all control variates 0, is FedAvg's.
    without = three_clients("mlp", RULES[rule])
    zero = [
        replace(task, constant={name: torch.zeros_like(value) for name, value in task.start.items()})
        for task in without
    ]
    for (w, loss), (v, other_loss) in zip(by_way(way, zero), by_way(way, without), strict=True):
        assert all(torch.equal(w[name], v[name]) for name in w)
        assert loss == other_loss


@st.composite
def cases(draw: st.DrawFn, way: Way) -> list[LocalTask]:
    """Draw 1 to 5 ragged clients of one model and rule."""
    model = draw(st.sampled_from([model for model, ways in MODELS.items() if way in ways and model != "cnn"]))
    rule = LocalRule(
        alpha=draw(st.sampled_from([0.0, 0.3, 2.0])),
        beta=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        momentum=draw(st.sampled_from([0.0, 0.0, 0.9])),
        l2=draw(st.sampled_from([0.0, 0.1])),
        clip_norm=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    batch = draw(st.integers(0, 6))
    unit = draw(st.sampled_from(["epochs", "steps"]))
    seed = draw(st.integers(0, 2**32 - 1))
    plans = [
        plan(n, batch=batch, key=(seed, client, 1), **{unit: draw(st.integers(1, 3))})
        for client, n in enumerate(sizes)
    ]
    rates = [draw(st.sampled_from([0.005, 0.02, 0.05])) for _ in sizes]
    shape = draw(st.sampled_from([(1, 2, 3), (1,), (20,)]))
    one_start, constant = draw(st.booleans()), draw(st.booleans())
    return make_tasks(
        model, rule, plans, rates, shape=shape, one_start=one_start, constant=constant, seed=seed
    )


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
def test_any_clients_are_trained_by_the_formulas(way, data):
    tasks = data.draw(cases(way))
    for task, (w, loss) in zip(tasks, by_way(way, tasks), strict=True):
        assert_equals_reference(task, w, loss)
