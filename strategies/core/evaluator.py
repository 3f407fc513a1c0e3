"""The evaluation of the global model on clients."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import streams
from strategies.clients import client_metrics
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.roster import (
    Client,
    by_reason,
    clients_of_replies,
    display_names,
    index_by_node,
    sized_by_replies,
)
from strategies.core.population import Population
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Vector

log = logging.getLogger("flwr.strategies")

_LEFT_OUT = "evaluation %d: left out of the means client %s: %s"
_LATE = "evaluation of aggregation %d: %d of %d haven't answered in time, it is without %s"
_LOST = (
    ": a mod for clipping or local differential privacy of the whole app loses such answers, one for training alone, "
    "@app.train(mods=[…]), doesn't"
)


class Evaluator:
    """Asks clients to evaluate a model, and averages their metrics.

    Parameters
    ----------
    seed : int
        Of the draw of evaluating clients.
    evaluation_rule, personal_model : callable
        Hooks of the method: fields of the message, and the model (D,) that a client evaluates beside the global one.
    """

    def __init__(
        self,
        run: RunState,
        population: Population,
        pending: PendingReplies,
        seed: int,
        evaluation_rule: Callable[[], dict[str, float]],
        personal_model: Callable[[Client], Vector | None],
    ) -> None:
        self._run, self._population, self._pending, self._seed = run, population, pending, seed
        self._evaluation_rule, self._personal_model = evaluation_rule, personal_model

    def requests(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, clients: Sequence[Client]
    ) -> list[Message]:
        """Return evaluation requests to ``fraction_evaluate`` of the clients, ``min_evaluate_nodes`` at least."""
        fraction = self._run.flower.fraction_evaluate
        if not fraction:
            return []
        if without := self._population.roster.without_evaluation:
            clients = self._answering(clients, without)
        number = len(clients)
        size = min(max(int(fraction * number), self._run.flower.min_evaluate_nodes, 1), number)
        chosen: Iterable[int] = range(number)
        if size < number:
            rng = streams.generator(self._seed, "evaluators", server_round)
            chosen = sorted(rng.choice(number, size, replace=False).tolist())
        return [self._request(clients[place], server_round, arrays, config) for place in chosen]

    def _answering(self, clients: Sequence[Client], without: Mapping[int, str]) -> list[Client]:
        """Return the clients that can answer an evaluation; log once why the others aren't asked."""
        answering = [client for client in clients if client.node_id not in without]
        if len(answering) < len(clients):
            self._run.warn_once(
                "%s to evaluate the model: %s, and an answer to an evaluation has none, so that it would be lost "
                "(mods for training alone are @app.train(mods=[…]); fraction_evaluate = 0 asks none)",
                "some clients aren't asked" if answering else "no client is asked",
                next(without[client.node_id] for client in clients if client.node_id in without),
            )
        return answering

    def _request(
        self, client: Client, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> Message:
        own = self._personal_model(client)
        sent = {messages.SERVER_ROUND: server_round, messages.CLIENT: client.index}
        fields = config.copy()  # whose values are checked already
        fields.update({**sent, **self._evaluation_rule(), **self._run.options.evaluation_fields(client)})
        return messages.request(
            messages.EVALUATE,
            client.node_id,
            fields,
            ttl=self._run.timeout,
            arrays=arrays,
            extra_records={} if own is None else {messages.PERSONAL_MODEL: self._run.layout.to_record(own)},
            keys=self._run.flower.keys,
        )

    def mean(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics by p_i; None if no client replied.

        A client that hasn't described itself counts by the number of examples in its reply.
        """
        replies = list(replies)
        by_node = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        self._name_failed(server_round, replies)
        clients = [client for client in self._run.clients if client.node_id in by_node]
        if not self._run.clients:  # the hook is called alone
            valid = [reply for reply in replies if not reply.has_error()]
            clients = clients_of_replies(valid)
            by_node = {client.node_id: reply for client, reply in zip(clients, valid, strict=True)}
        if not clients:
            return None
        flower = self._run.flower
        mean = MetricsMean(
            flower.weighted_by_key,
            flower.evaluate_metrics_aggr_fn,
            client_metrics.OF_EVALUATION,
            robust=self._run.best is not None and self._population.safeguards.active,
        )
        if self._population.kind == "samples" and mean.function is None:
            clients = self._weighed(server_round, clients, by_node)
        weights = self._population.client_weights_of(clients)
        for client, weight in zip(clients, weights.tolist(), strict=True):
            mean.add(weight, by_node[client.node_id].content)
        return MetricRecord(dict(mean.result()))

    def collect(
        self,
        result: Result,
        aggregation: int,
        requests: Sequence[Message],
        grid: Grid,
        aggregate: Callable[[int, list[Message]], MetricRecord | None],
    ) -> tuple[dict[str, Any], dict[str, client_metrics.ByClient]]:
        """Wait for the replies about an aggregation's model, and put their means by ``aggregate`` into the result.

        Returns
        -------
        tuple
            The means, named as metrics of clients, and the metrics of each client; both are empty if nobody answered.
        """
        if not requests:
            return {}, {}
        replies = list(self._pending.awaited(grid, requests))
        if not self._run.should_stop():
            answered = {reply.metadata.reply_to_message_id for reply in replies}
            asked = [request.metadata for request in requests]
            late = {each.dst_node_id for each in asked if each.message_id not in answered}
            self.name_missing(aggregation, late, len(requests))
            if not answered:
                self._run.warn_once("nobody has answered the evaluation%s", _LOST)
        averages = aggregate(aggregation, replies)
        if averages is None:
            return {}, {}
        result.evaluate_metrics_clientapp[aggregation] = averages
        means = {client_metrics.of_clients(key): value for key, value in averages.items()}
        return means, self.by_client(replies)

    def by_client(self, replies: Iterable[Message]) -> dict[str, client_metrics.ByClient]:
        """Return the metrics in the replies, by client."""
        return client_metrics.from_replies(
            replies, index_by_node(self._run.clients).get, self._run.flower.weighted_by_key
        )

    def name_missing(self, aggregation: int, late: Collection[int], asked: int) -> None:
        """Log the nodes whose answer to an evaluation hasn't come in time."""
        if late:
            log.warning(_LATE, aggregation, len(late), asked, self._population.roster.named(late))

    def _name_failed(self, server_round: int, replies: Sequence[Message]) -> None:
        """Log the clients that couldn't evaluate the model; only once if no client can (an app without a handler)."""
        located = {client.node_id: client.display_name for client in self._run.clients}
        failed: defaultdict[str, list[str]] = defaultdict(list)
        errors = [reply for reply in replies if reply.has_error()]
        for reply in errors:  # the SuperLink's own, where a node is gone, don't say which
            client = located.get(reply.metadata.src_node_id, "that is gone")
            failed[messages.reason_of(reply)].append(client)
        if errors and len(errors) == len(replies):
            reason = next(iter(failed))
            self._run.warn_once(
                "no client evaluates the model: %s%s (fraction_evaluate = 0 asks none)",
                reason,
                _LOST if reason == messages.NO_REPLY else "",
            )
            return
        for reason, clients in failed.items():
            log.warning(_LEFT_OUT, server_round, ", ".join(clients), reason)

    def _weighed(
        self, server_round: int, clients: Sequence[Client], by_node: Mapping[int, Message]
    ) -> list[Client]:
        """Return the clients with the sizes of their evaluation data; log and drop the clients without a size."""
        key = self._run.flower.weighted_by_key
        # Not as many as it trains on, which its replies to training have told.
        unsized = [c if c.described else replace(c, num_examples=None) for c in clients]
        sized = sized_by_replies(unsized, by_node, key)
        reasons = {c.index: _unweighed(by_node[c.node_id], key) for c in sized if c.num_examples is None}
        if len(reasons) == len(sized):
            return sized  # all count the same
        for reason, left_out in by_reason(sized, reasons).items():
            log.warning(_LEFT_OUT, server_round, display_names(left_out), reason)
        return [client for client in sized if client.index not in reasons]


def _unweighed(reply: Message, key: str) -> str:
    """Return why a reply has no valid weight."""
    try:
        messages.weight_of(messages.metrics_of(reply), key, or_zero=True)
    except ValueError as error:
        return str(error)
    return f"no metric {key!r}"
