"""Data that a function of one's own, or Python, gives: how it is called, and what it returns, as arrays."""
