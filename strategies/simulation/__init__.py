"""Simulation of any ClientApp in processes of this machine, without Ray."""
