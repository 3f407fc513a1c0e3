"""The real ClientApp in process: messages in, replies out, and every error a reply with its reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedapp import federation
from fedapp.client import training
from fedapp.client_app import CANNOT_TAKE_PART, app
from fedapp.config import RunConfig
from fedapp.federation import to_arrays, to_state
from fedapp.server import Experiment, prepare, task_config
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.evaluation import evaluate
from fedapp.training.rule import LocalRule
from fedapp.training.schedule import scheduled_lr
from fedapp.training.task import LocalTask
from fedapp.training.trainer import train_one
from strategies import messages

CPU = torch.device("cpu")
CLIENTS = 5
NODE = {"partition-id": 2, "num-partitions": CLIENTS}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def this_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message carries the identity of the process that builds it; and the client starts with an empty cache."""
    for name, value in (("_task_id", 1), ("_run_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(training, "_tensors", federation.TensorCache())


@pytest.fixture
def experiment(configure: Callable[..., RunConfig]) -> Experiment:
    return prepare(configure(model="logistic", local_epochs=2, batch_size=32), CLIENTS)


def ask(
    kind: str,
    experiment: Experiment,
    node_config: dict[str, Any] = NODE,
    *,
    config: Any = None,
    neighbours: ArrayRecord | None = None,
    **fields: Any,
) -> Message:
    """Send the app one request as the strategies do, and return its reply."""
    record = ConfigRecord(
        {
            **task_config(experiment),
            messages.SERVER_ROUND: 1,
            messages.CLIENT: 2,
            messages.TASK: 1,
            **{name.replace("_", "-"): value for name, value in fields.items()},
            **(config or {}),
        }
    )
    queried = kind in (messages.DESCRIBE, messages.ASK_DIRECTION)
    arrays = None if queried else to_arrays(experiment.model.state_dict())
    companions = {} if neighbours is None else {messages.NEIGHBOURS: neighbours}
    request = messages.request(kind, 7, record, ttl=60.0, arrays=arrays, companions=companions)
    context = Context(run_id=2, node_id=7, node_config=node_config, state=RecordDict(), run_config={})
    return app(request, context)


def trained(reply: Message) -> dict[str, np.ndarray]:
    assert reply.has_content(), reply.error.reason
    return {name: array.numpy() for name, array in reply.content.array_records[messages.ARRAYS].items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def reason(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == CANNOT_TAKE_PART
    assert "\n" not in reply.error.reason
    assert "Traceback" not in reply.error.reason
    return reply.error.reason


# Describe --------------------------------------------------------------------------------------------------


def test_a_client_describes_itself(experiment: Experiment) -> None:
    rows = experiment.partition.client(2)
    metrics = dict(ask(messages.DESCRIBE, experiment).content.metric_records[messages.METRICS])
    assert metrics == {
        "num-examples": len(rows),
        "gpu": int(torch.cuda.is_available()),
        "partition-id": 2,
        "num-partitions": CLIENTS,
    }
    assert len(rows) > 0


def test_all_clients_together_have_every_training_row(experiment: Experiment) -> None:
    described = [
        ask(
            messages.DESCRIBE, experiment, {"partition-id": i, "num-partitions": CLIENTS}
        ).content.metric_records[messages.METRICS]
        for i in range(CLIENTS)
    ]
    assert sum(m["num-examples"] for m in described) == len(experiment.partition.client_indices)


def test_a_reply_goes_back_to_who_asked(experiment: Experiment) -> None:
    reply = ask(messages.DESCRIBE, experiment)
    assert reply.metadata.dst_node_id == 3
    assert reply.metadata.src_node_id == 7
    assert reply.metadata.message_type == messages.DESCRIBE


# Direction -------------------------------------------------------------------------------------------------


def direction(reply: Message) -> np.ndarray:
    assert reply.has_content(), reply.error.reason
    (array,) = reply.content.array_records[messages.DIRECTION].values()
    return array.numpy()


def test_the_direction_is_the_principal_direction_of_the_clients_training_rows(
    experiment: Experiment,
) -> None:
    rows = experiment.partition.client(2)
    pixels = np.asarray(experiment.dataset.x)[rows].reshape(len(rows), 64).astype(np.float64)
    m = direction(ask(messages.ASK_DIRECTION, experiment))
    assert (m.shape, m.dtype) == ((64,), np.float64)
    first = np.linalg.svd(pixels)[2][0]
    np.testing.assert_allclose(m, first * np.sign(first.sum()), atol=1e-10)
    other = direction(ask(messages.ASK_DIRECTION, experiment, {"partition-id": 3, "num-partitions": CLIENTS}))
    assert np.linalg.norm(m - other) > 0.01


def test_the_noise_of_a_direction_can_be_repeated_and_is_each_clients_own(experiment: Experiment) -> None:
    clean = direction(ask(messages.ASK_DIRECTION, experiment))
    noisy = direction(ask(messages.ASK_DIRECTION, experiment, message_epsilon=8.0))
    assert np.linalg.norm(noisy) == pytest.approx(1, abs=1e-12)
    # σ = .97 for (8, 1e-5) and sensitivity 2: in 64 dimensions noise of length about 8 drowns one of length 1
    assert np.linalg.norm(noisy - clean) > 0.5
    assert np.array_equal(direction(ask(messages.ASK_DIRECTION, experiment, message_epsilon=8.0)), noisy)
    for other in ({"seed": 1}, {"client": 3}, {"message_delta": 1e-9}, {"message_epsilon": 7.0}):
        reply = ask(messages.ASK_DIRECTION, experiment, **{"message_epsilon": 8.0, **other})
        assert not np.array_equal(direction(reply), noisy)


def test_a_node_of_its_own_draws_noise_that_the_server_cannot_repeat(
    npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    node = {"data-path": save_npz("node.npz")}
    assert np.array_equal(*(direction(ask(messages.ASK_DIRECTION, npz_experiment, node)) for _ in "ab"))
    one, two = (
        direction(ask(messages.ASK_DIRECTION, npz_experiment, node, message_epsilon=8.0)) for _ in "ab"
    )
    assert not np.array_equal(one, two)


# Train -----------------------------------------------------------------------------------------------------


def directly(
    experiment: Experiment, config: RunConfig, rule: LocalRule, server_round: int = 1, **more: Any
) -> Any:
    """What the reply should be: local training called without Flower."""
    rows = experiment.partition.client(2)
    x, y = federation.to_tensors(experiment.dataset, rows, config.normalize, CPU)
    batches = plan_batches(
        len(rows), batch_size=config.batch_size, epochs=config.local_epochs, steps=config.local_steps,
        rng=task_rng(config.seed, 2, server_round),
    )  # fmt: skip
    lr = scheduled_lr(config.lr, config.lr_schedule, server_round, config.num_server_rounds)
    start = {name: value.detach().clone() for name, value in experiment.model.named_parameters()}
    lr = lr / len(batches) if config.normalize_steps else lr
    state, loss = train_one(LocalTask(experiment.model, start, x, y, 0, batches, lr, rule, **more))
    return state, loss, len(batches), len(rows)


@pytest.mark.parametrize(
    ("values", "fields", "rule"),
    [
        ({}, {}, LocalRule()),
        ({}, {"alpha": 0.3}, LocalRule(alpha=0.3)),
        (
            {"momentum": 0.9, "l2": 0.01, "clip_norm": 0.5},
            {},
            LocalRule(momentum=0.9, l2=0.01, clip_norm=0.5),
        ),
        ({"local_epochs": 0, "local_steps": 7, "batch_size": 10}, {}, LocalRule()),
        ({"batch_size": 0}, {}, LocalRule()),
        ({"normalize_steps": True}, {}, LocalRule()),
        ({"lr_schedule": "inverse"}, {"server_round": 4, "task": 4}, LocalRule()),
    ],
)
def test_training_equals_local_training(
    values: dict[str, Any], fields: dict[str, Any], rule: LocalRule, configure: Callable[..., RunConfig]
) -> None:
    config = configure(**{"model": "logistic", "local_epochs": 2, "batch_size": 32, **values})
    experiment = prepare(config, CLIENTS)
    reply = ask(messages.TRAIN, experiment, **fields)
    state, loss, steps, examples = directly(experiment, config, rule, fields.get("task", 1))
    assert same(trained(reply), state)
    metrics = dict(reply.content.metric_records[messages.METRICS])
    assert metrics == {"num-examples": examples, "num-steps": steps, "train-loss": loss}
    assert not same(state, trained_start(experiment))


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_training_at_a_point_between_the_own_model_and_the_neighbours(
    beta: float, configure: Callable[..., RunConfig]
) -> None:
    config = configure(model="logistic", local_epochs=0, local_steps=4, batch_size=10, l2=0.1)
    experiment = prepare(config, CLIENTS)
    rng = np.random.default_rng(0)
    u = {
        name: torch.tensor(rng.normal(size=value.shape), dtype=torch.float32)
        for name, value in experiment.model.named_parameters()
    }
    reply = ask(messages.TRAIN, experiment, neighbours=to_arrays(u), beta=beta)
    state, loss, steps, examples = directly(experiment, config, LocalRule(beta=beta, l2=0.1), neighbours=u)
    assert same(trained(reply), state)
    metrics = dict(reply.content.metric_records[messages.METRICS])
    assert metrics == {"num-examples": examples, "num-steps": steps, "train-loss": loss}
    # without β in the message u counts for nothing: the run config's perturbation-beta is the server's
    plain = trained(ask(messages.TRAIN, experiment, perturbation_beta=beta))
    assert same(trained(ask(messages.TRAIN, experiment, neighbours=to_arrays(u))), plain)
    assert not same(plain, state)


def trained_start(experiment: Experiment) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in experiment.model.state_dict().items()}


def test_the_same_task_is_equal_bit_for_bit_and_another_is_not(experiment: Experiment) -> None:
    base = trained(ask(messages.TRAIN, experiment))
    torch.manual_seed(99)
    assert same(trained(ask(messages.TRAIN, experiment)), base)
    for other in ({"task": 2}, {"client": 3}, {"seed": 1}):
        assert not same(trained(ask(messages.TRAIN, experiment, **other)), base)
    # the round alone changes nothing at a constant learning rate
    assert same(trained(ask(messages.TRAIN, experiment, server_round=9)), base)


def test_the_same_task_is_equal_in_a_process_that_knows_nothing(experiment: Experiment) -> None:
    base = trained(ask(messages.TRAIN, experiment))
    federation.forget()
    training._tensors = federation.TensorCache()  # the fixture puts the old one back
    assert same(trained(ask(messages.TRAIN, experiment)), base)


def test_training_leaves_the_data_and_the_model_sent_alone(experiment: Experiment) -> None:
    before = trained_start(experiment)
    before = {name: value.copy() for name, value in before.items()}
    first = trained(ask(messages.TRAIN, experiment))
    ask(messages.TRAIN, experiment, client=1, alpha=0.5)
    assert same(trained_start(experiment), before)
    assert same(trained(ask(messages.TRAIN, experiment)), first)


def test_without_alpha_in_the_message_proximal_mu_counts_for_nothing(experiment: Experiment) -> None:
    fedavg = trained(ask(messages.TRAIN, experiment, proximal_mu=0.0))
    assert same(trained(ask(messages.TRAIN, experiment, proximal_mu=100.0)), fedavg)
    assert same(trained(ask(messages.TRAIN, experiment, alpha=0.0)), fedavg)
    assert not same(trained(ask(messages.TRAIN, experiment, alpha=0.5)), fedavg)


def test_buffers_come_back_as_they_were_sent(configure: Callable[..., RunConfig]) -> None:
    config = configure(dataset="synthetic", partitioner="natural", model="perceptron", batch_size=0, lr=0.2)
    experiment = prepare(config, CLIENTS)
    state, start = trained(ask(messages.TRAIN, experiment)), trained_start(experiment)
    assert set(state) == {"slope", "bias"}
    assert state["slope"].tolist() == start["slope"].tolist()
    # one full-batch step from b = 0: b = −γ mean(σ(v·x) − y)
    rows = experiment.partition.client(2)
    x, y = experiment.dataset.inputs(rows).astype(np.float64), np.asarray(experiment.dataset.y)[rows]
    expected = -0.2 * (1 / (1 + np.exp(-(x @ np.array([2.700213, 0.7134238])))) - y).mean()
    assert state["bias"].tolist() == pytest.approx([expected], abs=1e-6)


def test_arrays_and_tensors_convert_both_ways_as_copies() -> None:
    state = {"w": torch.randn(2, 3), "n": torch.tensor(5)}
    arrays = to_arrays(state)
    assert isinstance(arrays, ArrayRecord)
    back = to_state(arrays, CPU)
    assert all(
        torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items()
    )
    back["w"] += 1
    assert torch.equal(to_state(arrays, CPU)["w"], state["w"])


# Evaluate --------------------------------------------------------------------------------------------------


def test_evaluation_is_that_of_the_clients_training_rows(experiment: Experiment) -> None:
    reply = ask(messages.EVALUATE, experiment)
    rows = experiment.partition.client(2)
    x, y = federation.to_tensors(experiment.dataset, rows, False, CPU)
    score = evaluate(experiment.model, dict(experiment.model.named_parameters()), x, y)
    metrics = dict(reply.content.metric_records[messages.METRICS])
    assert metrics == {"num-examples": len(rows), "loss": score.loss, "accuracy": score.accuracy}
    assert not reply.content.array_records


# A node with data of its own -------------------------------------------------------------------------------


@pytest.fixture
def npz_experiment(configure: Callable[..., RunConfig], save_npz: Callable[..., str]) -> Experiment:
    path = save_npz("server.npz", test=True)
    return prepare(configure(dataset="npz", data_path=path, model="logistic", batch_size=8), 2)


def test_a_node_with_a_file_of_its_own_has_all_its_training_rows(
    npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    own = save_npz("node.npz", test=True)
    metrics = dict(
        ask(messages.DESCRIBE, npz_experiment, {"data-path": own}).content.metric_records[messages.METRICS]
    )
    # 30 training rows; its 10 test rows aren't trained on
    assert metrics == {"num-examples": 30, "gpu": int(torch.cuda.is_available())}
    reply = ask(messages.TRAIN, npz_experiment, {"data-path": own})
    assert reply.content.metric_records[messages.METRICS]["num-examples"] == 30
    assert reply.content.metric_records[messages.METRICS]["num-steps"] == 4  # ⌈30 / 8⌉


def test_a_node_without_the_last_classes_can_take_part(
    npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    reply = ask(messages.TRAIN, npz_experiment, {"data-path": save_npz("node.npz", classes=4)})
    assert trained(reply)["1.weight"].shape == (10, 64)


def test_a_file_of_its_own_can_be_divided_too(
    npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    own = save_npz("node.npz", test=True)
    replies = [
        ask(messages.DESCRIBE, npz_experiment, {"data-path": own, "partition-id": i, "num-partitions": 3})
        for i in range(3)
    ]
    assert sum(reply.content.metric_records[messages.METRICS]["num-examples"] for reply in replies) == 30


# Errors are replies ----------------------------------------------------------------------------------------

KINDS = (messages.DESCRIBE, messages.ASK_DIRECTION, messages.TRAIN, messages.EVALUATE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file(kind: str, npz_experiment: Experiment, broken_npz: str) -> None:
    text = reason(ask(kind, npz_experiment, {"data-path": broken_npz}))
    assert text.startswith(f"data-path = {broken_npz!r}: is not an npz file")


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file(kind: str, npz_experiment: Experiment, tmp_path: Path) -> None:
    path = str(tmp_path / "none.npz")
    assert reason(ask(kind, npz_experiment, {"data-path": path})).startswith(
        f"data-path = {path!r}: no such file"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node_config", [{}, {"partition-id": 0}, {"num-partitions": 5}])
def test_a_node_that_does_not_know_its_part(
    kind: str, node_config: dict[str, int], experiment: Experiment
) -> None:
    assert reason(ask(kind, experiment, node_config)) == (
        "node-config: needs partition-id and num-partitions, or a data-path of the node's own"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partition_id", [-1, CLIENTS, 100])
def test_a_partition_id_out_of_range(kind: str, partition_id: int, experiment: Experiment) -> None:
    node_config = {"partition-id": partition_id, "num-partitions": CLIENTS}
    assert reason(ask(kind, experiment, node_config)) == f"partition-id = {partition_id}: must be 0 to 4"


@pytest.mark.parametrize(
    "node_config",
    [{"partition-id": "two", "num-partitions": 5}, {"partition-id": 0, "num-partitions": "five"}],
)
def test_a_node_config_that_is_no_number(node_config: dict[str, Any], experiment: Experiment) -> None:
    assert reason(ask(messages.DESCRIBE, experiment, node_config)).startswith(
        ("partition-id = ", "num-partitions = ")
    )


def test_more_partitions_than_the_data_allow(experiment: Experiment) -> None:
    text = reason(ask(messages.DESCRIBE, experiment, {"partition-id": 0, "num-partitions": 2000}))
    assert text.startswith("num-supernodes = 2000: 'digits' has ")


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
def test_data_that_do_not_fit_the_servers_model(
    kind: str, data: dict[str, Any], found: str, npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    text = reason(ask(kind, npz_experiment, {"data-path": save_npz("node.npz", **data)}))
    assert text == f"this client's data are {found}, the model's image [1, 8, 8] with 10"


@NO_GPU
@pytest.mark.parametrize("kind", [messages.DESCRIBE, messages.TRAIN, messages.EVALUATE])
def test_a_gpu_that_is_not_there(kind: str, experiment: Experiment) -> None:
    text = reason(ask(kind, experiment, client_device="cuda"))
    assert text == "client-device = 'cuda': this client has no GPU; allowed are auto, cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_makes_no_sense(kind: str, experiment: Experiment) -> None:
    assert reason(ask(kind, experiment, lr=-1.0)) == "lr = -1.0: must be a number > 0"


@pytest.mark.parametrize("kind", [messages.TRAIN, messages.EVALUATE])
def test_normalising_a_file_of_its_own(
    kind: str, npz_experiment: Experiment, save_npz: Callable[..., str]
) -> None:
    reply = ask(kind, npz_experiment, {"data-path": save_npz("node.npz")}, normalize=True)
    assert reason(reply).startswith("normalize = true: dataset 'npz' has no published mean and deviation")


def test_after_an_error_the_client_still_works(experiment: Experiment) -> None:
    base = trained(ask(messages.TRAIN, experiment))
    reason(ask(messages.TRAIN, experiment, {}))
    assert same(trained(ask(messages.TRAIN, experiment)), base)


def test_a_bug_is_not_dressed_up_as_a_users_error(experiment: Experiment) -> None:
    request = messages.request(messages.TRAIN, 7, ConfigRecord({"lr": 0.1}), ttl=60.0)
    context = Context(run_id=2, node_id=7, node_config=NODE, state=RecordDict(), run_config={})
    with pytest.raises(KeyError):
        app(request, context)
