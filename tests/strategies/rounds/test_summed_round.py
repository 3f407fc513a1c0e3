"""A round whose sum an engine is asked for, alone: the blocks' sums by hand, and the tasks that don't count."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from strategies import messages
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.client_statistics import ACCEPTED, Timeline
from strategies.core.requests import PendingReplies
from strategies.core.server_step import ServerStep
from strategies.rounds.round import GONE, Round
from strategies.rounds.summed import EngineSums
from strategies.updates.server_optimizer import make_optimizer
from strategies.updates.sums import BlockSum, NotCounted, SummingGrid, SumRequest
from tests.strategies.parts import begun, client

WEIGHTS = [0.1, 0.2, 0.3, 0.4]
SIZE = 128 + 2 * 8  # bytes of the model: a header and two values


class Engine(SummingGrid):
    """An engine with two blocks: Δ_0 = (1, 0), client 1 fails, and Δ_2 = (0, 2)."""

    request: SumRequest
    blocks = (
        BlockSum(
            np.array([0.1, 0.0]), 0.1, 2, {"loss": [4.0, 9.0]}, {1: NotCounted("out of memory")}, (0,), 0.1
        ),
        BlockSum(np.array([0.0, 0.6]), 1.2, 1, {"loss": [2.0]}, furthest=0.6),
    )

    def __init__(self, pending: PendingReplies) -> None:
        self.pending, self.busy_clients = pending, list[Any]()

    def can_sum(self, request: SumRequest) -> bool:
        return True

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        self.request = request
        for block in self.blocks:
            self.busy_clients.append(self.pending.busy_clients())
            yield block


EVERYBODY = SimpleNamespace(part=lambda index: 1.0)  # no stragglers


def made(
    optimizer: str = "sgd", stragglers: Any = EVERYBODY, lost: Any = (3,), cancelled: bool = False
) -> tuple[Any, Round, Engine]:
    """Return a session in which an engine has been asked for a round, the round, and the engine."""
    clients = [client(index) for index in range(4)]
    run = begun(clients)
    run.options.should_stop = lambda: cancelled
    run.scheduler.task_costs.up = SIZE
    current = Round(
        7, run.model, run.result.arrays, run.model, clients, WEIGHTS, MetricsMean(), lost=set(lost)
    )
    pending = PendingReplies(run)
    step = ServerStep(run, make_optimizer(optimizer, 1.0), 0.0, lambda: 1.0, stale=False)
    session = SimpleNamespace(
        run=run,
        scheduler=run.scheduler,
        server_step=step,
        optimizer=step.optimizer,
        pending=pending,
        timeline=Timeline(),
        selection=SimpleNamespace(stragglers=stragglers),
        upper_round=0,
        strategy=SimpleNamespace(
            local_rule=lambda: {messages.ALPHA: 0.1}, config=SimpleNamespace(update_norm_bound=1.2)
        ),
    )
    session.part, engine = EngineSums(session), Engine(pending)  # type: ignore[arg-type]
    assert session.part.ask(current, ConfigRecord({"lr": 0.5}), engine)
    return session, current, engine


def test_the_request_has_all_tasks_and_the_methods_rule():
    stragglers = SimpleNamespace(part=lambda index: 0.5 if index == 2 else 1.0)
    for optimizer, part in (("sgd", EVERYBODY), ("fedexp", stragglers)):
        summed, current, _ = made(optimizer, part)
        request = summed.part._request
        assert dict(request.config) == {"lr": 0.5, messages.SERVER_ROUND: 7, messages.ALPHA: 0.1}
        assert (request.tasks.nodes, request.tasks.clients) == ([100, 101, 102, 103], [0, 1, 2, 3])
        assert request.tasks.fractions.tolist() == [1.0, 1.0, 0.5 if part is stragglers else 1.0, 1.0]
        assert (request.bound, request.squares) == (1.2, optimizer == "fedexp")
        assert current.bytes_down == 4 * SIZE


def test_blocks_are_added_and_tasks_that_fail_or_are_lost_do_not_count():
    session, current, engine = made()
    gathered = session.part.run(current, engine).total
    assert engine.request.tasks.clients == [0, 1, 2]  # nobody works on the lost one
    assert (gathered.total.tolist(), gathered.squares, gathered.kept) == ([0.1, 0.6], 1.3, [0.1, 0.3])
    # Σ d = 1 over the 0.4 that count, but client 2 moves the sum by 0.6 already, of 1.2 at most
    assert gathered.result(WEIGHTS) == pytest.approx([0.2, 1.2])
    assert current.outcomes == {0: ACCEPTED, 1: messages.FAILED, 2: ACCEPTED, 3: messages.LOST}
    assert current.failures == {1: "out of memory", 3: GONE}
    assert (current.bounded, current.bytes_up, current.sizes) == ({0}, 2 * SIZE, {0: SIZE, 2: SIZE})
    assert current.metrics.result() == pytest.approx({"loss": (0.1 * 4 + 0.3 * 2) / 0.4})
    assert current.weight_by_client == dict(enumerate(WEIGHTS))
    assert (engine.busy_clients, session.pending.busy_clients()) == ([[0, 1, 2], [2]], [])
    assert (session.run.last_failure, session.run.any_nonzero_update) == ("out of memory", True)


def test_a_round_that_is_cut_off_takes_no_more_blocks():
    session, current, engine = made(cancelled=True)
    assert session.part.run(current, engine) is None
    assert (len(engine.busy_clients), session.pending.busy_clients()) == (1, [])


def test_nothing_is_asked_where_all_tasks_are_lost():
    session, current, engine = made(lost=range(4))
    assert session.part.run(current, engine).total.result(WEIGHTS) is None
    assert not engine.busy_clients
