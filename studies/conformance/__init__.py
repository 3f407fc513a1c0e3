"""A conformance kit for federated learning: tiny exact problems, and the models that a method's formula gives.

For each method there is a problem that fits on a page, and the global model after each round (or arrival) in float64,
computed from the formula of the paper. An implementation passes if its models are these::

    from conformance import check

    class Mine:                               # an adapter
        def __init__(self, problem):
            self.problem, self.model = problem, problem.initial

        def step(self, number, participants):     # → the global model (D,) after this round
            ...

    print(check(Mine, "fedavg"))              # passes: largest difference 3.1e-08

``python -m conformance`` prints the table of the kit's adapters whose packages are installed.
"""

from .problem import Arrival, Client, Problem, descend, load, names
from .runner import Implementation, Verdict, check

__version__ = "0.1.0"

__all__ = ["Arrival", "Client", "Implementation", "Problem", "Verdict", "check", "descend", "load", "names"]
