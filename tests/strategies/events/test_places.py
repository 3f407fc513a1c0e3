"""Runs with a concurrency: the place of a client that fails is another's, and who was dropped gets one again."""

from typing import Any

import pytest

from tests.strategies.events.runs import CENTRES, KINDS, SIZES, TAU, text_of

FOUR = {"centres": CENTRES, "sizes": SIZES}


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("failing", [(0,), (3,), (0, 1, 2)])
def test_the_place_of_a_dropped_client_is_anothers_at_once(federation, start, caplog, scheme, failing):
    grid = federation(**FOUR)
    for client in failing:
        grid.spoil(client, "raise")
    alone = {"buffer_size": 1} if scheme == "fedbuff" else {}
    run = start(scheme, grid, 30, lr=0.05, concurrency=1, **alone)
    counts = run.seen[-1].clients["participation"]
    assert run.seen[-1].aggregation == 30
    assert [counts[client] for client in failing] == [0] * len(failing)
    assert text_of(caplog).count("is dropped after 3 misses in a row") >= len(failing)
    if scheme == "async":  # the others may have to wait for an aggregation; here somebody is always at work
        at_work = sum(TAU[i] * member.tasks for i, member in run.strategy.session.task_table.members.items())
        assert run.seen[-1].time == pytest.approx(at_work)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_dropped_client_gets_a_place_again_and_counts_again(federation, start, caplog, scheme):
    grid = federation(**FOUR)
    grid.spoil(2, "raise")
    dropped: list[float] = []

    def observe(progress: Any) -> None:
        if "client 2 is dropped" in text_of(caplog) and not dropped:
            dropped.append(progress.time)
            grid.spoil(2, None)

    run = start(scheme, grid, 200, lr=0.02, concurrency=2, observe=observe)
    assert dropped
    assert "client 2 answers again and counts again" in text_of(caplog)
    member, rest = run.strategy.session.task_table.members[2], run.seen[-1].time - dropped[0]
    assert not member.dropped
    # RETRY_AFTER task times of 11/15 s later it is one of four that two places are drawn among.
    first = next(p.time for p in run.seen[1:] if p.clients["participation"][2])
    assert first >= dropped[0] + 10 * 11 / 15
    assert member.contributions > rest / 11


def test_work_that_is_held_back_takes_no_place(federation, start):
    # Which norms are usual is known of three clients; their work waits until then.
    run = start("async", federation(**FOUR), 20, lr=0.05, concurrency=1, safeguards="on")
    assert run.seen[-1].aggregation == 20
    assert len(run.strategy.session.safeguards.norms.norms) >= 3
