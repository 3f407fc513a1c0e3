"""Errors that end a run with one clear line."""


class RunError(RuntimeError):
    """A run can't begin or continue; the message tells the user the reason."""


class DivergedError(RunError):
    """Training has diverged: the global model isn't finite, or too large to train on."""
