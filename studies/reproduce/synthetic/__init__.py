"""The synthetic problem of a plan: its minima, what is measured on it, and the figures."""
