"""Mean and deviation of all clients' inputs: worked out here in a simulation, from the devices' sums else.

A device sends three things of its inputs, per value of a vector or channel of an image: their number, their sums, and
the sums of their squared distances from its own mean. What they come to goes to every device with every message, and
to preparation.json; a run that goes on takes it from there, so that its model keeps its inputs.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedapp.data import Dataset
from fedapp.data.moments import Sums
from fedapp.data.standardize import same_size
from fedapp.federation.records import ASK_SUMS, COUNT, SQUARES, SUMS
from fedapp.server.experiment import Experiment, task_config
from fedapp.server.run_directory import RunDirectory
from strategies import RunError
from strategies.clients.registered import NodeRecord
from strategies.flower import messages
from strategies.flower.exchange import exchange

log = logging.getLogger("flwr.fedapp")


def standardized(
    grid: Grid, experiment: Experiment, directory: RunDirectory, should_stop: Callable[[], bool]
) -> Experiment:
    """Return the experiment with the mean and deviation of inputs; on devices each device is asked for its sums.

    Raises
    ------
    ConfigError
        If the run to resume has no mean and deviation in preparation.json.
    RunError
        If no device sends sums that can be.
    """
    config, dataset = experiment.config, experiment.dataset
    if config.resume and directory.checkpoint is not None:
        moments = directory.read_moments()
    elif dataset.moments is not None:
        moments = dataset.moments
    else:
        sums = _asked(grid, experiment, should_stop)
        if not sums:
            if should_stop():
                return experiment
            raise RunError(
                "normalize = 'standardize': no client sent sums of its inputs; the log names the reasons"
            )
        moments = Sums.merged(sums).moments()
        log.info(
            "standardized by %d clients' inputs; %d values a feature",
            len(sums),
            np.max(np.sum([part.count for part in sums], axis=0)),
        )
    return replace(experiment, dataset=replace(dataset, moments=moments))


def _asked(grid: Grid, experiment: Experiment, should_stop: Callable[[], bool]) -> list[Sums]:
    """Ask every node that is connected, in the order of their ids, so that sums are added in one order."""
    config, timeout = task_config(experiment), experiment.config.round_timeout
    nodes = sorted(grid.get_node_ids())
    requests = [messages.request(ASK_SUMS, node_id, config, ttl=timeout) for node_id in nodes]
    replies = exchange(grid, requests, timeout, should_stop)
    found, shown = [], NodeRecord(experiment.config.registered_nodes).shown
    for node_id in nodes:
        try:
            found.append(_read(replies.get(node_id), experiment.dataset))
        except ValueError as error:
            if not should_stop():
                log.warning("%s isn't in the mean and deviation of inputs: %s", shown(node_id), error)
    return found


def _read(reply: Message | None, dataset: Dataset) -> Sums:
    """Read a device's sums; ValueError if they aren't such."""
    if reply is None:
        raise ValueError(messages.NO_REPLY)
    if reply.has_error():
        raise ValueError(messages.reason_of(reply))
    arrays = messages.arrays_of(reply)
    try:
        assert arrays is not None
        sums = Sums(*(np.asarray(arrays[name].numpy(), np.float64) for name in (COUNT, SUMS, SQUARES)))
    except Exception as error:  # whatever bytes a device sends must not stop the server
        raise ValueError(f"its sums can't be read ({type(error).__name__})") from error
    if not same_size(sums, dataset):
        raise ValueError("its sums aren't finite, or of inputs of another shape")
    return sums
