"""Secure aggregation: clients mask their updates, and the server learns their sum alone (Bell et al. 2020)."""

from strategies.secure.mod import masks_updates

__all__ = ["masks_updates"]
