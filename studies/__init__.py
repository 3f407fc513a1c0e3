"""Bounds and problems with known minima, the papers reproduced, maps of which method wins where, and benchmarks.

A distribution of its own: it imports the app, which knows nothing of it but the commands that it adds.
"""
