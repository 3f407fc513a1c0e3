"""Run, sweep, load and compare: from Python (``interface``) and from a command line (``command``)."""
