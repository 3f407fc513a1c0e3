"""How far clients' models and gradients are from the global ones, where ``record-divergence`` asks for it."""

from fedapp import federation
from fedapp.server.experiment import Experiment
from fedapp.server.record import Entry, Observer
from fedapp.training.divergence import DivergenceMeter
from fedapp.training.losses import loss_of
from strategies import FederatedStrategy
from strategies.flower.arrays import Layout, Vector


class Divergence(Observer):
    """Measures the models that clients send back; a simulation only, as it needs all clients' data."""

    def __init__(self, experiment: Experiment, strategy: FederatedStrategy) -> None:
        self.experiment = experiment
        self.strategy = strategy
        self._meter: DivergenceMeter | None = None
        strategy.run_options.on_client_model = self.take

    def take(self, client: int, local_model: Vector) -> None:
        """Take a client's trained model (D,) into divergence and drift of the aggregation under way."""
        experiment = self.experiment
        if self._meter is None:
            training = federation.training_tensors(
                experiment.config, experiment.num_clients, experiment.device, experiment.dataset.moments
            )
            loss = loss_of(experiment.config.loss)
            self._meter = DivergenceMeter(
                experiment.scored_model, *training, experiment.partition.client_offsets, loss
            )
        layout = Layout.of(experiment.initial_arrays())
        state = federation.to_state(layout.to_record(local_model), experiment.device)
        self._meter.take(client, state, self.strategy.session.client_weights())

    def measure(self, entry: Entry) -> None:
        """Add what was measured since the last aggregation."""
        if self._meter is not None:
            entry.metrics.update(self._meter.metrics())
