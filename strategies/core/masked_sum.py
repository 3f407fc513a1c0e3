"""One secure sum between clients and the server of a run (``strategies.secure``): four messages to each client."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies import streams
from strategies.clients.roster import Client, display_names
from strategies.core.config import SecureConfig
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.frozen import FrozenParameterCache
from strategies.flower.grids import innermost
from strategies.flower.internals import NOBODY_ANSWERED
from strategies.secure.client import KEYS, MASKED, SHARES, UNMASK, PublicKeys, SealedShares
from strategies.secure.graph import terms_for
from strategies.secure.masking import Decoded, Quantizer, SecureSumError, size_of
from strategies.secure.mod import BY_PATH, METRICS, REFUSED, values_of
from strategies.secure.openings import Update
from strategies.secure.server import ServerSession
from strategies.updates.sums import SummingGrid

log = logging.getLogger("flwr.strategies")

Stage = Callable[[Client, Message], None]


class Missed(NamedTuple):
    """Why a client isn't in a sum: the reason, its reply, and the outcome of its task if the reply doesn't tell."""

    reason: str
    reply: Message | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class SumOptions:
    """What distinguishes one secure sum of a run from another.

    Attributes
    ----------
    unit : str
        ``round`` or ``aggregation``, for the log.
    number : int
        Its number.
    divides_by_path : bool
        Whether each update is divided by its client's path, and the weighted path is summed, too.
    lost : frozenset of int
        The clients, by index, that go away before they send their masked updates.
    least : int
        The fewest masked updates whose sum is opened.
    versions : mapping of int to int
        By client the version of the model that it was sent, where that isn't ``number``.
    """

    unit: str
    number: int
    divides_by_path: bool = False
    lost: frozenset[int] = frozenset()
    least: int = 2
    versions: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.unit} {self.number}"


class MaskedSum:
    """Goes through the stages of one secure sum, and takes the masks off.

    Parameters
    ----------
    clients : sequence of Client
        The clients whose updates are to be summed.
    quantizer : Quantizer
        By which the clients encode their updates.
    options : SumOptions
        The number of the sum, and how it differs from others.

    Attributes
    ----------
    missed : dict of int to Missed
        The clients that aren't in the sum, by index, as they went.
    opened : bool
        Whether clients have been asked to unmask the sum of those in ``summed``.
    bytes_down, bytes_up : int
        Bytes of the stages' messages and replies.

    Raises
    ------
    SecureSumError
        If there is no graph of so many clients.
    """

    def __init__(
        self,
        run: RunState,
        pending: PendingReplies,
        grid: Grid,
        clients: Sequence[Client],
        quantizer: Quantizer,
        options: SumOptions,
    ) -> None:
        config = run.config
        assert isinstance(config, SecureConfig)
        self._run, self._pending, self._grid, self._clients = run, pending, grid, clients
        self._quantizer, self._options = quantizer, options
        self._metrics = () if quantizer.deviation else config.summed_metrics  # to which nobody adds noise
        self._numbers = options.divides_by_path + 2 * len(self._metrics)
        try:
            k, self._threshold = terms_for(len(clients), config.secure_neighbours, config.secure_threshold)
        except ValueError as error:
            raise SecureSumError(str(error)) from None
        rng = streams.unpredictable()
        indices = [client.index for client in clients]
        self._server = ServerSession(indices, k, self._threshold, rng, options.least)
        self._session = int(rng.integers(2**62))
        self._terms: dict[str, Any] = {
            "clipping": quantizer.clipping,
            "levels": quantizer.levels,
            "norm": quantizer.norm,
            "deviation": quantizer.deviation,
            "repeatable": run.options.deterministic_noise,
            "seed": config.seed,
            "arrays": run.flower.arrayrecord_key,
            BY_PATH: options.divides_by_path,
        }
        if self._metrics:
            self._terms[METRICS] = list(self._metrics)
        self.missed: dict[int, Missed] = {}
        self.opened = False
        self._silent: list[Client] = []  # whose masked updates came, and no shares
        self.bytes_down = self.bytes_up = 0

    @property
    def summed(self) -> Sequence[int]:
        """The clients whose masked updates are in the sum, by index, in ascending order."""
        return sorted(self._server.summed)

    def work(
        self,
        fields: Mapping[int, Mapping[str, Any]],
        arrived: Callable[[Client, Message], None],
        requests: Mapping[int, Message] | None = None,
    ) -> None:
        """Go through the stages.

        Parameters
        ----------
        fields : mapping of int to mapping
            By client what its masked update is made by, beside the quantizer's terms.
        arrived : callable
            Called with a client and its reply when its masked update has come.
        requests : mapping of int to Message, optional
            By node the training requests that ask for masked updates; None: clients have trained before.

        Raises
        ------
        SecureSumError
            If too many clients went.
        """
        server = self._server

        def keys(client: Client, reply: Message) -> None:
            if reply.has_error() and reply.error.code not in (REFUSED, *NOBODY_ANSWERED):
                raise SecureSumError(f"{messages.NOT_MASKED} ({messages.reason_of(reply)})")
            record = reported_record(reply)
            server.take_keys(client.index, PublicKeys(_bytes(record, "seal"), _bytes(record, "mask")))

        def shares(client: Client, reply: Message) -> None:
            record = reported_record(reply)
            dealt = SealedShares(_by_client(record, "sealed"), _bytes(record, "commitment"))
            server.take_shares(client.index, dealt)

        def masked(client: Client, reply: Message) -> None:
            if not reply.has_content():
                raise SecureSumError(messages.reason_of(reply))
            server.take_masked(client.index, values_of(reply, size_of(self._run.layout.size, self._numbers)))
            arrived(client, reply)

        def revealed(client: Client, reply: Message) -> None:
            server.take_revealed(client.index, _by_client(reported_record(reply), "shares"))

        everyone = {client.index: {"threshold": self._threshold} for client in self._clients}
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
                each: {"clients": list(known), "sealed": list(known.values()), **self._terms, **fields[each]}
                for each, known in sealed.items()
            },
            masked,
            requests,
        )
        updates = self._updates()
        opened = {"clients": [each for each, _ in updates], "versions": [version for _, version in updates]}
        unmask_requests = {
            each: {**opened, **{name: those for name, those in (("here", here), ("gone", gone)) if those}}
            for each, (here, gone) in server.unmask_requests().items()
        }
        self._check_repeated(updates)
        self.opened = True
        self._ask(UNMASK, unmask_requests, revealed)

    def _updates(self) -> list[Update]:
        """Return the updates in the sum: each client's index, and the version of the model that it was sent."""
        versions, number = self._options.versions, self._options.number
        return [(each, versions.get(each, number)) for each in self.summed]

    def _check_repeated(self, updates: Sequence[Update]) -> None:
        """Raise SecureSumError if this sum and one that was opened before tell the updates of few clients."""
        openings = self._run.options.openings
        if openings is not None and (reason := openings.refusal(updates, self._threshold)):
            raise SecureSumError(reason)

    def result(self, weights: Mapping[int, float] | None) -> Decoded:
        """Return the sum, after ``work``; ``weights``: f_i in [0, 1] by client, None if they alone know.

        Raises
        ------
        SecureSumError
            If a mask can't be taken off, or masks don't cancel out.
        """
        quantizer, number = self._quantizer, len(self.summed)
        try:
            total = self._server.total()
        except SecureSumError:
            if self._silent:
                log.warning(
                    "%s: secure sum: clients that masked their update and then sent no share: %s (%s)",
                    self._options,
                    display_names(sorted(self._silent, key=lambda client: client.index)),
                    self._run.last_failure,
                )
            raise
        found = quantizer.decode(total, number, self._numbers)
        self._name_liars()
        if weights is None:
            wrong = found.weight > number * quantizer.levels
        else:
            wrong = found.weight != sum(quantizer.weight(weights[each]) for each in self.summed)
        if wrong or max(found.outside, found.longer) > number:
            raise SecureSumError(
                "the masks don't cancel out: a client masked or dealt something else than it said"
            )
        if found.outside:
            self._run.warn_once(
                "secure_clipping = %g: %d clients had weighted values beyond it, which were cut to it; a larger one "
                "lets them pass, at coarser steps",
                quantizer.clipping,
                found.outside,
            )
        self._run.any_nonzero_update = self._run.any_nonzero_update or bool(found.update.any())
        return found

    def _name_liars(self) -> None:
        """Log the clients whose shares of others don't fit the shares of the rest."""
        located = {client.index: client.display_name for client in self._clients}
        for liar, owners in sorted(self._server.liars.items()):
            log.warning(
                "%s: secure sum: client %s gave wrong shares of client %s: the sum is right without them",
                self._options,
                located[liar],
                ", ".join(map(str, owners)),
            )

    def metrics(self, found: Decoded) -> dict[str, tuple[float, float]]:
        """Return by name the mean of each metric in a sum, and Σ of the weights of the clients that have it."""
        numbers, means = found.numbers[self._options.divides_by_path :], dict[str, tuple[float, float]]()
        for name, total, weight in zip(self._metrics, numbers[::2], numbers[1::2], strict=True):
            if weight > 0:
                means[name] = total / weight, weight
            else:
                self._run.warn_once("secure_metrics: no client has a metric %r, as a number", name)
        return means

    # ---- Messages --------------------------------------------------------------------------------------------------

    def _ask(
        self,
        stage: str,
        fields: Mapping[int, Mapping[str, Any]],
        take: Stage,
        requests: Mapping[int, Message] | None = None,
    ) -> None:
        """Send a stage's messages, and take the replies; note why a client's doesn't count."""
        overdue, lost = dict[int, str](), self._options.lost if stage == MASKED else frozenset[int]()
        self.missed |= {index: Missed(messages.NO_REPLY) for index in sorted(fields.keys() & lost)}
        waiting = self._waiting(stage, {i: fields[i] for i in fields.keys() - lost}, requests)
        left = {client.index: client for client, _ in waiting}
        kind = messages.TRAIN if requests is not None else f"{messages.SECURE}.{stage}"
        for client, reply in self._replies(kind, waiting, overdue):
            if left.pop(client.index, None) is None:
                continue
            if reply.has_content():
                self.bytes_up += _size_of(reply)
            try:
                take(client, reply)
            except SecureSumError as error:
                self._miss(stage, client, str(error), reply)
        if self._run.should_stop():
            raise SecureSumError(f"{self._options} was cut off")
        for client in left.values():
            self._miss(stage, client, overdue.get(client.index, messages.NO_REPLY), None)

    def _waiting(
        self, stage: str, fields: Mapping[int, Mapping[str, Any]], requests: Mapping[int, Message] | None
    ) -> list[tuple[Client, Message]]:
        """Return the clients that are asked, with their messages, whose bytes are counted."""
        asked = [client for client in self._clients if client.index in fields]
        waiting = [(client, self._message(client, stage, fields[client.index], requests)) for client in asked]
        self.bytes_down += sum(_size_of(message) for _, message in waiting)
        return waiting

    def _message(
        self, client: Client, stage: str, fields: Mapping[str, Any], requests: Mapping[int, Message] | None
    ) -> Message:
        run = self._run
        record = ConfigRecord({"stage": stage, "session": self._session, "client": client.index, **fields})
        if requests is not None:
            request = requests[client.node_id]
            request.content[messages.SECURE] = record
            return request
        own = ConfigRecord({messages.SERVER_ROUND: self._options.number, messages.CLIENT: client.index})
        return messages.request(
            messages.TRAIN,
            client.node_id,
            own,
            ttl=run.timeout,
            extra_records={messages.SECURE: record},
            keys=run.flower.keys,
        )

    def _replies(
        self, kind: str, waiting: Sequence[tuple[Client, Message]], overdue: dict[int, str]
    ) -> Iterator[tuple[Client, Message]]:
        replies = self._pending.awaited(
            self._grid, [message for _, message in waiting], overdue=overdue, kind=kind
        )
        by_request = {message.metadata.message_id: client for client, message in waiting}
        for reply in replies:
            if (client := by_request.get(reply.metadata.reply_to_message_id)) is not None:
                yield client, reply

    def _miss(self, stage: str, client: Client, reason: str, reply: Message | None) -> None:
        """Note why a client isn't in the sum; in the stage ``UNMASK`` it is in the sum, which other shares open."""
        self._run.last_failure = reason
        if stage == UNMASK:
            self._silent.append(client)
            return
        self.missed[client.index] = Missed(reason, reply)

    def _left_out(self, before: Mapping[int, object], core: Mapping[int, object], did: str) -> None:
        """Note the clients that could go on, but for too few neighbours that can."""
        for client in self._clients:
            index = client.index
            if index in before and index not in core and index not in self.missed:
                few = f"fewer than {self._threshold} of its neighbours {did}"
                self.missed[index] = Missed(f"secure sum: {few}", outcome=messages.FAILED)


def reported_record(reply: Message) -> ConfigRecord:
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
    wrong = SecureSumError(f"its answer has no {name!r} by client")
    if not isinstance(clients, list) or not isinstance(values, list) or len(clients) != len(values):
        raise wrong
    pairs = zip(clients, values, strict=True)
    known = {each: value for each, value in pairs if isinstance(each, int) and isinstance(value, bytes)}
    if len(known) != len(clients):
        raise wrong
    return known


# ---- What can't be with secure sums --------------------------------------------------------------------------------


def check_grid(grid: Grid, run: RunState, receiver: Receiver) -> None:
    """Raise RunError, before a client trains, where an engine or a part of a run needs single updates."""
    if isinstance(inner := innermost(grid), SummingGrid):
        raise RunError(
            f"secure_sums = True: engine {getattr(inner, 'engine', 'of this grid')!r} trains clients past the "
            "mods of their app, which mask updates; allowed are sequential, ray and devices"
        )
    if isinstance(run.frozen, FrozenParameterCache):
        raise RunError(
            "secure_sums = True: trained names some of the model's arrays, and clients mask whole models; "
            "allowed is trained = None"
        )
    if run.options.on_client_model is not None:
        raise RunError("secure_sums = True: on_client_model sees single models; allowed is none")
    if (
        receiver.clip is None
        and run.config.norm_ratio_bound
        and run.config.safeguards == "auto"
        and run.in_real_time()
    ):
        log.warning(
            "secure_sums = True: nobody sees how long an update is, so that norm_ratio_bound = %g bounds none",
            run.config.norm_ratio_bound,
        )
    if len(run.buffers_at):
        names = ", ".join(run.layout.names[place] for place in run.buffers.arrays[:3])
        raise RunError(
            f"secure_sums = True: the model has arrays that aren't trained ({names}), whose averages aren't sums "
            "of updates; allowed are models without running statistics and counters"
        )
