"""Write the problems anew: ``python -m conformance.reference``."""

from .writing import write

write()
