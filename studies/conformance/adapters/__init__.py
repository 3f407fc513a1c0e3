"""Implementations as the kit sees them, a module each. A module imports the tested package only when it is run.

A module has

- ``NAME``: what the table calls the implementations.
- ``PACKAGES``: the distributions that the module needs; the table gives the version of the first.
- ``TOLERANCE``: the largest difference with which an implementation in float32 passes. A module that computes in
  float64 has no ``TOLERANCE``, and the tolerance of the problems holds.
- ``implementations()``: returns, by a problem's name, a callable that makes the implementation from the `Problem`.

Each module says at its top which part of a package is tested: its server alone, with clients that train as the kit
says, or server and clients.
"""
