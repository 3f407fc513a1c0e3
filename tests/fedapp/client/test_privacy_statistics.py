"""Differential privacy of a model with running statistics: what isn't trained neither leaves nor gets noise."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedapp.client.privacy import privately
from fedapp.config import RunConfig
from fedapp.server.privacy import say_what_stays
from fedapp.training.state import names_of
from strategies import FedAvg, FedFix
from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.flower.internals import be_the_server
from strategies.testing import MemoryGrid

NORM = 0.5
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def normalising() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def record_of(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: Array(value.numpy()) for name, value in model.state_dict().items()})


def trained(sent: ArrayRecord, seed: int) -> ArrayRecord:
    """Return what really comes of training on a client's own data, its statistics among it."""
    model = normalising()
    model.load_state_dict({name: torch.from_numpy(array.numpy().copy()) for name, array in sent.items()})
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(5.0 + seed, 3.0, (32, 4)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 2, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return record_of(model)


def app() -> ClientApp:
    """Return clients that train, and answer as ``dp`` in the message's config lets them."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        arrays = trained(message.content.array_records["arrays"], int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": 32, "train-loss": 0.1})
        reply = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
        return privately(message, context, reply)

    return made


def run(
    asked_for: str, kind: Any = FedAvg, noise: float = 1.0, **options: Any
) -> tuple[ArrayRecord, MemoryGrid]:
    grid = MemoryGrid(app(), [{"partition-id": i} for i in range(3)])
    asked = {"dp": asked_for, "dp-clipping-norm": NORM, "dp-noise-multiplier": noise, "seed": 3}
    strategy = kind(fraction_evaluate=0.0, client_weights="uniform", **options)
    result = strategy.start(grid, record_of(normalising()), num_rounds=2, train_config=ConfigRecord(asked))
    return result.arrays, grid


def answered(dp: str, noise: float = 1.0) -> tuple[ArrayRecord, ArrayRecord]:
    """Return what a client is sent, and what it sends."""
    _, grid = run(dp, noise=noise)
    request = grid.requests(server_round=1)[0]
    node = grid.nodes[request.metadata.dst_node_id]
    sent = request.content.array_records["arrays"]
    return sent, grid.app(request, node.context).content.array_records["arrays"]


def bits(record: ArrayRecord, names: Any = STATISTICS) -> dict[str, bytes]:
    return {name: record[name].data for name in names}


@pytest.mark.parametrize("dp", ["local", "central"])
def test_statistics_go_back_as_they_came(dp):
    sent, came = answered("none")
    assert all(one != other for one, other in zip(bits(sent).values(), bits(came).values(), strict=True))
    sent, came = answered(dp)
    assert bits(came) == bits(sent)
    assert list(came) == list(sent)
    others = [name for name in sent if name not in STATISTICS]
    weights = [name for name in others if name != "0.bias"]  # normalisation takes that out again
    assert all(came[name].data != sent[name].data for name in weights)


def test_the_norm_is_that_of_what_is_trained():
    sent, came = answered("none")
    layout = Layout.of(sent)
    delta = layout.to_vector(came) - layout.to_vector(sent)
    assert np.linalg.norm(delta) > 20 * NORM  # the count alone
    sent, came = answered("central")
    own = [
        came[name].numpy().astype(np.float64) - sent[name].numpy() for name in sent if name not in STATISTICS
    ]
    assert np.sqrt(sum((part**2).sum() for part in own)) == pytest.approx(NORM, rel=1e-5)


def test_noise_is_on_what_is_trained_as_much_as_it_says():
    sent, came = answered("local", noise=1000.0)
    own = np.concatenate([(came[n].numpy() - sent[n].numpy()).ravel() for n in sent if n not in STATISTICS])
    # 56 values of deviation 2 z S; √(1/(2·56)) = 9 % of it
    assert len(own) == 56
    assert own.std() == pytest.approx(2 * 1000 * NORM, rel=0.4)


def test_values_that_are_not_finite_only_there_do_not_count():
    be_the_server()
    request = Message(
        RecordDict(
            {
                "arrays": record_of(normalising()),
                "config": ConfigRecord(
                    {"dp": "central", "dp-clipping-norm": NORM, "dp-noise-multiplier": 1.0}
                ),
            }
        ),
        dst_node_id=1,
        message_type=messages.TRAIN,
    )
    spoilt = record_of(normalising())
    spoilt["1.running_var"] = Array(np.full(6, np.nan, np.float32))
    reply = Message(RecordDict({"arrays": spoilt, "metrics": MetricRecord({})}), reply_to=request)
    private = privately(request, Context(1, 1, {}, RecordDict(), {}), reply)
    assert np.isfinite(private.content.array_records["arrays"]["1.running_var"].numpy()).all()


@pytest.mark.parametrize(
    ("dp", "kind", "options"),
    [
        ("central", FedAvg, {"dp": "central", "dp_clipping_norm": NORM}),
        ("local", FedAvg, {}),
        ("local", FedFix, {"fedfix_interval": 0.5}),
    ],
)
def test_the_global_model_keeps_the_initial_statistics(dp, kind, options):
    initial = record_of(normalising())
    arrays, _ = run(dp, kind, **options)
    assert bits(arrays) == bits(initial)
    assert arrays["0.weight"].data != initial["0.weight"].data
    free, _ = run("none", kind)
    assert bits(free) != bits(initial)


def test_a_line_at_the_start_names_them(caplog):
    with caplog.at_level(logging.WARNING, "flwr.fedapp"):
        say_what_stays(RunConfig.load({"dp": "local"}), names_of(normalising()).fixed)
        say_what_stays(RunConfig.load({"dp": "local"}), ())
    assert [r.getMessage() for r in caplog.records] == [
        "dp = 'local': arrays that aren't trained would tell of the data, and stay as the initial model has them: "
        "1.running_mean, 1.running_var, 1.num_batches_tracked"
    ]
