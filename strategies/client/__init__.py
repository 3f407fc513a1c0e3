"""What a ClientApp of any app takes from the library, with NumPy alone."""

from strategies.client.direction import direction_of

__all__ = ["direction_of"]
