"""Compressed models: the server sends its model in fewer bytes, and counts on the model that clients then have.

With ``compression_down = "int8"`` or ``"fp16"`` clients are sent b = Q(w̄), the global model w̄ rounded by a compressor
of ``strategies/updates/compressors.py``. They train from b, and their updates are Δ_i = w_i − b; the server moves its
own w̄, which stays as exact as it was, by Σ d_i Δ_i. Q is deterministic. Buffers aren't rounded.

In a simulation clients get the arrays of b, and bytes and links count the compressed form. Devices get that form if
their ClientApp has ``compress_updates`` among its mods, which decodes it: server and client agree in the handshake.
Those without it get the arrays of b, and the bytes of these count.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import Layout, Vector
from strategies.flower.grids import DEPLOYMENT, asked_ids, engine_of, pulled_from
from strategies.flower.internals import with_content
from strategies.flower.messages import CompressedModel
from strategies.flower.packing import AgreeingGrid, read_head, with_head
from strategies.updates.compression import Compression
from strategies.updates.compressors import OF_MODELS

_LENGTH = 8  # bytes of a head's length

MODEL = "strategies.compressed-model"  # serialisation type of the array that holds a whole model
# In the config of a request for a description, and in the answer's metrics.
READS_COMPRESSED = "reads-compressed-models"

# From which these compressors take nothing.
_NOT_RANDOM = streams.generator(0, "compression-down")


class ModelCompression:
    """Compresses the models of one layout.

    Parameters
    ----------
    name : str
        The compressor, a key of ``OF_MODELS``.
    layout : Layout
        The model's arrays.
    untrained : sequence of str
        Patterns of the names of buffers.
    """

    def __init__(self, name: str, layout: Layout, untrained: Sequence[str]) -> None:
        self.layout = layout
        self._compression = Compression(name, OF_MODELS[name], layout, tuple(untrained))
        arrays = zip(layout.names, layout.dtypes, layout.shapes, strict=True)
        entries = [[name, str(dtype), list(shape)] for name, dtype, shape in arrays]
        self._heads = [json.dumps(entries).encode(), json.dumps(list(untrained)).encode()]

    @property
    def num_bytes(self) -> int:
        """Size of a compressed model in bytes, with its head."""
        return self._compression.num_bytes + sum(_LENGTH + len(head) for head in self._heads)

    def sent(self, model: Vector) -> tuple[CompressedModel, Vector]:
        """Return the record of a model (D,), and the model (D,) that a client has once it has decoded the record."""
        compression, origin = self._compression, np.zeros(len(model))
        values = compression.encode(compression.trained_of(model), compression.buffers_of(model), _NOT_RANDOM)
        decoded = self.layout.rounded(compression.decode(values, origin), in_place=True)
        data = with_head(self._heads[0], with_head(self._heads[1], values))
        travels = ArrayRecord({compression.name: Array("uint8", (len(data),), MODEL, data)})
        return CompressedModel(self.layout.to_record(decoded), travels), decoded

    def sent_again(self, decoded: NDArray[np.floating]) -> ArrayRecord:
        """Return the record of a model b (D,) that clients were sent before; in full precision if Q(b) isn't b."""
        record, again = self.sent(np.asarray(decoded, np.float64))
        return record if np.array_equal(again, decoded) else self.layout.to_record(np.asarray(decoded, float))


def read_model(record: ArrayRecord) -> ArrayRecord:
    """Return the arrays of a compressed model."""
    ((name, array),) = record.items()
    body, entries = read_head(array.data)
    size = int.from_bytes(body[:_LENGTH], "big")
    untrained, values = json.loads(bytes(body[_LENGTH : _LENGTH + size])), bytes(body[_LENGTH + size :])
    names, dtypes, shapes = zip(*entries, strict=True) if entries else ((), (), ())
    layout = Layout(names, shapes, dtypes)
    compression = Compression(name, OF_MODELS[name], layout, tuple(untrained))
    return layout.to_record(compression.decode(values, np.zeros(layout.size)))


# ---- The server's side on devices --------------------------------------------------------------------------


class CompressedModelGrid(AgreeingGrid):
    """A Grid that sends compressed models to the nodes that decode them, and their arrays to others.

    Parameters
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    on_whole_model : callable
        Called with the bytes that a node is sent beyond those of the compressed model, as it doesn't decode it.
    """

    form: ClassVar[str] = READS_COMPRESSED

    def __init__(self, grid: Grid, on_whole_model: Callable[[int], None]) -> None:
        super().__init__(grid)
        self._on_whole_model = on_whole_model

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the arrived replies."""
        pulled = pulled_from(self.grid, asked_ids(reply_to_message_ids, message_ids))
        for reply in pulled:
            if reply.has_content():
                self.note_answer(reply)
        return pulled

    def prepared(self, message: Message, *, reads: bool) -> Message:
        """Return a message as it travels; a model that is sent to many nodes is the same record in all messages."""
        content = dict(message.content.items())  # Flower warns of a record in place of one of another type
        for name, record in message.content.items():
            if isinstance(record, CompressedModel):
                content[name] = record.travels if reads else record.as_arrays
                if not reads:
                    self._on_whole_model(messages.num_bytes(record.as_arrays) - messages.num_bytes(record))
        return with_content(message, RecordDict(content))


def compressing_models(grid: Grid, on_whole_model: Callable[[int], None]) -> Grid:
    """Return a Grid that sends compressed models to devices; ``grid`` itself in a simulation."""
    return CompressedModelGrid(grid, on_whole_model) if engine_of(grid) == DEPLOYMENT else grid
