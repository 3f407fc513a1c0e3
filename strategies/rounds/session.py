"""A run in rounds: the parts that only rounds have, and the steps of the round loop that no method changes."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

from strategies.clients import client_metrics
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.client_statistics import ACCEPTED
from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.core.session import Session
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.messages import CompressedModel
from strategies.rounds.deadline_collector import DeadlineCollector
from strategies.rounds.reply_collection import AllReplies, ReplyCollector
from strategies.rounds.round import Chosen, EngineExecutor, MaskedExecutor, Round
from strategies.rounds.selection import CohortSampler, Selection
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.pipeline import Noise
from strategies.updates.tree_noise import TreeNoise

log = logging.getLogger("flwr.strategies")


class RoundSession(Session):
    """A run in rounds.

    Attributes
    ----------
    selection : Selection
        The participation scheme: the draw of participants, and their expected weights.
    collector : AllReplies or DeadlineCollector
        When a round closes, and which replies count in it.
    sampler : CohortSampler
        Samples the participants of each round.
    tree : TreeNoise, optional
        Adds the noise of central differential privacy, where it is that of a tree.
    engine_sums : EngineExecutor
        Has an engine train a round's participants, and takes the sums of their updates.
    masked_sums : MaskedExecutor, optional
        Has a round's participants mask their updates, and takes the masks off their sum.
    cohort : Round, optional
        The present round.
    upper_round : int
        The round of the server above, in a region's run: its clients' learning rates go by it; 0: by the own round.
    """

    engine_sums: EngineExecutor
    masked_sums: MaskedExecutor | None = None

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        config, able = strategy.config, strategy.capabilities
        self.selection = Selection(config, self.run, self.population, able)
        self.collector = self._new_collector()
        self.sampler = CohortSampler(self)
        self.tree: TreeNoise | None = None
        if config.dp == "central" and config.dp_mechanism == "tree":
            self.tree = TreeNoise(config.dp_restart, self.run.central_noise)
        self._refused_by_mods: set[int] = set()
        self.cohort: Round | None = None
        self.upper_round = 0

    def _new_collector(self) -> ReplyCollector:
        """Return the collector of a round's replies: of all, or of those until the round closes early."""
        strategy, run, selection = self.strategy, self.run, self.selection
        parts = self.pending, self.timeline
        if not strategy.config.closes_early:
            return AllReplies(run, *parts, selection.can_draw_from)
        return DeadlineCollector(
            strategy.config, run, selection, self.receiver, *parts, strategy.capabilities
        )

    # ---- The steps of the loop ---------------------------------------------------------------------------------

    def begin(self, num_rounds: int) -> None:
        """Evaluate the initial model, or go on from the state to resume; wait for the clients."""
        run = self.run
        state = self.begin_model(num_rounds)
        run.know(run.result.arrays, run.model)
        if run.aggregations < self.total and not run.is_over():
            run.clients = self.population.refresh(self.grid, self.train_config)
        if state is None:
            run.scheduler.begin()
            self.reporter.report_evaluation(0, run.result, {}, dict, self.evaluate_fn)
        else:
            run.clock.resume(state["time"])  # waiting for the clients didn't count
            self.evaluate_initial()
        if self.masked_sums is not None:
            self.masked_sums.check_grid(self.grid)

    def note_release(self) -> None:
        """Let whoever counts releases know that a round begins."""
        if not self.run.should_stop():
            self.run.options.before_release(())

    def remaining_rounds(self) -> Iterator[int]:
        """Yield the numbers of the rounds to come, until an evaluation meets a stop condition."""
        for server_round in range(self.run.aggregations + 1, self.total + 1):
            if self.run.is_over():
                return
            yield server_round
            if self.stops_after(server_round):
                return

    def nobody_to_ask(self) -> bool:
        """Return True if the run is stopped, or no client is available any more."""
        return self.run.should_stop() or self.sampler.no_client_available

    def open_cohort(self, server_round: int, arrays: ArrayRecord, chosen: Chosen) -> Round:
        """Open a round of the sampled participants, with their weights."""
        run = self.run
        run.model, (participants, weights) = run.vector_of(arrays), chosen
        key, function = run.flower.weighted_by_key, run.flower.train_metrics_aggr_fn
        metrics, each = MetricsMean(key, function, robust=self.decides_by_metrics), self.selection.each
        sent = run.to_send(run.model, arrays)
        self.cohort = Round(server_round, run.model, *sent, list(participants), weights, metrics, each)
        if isinstance(self.receiver.clip, AdaptiveClip):
            self.receiver.clip.begin()
        return self.cohort

    def requests_of(self, cohort: Round, config: ConfigRecord) -> list[Message]:
        """Build a round's requests, in the order of the clients."""
        key, requests = self.run.flower.arrayrecord_key, []
        vectors_of_clients = self.strategy.extra_vectors(cohort.clients)
        extra_vectors: Mapping[str, Vector] = {}
        for client in cohort.clients:
            extra_vectors = next(vectors_of_clients, {})
            server_round = self.upper_round or cohort.number
            fields = self.requests.fields(client, server_round, cohort.number, config)
            fields.update(part := self.selection.stragglers.request_fields(client))
            requests.append(self.requests.request(client, fields, cohort.arrays, extra_vectors))
            self.requests.note_sent(client, requests[-1], part.get(messages.PART, 1.0))
            if key in extra_vectors:  # sent in place of the model
                cohort.bases[client.index] = self.run.to_send(extra_vectors[key])[1]
            cohort.request_bytes[client.index] = messages.total_bytes(requests[-1])
        cohort.requests = [request.metadata for request in requests]
        cohort.extra_names = tuple(extra_vectors)
        cohort.bytes_down = sum(cohort.request_bytes.values())
        return requests

    def cohort_of(self, server_round: int, arrays: ArrayRecord, asked: Sequence[Message]) -> Round | None:
        """Return the round of the clients that ``configure_train`` asks, which may be other ones than were drawn."""
        by_node = {request.metadata.dst_node_id: request for request in asked}
        others = self.sampler.others(by_node, self.cohort, self.grid, self.train_config)
        if others is not None:  # their sizes in replies are their weights: the draw has none for them
            cohort = self.open_cohort(server_round, arrays, (others, None))
            if self.run.model_compression is not None:
                cohort.bases = {
                    c.index: cohort.model for c in others if not _is_compressed(by_node[c.node_id])
                }
            cohort.request_bytes = {c.index: messages.total_bytes(by_node[c.node_id]) for c in others}
            cohort.bytes_down = sum(map(messages.total_bytes, asked))
        return self.cohort

    def exceeds_budget(self, cohort: Round) -> bool:
        """Return True if a round would end after the time budget."""
        scheduler = self.run.scheduler
        return bool(scheduler.budget) and scheduler.over(scheduler.now() + self.collector.duration(cohort))

    def is_cancelled(self, cohort: Round) -> bool:
        """Return True if a round is given up: the run is stopped, or the round would end after the time budget."""
        return self.run.should_stop() or cohort.exceeds_budget

    def finish_round(self, cohort: Round, arrays: ArrayRecord | None, metrics: MetricRecord | None) -> None:
        """Make a round's model the global one, and move the clock on by the round's duration."""
        run, result, scheduler = self.run, self.run.result, self.run.scheduler
        result.arrays = result.arrays if arrays is None else arrays
        scheduler.clock.wait_until(scheduler.now() + self.collector.duration(cohort))
        self.reporter.stability.note_model(run.model, 1.0)  # from which this round began
        run.aggregations = cohort.number
        result.train_metrics_clientapp[cohort.number] = metrics or MetricRecord()

    def is_evaluation_round(self, server_round: int) -> bool:
        """Return True if the model of a round is evaluated: every ``eval_every`` rounds, and the last one's."""
        return server_round % (self.strategy.config.eval_every or 1) == 0 or server_round == self.total

    def report(self, *, evaluate: bool, on_clients: bool = True) -> None:
        """Report the last round; with ``evaluate`` its model is evaluated before, by default on clients, too."""
        run, strategy, number = self.run, self.strategy, self.run.aggregations
        reported = run.reported_result(self.optimizer)
        metrics = run.result.train_metrics_clientapp.get(number, MetricRecord())
        if not evaluate:
            self.reporter.report(number, reported, metrics)
            return
        of_clients = dict[str, Any]()
        if on_clients:
            requests = list(
                strategy.configure_evaluate(number, reported.arrays, self.evaluate_config, self.grid)
            )
            of_clients, self.reporter.by_client = self.evaluator.collect(
                reported, number, requests, self.grid, strategy.aggregate_evaluate
            )
        metrics_of_all = {**metrics, **of_clients}
        self.reporter.report_evaluation(
            number, reported, metrics_of_all, self.client_columns, self.evaluate_fn
        )

    def close(self) -> Result:
        """Evaluate the last model if it hasn't been, and return the result of the run."""
        run = self.run
        if run.aggregations > run.evaluated:  # ended early, between two evaluations
            self.report(evaluate=True, on_clients=not run.should_stop())
        run.check_progress(self.initial_arrays)
        if self.strategy.config.closes_early:
            self.selection.log_observed(self.client_stats)
        return self.end(run.reported_result(self.optimizer))

    def check_mods(self, cohort: Round) -> None:
        """Raise RunError if mods of the app let no client train: such a run would never get anywhere."""
        self._refused_by_mods |= cohort.by_mods
        self._refused_by_mods -= cohort.outcomes.keys() - cohort.by_mods
        if not self.clients or not {client.index for client in self.clients} <= self._refused_by_mods:
            return
        text = f"a mod of the app lets no client train ({next(iter(cohort.failures.values()))})"
        if extra_vectors := self.receiver.extra_names(cohort.extra_names):
            text += f": beside the model each is sent {', '.join(extra_vectors)}; allowed are mods that let it pass"
            if hint := self.strategy.capabilities.payload_off_hint:
                text += f", or {hint}"
        raise RunError(text)

    # ---- From a round's sum to the next model ------------------------------------------------------------------

    def record_outcomes(self, cohort: Round) -> MetricRecord:
        """Enter the outcomes of a round in client_stats; return the round's metrics."""
        sent, received = self.run.take_bytes_beside()
        cohort.bytes_down, cohort.bytes_up = cohort.bytes_down + sent, cohort.bytes_up + received
        clip, masked = self.receiver.clip, self.masked_sums is not None
        metrics = cohort.round_metrics(clipped=clip is None and (self.receiver.bounds_updates or masked))
        cohort.record_outcomes(self.client_stats, self.timeline, self.run.scheduler.now())
        metrics.update(self.collector.finish(cohort))
        if self.selection.weights_say_shares and self.safeguards.shrinkage(()) is not None:
            p = self.client_weights()
            if (q := self.expected_shares(p)) is not None:
                metrics["weights-distance"] = 0.5 * float(np.abs(q - np.array(list(p.values()))).sum())
        metrics = client_metrics.merged_metrics(metrics, cohort.metrics.result())
        if isinstance(clip, AdaptiveClip):
            metrics[messages.CLIPPING_NORM] = clip.norm
        return metrics

    def record_replies(self, cohort: Round) -> None:
        """Enter the outcomes of a round that a user-defined hook aggregates by itself, and name who has failed."""
        for client, request in zip(cohort.clients, cohort.requests, strict=True):
            reply = cohort.replies.get(request.message_id)
            if reply is not None and reply.has_content():
                cohort.count(client.index, messages.total_bytes(reply), bounded=False)
                continue
            cohort.reject(client, messages.NO_REPLY if reply is None else messages.reason_of(reply), reply)
            self.run.note_failure(cohort.failures[client.index])
        cohort.record_outcomes(self.client_stats, self.timeline, self.run.scheduler.now())

    def add_central_noise(self, cohort: Round, update: Vector, sensitivity: float) -> None:
        """Add central noise to a round's sum (D,), and adapt the norm to which the next round clips."""
        config, clip, run = self.strategy.config, self.receiver.clip, self.run
        z, tree = config.dp_noise_multiplier, self.tree
        if tree is not None:
            tree(update, Noise(z, config.dp_clipping_norm), sensitivity, cohort.number)
        elif isinstance(clip, AdaptiveClip):
            rng, expected = run.central_noise(cohort.number), 1 / sensitivity
            Noise(clip.multiplier(z, expected), clip.norm)(update, sensitivity, rng)
            clip.adapt(z, expected, rng)
        elif clip is not None:
            Noise(z, clip.norm)(update, sensitivity, run.central_noise(cohort.number))
        run.any_nonzero_update = True  # the noise moves the model, whoever came
        update[run.buffers_at] = 0.0

    def why_model_stays(self, cohort: Round) -> str:
        """Return why a round made no model, for the log."""
        rule, participants = self.strategy.config.rule(), len(cohort.clients) - len(cohort.failures)
        if self.strategy.config.closes_early and not cohort.clients:
            return "no reply in time"
        if not participants:
            return "no valid reply"
        if rule is not None:
            return f"{participants} valid replies are fewer than the {rule.least} for {rule.text}"
        return f"{participants} valid replies without a weight above 0"

    # ---- What a run knows of its clients, and its checkpoint ---------------------------------------------------

    def objective_weights(self) -> dict[int, float]:
        """Return E[d_i] of the clients that count now, by index, as if all were present and in time."""
        return self.selection.objective_weights()

    def client_columns(self) -> dict[str, list[float]]:
        """Return per-client statistics, by index: participations, importance, expected and observed share.

        The shares are only known where weights define them: not under a robust rule, nor where a method chooses
        clients or aggregates their work by itself.
        """
        config, able = self.strategy.config, self.strategy.capabilities
        unsized = config.client_weights == "samples" and any(c.num_examples is None for c in self.run.clients)
        p = {} if unsized else self.client_weights()
        size = max(self.client_stats.size, max(p, default=-1) + 1)
        shares, weighed = {"importance": p} if p else {}, config.rule() is None
        if p and weighed and (q := self.expected_shares(p)) is not None:
            shares["expected-share"] = dict(zip(p, q.tolist(), strict=True))
        reported = client_metrics.columns(shares, size, missing=0.0)
        if weighed and (not able.aggregates or able.uses_given_weights):
            reported["observed-share"] = client_metrics.shares(self.client_stats.column("weight", size))
        counted = self.client_stats.column(ACCEPTED, size)
        return {"participation": counted, **reported, **self.reporter.costs_of_clients(size)}

    def expected_shares(self, p: Mapping[int, float]) -> Weights | None:
        """Return clients' expected shares (n,) of the objective by their p_i, less where safeguards shorten."""
        expected: Weights | None = self.strategy.expected_weights(np.array(list(p.values())))
        left = self.safeguards.shrinkage(p)
        if expected is None or left is None:
            return expected
        shares = expected * left
        return np.asarray(shares / (shares.sum() or 1.0))

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients that have a request, late tasks included."""
        return list({*super().busy_clients(), *self.collector.busy_clients()})

    def free_to_evaluate(self) -> Sequence[Client]:
        """Return the connected clients; in real time without those at work, for which no evaluation waits."""
        if self.run.grid is None or not self.scheduler.real_time:
            return self.run.clients
        free, at_work = self.pending.free(self.run.grid, messages.EVALUATE), self.collector.busy_clients()
        return [client for client in free if client.index not in at_work]

    def stateful_components(self) -> list[Any]:
        """Return the parts that have a state: those of every run, and those of the round loop."""
        adaptive = [self.receiver.clip] if isinstance(self.receiver.clip, AdaptiveClip) else []
        tree = [] if self.tree is None else [self.tree]
        collector = [self.collector] if isinstance(self.collector, DeadlineCollector) else []
        return [*super().stateful_components(), self.pending, *collector, *tree, *adaptive]


def _is_compressed(request: Message) -> bool:
    """Return True if a request has a compressed model: a hook's own request may have the global one."""
    return any(isinstance(record, CompressedModel) for record in request.content.values())
