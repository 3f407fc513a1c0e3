"""Operators of a deployment: each has a certificate of its own and a role, which the proxy enforces."""
