"""A client whose frozen arrays aren't the server's is sent them once, and keeps them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from fedapp import client_app, federation
from fedapp.own import register
from fedapp.server import Experiment, prepare, task_config
from fedapp.server.experiment import frozen_arrays
from strategies.flower import messages
from strategies.testing import MemoryGrid
from tests.fedapp.client.asking import CLIENTS, NODE, context_of, reason, request_for, same, trained

builds = itertools.count()


def drawn(num_classes: int) -> nn.Module:
    """A net whose frozen layer is another each time that a process builds it, as pretrained weights may be."""
    values = np.random.default_rng(next(builds)).normal(size=(8, 64)).astype(np.float32)
    body = nn.Linear(64, 8).requires_grad_(False)
    body.weight.copy_(torch.from_numpy(values))
    return nn.Sequential(nn.Flatten(), body, nn.Tanh(), nn.Linear(8, num_classes))


@pytest.fixture
def make(configure):
    """Prepare a run; then what this process holds is a client's."""

    def prepared(**values: Any) -> Experiment:
        given = {"model": register(drawn), "batch_size": 16, "num_server_rounds": 3, **values}
        experiment = prepare(configure(**given), CLIENTS)
        federation.forget()
        return experiment

    return prepared


@pytest.fixture
def elsewhere(make):
    return make()


def asked(kind: str, experiment: Experiment, context: Context, *, brings: bool = False) -> Message:
    """Ask a client whose process is new."""
    federation.forget()
    message = request_for(kind, experiment)
    if brings:
        frozen = frozen_arrays(experiment)
        assert frozen is not None
        message.content[messages.FROZEN] = frozen.record
    return client_app.app(message, context)


def needs(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == messages.NEEDS_FROZEN


def as_the_server_would(experiment: Experiment) -> dict[str, np.ndarray]:
    """What a client returns that builds the server's model."""
    federation.forget()
    frozen = frozen_arrays(experiment)
    assert frozen is not None
    data = bytes(next(iter(frozen.record.values())).numpy())
    federation.offer(frozen.digest, lambda: data)
    return trained(client_app.app(request_for(messages.TRAIN, experiment), context_of()))


def test_a_client_asks_for_arrays_that_it_builds_otherwise_and_keeps_them(elsewhere):
    context = context_of()
    for kind in (messages.TRAIN, messages.EVALUATE):
        assert needs(asked(kind, elsewhere, context))
    expected = as_the_server_would(elsewhere)
    assert list(expected) == ["3.weight", "3.bias"]
    assert same(trained(asked(messages.TRAIN, elsewhere, context, brings=True)), expected)
    for _ in range(2):
        assert same(trained(asked(messages.TRAIN, elsewhere, context)), expected)
        assert asked(messages.EVALUATE, elsewhere, context).has_content()
    assert needs(asked(messages.TRAIN, elsewhere, context_of()))  # a SuperNode that was started anew


def test_arrays_of_another_run_take_their_place(elsewhere, make):
    context, other = context_of(), make()
    for experiment in (elsewhere, other):
        assert asked(messages.TRAIN, experiment, context, brings=True).has_content()
    assert asked(messages.TRAIN, other, context).has_content()
    assert needs(asked(messages.TRAIN, elsewhere, context))
    assert len(context.state[messages.FROZEN]) == 1


def test_a_device_has_them_in_its_folder_after_a_restart(elsewhere, tmp_path):
    def device() -> Context:
        return context_of({**NODE, "state-path": str(tmp_path / "state")})

    expected = as_the_server_would(elsewhere)
    assert needs(asked(messages.TRAIN, elsewhere, device()))
    first = device()
    assert same(trained(asked(messages.TRAIN, elsewhere, first, brings=True)), expected)
    assert not first.state  # which Flower would send to each message's process
    assert same(trained(asked(messages.TRAIN, elsewhere, device())), expected)
    (file,) = (tmp_path / "state").glob("*.frozen")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert needs(asked(messages.TRAIN, elsewhere, device()))
    file.unlink()
    assert needs(asked(messages.TRAIN, elsewhere, device()))


def test_arrays_that_fit_no_client_are_one_line(make):
    experiment = make()
    message = request_for(messages.TRAIN, experiment)
    other = frozen_arrays(
        make(model=register(lambda num_classes: nn.Sequential(*drawn(num_classes)[:3], Wider())))
    )
    assert other is not None
    federation.forget()
    message.content[messages.FROZEN] = other.record
    said = reason(client_app.app(message, context_of()))
    assert said.startswith(f"model = {experiment.config.model!r}: its frozen arrays aren't those")


class Wider(nn.Module):
    """Has its layer under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


# Whole runs: every message finds a new process, as on devices ------------------------------


class Devices(ClientApp):
    """The app, in a process of its own for each message."""

    def __call__(self, message: Message, context: Context) -> Message:
        federation.forget()
        return client_app.app(message, context)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy": "fedbuff", "buffer_size": CLIENTS},
        {"strategy": "scaffold", "compression": "int8"},
        {"client_evaluation": True, "compression": "topk:0.1"},
        {"personal": "3.bias", "client_evaluation": True},
    ],
    ids=lambda values: values.get("strategy", "fedavg"),
)
def test_each_device_is_sent_them_once_in_a_run_and_again_if_they_are_gone(make, values):
    experiment = make(**values)
    strategy = experiment.strategy
    strategy.run_options.frozen = frozen_arrays(experiment)
    assert strategy.run_options.frozen is not None
    size = messages.num_bytes(strategy.run_options.frozen.record)
    grid = MemoryGrid(Devices(), [{**NODE, "partition-id": i} for i in range(CLIENTS)])
    lines: list[Any] = []

    def observe(progress: Any) -> None:
        lines.append(progress)
        if progress.aggregation == 1:
            grid.node(1).context.state.clear()  # its SuperNode is started anew

    strategy.run_options.observer = observe
    result = strategy.start(
        grid, experiment.initial_arrays(), num_rounds=3, timeout=60, train_config=task_config(experiment)
    )
    sent = [m.metadata.dst_node_id for m in grid.sent if messages.FROZEN in m.content]
    again = grid.node(1).node_id
    assert {node_id: sent.count(node_id) for node_id in grid.nodes} == dict.fromkeys(grid.nodes, 1) | {
        again: 2
    }
    down = sum(progress.metrics.get("bytes-down", 0) for progress in lines)
    assert down >= size * len(sent)
    assert list(result.arrays) == list(experiment.travelling)
    assert not any(progress.metrics.get("failures", 0) for progress in lines)
