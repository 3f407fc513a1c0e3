"""Rounds in which the server learns the sum of its clients' updates and no single one (``strategies.secure``)."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from scipy.stats import binom

from strategies import streams
from strategies.clients.accounts import Timeline
from strategies.clients.roster import Client
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.protection import needs_sums_alone
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.grids import innermost
from strategies.flower.internals import NOBODY_ANSWERED
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from strategies.secure.client import KEYS, MASKED, SHARES, UNMASK, PublicKeys, SealedShares
from strategies.secure.graph import FEWEST, terms_for
from strategies.secure.masking import HEADER, Quantizer, SecureSumError
from strategies.secure.mod import REFUSED, values_of
from strategies.secure.server import ServerSession
from strategies.updates.aggregation import WeightedSum
from strategies.updates.chain import Clip
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.compressors import NONE
from strategies.updates.server_optimizer import OPTIMIZERS
from strategies.updates.sums import SummingGrid

log = logging.getLogger("flwr.strategies")

TOO_SMALL = 1e-9  # probability of a round without a sum, which no account of privacy counts

Stage = Callable[[Client, Message], None]


class SecureSums:
    """Asks a round's participants for their masked updates, in four stages, and takes the masks off their sum.

    A participant that goes away in a stage isn't in the sum if its masked update hadn't come. A round in which too
    many go has no sum: the log says in which stage, and the model stays as it is. Stages take no virtual time.
    """

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        pending: PendingReplies,
        timeline: Timeline,
        receiver: Receiver,
        selection: Selection,
    ) -> None:
        self._config, self._run, self._pending = config, run, pending
        self._timeline, self._receiver, self._selection = timeline, receiver, selection

    def check(self, num_clients: int) -> None:
        """Raise ValueError if a round of so many clients has no graph with these keys."""
        config, scheme = self._config, self._selection.scheme
        drawn = len(scheme.fixed) or num_clients
        if scheme.scheme in ("uniform", "flower"):
            drawn = scheme.sample_size(num_clients)
        if self._selection.stragglers is not None:
            drawn = self._selection.stragglers.counting(drawn)
        if scheme.scheme != "poisson":  # whose rounds are of any size
            terms_for(drawn, config.secure_neighbours, config.secure_threshold)
        elif config.dp == "central":
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

    def look(self, grid: Grid) -> None:
        """Raise RunError, before a client trains, where an engine or a part of this run needs single updates."""
        run = self._run
        if isinstance(inner := innermost(grid), SummingGrid):
            raise RunError(
                f"secure_sums = True: engine {getattr(inner, 'engine', 'of this grid')!r} trains clients past the "
                "mods of their app, which mask updates; allowed are sequential, ray and devices"
            )
        if self._receiver.witness is not None:
            raise RunError("secure_sums = True: a witness sees single models; allowed is none")
        if self._receiver.bounds_updates:
            log.warning(
                "secure_sums = True: nobody sees how long an update is, so that norm_ratio_bound = %g bounds none",
                self._config.norm_ratio_bound,
            )
        if len(run.buffers_at):
            names = ", ".join(run.layout.names[place] for place in run.buffers.arrays[:3])
            raise RunError(
                f"secure_sums = True: the model has arrays that aren't trained ({names}), whose averages aren't sums "
                "of updates; allowed are models without running statistics and counters"
            )
        if run.flower.train_metrics_aggr_fn is not None:
            raise RunError(
                "secure_sums = True: train_metrics_aggr_fn reads single clients' metrics; allowed is None"
            )

    def work(
        self, current: Round, grid: Grid, requests: Sequence[Message], cut_off: Callable[[], bool]
    ) -> tuple[WeightedSum, Sequence[float]]:
        """Have the clients of a round train and mask; return the sum, without updates if too many went, and the d_i.

        ``cut_off``: whether to give up the round.
        """
        number = len(current.clients)
        empty = _sum_of(current, self._config)
        if not number:
            return empty, []
        current.begin(requests, self._timeline, self._run.pace)
        current.bytes_down = 0  # counted as stages go out
        try:
            session = _Session(
                self._run, self._config, self._pending, self._receiver.clip, current, grid, cut_off
            )
            return session.work(
                {request.metadata.dst_node_id: request for request in requests}, self._arrived
            )
        except SecureSumError as error:
            if cut_off():
                return empty, []
            if not current.failures:
                self._run.last_reason = f"secure sum: {error}"
            for client in current.clients:
                if client.index not in current.failures:
                    current.leave_out(client, f"secure sum: {error}", outcome=messages.FAILED)
            current.sizes.clear()
            return empty, []

    def _arrived(self, client: Client, reply: Message, sent: Sequence[str]) -> None:
        self._timeline.arrived(client.index, self._run.pace.now())
        self._receiver.look_at(client, reply, [*sent, *self._selection.asks(client)])


class _Session:
    """One round's secure sum between its clients and this server."""

    def __init__(
        self,
        run: RunState,
        config: SynchronousConfig,
        pending: PendingReplies,
        clip: Clip | AdaptiveClip | None,
        current: Round,
        grid: Grid,
        cut_off: Callable[[], bool],
    ) -> None:
        self._run, self._config, self._pending, self._clip = run, config, pending, clip
        self._current, self._grid, self._cut_off = current, grid, cut_off
        number = len(current.clients)
        try:
            k, t = terms_for(number, config.secure_neighbours, config.secure_threshold)
        except ValueError as error:
            raise SecureSumError(str(error)) from None
        rng = streams.unpredictable()
        self._server = ServerSession([client.index for client in current.clients], k, t, rng)
        self._number = int(rng.integers(2**62))
        self._quantizer = Quantizer.for_sum(
            config.secure_clipping, number, 0.0 if clip is None else clip.norm
        )
        self._size = HEADER + len(current.model)
        self._threshold = t
        self._weights = self._weigh()

    def work(
        self,
        requests: Mapping[int, Message],
        arrived: Callable[[Client, Message, Sequence[str]], None],
    ) -> tuple[WeightedSum, Sequence[float]]:
        """Go through the stages; ``requests``: the training requests by node."""
        current, server = self._current, self._server

        def keys(client: Client, reply: Message) -> None:
            if reply.has_error() and reply.error.code not in (REFUSED, *NOBODY_ANSWERED):
                raise SecureSumError(f"{messages.NOT_MASKED} ({messages.reason_of(reply)})")
            record = _told(reply)
            server.take_keys(client.index, PublicKeys(_bytes(record, "seal"), _bytes(record, "mask")))

        def shares(client: Client, reply: Message) -> None:
            record = _told(reply)
            dealt = SealedShares(_by_client(record, "sealed"), _bytes(record, "commitment"))
            server.take_shares(client.index, dealt)

        def masked(client: Client, reply: Message) -> None:
            if not reply.has_content():
                raise SecureSumError(messages.reason_of(reply))
            server.take_masked(client.index, values_of(reply, self._size))
            current.count(client.index, 0, bounded=False)
            arrived(client, reply, current.companions)

        def revealed(client: Client, reply: Message) -> None:
            server.take_revealed(client.index, _by_client(_told(reply), "shares"))

        everyone = {client.index: {"threshold": self._threshold} for client in current.clients}
        self._ask(KEYS, everyone, keys)
        near = server.keys_for()
        self._left_out(server.asked, near, "sent keys")
        self._ask(
            SHARES,
            {
                each: {
                    "clients": list(known),
                    "seal": [keys.seal for keys in known.values()],
                    "mask": [keys.mask for keys in known.values()],
                }
                for each, known in near.items()
            },
            shares,
        )
        sealed = server.shares_for()
        self._left_out(near, sealed, "dealt shares")
        self._ask(
            MASKED,
            {
                each: {
                    "clients": list(known),
                    "sealed": list(known.values()),
                    **self._weights[each],
                    **self._terms(),
                }
                for each, known in sealed.items()
            },
            masked,
            requests,
        )
        asks = {
            each: {name: those for name, those in (("here", here), ("gone", gone)) if those}
            for each, (here, gone) in server.asks().items()
        }
        self._ask(UNMASK, asks, revealed)
        return self._sum()

    def _terms(self) -> dict[str, Any]:
        """Return the fields by which all clients encode their updates."""
        return {
            "clipping": self._quantizer.clipping,
            "levels": self._quantizer.levels,
            "norm": self._quantizer.norm,
            "seed": self._config.seed,
            "task": self._current.number,
            "arrays": self._run.flower.arrayrecord_key,
        }

    def _weigh(self) -> dict[int, dict[str, Any]]:
        """Return by client the fields for its weight: d_i over the largest, or by how many of its examples count."""
        current, most = self._current, self._config.examples_bound
        if current.weights is not None:
            largest = max(current.weights) or 1.0
            pairs = zip(current.clients, current.weights, strict=True)
            return {client.index: {"weight": float(d / largest)} for client, d in pairs}
        if not most:
            unknown = next(client for client in current.clients if not client.described)
            raise RunError(
                f"client_weights = 'samples' with secure_sums: {unknown.located} doesn't say how many examples it "
                "has before it trains; allowed are examples_bound > 0, the most that count of a client, or uniform"
            )
        fields = {"examples": most, "weighted-by": self._run.flower.weighted_by_key}
        return {client.index: fields for client in current.clients}

    def _sum(self) -> tuple[WeightedSum, Sequence[float]]:
        """Return the sum of the clients whose masked updates came, and the weights d_i of all."""
        current, server, quantizer = self._current, self._server, self._quantizer
        found = quantizer.decode(server.total(), len(server.summed))
        for liar, owners in sorted(server.liars.items()):
            log.warning(
                "round %d: secure sum: client %s gave wrong shares of client %s: the sum is right without them",
                current.number,
                current.client(liar).located,
                ", ".join(map(str, owners)),
            )
        shares = current.weights
        if shares is None:
            wrong = found.weight > len(server.summed) * quantizer.levels
            d, kept, scale = [1.0], [1.0], quantizer.levels / max(found.weight, 1)
        else:
            largest = max(shares) or 1.0
            by_client = dict(zip((client.index for client in current.clients), shares, strict=True))
            current.worth = by_client
            kept = [by_client[each] for each in server.summed]
            wrong = found.weight != sum(quantizer.weight(each / largest) for each in kept)
            d, scale = list(shares), largest
        if wrong or max(found.outside, found.longer) > len(server.summed):
            raise SecureSumError(
                "the masks don't cancel out: a client masked or dealt something else than it said"
            )
        if found.outside:
            current.outside = found.outside
            self._run.warn_once(
                "secure_clipping = %g: %d clients had weighted values beyond it, which were cut to it; a larger one "
                "lets them pass, at coarser steps",
                quantizer.clipping,
                found.outside,
            )
        if isinstance(self._clip, AdaptiveClip):
            self._clip.count(len(server.summed), found.longer)
        total = _sum_of(current, self._config)
        total.add_block(_scaled(found.update, scale), 0.0, kept)
        self._run.any_moved = self._run.any_moved or bool(found.update.any())
        return total, d

    # ---- Messages --------------------------------------------------------------------------------------------------

    def _ask(
        self,
        stage: str,
        fields: Mapping[int, Mapping[str, Any]],
        take: Stage,
        requests: Mapping[int, Message] | None = None,
    ) -> None:
        """Send a stage's messages, and take the replies; note why a client's doesn't count."""
        current, waiting = self._current, list[tuple[Client, Message]]()
        for client in current.clients:
            if client.index not in fields:
                continue
            if requests is not None and client.index in current.lost:
                current.leave_out(client, messages.NO_REPLY)
                continue
            waiting.append((client, self._message(client, stage, fields[client.index], requests)))
        current.bytes_down += sum(_size_of(message) for _, message in waiting)
        left = {client.index: client for client, _ in waiting}
        for client, reply in self._replies(stage, waiting):
            if left.pop(client.index, None) is None:
                continue
            if reply.has_content():
                current.bytes_up += _size_of(reply)
            try:
                take(client, reply)
            except SecureSumError as error:
                self._miss(stage, client, str(error), reply)
        if self._cut_off():
            raise SecureSumError("the round was cut off")
        for client in left.values():
            self._miss(stage, client, messages.NO_REPLY, None)

    def _message(
        self,
        client: Client,
        stage: str,
        fields: Mapping[str, Any],
        requests: Mapping[int, Message] | None,
    ) -> Message:
        run = self._run
        record = ConfigRecord({"stage": stage, "session": self._number, "client": client.index, **fields})
        if requests is not None:
            request = requests[client.node_id]
            request.content[messages.SECURE] = record
            return request
        own = ConfigRecord({messages.SERVER_ROUND: self._current.number, messages.CLIENT: client.index})
        return messages.request(
            messages.TRAIN,
            client.node_id,
            own,
            ttl=run.timeout,
            companions={messages.SECURE: record},
            keys=run.flower.keys,
        )

    def _replies(
        self, stage: str, waiting: Sequence[tuple[Client, Message]]
    ) -> Iterator[tuple[Client, Message]]:
        kind = messages.TRAIN if stage == MASKED else f"{messages.SECURE}.{stage}"
        replies = self._pending.awaited(
            self._grid, [message for _, message in waiting], None, self._current.overdue, kind
        )
        by_request = {message.metadata.message_id: client for client, message in waiting}
        for reply in replies:
            if (client := by_request.get(reply.metadata.reply_to_message_id)) is not None:
                yield client, reply

    def _miss(self, stage: str, client: Client, reason: str, reply: Message | None) -> None:
        """Note why a client isn't in the sum; after its masked update came, it is."""
        if stage != UNMASK:
            self._run.last_reason = reason
            self._current.leave_out(client, reason, reply)

    def _left_out(self, before: Mapping[int, object], core: Mapping[int, object], did: str) -> None:
        """Note the clients that could go on, but for too few neighbours that can."""
        for client in self._current.clients:
            if (
                client.index in before
                and client.index not in core
                and client.index not in self._current.failures
            ):
                few = f"fewer than {self._threshold} of its neighbours {did}"
                self._current.leave_out(client, f"secure sum: {few}", outcome=messages.FAILED)


def _told(reply: Message) -> ConfigRecord:
    """Return the record of a reply to a stage.

    Raises
    ------
    SecureSumError
        If it is an error, or there is none.
    """
    if not reply.has_content():
        raise SecureSumError(messages.reason_of(reply))
    record = reply.content.get(messages.SECURE)
    if not isinstance(record, ConfigRecord):
        raise SecureSumError(messages.NOT_MASKED)
    return record


def _size_of(message: Message) -> int:
    """Return the bytes of a message's arrays, and of the stage's record."""
    record = message.content.get(messages.SECURE)
    return messages.total_bytes(message) + (0 if record is None else messages.record_bytes(record))


def _bytes(record: ConfigRecord, name: str) -> bytes:
    """Return bytes of a client's answer, which may have anything."""
    if not isinstance(value := record.get(name), bytes):
        raise SecureSumError(f"its answer has no bytes {name!r}")
    return value


def _by_client(record: ConfigRecord, name: str) -> dict[int, bytes]:
    """Return the bytes by client of a client's answer, which may have anything."""
    clients, values = record.get("clients", []), record.get(name, [])
    if not isinstance(clients, list) or not isinstance(values, list) or len(clients) != len(values):
        raise SecureSumError(f"its answer has no {name!r} by client")
    known = {
        each: value
        for each, value in zip(clients, values, strict=True)
        if isinstance(each, int) and isinstance(value, bytes)
    }
    if len(known) != len(clients):
        raise SecureSumError(f"its answer has no {name!r} by client")
    return known


def _sum_of(current: Round, config: SynchronousConfig) -> WeightedSum:
    """Return a round's sum without updates."""
    number, private = len(current.clients), config.dp == "central"
    return WeightedSum(len(current.model), number, private=private, each=current.each)


def _scaled(update: Vector, scale: float) -> Vector:
    return np.multiply(update, scale, out=update)


def check_secure(name: str, config: SynchronousConfig, able: Capabilities) -> None:
    """Raise ValueError for what needs single updates, with secure sums."""
    reads: str = ""
    rule = config.rule()
    if not needs_sums_alone(able):
        reads = f"{name} reads single updates; allowed are methods that need sums alone, such as fedavg and fedprox"
    elif rule is not None:
        reads = f"{rule.text} compares single updates; allowed is mean"
    elif config.round_deadline or config.over_select:
        reads = "late updates count one by one; allowed are round_deadline and over_select 0"
    elif config.compression != NONE:
        reads = f"compression = {config.compression!r}: compressed updates can't be masked; allowed is none"
    elif config.update_norm_bound:
        reads = f"update_norm_bound = {config.update_norm_bound}: is of single updates; allowed is 0"
    elif config.safeguards == "on" and config.norm_ratio_bound:
        reads = f"norm_ratio_bound = {config.norm_ratio_bound}: is of single updates; allowed is 0"
    elif config.new_optimizer().reads_squares:
        others = ", ".join(each for each in OPTIMIZERS if each != config.server_optimizer)
        reads = f"server_optimizer = {config.server_optimizer!r}: reads single updates' lengths; allowed are {others}"
    if reads:
        raise ValueError(f"secure_sums = True: {reads}")
