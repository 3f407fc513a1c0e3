"""What a client says of itself in the handshake (strategies/clients/roster.py), and a Grid that says it for all at
once."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord

# Its metrics: partition, number of examples, and whatever else it tells.
Description = Mapping[str, Any]


@runtime_checkable
class DescribingGrid(Protocol):
    """What a Grid is in addition that knows what its nodes say of themselves: many are a minute of messages."""

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return what some of these nodes say; the others are to be asked, whose answer may be an error."""
        ...
