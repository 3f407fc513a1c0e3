"""Layers of clients' own in a run's record: what a resumed run needs of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedapp import federation
from fedapp.federation.own_layers import as_kept
from fedapp.server.experiment import Experiment
from fedapp.server.record import Observer
from strategies import AsynchronousStrategy, FederatedStrategy, streams
from strategies.clients.roster import Client
from strategies.core.kept_models import KeptByClients
from strategies.flower import messages
from strategies.flower.arrays import Layout

KEPT_FOR = "kept-for"  # the run's number in a checkpoint


def _under_way(strategy: AsynchronousStrategy, client: Client) -> dict[str, int]:
    """Return the number of the task that a client is at work on: an engine may have done its work already."""
    member = strategy.session.task_table.members.get(client.index)
    return (
        {messages.UNDER_WAY: member.tasks}
        if member is not None and strategy.session.task_table.busy(member)
        else {}
    )


class OwnLayers(Observer):
    """Clients' own arrays, kept by them under the run's number, and in the checkpoints of a simulation."""

    def __init__(self, experiment: Experiment, strategy: FederatedStrategy) -> None:
        self._number = int(streams.unpredictable().integers(1, messages.LARGEST))
        state = experiment.model.state_dict()
        arrays = federation.to_arrays({name: state[name] for name in experiment.own})
        layout = Layout.of(as_kept(0, arrays, arrays))
        kept = KeptByClients(strategy.session.run, lambda: layout, lambda: self._number)
        strategy.run_options.stateful_components.append(kept)
        strategy.run_options.only_own_arrays = not experiment.travelling
        strategy.session.population.listeners.append(kept.hand_back)
        if isinstance(strategy, AsynchronousStrategy):
            strategy.run_options.evaluation_fields = partial(_under_way, strategy)

    @property
    def fields(self) -> dict[str, int]:
        """What each message has beside the run's config."""
        return {messages.KEPT_FOR: self._number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the run's number."""
        self._number = int(state.get(KEPT_FOR, self._number))

    def state(self) -> dict[str, Any]:
        """Return the run's number."""
        return {KEPT_FOR: self._number}
