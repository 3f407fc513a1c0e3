"""What the ClientApp trains is what local training trains: any rule, any neighbour, to the last bit again."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from fedapp import federation
from fedapp.client import training
from fedapp.config import RunConfig
from fedapp.federation import to_arrays, to_state
from fedapp.server import Experiment, prepare
from fedapp.server.experiment import task_config
from fedapp.training.batches import plan_batches, task_rng
from fedapp.training.rule import LocalRule
from fedapp.training.task import LocalTask
from fedapp.training.trainer import train_one
from fedapp.training.work import scheduled_lr
from strategies.flower import messages
from tests.fedapp.client.asking import CLIENTS, ask, same, trained

CPU = torch.device("cpu")


def directly(
    experiment: Experiment, config: RunConfig, rule: LocalRule, server_round: int = 1, **more: Any
) -> Any:
    """What the reply should be: local training called without Flower."""
    rows = experiment.partition.client(2)
    x, y = federation.to_tensors(experiment.dataset, rows, config.normalize, CPU)
    batches = plan_batches(
        len(rows),
        batch_size=config.batch_size,
        epochs=config.local_epochs,
        steps=config.local_steps,
        rng=task_rng(config.seed, 2, server_round),
    )
    lr = scheduled_lr(config.lr, config.lr_schedule, server_round, config.num_server_rounds)
    start = {name: value.detach().clone() for name, value in experiment.model.named_parameters()}
    lr = lr / len(batches) if config.normalize_steps else lr
    state, loss = train_one(LocalTask(experiment.model, start, x, y, 0, batches, lr, rule, **more))
    return state, loss, len(batches), len(rows)


@pytest.mark.parametrize(
    ("values", "fields", "rule"),
    [
        ({}, {}, LocalRule()),
        ({}, {"proximal-mu": 0.3}, LocalRule(alpha=0.3)),
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
def test_training_equals_local_training(values, fields, rule, configure):
    config = configure(**{"model": "logistic", "local_epochs": 2, "batch_size": 32, **values})
    experiment = prepare(config, CLIENTS)
    reply = ask(messages.TRAIN, experiment, **fields)
    state, loss, steps, examples = directly(experiment, config, rule, fields.get("task", 1))
    assert same(trained(reply), state)
    metrics = dict(reply.content.metric_records[messages.METRICS])
    assert metrics == {"num-examples": examples, "num-steps": steps, "train-loss": loss}
    assert not same(state, trained_start(experiment))


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_training_at_a_point_between_the_own_model_and_the_neighbours(beta, configure):
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


def test_the_same_task_is_equal_bit_for_bit_and_another_is_not(experiment):
    base = trained(ask(messages.TRAIN, experiment))
    torch.manual_seed(99)
    assert same(trained(ask(messages.TRAIN, experiment)), base)
    for other in ({"task": 2}, {"client": 3}, {"seed": 1}):
        assert not same(trained(ask(messages.TRAIN, experiment, **other)), base)
    # the round alone changes nothing at a constant learning rate
    assert same(trained(ask(messages.TRAIN, experiment, server_round=9)), base)


def test_the_same_task_is_equal_in_a_process_that_knows_nothing(experiment):
    base = trained(ask(messages.TRAIN, experiment))
    federation.forget()
    training._tensors = federation.TensorCache()  # the fixture puts the old one back
    assert same(trained(ask(messages.TRAIN, experiment)), base)


def test_training_leaves_the_data_and_the_model_sent_alone(experiment):
    before = trained_start(experiment)
    before = {name: value.copy() for name, value in before.items()}
    first = trained(ask(messages.TRAIN, experiment))
    ask(messages.TRAIN, experiment, client=1, alpha=0.5)
    assert same(trained_start(experiment), before)
    assert same(trained(ask(messages.TRAIN, experiment)), first)


def test_the_run_configs_proximal_mu_is_the_strategys_to_tell(configure):
    experiment = prepare(configure(proximal_mu=100.0), CLIENTS)
    assert messages.ALPHA not in task_config(experiment)
    fedavg = trained(ask(messages.TRAIN, experiment))
    assert same(trained(ask(messages.TRAIN, experiment, alpha=0.0)), fedavg)
    assert not same(trained(ask(messages.TRAIN, experiment, alpha=0.5)), fedavg)


def test_a_constant_buffer_is_the_clients_own(configure):
    config = configure(dataset="synthetic", partitioner="natural", model="perceptron", batch_size=0, lr=0.2)
    experiment = prepare(config, CLIENTS)
    state = trained(ask(messages.TRAIN, experiment))
    assert set(state) == {"bias"}
    # one full-batch step from b = 0: b = −γ mean(σ(v·x) − y)
    rows = experiment.partition.client(2)
    x, y = experiment.dataset.inputs(rows).astype(np.float64), np.asarray(experiment.dataset.y)[rows]
    expected = -0.2 * (1 / (1 + np.exp(-(x @ np.array([2.700213, 0.7134238])))) - y).mean()
    assert state["bias"].tolist() == pytest.approx([expected], abs=1e-6)


def test_arrays_and_tensors_convert_both_ways_as_copies():
    state = {"w": torch.randn(2, 3), "n": torch.tensor(5)}
    arrays = to_arrays(state)
    assert isinstance(arrays, ArrayRecord)
    back = to_state(arrays, CPU)
    assert all(
        torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items()
    )
    back["w"] += 1
    assert torch.equal(to_state(arrays, CPU)["w"], state["w"])
