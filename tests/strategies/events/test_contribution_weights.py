"""What each client counts without rounds, alone: d_i = p_i P_i, alike, and what then is minimised, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategies import RunError
from strategies.clients.client_state import ClientState
from strategies.events.contribution_weights import ContributionWeights
from strategies.events.tasks import TaskTable
from tests.strategies.parts import client, run_of

P, PERIODS = [0.125, 0.25, 0.625], [1.0, 2.0, 4.0]


def weights(
    aggregation_weights: str = "time-based", bound: Any = None, discounts_staleness: bool = False
) -> ContributionWeights:
    run = run_of(
        name="Mine",
        scheduler=SimpleNamespace(
            real_time=False,
            keeps_times=True,
            cycles=lambda members, everybody, interval: periods_of(members),
        ),
    )
    task_table = TaskTable(run)
    task_table.members = {index: ClientState(client(index, size)) for index, size in enumerate((1, 2, 5))}
    population: Any = SimpleNamespace(
        version=0,
        follows_from_sizes=False,
        safeguards=SimpleNamespace(weights=bound or (lambda clients, d: d), shrinkage=lambda shares: None),
        client_weights_of=lambda clients: (
            np.array([c.num_examples for c in clients]) / sum(c.num_examples for c in clients)
        ),
    )
    hooks: Any = SimpleNamespace(
        observes_periods=False,
        discounts_staleness=discounts_staleness,
        interval=None,
        contribution_periods=lambda times: times,
        expected_periods=lambda times: times,
        identical_weight=lambda n: 1 / n,
        weights_over_time=lambda: None,
    )
    return ContributionWeights(run, task_table, population, aggregation_weights, hooks)


def periods_of(members: Any) -> Any:
    return np.array([PERIODS[member.client.index] for member in members])


def test_time_based_weights_make_up_for_how_seldom_a_client_contributes():
    part = weights()
    assert part.current.weight == {0: 0.125, 1: 0.5, 2: 2.5}  # p_i P_i
    assert part.expected_share() == pytest.approx(dict(enumerate(P)))  # d_i / P_i: unbiased
    assert part.total_variation() == pytest.approx(0)


def test_with_the_same_weight_for_all_the_frequent_count_more():
    part = weights("identical")
    assert part.current.weight == pytest.approx(dict.fromkeys(range(3), 1 / 3))
    # q ∝ 1/1, 1/2, 1/4: 4/7, 2/7, 1/7
    assert part.expected_share() == pytest.approx({0: 4 / 7, 1: 2 / 7, 2: 1 / 7})
    assert part.total_variation() == pytest.approx(0.5 * (4 / 7 - 1 / 8 + 2 / 7 - 1 / 4 + 5 / 8 - 1 / 7))
    losses = part.losses({0: 7.0, 1: 14.0, 2: 0.0})
    assert losses["federated-loss"] == pytest.approx(7 / 8 + 14 / 4)
    assert losses["surrogate-loss"] == pytest.approx(4 + 4)


def test_safeguards_bound_them_and_one_that_never_comes_weighs_nothing():
    part = weights(bound=lambda clients, d: np.minimum(d, 0.5))
    assert part.current.weight == {0: 0.125, 1: 0.5, 2: 0.5}
    part = weights()
    part._hooks.contribution_periods = lambda times: np.array([1.0, np.inf, 4.0])
    assert part.current.weight == {0: 0.125, 1: 0.0, 2: 2.5}


def test_they_are_worked_out_anew_when_others_count():
    part = weights()
    assert part.weight(2) == 2.5
    part._task_table.members[2].drop(0)
    part._task_table.changed()
    assert part.weight(2) == 0.0
    assert part.client_weights() == pytest.approx({0: 1 / 3, 1: 2 / 3})
    for member in part._task_table.members.values():
        member.drop(0)
    part._task_table.changed()
    assert (part.current.weight, part.client_weights()) == ({}, {})


def test_where_staleness_discounts_the_mean_of_those_that_came_says_what_a_client_is_worth():
    part = weights("identical", discounts_staleness=True)
    part._task_table.members[0].weight, part._task_table.members[0].contributions = 0.5, 4
    assert part.weights_so_far() == pytest.approx({0: 0.125, 1: 1 / 3, 2: 1 / 3})


@pytest.mark.parametrize(
    ("contribution_periods", "said"),
    [
        (
            [1.0, np.nan, 4.0],
            "returns nan for client 1: must be >= 0; infinity is a client that never contributes",
        ),
        (
            [1.0, 2.0, -4.0],
            "returns -4 for client 2: must be >= 0; infinity is a client that never contributes",
        ),
        ([1.0, 2.0], "returns an array (2,): must be (3,), a number for each of the 3 clients"),
        (2.0, "returns an array (): must be (3,), a number for each of the 3 clients"),
    ],
)
def test_what_a_hook_gives_for_them_must_be_a_number_for_each_client(contribution_periods, said):
    part = weights()
    part._hooks.contribution_periods = lambda times: contribution_periods
    with pytest.raises(RunError) as error:
        part.current  # noqa: B018
    assert str(error.value) == f"Mine.contribution_periods {said}"
    part = weights()
    part._hooks.expected_periods = lambda times: contribution_periods
    with pytest.raises(RunError) as error:
        part.expected_share()
    assert str(error.value) == f"Mine.expected_periods {said}"


@pytest.mark.parametrize(
    ("contribution_periods", "warns"), [([0.0] * 3, True), ([0.0, np.inf, 0.0], True), ([np.inf] * 3, False)]
)
def test_it_is_said_where_nobody_that_contributes_counts(contribution_periods, warns):
    part, said = weights(), []
    part._run.warn_once = lambda text, *values: said.append(text % values)
    part._hooks.contribution_periods = lambda times: np.array(contribution_periods)
    assert part.current.weight == dict.fromkeys(range(3), 0.0)
    assert [text.split(":")[0] for text in said] == [
        "Mine.contribution_periods gives 0 for each client that contributes"
    ] * warns


def test_a_method_that_uses_updates_again_says_what_they_came_to():
    part = weights("identical", discounts_staleness=True)
    part._hooks.weights_over_time = lambda: {0: 6.0, 2: 2.0, 7: 5.0}  # client 7 has left
    part._task_table.members[2].contributions = 4
    assert part.expected_share() == {0: 0.75, 1: 0.0, 2: 0.25}
    assert part.weights_so_far() == pytest.approx(
        {0: 1 / 3, 1: 1 / 3, 2: 0.5}
    )  # 2 / 4 for who has contributed
