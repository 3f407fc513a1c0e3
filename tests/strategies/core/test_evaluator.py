"""The evaluator alone: who is asked, and the mean of the clients' metrics by p_i, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message
from flwr.serverapp.strategy import Result

from strategies import messages
from strategies.clients.roster import Client
from strategies.core.evaluator import Evaluator
from strategies.core.requests import PendingReplies
from strategies.flower.internals import unavailable_reply
from tests.strategies.parts import begun, client, model_of, population, reply, request

SIZES = (1, 2, 5)


def evaluator(
    described: bool = True, clients: Any = None, kind: str = "samples", **options: Any
) -> Evaluator:
    personal, rule = options.pop("personal", lambda client: None), options.pop("rule", dict)
    clients = clients or [replace(client(i, n), described=described) for i, n in enumerate(SIZES)]
    run = begun(clients, **options)
    return Evaluator(run, population(run, kind), PendingReplies(run), 0, rule, personal)


def asked(part: Evaluator, server_round: int = 1) -> list[Message]:
    return part.requests(server_round, model_of(1.0, 2.0), ConfigRecord({"own": 7}), part._run.clients)


def answer(index: int, **metrics: Any) -> Message:
    return reply(request(100 + index, messages.EVALUATE), **metrics)


def failed(index: int) -> Message:
    return Message(Error(0, "out of memory"), reply_to=request(100 + index, messages.EVALUATE))


def gone(index: int) -> Message:
    """Return the SuperLink's own reply for a node that is gone, which has the id of no client."""
    return unavailable_reply(request(100 + index, messages.EVALUATE).metadata)


def test_a_request_has_the_model_the_loops_fields_the_methods_rule_and_the_clients_own_model():
    part = evaluator(rule=lambda: {"l": 0.5}, personal=lambda c: np.array([8.0, 9.0]) if c.index else None)
    first, second, _ = asked(part, 4)
    assert dict(second.content["config"]) == {
        "own": 7,
        messages.SERVER_ROUND: 4,
        messages.CLIENT: 1,
        "l": 0.5,
    }
    assert (first.metadata.dst_node_id, first.metadata.message_type) == (100, messages.EVALUATE)
    assert messages.PERSONAL_MODEL not in first.content
    own = second.content[messages.PERSONAL_MODEL]
    assert own["w"].numpy().tolist() == [8.0, 9.0]  # type: ignore[index, call-overload, union-attr]


@pytest.mark.parametrize(
    ("fraction", "least", "number"), [(0.0, 2, 0), (0.5, 0, 1), (0.5, 2, 2), (0.7, 0, 2), (1.0, 9, 3)]
)
def test_a_share_of_the_clients_is_asked_and_not_fewer_than_the_least(fraction, least, number):
    part = evaluator(fraction_evaluate=fraction, min_evaluate_nodes=least)
    nodes = [[each.metadata.dst_node_id for each in asked(part, n)] for n in range(1, 20)]
    assert all(len(each) == number and each == sorted(set(each)) for each in nodes)
    assert len({tuple(each) for each in nodes}) == (1 if number in (0, 3) else 3)  # each subset, by the round
    assert nodes == [[each.metadata.dst_node_id for each in asked(part, n)] for n in range(1, 20)]


def test_metrics_are_averaged_by_p_over_those_that_answer():
    losses = [answer(0, loss=8.0), answer(1, loss=4.0, acc=0.5), answer(2, loss=1.6)]
    assert dict(evaluator().mean(1, losses) or {}) == pytest.approx({"loss": 3.0, "acc": 0.5})
    assert dict(evaluator(kind="uniform").mean(1, losses[:2]) or {})["loss"] == 6.0
    # p = 1/3, 2/3 of the first two
    assert dict(evaluator().mean(1, losses[1::-1]) or {})["loss"] == pytest.approx(16 / 3)


@pytest.mark.parametrize("size", [None, -1, float("nan"), [3, 4]])
def test_clients_that_did_not_describe_themselves_count_by_the_sizes_in_their_replies(size, caplog):
    own = {} if size is None else {"num_examples": size}
    told = [
        answer(0, loss=8.0, num_examples=3),
        answer(1, loss=4.0, num_examples=1),
        answer(2, loss=9.0, **own),
    ]
    assert dict(evaluator(described=False).mean(1, told) or {}) == {"loss": 7.0}
    why = (
        "no metric 'num-examples'"
        if size is None
        else f"num-examples = {size}: must be a positive number, or 0"
    )
    assert f"evaluation 1: left out of the means client 2 (node 102): {why}" in caplog.text
    assert dict(evaluator(described=False, kind="uniform").mean(1, told) or {}) == {"loss": 7.0}
    # Where nobody tells, all count the same.
    assert dict(evaluator(described=False).mean(1, [answer(i, loss=float(i)) for i in range(3)]) or {}) == {
        "loss": 1.0
    }


def test_who_fails_is_left_out_and_an_app_without_a_handler_is_said_once(caplog):
    part = evaluator()
    assert dict(part.mean(2, [failed(0), answer(1, loss=4.0), failed(2)]) or {}) == {"loss": 4.0}
    assert (
        "evaluation 2: left out of the means client 0 (node 100), 2 (node 102): out of memory" in caplog.text
    )
    part.mean(5, [gone(0), answer(1, loss=4.0)])
    assert "evaluation 5: left out of the means client that is gone: Error: Node Unavailable" in caplog.text
    caplog.clear()
    assert [part.mean(n, [failed(i) for i in range(3)]) for n in (3, 4)] == [None, None]
    assert [record.getMessage()[:30] for record in caplog.records] == ["no client evaluates the model:"]


def test_a_function_of_the_users_own_gets_the_contents_of_the_valid_replies():
    def function(contents: Any, key: str) -> Any:
        return type(contents[0]["metrics"])({"number": len(contents)})

    part = evaluator(described=False, evaluate_metrics_aggr_fn=function)
    assert dict(part.mean(1, [answer(0, loss=1.0), failed(1), answer(2, loss=2.0)]) or {}) == {"number": 2}


def test_replies_are_collected_and_late_ones_named(federation, caplog):
    grid = federation()
    grid.lose(1, category="evaluate")
    part = evaluator(clients=[Client(grid.node(i).node_id, i, n, {}) for i, n in enumerate(SIZES)])
    part._run.timeout = 0.05
    requests, result = part.requests(1, model_of(1.0), ConfigRecord(), part._run.clients), Result()
    means, by_client = part.collect(result, 1, requests, grid, part.mean)
    # ½ (1 − c)² for c = 3, −1; sizes 1 and 5 are in the replies
    assert by_client == {"loss": {0: 2.0, 2: 2.0}}
    assert means == {"client-loss": 2.0}
    assert result.evaluate_metrics_clientapp == {1: {"loss": 2.0}}
    assert "evaluation of aggregation 1: 1 of 3 haven't answered in time" in caplog.text
    assert part.collect(result, 2, [], grid, part.mean) == ({}, {})
