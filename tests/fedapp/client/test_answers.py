"""The real ClientApp in process: what it answers of itself, and with data of its own."""

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedapp import federation
from fedapp.client_app import app
from fedapp.training.evaluation import evaluate
from strategies.flower import messages
from tests.fedapp.client.asking import CLIENTS, NODE, ask, context_of, request_for, trained

CPU = torch.device("cpu")


# Describe --------------------------------------------------------------------------------------------------


def test_a_client_describes_itself(experiment):
    rows = experiment.partition.client(2)
    metrics = dict(ask(messages.DESCRIBE, experiment).content.metric_records[messages.METRICS])
    assert metrics == {
        "num-examples": len(rows),
        "gpu": int(torch.cuda.is_available()),
        "partition-id": 2,
        "num-partitions": CLIENTS,
    }
    assert len(rows) > 0


@pytest.mark.parametrize(
    ("told", "said"),
    [({}, {}), ({"name": "oslo"}, {"device": {"name": "oslo"}}), ({"name": 7}, {"device": {"name": "7"}})],
)
def test_a_device_that_has_a_name_says_it(told, said, experiment):
    reply = ask(messages.DESCRIBE, experiment, {**NODE, **told})
    assert {key: dict(record) for key, record in reply.content.config_records.items()} == said


def test_all_clients_together_have_every_training_row(experiment):
    described = [
        ask(
            messages.DESCRIBE, experiment, {"partition-id": i, "num-partitions": CLIENTS}
        ).content.metric_records[messages.METRICS]
        for i in range(CLIENTS)
    ]
    rows = np.asarray(experiment.dataset.y)[experiment.partition.client_indices]
    assert sum(metrics["num-examples"] for metrics in described) == len(rows)


def test_a_reply_goes_back_to_who_asked(experiment):
    reply = ask(messages.DESCRIBE, experiment)
    assert reply.metadata.dst_node_id == 3
    assert reply.metadata.src_node_id == 7
    assert reply.metadata.message_type == messages.DESCRIBE


# Direction ---------------------------------------------------------------------------------------------------


def direction(reply: Message) -> np.ndarray:
    assert reply.has_content(), reply.error.reason
    (array,) = reply.content.array_records[messages.DIRECTION].values()
    return array.numpy()


def test_the_direction_is_the_principal_direction_of_the_clients_training_rows(experiment):
    rows = experiment.partition.client(2)
    pixels = np.asarray(experiment.dataset.x)[rows].reshape(len(rows), 64).astype(np.float64)
    m = direction(ask(messages.ASK_DIRECTION, experiment))
    assert (m.shape, m.dtype) == ((64,), np.float64)
    first = np.linalg.svd(pixels)[2][0]
    np.testing.assert_allclose(m, first * np.sign(first.sum()), atol=1e-10)
    other = direction(ask(messages.ASK_DIRECTION, experiment, {"partition-id": 3, "num-partitions": CLIENTS}))
    assert np.linalg.norm(m - other) > 0.01


def test_the_noise_of_a_direction_can_be_repeated_and_is_each_clients_own(experiment):
    clean = direction(ask(messages.ASK_DIRECTION, experiment))
    noisy = direction(ask(messages.ASK_DIRECTION, experiment, message_epsilon=8.0))
    assert np.linalg.norm(noisy) == pytest.approx(1, abs=1e-12)
    # σ = .97 for (8, 1e-5) and sensitivity 2: in 64 dimensions noise of length about 8 drowns one of length 1
    assert np.linalg.norm(noisy - clean) > 0.5
    assert np.array_equal(direction(ask(messages.ASK_DIRECTION, experiment, message_epsilon=8.0)), noisy)
    for other in ({"seed": 1}, {"client": 3}, {"message_delta": 1e-9}, {"message_epsilon": 7.0}):
        reply = ask(messages.ASK_DIRECTION, experiment, **{"message_epsilon": 8.0, **other})
        assert not np.array_equal(direction(reply), noisy)


def test_a_node_of_its_own_draws_noise_that_the_server_cannot_repeat(npz_experiment, save_npz):
    node = {"data-path": save_npz("node.npz")}
    assert np.array_equal(*(direction(ask(messages.ASK_DIRECTION, npz_experiment, node)) for _ in "ab"))
    one, two = (
        direction(ask(messages.ASK_DIRECTION, npz_experiment, node, message_epsilon=8.0)) for _ in "ab"
    )
    assert not np.array_equal(one, two)


def test_a_node_of_its_own_that_is_asked_again_draws_no_other_noise(npz_experiment, save_npz):
    context = context_of({"data-path": save_npz("node.npz")})
    clean = app(request_for(messages.ASK_DIRECTION, npz_experiment), context)
    one, two = (
        app(request_for(messages.ASK_DIRECTION, npz_experiment, message_epsilon=8.0), context) for _ in "ab"
    )
    assert np.array_equal(direction(one), direction(two))
    assert not np.array_equal(direction(one), direction(clean))


# Evaluate --------------------------------------------------------------------------------------------------


def test_evaluation_is_that_of_the_clients_training_rows(experiment):
    reply = ask(messages.EVALUATE, experiment)
    rows = experiment.partition.client(2)
    x, y = federation.to_tensors(experiment.dataset, rows, False, CPU)
    score = evaluate(experiment.model, dict(experiment.model.named_parameters()), x, y)
    metrics = dict(reply.content.metric_records[messages.METRICS])
    assert metrics == {"num-examples": len(rows), "loss": score.loss, **score.values()}
    assert not reply.content.array_records


def test_a_node_with_a_file_of_its_own_has_all_its_training_rows(npz_experiment, save_npz):
    own = save_npz("node.npz", test=True)
    metrics = dict(
        ask(messages.DESCRIBE, npz_experiment, {"data-path": own}).content.metric_records[messages.METRICS]
    )
    # 30 training rows; its 10 test rows aren't trained on
    assert metrics == {"num-examples": 30, "gpu": int(torch.cuda.is_available())}
    reply = ask(messages.TRAIN, npz_experiment, {"data-path": own})
    assert reply.content.metric_records[messages.METRICS]["num-examples"] == 30
    assert reply.content.metric_records[messages.METRICS]["num-steps"] == 4  # ⌈30 / 8⌉


def test_a_node_without_the_last_classes_can_take_part(npz_experiment, save_npz):
    reply = ask(messages.TRAIN, npz_experiment, {"data-path": save_npz("node.npz", classes=4)})
    assert trained(reply)["1.weight"].shape == (10, 64)


def test_a_file_of_its_own_can_be_divided_too(npz_experiment, save_npz):
    own = save_npz("node.npz", test=True)
    replies = [
        ask(messages.DESCRIBE, npz_experiment, {"data-path": own, "partition-id": i, "num-partitions": 3})
        for i in range(3)
    ]
    assert sum(reply.content.metric_records[messages.METRICS]["num-examples"] for reply in replies) == 30
