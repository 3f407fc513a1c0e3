"""What a round's scheme says: who takes part, with which weight, and which settings need clients that count alike.

A round draws its participants and gives each a weight d_i, as strategies/clients/weights.py has them; a subclass
may do
either by itself. The loop is in strategies/rounds/strategy.py.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message

from strategies.clients.roster import Client, sized_by_replies
from strategies.clients.weights import Participation, Weights
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.strategy import FederatedStrategy
from strategies.flower.errors import RunError
from strategies.flower.exchange import in_order
from strategies.rounds.round import Round
from strategies.rounds.stragglers import Stragglers
from strategies.updates.aggregation import MEAN, RULES, least_updates
from strategies.updates.chain import Contribution

log = logging.getLogger("flwr.strategies")


class RoundScheme(FederatedStrategy):
    """Who takes part in a round, and how much each counts."""

    Config: ClassVar[type[StrategyConfig]] = SynchronousConfig
    config: SynchronousConfig

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        self.participation = Participation.parse(
            self.config.participation, self.config.fraction_train, self.flower.min_train_nodes
        )
        self.stragglers = Stragglers(self.config)
        own = type(self)
        #: Whether a hook wants to see all contributions of a round at once.
        self._wants_all = (
            own.weigh is not RoundScheme.weigh or own.aggregate is not FederatedStrategy.aggregate
        )
        self._worth: dict[int, float] = {}
        if self.participation.scheme == "paired" and not self.pace.always:
            raise ValueError(
                "participation = 'paired': the last client is in every round, and can't be if it comes and goes; "
                "allowed with availability and task_failure are full, uniform, md, flower, fixed:…"
            )
        self._check_equality()

    def _check_equality(self) -> None:
        """Refuse what rests on all clients counting alike where they don't."""
        config, scheme = self.config, self.participation.scheme
        if config.aggregation_rule not in RULES:
            raise ValueError(
                f"aggregation_rule = {config.aggregation_rule!r}: allowed are {', '.join(RULES)}"
            )
        asked = {
            f"aggregation_rule = {config.aggregation_rule!r}": config.aggregation_rule != MEAN,
            f"dp = {config.dp!r}": config.dp == "central",
        }
        if self._wants_all and (name := next((name for name, there in asked.items() if there), "")):
            raise ValueError(
                f"{name}: {type(self).__name__} puts updates together by itself (weigh, aggregate)"
            )
        for name in (name for name, there in asked.items() if there):
            if all(asked.values()):
                raise ValueError(
                    f"{name} with dp = 'central': its noise is that of a mean; allowed is one of the two"
                )
            if config.client_weights != "uniform":
                raise ValueError(
                    f"{name}: takes clients as equals; client_weights = {config.client_weights!r}, allowed is uniform"
                )
            if scheme in ("md", "paired"):
                raise ValueError(
                    f"{name}: takes clients as equals; participation = {scheme!r}, allowed are full, uniform, fixed:…"
                )

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the participation scheme or the aggregation rule."""
        self.participation.check(num_clients)
        if (rule := self.config.aggregation_rule) != MEAN:
            scheme, faulty = self.participation, self.config.faulty_clients
            there = scheme.sample_size(num_clients) if scheme.scheme in ("uniform", "flower") else num_clients
            drawn = self.stragglers.counting(len(scheme.fixed) or there)
            if drawn < least_updates(rule, faulty):
                raise ValueError(
                    f"aggregation_rule = {rule!r}, faulty_clients = {faulty}: needs {least_updates(rule, faulty)} "
                    f"clients a round or more, {drawn} take part"
                )

    # ---- What an algorithm may fill in: see strategies/__init__.py --------------------------------------------

    def select(
        self, clients: Sequence[Client], rng: np.random.Generator
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Return who takes part in a round and their weights d_i; None: by the sizes that their replies tell.

        Parameters
        ----------
        clients : sequence of Client
            Those that are there and free, by index; ``importance`` has the p_i of all.
        rng : np.random.Generator
            The round's own.
        """
        sized = self.config.client_weights != "samples" or all(client.described for client in clients)
        scheme = self._participation_among(clients)
        if not sized and scheme.scheme in ("md", "uniform"):
            raise RunError(
                f"participation = {scheme.scheme!r}: its weights rest on the number of examples of all clients, and "
                "not all answer query.describe with it; allowed are full, flower, or client_weights = uniform"
            )
        draw = scheme.draw(self._importances(clients), rng, self._number_to_draw())
        by_replies = not sized and scheme.scheme != "paired"
        return [clients[place] for place in draw.clients], None if by_replies else draw.weights

    def _number_to_draw(self) -> int | None:
        """Return how many ``uniform``, ``md`` and ``flower`` draw; None: as the scheme says."""
        return None

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of a round, which come in client order."""
        d = [self._worth[contribution.client.index] for contribution in contributions]
        return [weight * (sum(self._worth.values()) / sum(d)) for weight in d] if sum(d) > 0 else d

    # ---- Who takes part, and what each counts ------------------------------------------------------------------

    def _participation_among(self, clients: Sequence[Client]) -> Participation:
        """Translate the client indices of scheme ``fixed`` to positions among those that are there."""
        if self.participation.scheme != "fixed":
            return self.participation
        positions = tuple(i for i, client in enumerate(clients) if client.index in self.participation.fixed)
        there = {
            client.index for client in [*clients, *self.clients]
        }  # some may be at work, and can't be drawn
        if missing := set(self.participation.fixed) - there:
            log.warning("participation names clients that aren't there: %s", sorted(missing))
        if not positions:
            raise RunError(f"participation = {self.config.participation!r}: none of these clients is there")
        return replace(self.participation, fixed=positions)

    def minimised(self) -> dict[int, float]:
        """Return E[d_i] of the clients that count now, by index, if all were there and in time."""
        p = self.importance()
        if not p or type(self).select is not RoundScheme.select:
            return p
        shares = self._shares_among(range(len(p)), np.array(list(p.values())))
        return dict(zip(p, shares.tolist(), strict=True)) if shares.any() else p

    def _expected_weights(self, p: Weights) -> Weights | None:
        """Return E[d_i] (n,) by the scheme and by who is there."""
        if self._wants_all and not self.by_weights:
            return None
        if type(self).select is not RoundScheme.select or self.stragglers.drops:
            return None
        if not self._shares_among(range(len(p)), p).any():
            return None
        return self.pace.expected(self._counting, lambda places: self._shares_among(places, p))

    def _corrected_weights(self, p: Weights) -> Weights | None:
        """Return E[d_i] (n,) over all that are ever done: shares where it is corrected who takes part more often."""
        expected = RoundScheme._expected_weights(self, p)
        if expected is None or self.pace.always:
            return expected
        shares = np.where(expected > 0, list(self.minimised().values()), 0.0)
        return shares / (shares.sum() or 1.0)

    def _shares_among(self, places: Sequence[int], p: Weights) -> Weights:
        """Return E[d_i] (m,) by the scheme, of the clients at some places; zeros if it wants none of them."""
        fixed, counting = self.participation.fixed, self._counting
        here = tuple(at for at, place in enumerate(places) if counting[place].index in fixed)
        if self.participation.scheme == "fixed" and not here:
            return np.zeros(len(places))
        some = p[list(places)] / p[list(places)].sum() if len(places) < len(p) else p
        return replace(self.participation, fixed=here).expected_weights(some)

    def _weights_of(self, current: Round, replies: Iterable[Message]) -> Sequence[float]:
        """Weights d_i of the participants; by the sizes in their replies where none were known before."""
        if current.weights is not None:
            return current.weights
        pairs = zip(current.clients, in_order(current.requests, replies), strict=True)
        by_node = {client.node_id: reply for client, reply in pairs if reply is not None}
        sized = sized_by_replies(current.clients, by_node, self.flower.weighted_by_key)
        told = {client.index: client for client in sized}
        self.roster.keep_sizes(sized)  # for those that are away in later rounds
        self.clients = [told.get(client.index, client) for client in self.clients]
        sizes, number = [client.num_examples or 0 for client in sized], len(sized)
        return self._by_size(current.clients, sizes).tolist() if any(sizes) else [1 / max(number, 1)] * number
