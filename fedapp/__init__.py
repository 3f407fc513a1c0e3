"""Federated learning under heterogeneous data and heterogeneous speed: the Flower app."""
