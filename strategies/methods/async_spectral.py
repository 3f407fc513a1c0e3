"""The asynchronous spectral method: the spectral-graph perturbed method without rounds.

This project's own method; no paper has it. Graph, u_i and local step are those of E. Buttaci 2024, section 4.3 and
algorithm 2; the server steps as in FedBuff (J. Nguyen et al. 2022), with the time-based weights of Y. Fraboni et
al. 2023, section 4.5; the discount s is one of C. Xie et al. 2019. A_ij is the similarity of the data of clients i
and j, and p_i = Σ_j A_ij / Σ A, as in strategies/methods/spectral.py. w_j is the last local model of client j, before
its first one the initial model, and a_j the number of aggregations since the one in which w_j arrived:

    client i is sent W and        u_i = Σ_j A_ij s(a_j) w_j / Σ_j A_ij s(a_j)
    client i, from w ← W:         w̃ = β w + (1−β) u_i,   w ← w − γ g_i(w̃)                 E times
    when m have arrived:          W ← W + η_g Σ_S d_i (w_i − the W that client i was sent)

With m = 1 (``buffer_size``) there is a new W at every arrival, and the client that has arrived is sent a new u_i. A
client that waits in the buffer is sent the u_i of the time when the buffer is full. Time-based weights, the default,
are d_i = p_i P_i, with P_i the aggregations from one contribution of client i to the next: clients count by p_i,
however fast they are. Staleness discounts the neighbours' models, and no contribution, so that clients count by p_i
with every s. With s = 1, the default, the u_i of one time have Σ p_i u_i = Σ p_j w_j: in all of them together, a last
model counts by p_j.

With m = C and equal speeds the method is the spectral method bit for bit, with every s, because all a_j are 0. With
β = 1 it is FedBuff with adjacency weights bit for bit. η_g is FedBuff's by default (``server_lr = 0``), 1/Σ d_i: one
contribution of every client together moves the model as far as a round.

A client receives two models and sends one back; the server keeps C vectors of float32, 4 C D bytes (``bytes-kept``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.core.config import AsynchronousConfig, StrategyConfig
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import Buffered, BufferedConfig
from strategies.methods.shared.buffer_schedule import BufferSchedule
from strategies.methods.shared.last_arrivals import last_arrivals
from strategies.methods.shared.neighbours import NeighbourModels, PerturbedConfig
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.timing.scheduler import Times


@dataclass(frozen=True)
class AsyncSpectralConfig(PerturbedConfig, BufferedConfig, AsynchronousConfig):
    """Parameters of the asynchronous spectral method; its p_i are always ``adjacency``.

    Parameters
    ----------
    staleness_discount : str
        s(a), the factor of a client's last model in its neighbours' averages, a aggregations after it arrived: 1,
        (a + 1)^−A, or 1 up to B and beyond it 1/(A (a − B) + 1)
    """

    staleness_discount: str = discount_parameter()


class AsyncSpectral(Buffered):
    """The asynchronous spectral method (of this project, after Buttaci 2024, algorithm 2, and Nguyen et al. 2022).

    Rule: FedBuff's, with the spectral method's gradients; in u_i older models may count less.
    Needs: a direction of each client's data (`graph-source=data`).
    Sent: u_i.
    Kept: all clients' last models.
    Helps: as spectral, where speeds differ, too.
    """

    Config: ClassVar[type[StrategyConfig]] = AsyncSpectralConfig
    config: AsyncSpectralConfig
    leaks_models: ClassVar[bool] = True  # each client gets an average of its neighbours' models

    _neighbours: NeighbourModels
    _schedule: BufferSchedule

    def resolve_config(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with adjacency weights, because the method needs the A_ij of the graph."""
        return replace(config, client_weights="adjacency")

    def local_rule(self) -> dict[str, float]:
        """Return β for the clients, or {} if β = 1, where the method is FedBuff."""
        return self.config.local_rule

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield u_i (D,) of the clients that are sent the model now."""
        if self.config.local_rule and self.session.graph is not None:
            factors = self._factors_of(self.session.graph.clients)
            for u in self._neighbours.averages(self.session.graph, clients, self.session.model, factors):
                yield {messages.NEIGHBOURS: u}

    def _factors_of(self, clients: Sequence[int]) -> NDArray[np.float64]:
        """Return s(a_j) (C,) of clients, given by index."""
        discount = discount_of(self.config.staleness_discount)
        arrived = last_arrivals(self.session.memory, max(clients) + 1)[list(clients)]
        # The age of a model that waits in the buffer is 0, too.
        ages, places = np.unique(np.maximum(self.session.aggregations - arrived, 0), return_inverse=True)
        return np.array([discount(age) for age in ages.tolist()])[places]

    def contribution_periods(self, times: Times) -> Times:
        """Return P_i (n,), aggregations per contribution: expected if all task times are known, else observed."""
        expected = self._schedule.contribution_periods(
            self.session.scheduler, self.session.task_table.active_clients, self.m, self.session.total
        )
        return super().contribution_periods(times) if expected is None else expected

    def on_local_model(self, client: Client, local_model: Vector) -> None:
        """Keep the client's last local model w_i."""
        self._neighbours.put(client, local_model)
        # It goes into the next aggregation.
        last_arrivals(self.session.memory, client.index + 1)[client.index] = self.session.aggregations + 1

    def stateful_components(self) -> Sequence[Any]:
        """Return the clients' last local models, and begin a new schedule of the buffer."""
        self._neighbours, self._schedule = NeighbourModels(self.config.neighbour_memory), BufferSchedule()
        return [self._neighbours]
