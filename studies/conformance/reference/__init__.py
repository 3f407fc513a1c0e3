"""How the problems came about: each method in plain numpy and float64, from the papers' formulas alone.

Nothing here is shared with an implementation that is tested. ``python -m conformance.reference`` writes the problems
anew.
"""
