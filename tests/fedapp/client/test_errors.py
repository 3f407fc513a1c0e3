"""Every error is a reply with its reason."""

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from fedapp.client_app import app
from strategies.flower import messages
from tests.fedapp.client.asking import CLIENTS, NODE, ask, reason, same, trained

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


KINDS = (messages.DESCRIBE, messages.ASK_DIRECTION, messages.TRAIN, messages.EVALUATE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file(kind, npz_experiment, broken_npz):
    text = reason(ask(kind, npz_experiment, {"data-path": broken_npz}))
    assert text.startswith(f"data-path = {broken_npz!r}: is not an npz file")


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file(kind, npz_experiment, tmp_path):
    path = str(tmp_path / "none.npz")
    assert reason(ask(kind, npz_experiment, {"data-path": path})).startswith(
        f"data-path = {path!r}: no such file"
    )


NEEDS = "node-config: needs partition-id and num-partitions, or a data-path of the node's own"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("node_config", "said"),
    [
        ({}, NEEDS),
        ({"partition-id": 0}, NEEDS),
        ({"num-partitions": 5}, NEEDS),
        ({"partition-id": -1, "num-partitions": CLIENTS}, "partition-id = -1: must be 0 to 4"),
        ({"partition-id": CLIENTS, "num-partitions": CLIENTS}, "partition-id = 5: must be 0 to 4"),
        ({"partition-id": "two", "num-partitions": CLIENTS}, "partition-id = "),
        ({"partition-id": 0, "num-partitions": "five"}, "num-partitions = "),
        ({"partition-id": 0, "num-partitions": 2000}, "num-supernodes = 2000: 'digits' has "),
    ],
)
def test_a_node_that_does_not_know_its_part(kind, node_config, said, experiment):
    assert reason(ask(kind, experiment, node_config)).startswith(said)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"shape": (6, 6)}, "image [1, 6, 6] with 10 classes"),
        ({"shape": (64,)}, "vector [64] with 10 classes"),
        ({"shape": (8, 8, 3)}, "image [3, 8, 8] with 10 classes"),
        ({"classes": 12}, "image [1, 8, 8] with 12 classes"),
    ],
)
def test_data_that_do_not_fit_the_servers_model(kind, data, found, npz_experiment, save_npz):
    text = reason(ask(kind, npz_experiment, {"data-path": save_npz("node.npz", **data)}))
    assert text == f"this client's data are {found}, the model's image [1, 8, 8] with 10"


@NO_GPU
@pytest.mark.parametrize("kind", [messages.DESCRIBE, messages.TRAIN, messages.EVALUATE])
def test_a_gpu_that_is_not_there(kind, experiment):
    text = reason(ask(kind, experiment, client_device="cuda"))
    assert text == "client-device = 'cuda': this client has no GPU; allowed are auto, cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_makes_no_sense(kind, experiment):
    assert reason(ask(kind, experiment, lr=-1.0)) == "lr = -1.0: must be a number > 0"


@pytest.mark.parametrize("kind", [messages.TRAIN, messages.EVALUATE])
def test_normalising_a_file_of_its_own(kind, npz_experiment, save_npz):
    reply = ask(kind, npz_experiment, {"data-path": save_npz("node.npz")}, normalize=True)
    assert reason(reply).startswith("normalize = true: dataset 'npz' has no published mean and deviation")


def test_after_an_error_the_client_still_works(experiment):
    base = trained(ask(messages.TRAIN, experiment))
    reason(ask(messages.TRAIN, experiment, {}))
    assert same(trained(ask(messages.TRAIN, experiment)), base)


def test_a_bug_is_not_dressed_up_as_a_users_error(experiment):
    request = messages.request(messages.TRAIN, 7, ConfigRecord({"lr": 0.1}), ttl=60.0)
    context = Context(run_id=2, node_id=7, node_config=NODE, state=RecordDict(), run_config={})
    with pytest.raises(KeyError):
        app(request, context)
