"""What ends a run with one clear line."""


class RunError(RuntimeError):
    """A run can't begin or go on; the text says why, to the user."""


class DivergedError(RunError):
    """The global model is none that can be trained on."""
