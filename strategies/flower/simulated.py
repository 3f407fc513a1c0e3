"""Which clients are simulated, so that their noise may come from the run's seed and a run can be repeated.

On a device noise that protects data comes from the operating system, whatever the server asks for and whatever the
node's config says. So a client is simulated only where the process that runs it says so: one that made its context
(``SimulatedContext``), or an actor of Flower's simulation on Ray.
"""

import sys
from typing import Any

from flwr.app import Context


class SimulatedContext(Context):
    """The context of a client in a Grid of this process."""


def is_simulated(context: Context) -> bool:
    """Return True for a client of a simulation; False on a device, and wherever it isn't known."""
    return isinstance(context, SimulatedContext) or in_ray_actor()


def in_ray_actor() -> bool:
    """Return True in an actor of Ray, where Flower's simulation runs its clients."""
    ray = started_ray()
    # Asked in another process, Ray would start a cluster.
    return ray is not None and ray.get_runtime_context().get_actor_id() is not None


def started_ray() -> Any:
    """Return the module ``ray`` if this process has started Ray or joined a cluster; None otherwise."""
    ray = sys.modules.get("ray")
    # Flower's main thread may be importing Ray at this moment: the module is there before its functions are.
    is_initialized = getattr(ray, "is_initialized", None)
    return ray if is_initialized is not None and is_initialized() else None
