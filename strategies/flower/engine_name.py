"""Which engine is behind a Grid: ours say it themselves."""

from flwr.serverapp import Grid

from strategies.flower.internals import is_simulation

DEPLOYMENT, RAY = "deployment", "ray"


def engine_of(grid: Grid) -> str:
    """Return ``sequential``, ``vectorized``, ``ray``, ``memory`` (of tests) or ``deployment``."""
    name = getattr(grid, "engine", None)
    return name if isinstance(name, str) else RAY if is_simulation(grid) else DEPLOYMENT
