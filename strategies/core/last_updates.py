"""The graph of the clients' last updates: the directions that it is made of, without asking any client.

Δ_i is what the server gets in any case: the graph costs no message and no privacy beside training itself. The graph
of aggregation n is made of updates that aggregations before n have taken in: the weights of an aggregation don't
depend on the work that it takes in, in rounds as without.

A direction Δ_i/‖Δ_i‖ is kept as float32: 4 C D bytes, beyond a limit in a temporary file. A new direction is compared
with those of the other clients in C D steps. The misalignment of each pair is computed by itself, ¼‖m_i − m_j‖², so
that it is the same number in whatever order updates came, and in a run that goes on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients import graph
from strategies.clients.client_graph import ClientGraph
from strategies.clients.roster import Client
from strategies.core.client_vectors import ClientVectors
from strategies.core.run_state import RunState
from strategies.flower.exchange import never
from strategies.updates.pipeline import LocalModel

# Columns are compared in blocks of this many: a fixed number, because the order of a sum decides its last bits.
WIDTH = 4096

NAME = "last-updates"  # in a checkpoint


class LastUpdates:
    """The directions of the clients' last updates; a link of the chain (strategies/updates/pipeline.py).

    Parameters
    ----------
    run : RunState
        The run, whose number of aggregations says which updates count.
    limit : float
        GiB of directions that may be in memory.
    """

    def __init__(self, run: RunState, limit: float) -> None:
        self._run, self._limit = run, limit
        self._directions: ClientVectors | None = None
        self._misalignment = np.empty((0, 0))  # (M, M), by row of the directions; NaN: not known yet
        self._changed: dict[int, None] = {}  # clients whose update of the present aggregation isn't in it yet
        self._changed_in = 0
        self._version = 0

    def __call__(self, local: LocalModel) -> None:
        """Keep the direction of an update; an update of zero has no direction, and the client's last one stays."""
        self._settle()
        update: NDArray[np.float64] = local.model - local.base
        if not (largest := float(np.abs(update).max(initial=0.0))) > 0:
            return
        update /= largest  # so that the squares neither overflow nor lose their digits
        update /= np.linalg.norm(update)
        if self._directions is None:
            self._directions = ClientVectors(
                np.zeros(len(update)), max(len(self._run.clients), 1), self._limit
            )
        self._directions.put(local.client.index, update)
        self._changed[local.client.index] = None
        self._changed_in = self._run.aggregations

    @property
    def version(self) -> int:
        """A number that is another one whenever a direction has changed."""
        self._settle()
        return self._version

    @property
    def num_bytes(self) -> int:
        """The size of the directions in bytes."""
        return 0 if self._directions is None else self._directions.matrix.nbytes

    def misalignment(self, clients: Sequence[int]) -> NDArray[np.float64]:
        """Return mis(i, j) = ¼‖m_i − m_j‖² (C, C) of clients, given by index; NaN where an update isn't known yet."""
        self._settle()
        mis = np.full((len(clients), len(clients)), np.nan)
        if self._directions is not None:
            # A client that has sent its first update just now has no row in the matrix yet.
            compared = self._directions.clients[: len(self._misalignment)]
            rows = {client: row for row, client in enumerate(compared)}
            known = [place for place, client in enumerate(clients) if client in rows]
            own = [rows[clients[place]] for place in known]
            mis[np.ix_(known, known)] = self._misalignment[np.ix_(own, own)]
        return mis

    def _settle(self) -> None:
        """Compare the directions that an aggregation has taken in, once it is over, with all others."""
        if self._changed and self._run.aggregations != self._changed_in:
            self._compare(list(self._changed))

    def _compare(self, changed: Sequence[int]) -> None:
        from scipy.spatial.distance import cdist

        assert self._directions is not None
        self._changed = {}
        self._version += 1
        rows, number = self._directions.rows(changed), len(self._directions.clients)
        before, self._misalignment = self._misalignment, np.full((number, number), np.nan)
        self._misalignment[: len(before), : len(before)] = before
        squares = np.zeros((len(rows), number))
        for start in range(0, self._directions.matrix.shape[1], WIDTH):
            block = self._directions.matrix[:number, start : start + WIDTH].astype(np.float64)
            squares += cdist(block[rows], block, "sqeuclidean")
        squares = np.minimum(squares / 4, 1.0)
        self._misalignment[rows] = squares
        self._misalignment[:, rows] = squares.T

    def state(self) -> dict[str, Any]:
        """Return the directions for a checkpoint."""
        return {} if self._directions is None else self._directions.state(NAME)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the directions of an earlier run."""
        self._directions = ClientVectors.restored(state, NAME, self._limit)
        if self._directions is not None:
            self._compare(self._directions.clients)


class UpdateGraph(ClientGraph):
    """The graph of the clients' last updates: no client is asked for anything, and none is excluded.

    Parameters
    ----------
    updates : LastUpdates
        The directions of last updates.
    """

    by_data = False

    def __init__(self, updates: LastUpdates, floor: float = graph.FLOOR, neighbours: int = 0) -> None:
        super().__init__(floor, neighbours)
        self._updates = updates
        self._made_of: tuple[tuple[int, ...], int] = ((), 0)  # clients and version of the updates

    @property
    def version(self) -> tuple[tuple[int, ...], int]:
        """The graph's version: its clients, and how often their directions have changed."""
        return self.clients, self._updates.version

    @property
    def num_bytes(self) -> int:
        """The bytes of the directions of last updates."""
        return self._updates.num_bytes

    @property
    def misalignment(self) -> graph.Matrix:
        """mis(i, j) (C, C) of the clients."""
        self._update()
        return self._misalignment

    @property
    def adjacency(self) -> graph.Matrix:
        """A_ij (C, C) of the clients; another array whenever the graph has changed."""
        self._update()
        return self._adjacency

    def refresh(
        self,
        grid: Grid,
        clients: Sequence[Client],
        config: ConfigRecord,
        timeout: float,
        should_stop: Callable[[], bool] = never,
    ) -> list[Client]:
        """Return the connected clients: all are in the graph."""
        self.clients = tuple(client.index for client in clients)
        return list(clients)

    def _update(self) -> None:
        """Make the graph anew if clients or updates have changed."""
        if self._made_of == self.version:
            return
        self._made_of = self.version
        mis = self._updates.misalignment(self.clients)
        known = np.flatnonzero(~np.isnan(np.diagonal(mis)))
        among = np.ix_(known, known)
        mean, A = 1.0, np.empty((0, 0))
        if len(known):
            A = self._of(mis[among])
        if len(known) > 1:
            mean = float(A.sum() / (len(known) * (len(known) - 1)))
        self._adjacency, self._misalignment = np.full(mis.shape, mean), np.full(mis.shape, np.exp(-mean))
        for whole, part in ((self._adjacency, A), (self._misalignment, mis[among])):
            whole[among] = part
            np.fill_diagonal(whole, 0.0)

    def state(self) -> dict[str, Any]:
        """Return the directions of last updates."""
        return self._updates.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the directions of an earlier run's updates."""
        self._updates.restore(state)
