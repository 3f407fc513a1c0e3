"""Federated problems f = Σ p_i f_i in float64 whose minima are known: in closed form, or to 1e-12 by Newton's method.

C is the number of clients, D the number of parameters; a model is a vector (D,).
"""

from studies.theory.problems.base import ClientData, Problem
from studies.theory.problems.logistic import Logistic
from studies.theory.problems.perceptron import FrozenSlope
from studies.theory.problems.quadratic import Quadratics, lower_bound_problem, quadratics

__all__ = [
    "ClientData",
    "FrozenSlope",
    "Logistic",
    "Problem",
    "Quadratics",
    "lower_bound_problem",
    "quadratics",
]
