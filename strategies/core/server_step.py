"""The server's step: the server optimizer moves the global model, and a model that isn't finite ends the run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord

from strategies.core.run_state import RunState
from strategies.flower.arrays import LARGEST_SQUARE, ArraysMismatchError, Layout, Vector
from strategies.flower.errors import DivergedError, RunError
from strategies.updates.pipeline import LocalModel
from strategies.updates.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr.strategies")

Update = TypeVar("Update", Vector, Vector | LocalModel)


class ServerStep:
    """The server optimizer's step of the global model.

    Parameters
    ----------
    optimizer : ServerOptimizer
        A new server optimizer.
    lr : float
        η_g; 0: the optimizer's usual step size, else the method's.
    default_server_lr : callable
        Hook of the method: returns its η_g.
    stale : bool
        Whether updates may be of older models, as without rounds.

    Attributes
    ----------
    add_noise : callable, optional
        Adds the noise of central differential privacy to Σ d_i Δ_i (D,) of a loop without rounds, given the d_i.
    """

    def __init__(
        self,
        run: RunState,
        optimizer: ServerOptimizer,
        lr: float,
        default_server_lr: Callable[[], float],
        *,
        stale: bool,
    ) -> None:
        self._run, self.optimizer = run, optimizer
        self._lr, self._default_server_lr, self._stale = lr, default_server_lr, stale
        self.add_noise: Callable[[Vector, Sequence[float]], None] | None = None

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state."""
        self.optimizer.restore(state)

    def keep_memory(self, state: Mapping[str, Any], size: int) -> None:
        """Take the memory of an earlier run's optimizer, unless its model had another size than D = ``size``."""
        if any(isinstance(kept, np.ndarray) and kept.size != size for kept in state.values()):
            log.warning("the server optimizer begins anew: its memory is of a model of another size")
        else:
            self.restore(state)

    def apply(self, model: Vector, update: Vector, squares: float = 0.0, *, in_place: bool = False) -> Vector:
        """Return the next global model (D,), from the present ``model`` (D,) and the update (D,).

        ``squares`` is Σ d_i ‖Δ_i‖², where the optimizer reads it; ``in_place``: the update may be overwritten.
        """
        self.optimizer.lr = (
            self._lr or self.optimizer.usual_lr or self._scaled_by_gain(self._default_server_lr())
        )
        self.optimizer.squares = squares
        self.optimizer.number = self._run.aggregations - self._run.earlier + 1
        run, step = self._run, self.optimizer.step_in_place if in_place else self.optimizer.step
        stays = run.aggregations == 0 and not run.any_nonzero_update and bool(np.isfinite(update).all())
        updated_model = step(model, update)
        if len(update) and stays:
            log.warning(
                "the first aggregation left the model as it was: are the steps (lr, server_lr) too small?"
            )
        return updated_model

    def _scaled_by_gain(self, step: float) -> float:
        """Return η_g, divided by the optimizer's gain if η_g < 1 in a run without rounds.

        A step of 1 stays: no update is stale there, and the method is FedAvg with the same optimizer.
        """
        return step / self.optimizer.gain if self._stale and step < 1 else step

    def note_nonzero(self, update: Update) -> Update:
        """Return a client's update (D,), and note whether any client's isn't zero."""
        run = self._run
        if not run.any_nonzero_update:
            run.any_nonzero_update = update.moves() if isinstance(update, LocalModel) else bool(update.any())
        return update

    def validated(self, updated_model: Vector) -> Vector:
        """Return the model (D,) that an aggregation made, by whatever rule.

        Raises
        ------
        DivergedError
            If the model can't be trained on.
        RunError
            If it is no model.
        """
        if np.shape(updated_model) != self._run.model.shape:
            raise RunError(
                f"{self._run.name}.aggregate returns an array {np.shape(updated_model)}: must be the model, "
                f"{self._run.model.shape}"
            )
        if not float(
            np.einsum("i,i->", updated_model, updated_model)
        ) <= LARGEST_SQUARE or self._run.layout.overflows(updated_model):
            raise DivergedError(
                f"aggregation {self._run.aggregations + 1} made a model that isn't finite, or too large to train on: "
                "the steps are too large (lr, server_lr), or the noise is"
            )
        return updated_model

    def as_the_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of a user-defined ``aggregate_train`` in the model's dtypes; NumPy's means are float64.

        Raises
        ------
        ArraysMismatchError
            If they aren't the model's but for their dtypes, or not finite.
        DivergedError
            If the model can't be trained on.
        """
        run = self._run
        try:
            dtypes = dict(zip(arrays, Layout.of(arrays).dtypes, strict=True))
            names = zip(run.layout.names, run.layout.dtypes, strict=True)
            made = replace(run.layout, dtypes=tuple(dtypes.get(name, dtype) for name, dtype in names))
            vector = made.to_vector(arrays)
        except ArraysMismatchError as error:
            raise ArraysMismatchError(f"{run.name}.aggregate_train made no model to train: {error}") from None
        return run.layout.to_record(self.validated(vector))
