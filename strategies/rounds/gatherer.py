"""The replies of a round, one after the other in the order of the clients, up to its sum or its contributions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import Message

from strategies.core.capabilities import Capabilities
from strategies.core.receiver import Receiver
from strategies.core.run_state import RunState
from strategies.core.server_step import ServerStep
from strategies.core.wrapper import Wrapped
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import in_order
from strategies.rounds.mods import RefusingMods
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from strategies.updates.aggregation import WeightedSum
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Contribution, UnweighedError
from strategies.updates.safeguards import Safeguards


class Gatherer:
    """Takes in a round's replies.

    Parameters
    ----------
    robust : bool
        Whether buffers are put together by their median, beside a robust rule.
    counted : callable
        Hook of the method: what of a contribution is weighted and summed.
    """

    def __init__(
        self,
        run: RunState,
        receiver: Receiver,
        safeguards: Safeguards,
        server_step: ServerStep,
        selection: Selection,
        wrapper: Wrapped,
        mods: RefusingMods,
        capabilities: Capabilities,
        *,
        robust: bool,
        counted: Callable[[Contribution], Vector],
    ) -> None:
        self._run, self._receiver, self._safeguards = run, receiver, safeguards
        self._server_step, self._selection, self._wrapper, self._mods = server_step, selection, wrapper, mods
        self._capabilities, self._robust, self._counted = capabilities, robust, counted

    def state(self) -> dict[str, Any]:
        """Return nothing: a run that goes on begins anew with what is known of mods and wrappers."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Forget the mods and the wrapper of an earlier run."""
        self._wrapper.reset()
        self._mods.reset()

    @property
    def looks_first(self) -> bool:
        """Whether all of a round are looked at before any counts, as nobody knows yet what norms are usual."""
        guards = self._safeguards
        return guards.learns_norms and not guards.norms.knows_enough(len(self._run.clients))

    def gather(
        self, current: Round, weights: Sequence[float], replies: Iterable[Message], total: WeightedSum
    ) -> Untrained:
        """Take the valid replies in; keep the reasons against the others. Return the buffers, set apart."""
        run, receiver = self._run, self._receiver
        apart = Untrained(run.buffers_at, robust=self._robust)
        check, links, unweighed = receiver.check(apart), receiver.links(), False
        if self.looks_first:
            replies = list(replies)
            for client, reply in zip(current.clients, in_order(current.requests, replies), strict=True):
                with suppress(ArraysMismatchError):
                    self._safeguards.norms.see(check(client, reply, current.base_of(client)[0]))
        answers = in_order(current.requests, replies)
        for client, weight, reply in zip(current.clients, weights, answers, strict=True):
            base, sent_in = current.base_of(client)
            try:
                local = check(client, reply, base)
            except ArraysMismatchError as error:
                run.last_reason = str(error)
                current.leave_out(client, run.last_reason, reply)
                unweighed = unweighed or isinstance(error, UnweighedError)
                if client.index not in current.lost:
                    total.skip()
                continue
            assert reply is not None
            self._wrapper.look(local, apart.positions, reply)
            links(local)
            asked = [*current.companions, *self._selection.asks(client)]
            contribution = receiver.contribution(local, reply, sent_in - 1, current.number - sent_in, asked)
            if self._capabilities.needs_all_updates:
                current.contributions.append(contribution)
            else:
                total.add(weight, self._server_step.looked_at(self._counted(contribution)))
            apart.add(weight, contribution.untrained)
            current.take_in(contribution, weight, reply, bounded=local.bounded)
        if unweighed and len(current.failures) == len(current.clients):
            raise RunError(f"no client counts: {next(iter(current.failures.values()))}")
        self._mods.check(current)
        self._wrapper.judge()
        return apart
