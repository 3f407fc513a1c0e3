"""What late work is worth, by its staleness δ: the aggregations since its client was sent the model.

C. Xie et al., "Asynchronous federated optimization", 2019, have three:

    constant          s(δ) = 1
    polynomial:A      s(δ) = (δ + 1)^−A
    hinge:A,B         s(δ) = 1 if δ ≤ B, else 1 / (A (δ − B) + 1)
"""

import math
from dataclasses import dataclass
from typing import Any

from strategies.core.parameters import parameter

ALLOWED = "constant, polynomial:A or hinge:A,B with numbers A, B >= 0"
_NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?"
PATTERN = rf"^(constant|polynomial:{_NUMBER}|hinge:{_NUMBER},{_NUMBER})$"


@dataclass(frozen=True)
class Discount:
    """s(δ).

    Attributes
    ----------
    kind : str
        ``constant``, ``polynomial`` or ``hinge``.
    a, b : float
        A and B.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    @property
    def constant(self) -> bool:
        """Whether late work is worth as much as any."""
        return self.kind == "constant"

    def __call__(self, staleness: int) -> float:
        """Return s(δ), in (0, 1]."""
        if self.kind == "polynomial":
            return float((staleness + 1.0) ** -self.a)
        if self.kind == "hinge":
            return 1 / (self.a * max(staleness - self.b, 0.0) + 1)
        return 1.0


def discount_parameter() -> Any:
    """Declare the field ``staleness_discount`` of a Config; the docstring of the Config says what s(δ) multiplies."""
    return parameter("constant", pattern=PATTERN, words=ALLOWED)


def discount_of(text: str) -> Discount:
    """Return the discount that a text names.

    Raises
    ------
    ValueError
        If it names none.
    """
    kind, colon, rest = text.partition(":")
    numbers = rest.split(",") if colon else []
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    known = {"constant": 0, "polynomial": 1, "hinge": 2}.get(kind)
    if known != len(values) or not all(0 <= value < math.inf for value in values):
        raise ValueError(f"staleness_discount = {text!r}: must be {ALLOWED}")
    return Discount(kind, *values)
