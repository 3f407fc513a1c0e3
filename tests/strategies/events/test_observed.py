"""Weights by what is observed: those of the formula over all clients, to the bit, without a look at all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import Contribution, Progress
from strategies.core.population import Population
from strategies.events import observed_periods as observed
from tests.selection import covering
from tests.strategies.events.runs import CENTRES, KINDS, SIZES


@dataclass
class Seen:
    contributions: int
    since: int


STORY = st.lists(
    st.one_of(
        st.tuples(st.just("aggregations"), st.integers(1, 9)),
        st.tuples(st.just("contributes"), st.integers(0, 99)),
        st.tuples(st.just("comes"), st.integers(0, 1)),  # during the aggregation under way, or before it
        st.tuples(st.just("goes"), st.integers(0, 99)),
    ),
    max_size=60,
)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), STORY)
def test_a_period_is_that_of_the_formula_over_all_clients(begun, story):
    members, aggregations = [Seen(count, 0) for count in begun], 0
    kept = observed.Observed(members)
    for what, number in story:
        if what == "aggregations":
            aggregations += number
        elif what == "contributes":
            members[number % len(members)].contributions += 1
            kept.contributed()
        else:
            if what == "comes":
                members.append(Seen(0, aggregations + number))
                kept.replace(None, members[-1])
            elif len(members) > 1:
                kept.replace(members.pop(number % len(members)), None)
        assert [kept.period(m, aggregations) for m in members] == observed.contribution_periods(
            members, aggregations
        ).tolist()


def checked(kind: Any, told: list[tuple[float, ...]]) -> Any:
    """Return a strategy that compares what it weighs with what the formulas say of all clients."""

    class Checked(kind):  # type: ignore[misc]
        def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
            weights, members = super().weigh(contributions), self.session.task_table.active_clients
            d = self.session.population.client_weights_of(
                [m.client for m in members]
            ) * observed.contribution_periods(members, self.session.aggregations)
            d = np.minimum(d, self.session.safeguards.max_weight or np.inf)
            known = dict(zip((m.client.index for m in members), d.tolist(), strict=True))
            told.append(tuple(weights))
            assert list(weights) == [known.get(c.client.index, 0.0) for c in contributions]
            return weights

    return Checked


OPTIONS: dict[str, dict[str, Any]] = {
    "observed": {"aggregation_weights": "observed"},
    "few at work": {"concurrency": 2},
    "guarded": {"concurrency": 2, "safeguards": "on"},
}


@pytest.mark.parametrize(("scheme", "case"), covering(KINDS, OPTIONS, together=1))
def test_a_run_weighs_as_the_formulas_say_of_all_clients(federation, start, monkeypatch, scheme, case):
    told, options = list[tuple[float, ...]](), OPTIONS[case]
    monkeypatch.setitem(KINDS, scheme, checked(KINDS[scheme], told))
    grid = federation(CENTRES, SIZES, messages=False)
    grid.spoil(3, "raise")  # is dropped, and back later

    def observe(progress: Progress) -> None:
        if progress.time > 5:
            grid.spoil(3, None)

    run = start(
        scheme, grid, 300, lr=0.01, eval_every=7, arrival_weight_bound=1.5, observe=observe, **options
    )
    assert len(told) == 300
    assert len(set(told)) > 40
    assert run.strategy.session.task_table.members[3].since > 0  # it was dropped
    assert run.strategy.session.task_table.members[3].contributions > 1
    assert ("safeguards" in options) == (max(map(max, told)) == 1.5)


def test_arrivals_look_at_all_clients_only_where_the_model_is_evaluated(federation, start, monkeypatch):
    formula, looks = observed.contribution_periods, []
    monkeypatch.setattr(observed, "contribution_periods", lambda *given: looks.append(1) or formula(*given))
    importances = Population.client_weights_of

    def noted(population: Population, clients: Sequence[Any]) -> Any:
        looks.append(2)
        return importances(population, clients)

    monkeypatch.setattr(Population, "client_weights_of", noted)
    grid = federation(CENTRES, SIZES, messages=False)
    run = start("async", grid, 200, lr=0.01, eval_every=100, aggregation_weights="observed")
    assert len(run.evaluations) == 3
    assert looks.count(1) <= 2 * 3
    assert looks.count(2) <= 2 * 3
