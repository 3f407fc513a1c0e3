"""Attacks by hostile clients on every method that averages, with and without safeguards: ``fedapp attacks``."""
