"""The nodes of a simulation in this process: a context of each, made when it is first looked at."""

from collections.abc import Iterator, MutableMapping

from flwr.app import Context, RecordDict, UserConfig

from strategies.flower.internals import RUN_ID

PARTITION_ID, NUM_PARTITIONS = "partition-id", "num-partitions"


class Nodes(MutableMapping[int, Context]):
    """Contexts by node id, which persist: node i + 1 has partition i, unless somebody changes that.

    Parameters
    ----------
    number : int
        Of nodes; their ids are 1 to that.

    Attributes
    ----------
    known : mapping of int to Context
        Those that have been looked at; the others are as they were made.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.known: dict[int, Context] = {}

    def partition_of(self, node_id: int) -> object:
        """Return what a node's config says of its partition, without making its context."""
        known = self.known.get(node_id)
        return node_id - 1 if known is None else known.node_config.get(PARTITION_ID)

    @property
    def untouched(self) -> bool:
        """Whether no node says anything of itself that isn't so at the start."""
        return all(context.node_config == self._config_of(node_id) for node_id, context in self.known.items())

    def _config_of(self, node_id: int) -> UserConfig:
        return {PARTITION_ID: node_id - 1, NUM_PARTITIONS: self.number}

    def __getitem__(self, node_id: int) -> Context:
        if (context := self.known.get(node_id)) is None:
            if not 1 <= node_id <= self.number:
                raise KeyError(node_id)
            config = self._config_of(node_id)
            context = Context(RUN_ID, node_id, config, RecordDict(), run_config={})
            self.known[node_id] = context
        return context

    def __setitem__(self, node_id: int, context: Context) -> None:
        self.known[node_id] = context

    def __delitem__(self, node_id: int) -> None:
        raise TypeError("a simulation's nodes stay")

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self.number + 1))

    def __len__(self) -> int:
        return self.number
