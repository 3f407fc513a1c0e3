"""The reference: each method in plain numpy and float64, from the papers' formulas alone.

No code here is shared with a tested implementation. ``python -m conformance.reference`` writes the problems anew.
"""
