"""Compare an implementation's models with a problem's, and find the first step at which they differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from .problem import Problem, load


class Implementation(Protocol):
    """An implementation of a method, as an adapter shows it."""

    def step(self, number: int, who: Sequence[Any]) -> ArrayLike:
        """Return the model after step ``number``, from 1.

        Parameters
        ----------
        who : sequence
            In rounds the participants' indices. Without rounds the arrivals since the last model, in their order:
            ``Arrival(client, staleness)``. If the server sets local steps, `Problem.task_steps` has those of each
            arrival.

        Returns
        -------
        array (D,) or (1 + C, D)
            As the problem's ``returns`` says.
        """


@dataclass(frozen=True)
class Verdict:
    """Whether an implementation passes.

    Attributes
    ----------
    step : int
        The first step whose model differs by more than the tolerance; 0: none does.
    difference : float
        The largest absolute difference of an entry: at that step, or over all steps if it passes. NaN if an entry
        isn't a number.
    """

    method: str
    step: int
    difference: float

    @property
    def passes(self) -> bool:
        """Whether no step differs."""
        return self.step == 0

    def __str__(self) -> str:
        if self.passes:
            return f"passes: largest difference {self.difference:.1e}"
        return f"differs from step {self.step} on, by {self.difference:.1e}"


def check(make: Callable[[Problem], Implementation], method: str, tolerance: float | None = None) -> Verdict:
    """Compare an implementation with a problem's models.

    Parameters
    ----------
    make : callable
        Makes the implementation of a problem.
    method : str
        The problem's name.
    tolerance : float, optional
        By default the problem's tolerance, which is meant for float64. For float32 1e-6 is suitable.

    Raises
    ------
    ValueError
        If there is no such problem, or a model hasn't the shape of the problem's.
    """
    problem = load(method)
    within, largest = problem.tolerance if tolerance is None else tolerance, 0.0
    implementation = make(problem)
    for number, (who, expected) in enumerate(zip(problem.steps, problem.models, strict=True), start=1):
        model = np.asarray(implementation.step(number, who), dtype=np.float64)
        if model.shape != expected.shape:
            raise ValueError(
                f"{method}, step {number}: the model has shape {model.shape}, must have {expected.shape} "
                f"({problem.returns})"
            )
        difference = float(np.abs(model - expected).max())
        if not difference <= within:
            return Verdict(method, number, difference)
        largest = max(largest, difference)
    return Verdict(method, 0, largest)
