"""A scheme of one's own: a model from every few arrivals, and old work is thrown away."""

from dataclasses import dataclass

from strategies import AsynchronousConfig, AsynchronousStrategy


@dataclass(frozen=True)
class EveryConfig(AsynchronousConfig):
    """After how many arrivals there is a new model, and how many models old a contribution may be."""

    every: int = 2
    most_stale: int = 4


class Every(AsynchronousStrategy):
    """Aggregate after every few arrivals; weights are the library's, by what it sees of the clients' speeds."""

    Config = EveryConfig
    config: EveryConfig

    def ready(self, arrived: int) -> bool:
        """Tell whether there is enough for a new model: who has answered waits for it, and fewer may be left."""
        return arrived >= min(self.config.every, len(self.session.task_table.active_clients))

    def is_fresh_enough(self, staleness: int) -> bool:
        """Tell whether work counts that is so many models old."""
        return staleness <= self.config.most_stale
