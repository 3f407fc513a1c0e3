"""Participation schemes: who takes part in a round, and the weights d_i that go with it.

A scheme draws who takes part in a round and the weight d_i of each, so that E[Σ d_i Δ_i] = Σ p_i Δ_i (Fraboni et al.
2023, appendix C). Two schemes minimise another objective, by design, and ``expected_weights`` says which: ``paired``
(Dhasade, Kremer & Renard, section 3.2) and ``fixed``. ``flower`` is what Flower's own strategies do: clients are
drawn uniformly, and d_i = p_i / Σ_S p_j over those drawn, a ratio whose mean is only near p_i.

``poisson`` draws each client by a coin of its own, with probability q = ``fraction``: a round has a random size, and
may be empty. Its d_i = p_i / q divide by the expected size and not by the drawn one (with equal p_i by
q C), so that what one client adds to the sum doesn't depend on who else was drawn (McMahan et al. 2018, section 2).

``turns`` draws nobody: clients take turns in an order that is fixed. With ``fraction`` = 1/B those whose index leaves
the remainder t mod B take part in the t-th round, from 0: each once in B rounds. The d_i = p_i B sum to 1 on the
average over B rounds (rounds without sampling: Kairouz et al. 2021).

``tag:T,…`` and ``name:N,…`` address devices by the record of registered nodes (strategies/clients/registered.py).
They say whose devices the clients of a run are, and not whom of them a round draws: these are all, as with ``full``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from strategies.clients.registered import addresses
from strategies.clients.weights import Weights

SCHEMES = ("full", "uniform", "md", "poisson", "turns", "paired", "fixed", "flower")


@dataclass(frozen=True)
class Draw:
    """The participants of one round: client indices, ascending, and the weight d_i of each."""

    clients: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Participation:
    """A participation scheme.

    Parameters
    ----------
    scheme : str
        One of ``SCHEMES``.
    fraction : float
        L / C for ``uniform``, ``md`` and ``flower``, which draw at least one client; q for ``poisson``; 1/B for
        ``turns``.
    fixed : tuple of int
        The clients of scheme ``fixed``; with ``turns`` the places of those whose turn it is.
    least : int
        With ``flower`` at least so many are drawn, if so many are there.
    """

    scheme: str = "full"
    fraction: float = 1.0
    fixed: tuple[int, ...] = ()
    least: int = 1

    @classmethod
    @cache
    def parse(cls, text: str, fraction: float = 1.0, least: int = 1) -> "Participation":
        """Read a scheme from a config value such as ``"uniform"`` or ``"fixed:0,3,5"``.

        Raises
        ------
        ValueError
            If it names no scheme, or ``fixed`` no clients.
        """
        scheme, colon, names = text.partition(":")
        known = scheme in SCHEMES and bool(colon) == (scheme == "fixed")
        if not known and not addresses(text):
            raise ValueError(
                f"participation = {text!r}: allowed are full, uniform, md, poisson, turns, paired, flower, "
                "fixed:I,J,…, and on devices tag:TAG,…, name:NAME,…"
            )
        if not known:  # devices by tag or name, all of which take part
            return cls()
        if scheme != "fixed":
            return cls(scheme, fraction, least=least)
        return cls(scheme, fraction, _fixed(text, names))

    def at(self, places: Iterable[int]) -> "Participation":
        """Return the scheme with the places of its clients, ``fixed``, among those that are there."""
        return replace(self, fixed=tuple(places))

    def check(self, num_clients: int) -> None:
        """Raise ValueError if ``num_clients`` are too few for the scheme."""
        if self.scheme == "fixed" and self.fixed[-1] >= num_clients:
            raise ValueError(
                f"participation names client {self.fixed[-1]}: there are {num_clients} clients, "
                f"allowed are 0 to {num_clients - 1}"
            )
        if self.scheme == "turns" and num_clients < self.num_turns:
            raise ValueError(
                f"fraction_train = {self.fraction}: with participation = 'turns' needs {self.num_turns} clients or "
                f"more, there are {num_clients}"
            )
        if self.scheme == "paired" and num_clients < 2:
            raise ValueError(f"participation = 'paired': needs 2 clients or more, there are {num_clients}")

    def is_eligible(self, client: int) -> bool:
        """Tell whether a client can take part in any round, by its index."""
        return self.scheme != "fixed" or client in self.fixed

    @property
    def num_turns(self) -> int:
        """B, the number of rounds in which each client takes part once; 1 where all take part in each."""
        return round(1 / self.fraction) if self.scheme == "turns" else 1

    def sample_size(self, num_clients: int) -> int:
        """L, the number of draws of ``uniform``, ``md`` and ``flower``, which rounds down as Flower does."""
        if self.scheme == "flower":
            return min(max(int(self.fraction * num_clients), self.least, 1), num_clients)
        return max(1, round(self.fraction * num_clients))

    def draw(self, importances: Weights, rng: np.random.Generator, number: int | None = None) -> Draw:
        """Draw the participants of one round.

        Parameters
        ----------
        importances : Weights
            p_i, shape (C,), summing to 1.
        rng : np.random.Generator
            The round's own random stream.
        number : int, optional
            How many ``uniform``, ``md`` and ``flower`` draw, by default ``sample_size``; all but ``md`` draw no
            client twice, and so C at most.
        """
        C = len(importances)
        number = self.sample_size(C) if number is None else number
        draws: dict[str, Callable[[], Any]] = {
            "full": lambda: np.arange(C),
            "uniform": lambda: rng.choice(C, min(number, C), replace=False),
            "flower": lambda: rng.choice(C, min(number, C), replace=False),
            "poisson": lambda: np.flatnonzero(rng.random(C) < self.fraction),
            "md": lambda: rng.choice(C, number, p=importances),
            "paired": lambda: np.array([rng.integers(C - 1), C - 1]),
            "fixed": lambda: np.array(self.fixed, dtype=np.int64),
            "turns": lambda: np.array(self.fixed, dtype=np.int64),
        }
        return self.weigh(draws[self.scheme]().tolist(), importances)

    def weigh(self, drawn: Sequence[int], importances: Weights) -> Draw:
        """Give the drawn clients their weights; a client drawn twice trains once and counts twice."""
        clients, counts = np.unique(np.asarray(drawn, dtype=np.int64), return_counts=True)
        p = importances[clients]
        weights: dict[str, Callable[[], Weights]] = {
            "full": lambda: p,
            "uniform": lambda: p * (len(importances) / len(drawn)),
            "flower": lambda: p / p.sum(),
            "poisson": lambda: p / self.fraction,
            "md": lambda: counts / len(drawn),
            "paired": lambda: np.full(len(clients), 0.5),
            "fixed": lambda: p / p.sum(),
            "turns": lambda: p * self.num_turns,
        }
        return Draw(tuple(clients.tolist()), tuple(weights[self.scheme]().tolist()))

    def expected_weights(self, importances: Weights) -> Weights:
        """E[d_i], shape (C,): the importances of the objective that is really minimised."""
        num_clients = len(importances)
        expected, fixed = np.zeros(num_clients), list(self.fixed)
        if self.scheme == "paired":
            expected[:-1] = 0.5 / max(num_clients - 1, 1)
            expected[-1] = 0.5
        elif self.scheme == "fixed":
            expected[fixed] = importances[fixed] / importances[fixed].sum()
        else:
            expected = np.asarray(importances, dtype=np.float64)
        return expected


def _fixed(text: str, names: str) -> tuple[int, ...]:
    """Return the client indices of the scheme ``fixed``, ascending; ValueError if they are none, or not distinct."""
    try:
        fixed = tuple(sorted(map(int, names.split(","))))
    except ValueError:
        fixed = ()
    if not fixed or fixed[0] < 0 or len(set(fixed)) < len(fixed):
        raise ValueError(
            f"participation = {text!r}: after 'fixed:' distinct client indices, such as fixed:0,3"
        )
    return fixed
