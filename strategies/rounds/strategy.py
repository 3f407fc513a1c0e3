"""The round loop of the synchronous strategies, and the hooks an algorithm fills in.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/clients/weights.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on who answers first. A reply that
is an error, missing, not finite or of another shape or dtype is left out, named in the log and counted; its weight is
shared over the others. A round with no valid reply keeps the model, and the optimizer takes no step.

What becomes of replies is in strategies/rounds/gathered_rounds.py, and strategies/updates/sums.py has rounds
without any.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.core.reporting import EvaluateFn
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.engine_name import RAY, engine_of
from strategies.flower.errors import RunError
from strategies.flower.packing import packing
from strategies.rounds.gathered_rounds import GatheredRounds
from strategies.rounds.presence import check_loop, present
from strategies.updates.aggregation import gathering
from strategies.updates.sums import SummingGrid, looks_at_updates

log = logging.getLogger("flwr.strategies")


class SynchronousStrategy(GatheredRounds):
    """The loop that FedAvg, FedProx and the spectral method share; a Flower Strategy for any Flower app.

    The parameters are those of ``strategies.core.strategy.FederatedStrategy``. In virtual time a round takes as
    long as its
    slowest participant, unless it closes early (strategies/rounds/deadline.py). Under Flower's own
    ``Strategy.start`` the
    rounds are the same; clock, time budget and observer belong to this one.

    New model: when all participants have answered.
    """

    _too_few: int | None  # how many clients weren't enough so far; None once that is settled

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        self._nobody_comes, self._too_few = False, 0
        self._looks_at_updates = looks_at_updates(type(self), SynchronousStrategy)

    # ---- Flower's hooks -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        if not self._own_loop:
            self._follow(server_round, arrays, grid)
            if server_round == 1:
                self._too_few = 0
            check_loop(self.pace, self.config)
            self._check_loop()
            self.wrapped.asks(server_round, config)
        called = self._call_up(server_round, arrays, config, grid)
        return [] if called is None else self._requests(server_round, arrays, config, *called)

    def _requests(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        participants: Sequence[Client],
        weights: Sequence[float] | None,
    ) -> list[Message]:
        """Build a round's requests, in the order of the clients."""
        early, self._fields = self._early(participants, weights, server_round), config
        companions, requests = self.companions(participants), []
        beside: Mapping[str, Vector] = {}
        for client in participants:
            beside = next(companions, {})
            own = self._train_config(client, server_round, server_round, config)
            own.update(self.stragglers.asks(client))
            requests.append(self._train_request(client, own, arrays, beside))
            part = float(own.get(messages.PART, 1.0))  # type: ignore[arg-type]
            self.loads.note(client.index, messages.total_bytes(requests[-1]), part)
            if early is not None:
                early.note_sent(client, requests[-1], beside)
        if early is not None:  # by now it is known how many bytes each is sent
            early.due = self._due(participants, server_round)
        self._round = self._round_of(server_round, participants, weights)
        self._round.requests = [request.metadata for request in requests]
        self._round.companions, self._round.early = tuple(beside), early
        self._round.bytes_down = sum(messages.total_bytes(request) for request in requests)
        return requests

    def _call_up(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[Sequence[Client], Sequence[float] | None] | None:
        """Return a round's participants, in the order of the clients, and their weights; None if nobody comes."""
        self.clients = clients = self._take_part(grid, config)
        if not clients:  # stopped before they could answer
            return None
        self._check_number(grid)
        self._say_objective()
        free = present(
            self.pace, self._free(grid), self.participation.may_draw, wait=not self.late_work.tasks
        )
        if not free and not self.late_work.tasks:
            self._nobody_comes = True
            return None
        drawn = self.stragglers.among(*self._drawn(free, server_round), server_round)
        self.model = self._layout.to_vector(arrays)
        return drawn

    def _check_number(self, grid: Grid) -> None:
        """Check whether so many clients are enough, until they are or no more come; in real time more always may.

        Raises
        ------
        RunError
            If they are too few, or none of those that the config names is there.
        """
        if self._too_few is None:
            return
        before, self._too_few = self._too_few, None
        number, named = len(self.clients), self.participation.fixed
        if named and not any(client.index in named for client in self.clients):
            raise RunError(f"participation = {self.config.participation!r}: none of these clients is there")
        try:
            # A round goes without those that are named and aren't there.
            self.check(max(number, 1 + max(named, default=-1)))
        except ValueError as error:
            if not self.pace.waits:
                # Flower's simulation registers its nodes while the run is under way already.
                if engine_of(grid) != RAY or number <= before:
                    raise RunError(str(error)) from None
                self._too_few = number
            log.warning("%s; more clients may come", error)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the valid replies of the round together; None for the arrays if there is none.

        A round that is cut off leaves no trace: None for both.
        """
        current = self._round
        if current is None:
            raise RuntimeError("aggregate_train is called after configure_train")
        self.wrapped.passes_on()
        if current.early is not None and not self._own_loop:
            replies = self._closed_by_others(current, replies)
        streaming = self.streams and current.weights is not None and not self._must_look_first
        if not streaming:
            replies = list(replies)
            if self._cut_off():
                return None, None  # a round that was cut off would count only its fast clients
        weights = self._weights_of(current, replies)
        self._worth = {client.index: d for client, d in zip(current.clients, weights, strict=True)}
        size, rule = len(current.model), self.config.aggregation_rule
        number, squares = len(current.clients) - len(current.lost), self.optimizer.reads_squares
        faulty, bound = self.config.faulty_clients, self.config.update_norm_bound
        private = self._noise is not None
        gathered = gathering(rule, faulty, size, number, squares=squares, bound=bound, private=private)
        apart = self._gather(current, weights, replies, gathered)
        if streaming and self._cut_off():
            return None, None
        return self._conclude(current, weights, gathered, apart)

    # ---- The loop -------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run up to ``num_rounds`` rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        Parameters
        ----------
        timeout : float
            Seconds that a round waits for its replies; also the time to live of its messages.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        grid = packing(grid)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        with self._running(grid, timeout):
            return self._run(grid, initial_arrays, num_rounds, train_config, evaluate_config, evaluate_fn)

    def _run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        self._nobody_comes, self._too_few = False, 0
        if self._begin(initial_arrays) is None:
            self._report(0, self._result, evaluate_fn, MetricRecord(), evaluate=True)
        self._take_up_late_work()
        result = self._result
        for server_round in range(self.aggregations + 1, num_rounds + 1):
            work = self._handed_out(server_round, result.arrays, train_config, grid)
            if self.stopped() or self._nobody_comes or not self._fits_budget(server_round):
                break
            arrays, train_metrics = work()
            if arrays is None and self._cut_off():  # cut off; a round that is complete counts
                break
            result.arrays = arrays or result.arrays
            self.clock.wait_until(self.pace.now() + self._duration(server_round))
            self.aggregations, metrics = server_round, train_metrics or MetricRecord()
            result.train_metrics_clientapp[server_round] = metrics
            every = self.config.eval_every or 1
            told = self._told_of(result)
            if evaluate := server_round % every == 0 or server_round == num_rounds:
                metrics = self._evaluate_on_clients(server_round, told, evaluate_config, grid, metrics)
            self._report(server_round, told, evaluate_fn, metrics, evaluate=evaluate)
        if self.aggregations > self._evaluated:  # stopped early, between two evaluations
            self._report(self.aggregations, self._told_of(result), evaluate_fn, MetricRecord(), evaluate=True)
        self._check_worked(initial_arrays)
        self._say_observed()
        return self._told_of(result)

    # ---- Parts of a round -----------------------------------------------------------------------------------

    def _handed_out(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Callable[[], tuple[ArrayRecord | None, MetricRecord | None]]:
        """Call up a round's participants; return what has them work, and makes the next model of it."""
        if not isinstance(grid, SummingGrid) or not self._takes_sums:
            requests = list(self.configure_train(server_round, arrays, config, grid))
            return lambda: self._aggregate_replies(server_round, grid, requests)
        called = self._call_up(server_round, arrays, config, grid)
        if called is None:
            return lambda: (None, None)
        request = self._sum_request(server_round, arrays, config, *called)
        if request is None or not grid.can_sum(request):
            requests = self._requests(server_round, arrays, config, *called)
            return lambda: self._aggregate_replies(server_round, grid, requests)
        return lambda: self._aggregate_sums(grid, request)

    def _aggregate_replies(
        self, server_round: int, grid: Grid, requests: Sequence[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies: Iterable[Message] = self._replies(self._round, grid, requests)
        if type(self).aggregate_train is not SynchronousStrategy.aggregate_train:
            replies = list(replies)  # as Flower's own loop gives them
        return self.aggregate_train(server_round, replies)
