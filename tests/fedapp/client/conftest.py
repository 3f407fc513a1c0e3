"""Fixtures of the ClientApp's tests."""

import pytest
from flwr.supercore.task_identity import TaskIdentity

from fedapp import federation
from fedapp.client import training
from fedapp.server import prepare
from tests.fedapp.client.asking import CLIENTS


@pytest.fixture(autouse=True)
def this_task(monkeypatch):
    """A message carries the identity of the process that builds it; and the client starts with an empty cache."""
    for name, value in (("_task_id", 1), ("_run_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(training, "_tensors", federation.TensorCache())


@pytest.fixture
def experiment(configure):
    return prepare(
        configure(model="logistic", local_epochs=2, batch_size=32, client_device="cpu", server_device="cpu"),
        CLIENTS,
    )


@pytest.fixture
def npz_experiment(configure, save_npz):
    path = save_npz("server.npz", test=True)
    return prepare(configure(dataset="npz", data_path=path, model="logistic", batch_size=8), 2)
