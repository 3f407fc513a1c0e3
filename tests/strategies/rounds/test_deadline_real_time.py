"""Rounds that close early in real time: by the replies that come, on a grid that holds back those of some clients."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from strategies import FedAvg, Progress, RunError
from strategies.clock import WallClock
from strategies.flower import messages

CENTRES, LR = (3.0, 2.0, -1.0, 0.5), 0.3
SOON = 0.2  # seconds that a round waits for a reply that is held back


class Post:
    """Holds replies of clients back until they are let go."""

    def __init__(self, grid: Any, held: Iterable[int]) -> None:
        self.grid, self.held = grid, set(held)
        self._pull = grid.pull_messages
        grid.pull_messages = self.pull

    def pull(self, ids: Iterable[str]) -> Any:
        nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in self.grid.sent}
        types = {m.metadata.message_id: m.metadata.message_type for m in self.grid.sent}
        back = {self.grid.node(client).node_id for client in self.held}
        return self._pull([i for i in ids if types[i] == messages.DESCRIBE or nodes[i] not in back])


@pytest.fixture
def go(federation, model, train_config):
    """Run FedAvg in real time; ``after`` is called with the post after each round."""

    def run(
        held: Iterable[int],
        *,
        clients: int = 3,
        rounds: int = 4,
        after: Callable[[int, Post], None] = lambda number, post: None,
        timeout: float = 60.0,
        **options: Any,
    ) -> Any:
        grid = federation(CENTRES[:clients], [1] * clients)
        post, reports = Post(grid, held), list[Progress]()

        def observe(progress: Progress) -> None:
            reports.append(progress)
            after(progress.aggregation, post)

        # The expected values are those of whole updates.
        own = {"fraction_evaluate": 0.0, "client_weights": "uniform", "norm_ratio_bound": 0.0, **options}
        strategy = FedAvg(clock=WallClock(), observer=observe, **own)
        strategy.post = post
        try:
            strategy.start(
                grid, model(0.1), num_rounds=rounds, timeout=timeout, train_config=train_config(2, LR)
            )
        finally:
            strategy.asked = [sorted(grid.asked(messages.TRAIN, number)) for number in range(1, rounds + 1)]
        return reports[1:], strategy

    return run


def trained(client: int, w: float) -> float:
    for _ in range(2):
        w = w - LR * (w - CENTRES[client])
    return w


def mean(*updates: float) -> float:
    return sum(updates) / len(updates)


def models(reports: list[Progress]) -> list[float]:
    return [float(report.arrays["w"].numpy()[0]) for report in reports]


def told(reports: list[Progress], name: str) -> list[Any]:
    return [report.metrics.get(name) for report in reports]


def test_the_first_replies_close_a_round_and_nobody_waits_for_the_others(go):
    own = {"participation": "uniform", "fraction_train": 0.5, "over_select": 1.0}
    reports, strategy = go([3], clients=4, **own)
    # Client 3 never answers, and is at work from the first round on; of three that answer at once the first count.
    assert strategy.asked == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert told(reports, "participants") == [2] * 4
    assert told(reports, "late-updates") == [2, 1, 1, 1]
    assert told(reports, "dropped-updates") == [2, 1, 1, 1]
    w, expected = 0.1, []
    for _ in range(4):
        w += mean(trained(0, w) - w, trained(1, w) - w)
        expected.append(w)
    assert models(reports) == pytest.approx(expected, rel=1e-12)
    assert strategy.session.busy_clients() == [3]
    client_stats = dict(strategy.session.client_stats.items())
    assert [(client_stats[c].tasks, client_stats[c].late) for c in range(4)] == [
        (4, 0),
        (4, 0),
        (4, 4),
        (1, 1),
    ]
    # A reply that came too late has cost its way up, too.
    size = len(reports[0].arrays["w"].data)
    assert told(reports, "bytes-wasted") == [3 * size, 2 * size, 2 * size, 2 * size]


def test_a_late_reply_is_dropped_and_its_client_asked_again(go):
    def let_go(number: int, post: Post) -> None:
        if number == 2:
            post.held.clear()

    reports, strategy = go([2], round_deadline=SOON, after=let_go)
    assert strategy.asked == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert told(reports, "participants") == [2, 2, 3, 3]
    size = len(reports[0].arrays["w"].data)
    assert told(reports, "bytes-wasted") == [size, 0, size, 0]
    w = 0.1
    for among in ((0, 1), (0, 1), (0, 1, 2), (0, 1, 2)):
        w += mean(*(trained(client, w) - w for client in among))
    assert models(reports)[-1] == pytest.approx(w, rel=1e-12)


def test_a_round_for_which_nobody_is_free_ends_at_its_deadline(go):
    def let_go(number: int, post: Post) -> None:
        if number == 3:
            post.held.clear()

    reports, strategy = go([0, 1, 2], round_deadline=SOON, after=let_go, rounds=5)
    assert strategy.asked == [[0, 1, 2], [], [], [0, 1, 2], [0, 1, 2]]
    assert told(reports, "participants") == [0, 0, 0, 3, 3]
    w = 0.1
    for _ in range(2):
        w += mean(*(trained(client, w) - w for client in range(3)))
    assert models(reports)[-1] == pytest.approx(w, rel=1e-12)


def test_a_task_that_never_ends_is_given_up_and_its_client_asked_again(go):
    with pytest.raises(RunError, match=r"no client's work was accepted.*'not done when round"):
        go([0], clients=1, min_clients=1, round_deadline=0.05, timeout=0.12, rounds=8)


def test_who_is_gone_is_not_waited_for(go):
    def leave(number: int, post: Post) -> None:
        if number == 1:
            post.grid.node(2).present = False

    reports, strategy = go([2], round_deadline=SOON, after=leave)
    assert strategy.asked == [[0, 1, 2], [0, 1], [0, 1], [0, 1]]
    assert told(reports, "dropped-updates") == [1, 0, 0, 0]
    assert dict(strategy.session.client_stats.items())[2].late == 1
    assert strategy.session.busy_clients() == []


def test_who_is_at_work_is_not_asked_to_evaluate(go):
    reports, strategy = go([2], round_deadline=SOON, fraction_evaluate=1.0, rounds=2)
    assert [sorted(strategy.post.grid.asked(messages.EVALUATE, number)) for number in (1, 2)] == [
        [0, 1],
        [0, 1],
    ]
    assert all("client-loss" in report.metrics for report in reports)


def test_late_work_of_a_run_that_ended_is_lost(go, federation, model, train_config, caplog):
    _, strategy = go([2], round_deadline=SOON, rounds=2)
    again = FedAvg(clock=WallClock(), client_weights="uniform", round_deadline=SOON)
    again.restore(strategy.state())
    grid = federation(CENTRES[:3], [1] * 3)
    with caplog.at_level(logging.WARNING):
        again.start(grid, model(0.1), num_rounds=3, timeout=60.0, train_config=train_config(2, LR))
    assert "late work of 1 clients was under way when the run ended: it is lost" in caplog.text
    assert grid.asked(messages.TRAIN, 3) == [0, 1, 2]


def test_the_observed_shares_are_said_at_the_end(go, caplog):
    with caplog.at_level(logging.WARNING):
        go([2], round_deadline=SOON)
    assert "this run counted its clients by Σ q_i f_i" in caplog.text
    assert "their distance is 0.333" in caplog.text


def test_a_deadline_after_the_timeout_is_said_to_change_nothing(go, caplog):
    with caplog.at_level(logging.WARNING):
        reports, _ = go([2], round_deadline=5.0, timeout=SOON, rounds=1)
    assert "round_deadline = 5 changes nothing: no round waits longer than timeout = 0.2 s" in caplog.text
    assert (reports[0].metrics["failures"], reports[0].metrics["late-updates"]) == (1, 0)


def test_a_loop_around_it_waits_for_all_and_is_refused(federation, model, train_config):
    strategy = FedAvg(clock=WallClock(), round_deadline=1.0)
    with pytest.raises(RunError, match=r"round_deadline = 1, over_select = 0: a wrapper around the strategy"):
        list(strategy.configure_train(1, model(0.1), train_config(2, LR), federation()))
