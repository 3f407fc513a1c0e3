"""Rounds in which the server learns the sum of its clients' updates and no single one (``strategies.secure``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from scipy.stats import binom

from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.core.masked_sum import MaskedSum, SumOptions, check_grid
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.rounds.round import Aggregate, Round
from strategies.rounds.session import RoundSession
from strategies.secure.discrete_gaussian import divergence
from strategies.secure.graph import FEWEST, least_of, terms_for
from strategies.secure.masking import Quantizer, SecureSumError
from strategies.updates.aggregation import WeightedSum
from strategies.updates.buffers import BufferAverage
from strategies.updates.clipping import AdaptiveClip

TOO_SMALL = 1e-9  # probability of a round without a sum, which no account of privacy counts
NEGLIGIBLE = 1e-100  # bound on |log P/Q| of a round's sum, with noise of clients and with Gaussian noise


class SecureSums:
    """Asks a round's participants for their masked updates, in four stages, and takes the masks off their sum.

    A participant that goes away in a stage isn't in the sum if its masked update hadn't come. A round in which too
    many go has no sum: the log says in which stage, and the model stays as it is. Stages take no virtual time.
    """

    def __init__(self, session: RoundSession) -> None:
        self._strategy = session.strategy
        self._run, self._pending, self._client_stats = session.run, session.pending, session.client_stats
        self._timeline, self._receiver = session.timeline, session.receiver
        self._selection = session.selection
        self._divides_by_path = session.strategy.capabilities.divides_by_path

    @property
    def _config(self) -> SynchronousConfig:
        """The method's config now: an app may set the noise after the strategy is made."""
        config: SynchronousConfig = self._strategy.config
        return config

    def check(self, num_clients: int) -> None:
        """Raise ValueError if a round of so many clients has no graph with these keys."""
        config = self._config
        if self._selection.scheme.scheme != "poisson":  # whose rounds are of any size
            number = self._selection.number_that_counts(num_clients)
            terms_for(number, config.secure_neighbours, config.secure_threshold)
        elif config.dp == "central" and not config.distributes_noise:
            self._check_hidden(num_clients)

    def _check_hidden(self, num_clients: int) -> None:
        """Raise ValueError if rounds may be too small for a sum, so that one client more tells of all others."""
        config, fraction = self._config, self._selection.scheme.fraction
        least = max(FEWEST, config.secure_neighbours + 1, config.secure_threshold + 1)
        if (small := float(binom.cdf(least - 1, num_clients, fraction))) > TOO_SMALL:
            raise ValueError(
                f"fraction_train = {fraction:g}: of {num_clients} clients fewer than {least} are drawn with a "
                f"probability of {small:.2g}, and a round of so few has no sum; allowed with dp = 'central' and "
                f"secure_sums is at most {TOO_SMALL:g}, with more clients or a larger fraction_train"
            )

    def check_grid(self, grid: Grid) -> None:
        """Raise RunError, before a client trains, where an engine or a part of this run needs single updates."""
        check_grid(grid, self._run, self._receiver)

    def run(self, cohort: Round, grid: Grid) -> Aggregate | None:
        """Have the participants train and mask; return the sum, without updates if too many went.

        None if the round is cancelled.
        """
        total, weights = self._work(cohort, grid)
        if self._run.should_stop():
            return None
        return Aggregate(weights, total, BufferAverage(self._run.buffers))

    def _work(self, current: Round, grid: Grid) -> tuple[WeightedSum, Sequence[float]]:
        config = self._config
        empty = WeightedSum(len(current.model), private=config.dp == "central", each=current.each)
        if not current.clients:
            return empty, []
        current.begin(current.asked, self._timeline, self._run.scheduler)
        current.bytes_down = 0  # counted as stages go out
        try:
            return self._summed(current, grid, empty)
        except SecureSumError as error:
            if self._run.should_stop():
                return empty, []
            if not current.failures:
                self._run.last_failure = f"secure sum: {error}"
            for client in current.clients:
                if client.index not in current.failures:
                    current.reject(client, f"secure sum: {error}", outcome=messages.FAILED)
            current.sizes.clear()
            return empty, []

    def _summed(self, current: Round, grid: Grid, total: WeightedSum) -> tuple[WeightedSum, Sequence[float]]:
        """Return the sum of the clients whose masked updates came, and the weights d_i of all."""
        config, clip, number = self._config, self._receiver.clip, len(current.clients)
        norm, least = 0.0 if clip is None else clip.norm, 2
        quantizer = Quantizer.for_sum(config.secure_clipping, number, norm)
        if config.distributes_noise:
            quantizer, least = _with_noise(config, config.dp_noise_multiplier, number, len(current.model))
        masked = MaskedSum(
            self._run,
            self._pending,
            grid,
            current.clients,
            quantizer,
            SumOptions("round", current.number, self._divides_by_path, frozenset(current.lost), least),
        )
        shares = self._shares(current)
        weighs = self._weigh(current, shares).items()
        fields = {each: {"task": current.number, **its} for each, its in weighs}
        nodes = {request.metadata.dst_node_id: request for request in current.asked}

        def arrived(client: Client, reply: Message) -> None:
            current.count(client.index, 0, bounded=False)
            self._timeline.arrived(client.index, self._run.scheduler.now())
            self._receiver.check_reply_metadata(
                client, reply, [*current.extra_names, *self._selection.stragglers.request_fields(client)]
            )

        try:
            masked.work(fields, arrived, nodes)
        finally:
            current.bytes_down += masked.bytes_down
            current.bytes_up += masked.bytes_up
            for index in masked.summed if masked.opened else ():
                self._client_stats[index].opened += 1
            for index, missed in masked.missed.items():
                current.reject(current.client(index), *missed)
        found = masked.result(shares)
        if shares is None or current.weights is None:
            weight = max(found.weight, 1) / quantizer.levels
            d, kept, scale = [1.0], [1.0], 1 / weight
        else:
            current.weight_by_client = {
                client.index: d for client, d in zip(current.clients, current.weights, strict=True)
            }
            d, kept = list(current.weights), [current.weight_by_client[each] for each in masked.summed]
            scale = max(d) or 1.0
            weight = sum(kept) / scale
        current.outside = found.outside
        for name, (mean, counted) in masked.metrics(found).items():
            current.metrics.add_values(counted, {name: mean})
        if isinstance(clip, AdaptiveClip):
            clip.count(len(masked.summed), found.longer)
        if self._divides_by_path and weight:  # Σ d_i s_i / Σ d_i, in place of each client's own s_i
            scale *= found.numbers[0] / weight
        total.add_block(_scaled(found.update, scale), 0.0, kept)
        return total, d

    def _shares(self, current: Round) -> dict[int, float] | None:
        """Return d_i over the largest by client; None if clients alone know how many examples they have."""
        if current.weights is None:
            return None
        largest = max(current.weights) or 1.0
        pairs = zip(current.clients, current.weights, strict=True)
        return {client.index: float(d / largest) for client, d in pairs}

    def _weigh(self, current: Round, shares: Mapping[int, float] | None) -> dict[int, dict[str, Any]]:
        """Return by client the fields for its weight: d_i over the largest, or how many of its examples count."""
        if shares is not None:
            return {index: {"weight": share} for index, share in shares.items()}
        if not (most := self._config.examples_bound):
            unknown = next(client for client in current.clients if not client.described)
            raise RunError(
                f"client_weights = 'samples' with secure_sums: client {unknown.display_name} doesn't say how many "
                "examples it has before it trains; allowed are examples_bound > 0, the most that count of a "
                "client, or uniform"
            )
        fields = {"examples": most, "weighted-by": self._run.flower.weighted_by_key}
        return {client.index: fields for client in current.clients}


def _with_noise(config: SynchronousConfig, noise: float, number: int, size: int) -> tuple[Quantizer, int]:
    """Return the quantizer of a round in which clients add the noise, and the fewest of them who bring it.

    Raises
    ------
    SecureSumError
        If there is no graph of so many clients.
    RunError
        If the levels are too coarse for the model, or for the noise.
    """
    try:
        threshold = terms_for(number, config.secure_neighbours, config.secure_threshold).threshold
    except ValueError as error:
        raise SecureSumError(str(error)) from None
    least, norm = least_of(number, threshold), config.dp_clipping_norm
    quantizer = Quantizer.with_noise(norm, noise, number, least, size)
    given = (
        f"dp_noise_multiplier = {noise:g} with dp_mechanism = 'distributed': a value of {number} clients' sum"
    )
    if quantizer.shortened(size) < norm / 2:
        raise RunError(
            f"{given} has {quantizer.levels} levels, and rounding to these may double an update of {size} values; "
            "allowed are fewer clients, a smaller model or less noise"
        )
    if size * divergence(quantizer.deviation, number) > NEGLIGIBLE:
        raise RunError(
            f"{given} has noise of {quantizer.deviation} of {quantizer.levels} levels from each, too few to be as "
            "Gaussian noise; allowed are more noise or fewer clients"
        )
    return quantizer, least


def _scaled(update: Vector, scale: float) -> Vector:
    return np.multiply(update, scale, out=update)
