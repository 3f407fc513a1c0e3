"""Mods of the app that let no client train: such a run would never get anywhere."""

from collections.abc import Callable

from strategies.core.receiver import Receiver
from strategies.core.run_state import RunState
from strategies.flower.errors import RunError
from strategies.rounds.round import Round


class RefusingMods:
    """Counts the clients whose work mods refuse.

    Parameters
    ----------
    without_companions : callable
        Hook of the method: with which parameter nothing goes beside the model.
    """

    def __init__(self, run: RunState, receiver: Receiver, without_companions: Callable[[], str]) -> None:
        self._run, self._receiver, self._without_companions = run, receiver, without_companions
        self._refused: set[int] = set()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._refused = set()

    def check(self, current: Round) -> None:
        """Raise RunError if mods of the app let no client train that is there."""
        self._refused |= current.by_mods
        self._refused -= current.outcomes.keys() - current.by_mods
        clients = self._run.clients
        if not clients or not {client.index for client in clients} <= self._refused:
            return
        text = f"a mod of the app lets no client train ({next(iter(current.failures.values()))})"
        if beside := self._receiver.beside(current.companions):
            other = self._without_companions()
            text += f": beside the model each is sent {', '.join(beside)}; allowed are mods that let it pass"
            text += f", or {other}" if other else ""
        raise RunError(text)
