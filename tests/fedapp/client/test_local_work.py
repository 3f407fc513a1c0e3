"""Each client's share of work: that clients do it, and what it does to the model."""

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedapp import client_app
from fedapp.federation import to_arrays
from fedapp.server import Experiment, prepare, task_config
from strategies.flower import messages

# Doing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(monkeypatch):
    """Let one client of an experiment train, as a strategy would."""
    for name, value in (("_task_id", 1), ("_run_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)

    def train(experiment: Experiment, client: int, **more: float) -> Message:
        fields = {messages.SERVER_ROUND: 1, messages.CLIENT: client, messages.TASK: 1}
        fields |= {f"strategies.{name}": value for name, value in more.items()}
        request = messages.request(
            messages.TRAIN,
            7,
            ConfigRecord({**task_config(experiment), **fields}),
            ttl=60.0,
            arrays=to_arrays(experiment.model.state_dict()),
        )
        node = {"partition-id": client, "num-partitions": experiment.num_clients}
        reply = client_app.app(request, Context(2, 7, node, RecordDict(), {}))
        assert reply.has_content(), reply.error.reason
        return reply

    return train


def num_steps(reply: Message) -> int:
    return int(reply.content.metric_records[messages.METRICS][messages.NUM_STEPS])  # type: ignore[call-overload]


def trained(reply: Message) -> list[bytes]:
    return [array.data for array in reply.content.array_records[messages.ARRAYS].values()]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_each_client_does_its_own_work(unit, configure, ask):
    work = [3, 1, 4]
    length = (
        {"local_epochs": 1, "local_steps": 0} if unit == "epochs" else {"local_epochs": 0, "local_steps": 1}
    )
    config = configure(model="logistic", step_heterogeneity="list:3,1,4", batch_size=64, **length)
    experiment = prepare(config, 3)
    batches = [-(-size // 64) if unit == "epochs" else 1 for size in experiment.partition.sizes.tolist()]
    expected = [own * number for own, number in zip(work, batches, strict=True)]
    assert [num_steps(ask(experiment, client)) for client in range(3)] == expected


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_a_straggler_does_its_part_rounded_up_and_says_so(unit, configure, ask):
    length = (
        {"local_epochs": 4, "local_steps": 0} if unit == "epochs" else {"local_epochs": 0, "local_steps": 4}
    )
    experiment = prepare(configure(model="logistic", batch_size=0, **length), 3)
    replies = [ask(experiment, 0, part=part) for part in (0.01, 0.25, 0.26, 0.75, 1.0)]
    assert [num_steps(reply) for reply in replies] == [1, 1, 2, 3, 4]
    assert replies[2].content.config_records[messages.APPLIED][messages.PART] == 0.26
    assert messages.APPLIED not in ask(experiment, 0).content  # of whom nothing was asked


def test_normalized_steps_are_steps_of_a_smaller_rate(configure, ask):
    same = {"model": "logistic", "local_epochs": 0, "batch_size": 32}
    normalized = prepare(
        configure(**same, lr=0.4, local_steps=1, step_heterogeneity="range:4-8", normalize_steps=True), 3
    )
    plain = prepare(configure(**same, lr=0.05, local_steps=8), 3)  # client 2: E = 8, μ / E = 0.05
    assert trained(ask(normalized, 2)) == trained(ask(plain, 2))


def test_a_message_says_all_there_is_to_know(configure, tmp_path):
    # A device hasn't the server's trace, nor the number of clients: the message has the list.
    trace = tmp_path / "times.csv"
    trace.write_text("0,1.0\n1,3.0\n1,5.0\n2,2.0\n")  # τ = 1, 4, 2
    config = configure(step_heterogeneity="speed", local_epochs=8, time_scenario=f"trace:{trace}")
    experiment = prepare(config, 3)
    assert experiment.config.step_heterogeneity == "speed"
    assert task_config(experiment)["step-heterogeneity"] == "list:8,2,4"


# What comes of it ------------------------------------------------------------------------------------------
