"""Flower's attributes and positional arguments: subclasses and apps that read or set them work as with Flower's."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from strategies import FedAvg, FedBuff, FedProx, RunError, SynchronousConfig
from strategies.core.config import FLOWERS_ORDER
from strategies.testing import MemoryGrid
from tests.strategies.flower.test_stock_app import grid, model, stock

SET: dict[str, Any] = {
    "fraction_train": 0.5,
    "fraction_evaluate": 0.5,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 3,
    "weighted_by_key": "steps",
    "arrayrecord_key": "model",
    "configrecord_key": "settings",
}


def test_the_attributes_are_those_of_flowers_fedavg_with_its_values():
    theirs = set(vars(flower.FedAvg()))
    assert theirs == set(FLOWERS_ORDER)
    ours, stock = FedAvg(), flower.FedAvg()
    assert {name: getattr(ours, name) for name in FLOWERS_ORDER} == vars(stock)
    ours, stock = FedAvg(0.5, 0.25, 3, 4), flower.FedAvg(0.5, 0.25, 3, 4)
    shared = set(FLOWERS_ORDER) - {"min_available_nodes"}  # as in Flower, a round waits for four all the same
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(stock, name) for name in shared}
    assert FedProx(1.0, 1.0, 2, 2, 2, "n", "a", "c", None, None, 0.3).config.proximal_mu == 0.3


@pytest.mark.parametrize(("name", "value"), SET.items())
def test_an_attribute_that_is_set_does_what_the_keyword_does(name, value):
    set_later, given = FedAvg(seed=3), FedAvg(seed=3, **{name: value})
    setattr(set_later, name, value)
    assert getattr(set_later, name) == getattr(given, name) == value
    grids = [grid(), grid()]
    for strategy, each in zip((set_later, given), grids, strict=True):
        with suppress(RunError):  # these clients read a record ``config``
            strategy.start(each, model(), 2)
    assert set_later.session.model.tobytes() == given.session.model.tobytes()
    assert [sorted(m.content) for m in grids[0].sent] == [sorted(m.content) for m in grids[1].sent]
    assert [m.metadata.dst_node_id for m in grids[0].sent] == [m.metadata.dst_node_id for m in grids[1].sent]


def test_functions_can_be_read_called_and_set():
    strategy = FedAvg()
    content = [RecordDict({"metrics": MetricRecord({"num-examples": n, "loss": float(n)})}) for n in (1, 3)]
    assert strategy.train_metrics_aggr_fn(content, strategy.weighted_by_key)["loss"] == 2.5  # (1 + 9) / 4
    strategy.evaluate_metrics_aggr_fn = lambda contents, key: MetricRecord({"number": len(contents)})
    result = strategy.start(grid(), model(), 1)
    assert result.evaluate_metrics_clientapp[1] == {"number": 3}
    assert "participants" in result.train_metrics_clientapp[1]
    strategy.evaluate_metrics_aggr_fn = strategy.train_metrics_aggr_fn  # Flower's own: as if none was given
    assert strategy.session.run.flower.evaluate_metrics_aggr_fn is None


def test_a_wrong_value_is_refused_as_the_keywords_is():
    strategy = FedAvg()
    with pytest.raises(ValueError, match=r"fraction_train = 2\.0: must be"):
        strategy.fraction_train = 2.0
    with pytest.raises(TypeError, match=r"FedAvg\(weighted_by_key = 3\): must be of type str"):
        strategy.weighted_by_key = 3
    assert strategy.fraction_train == 1.0


class Halving(FedAvg):
    """As Flower's users write them: reads and sets attributes, and makes its own messages."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = sorted(grid.get_node_ids())[: max(1, int(3 * self.fraction_train))]
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, nodes, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        contents = [message.content for message in valid]
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        self.fraction_train = self.fraction_train / 2
        largest = max(contents, key=lambda content: content.metric_records["metrics"]["num-examples"])
        return largest.array_records["arrays"], metrics


class StockHalving(flower.FedAvg):
    """The same on Flower's."""

    configure_train = Halving.configure_train
    aggregate_train = Halving.aggregate_train


def test_a_subclass_that_uses_flowers_helpers_gives_flowers_result():
    grids = [MemoryGrid(stock(), [{"partition-id": i} for i in range(3)], (5, 6, 7)) for _ in range(2)]
    ours = Halving().start(grids[0], model(), 3)
    theirs = StockHalving().start(grids[1], model(), 3)
    assert grids[0].asked() == grids[1].asked() == [0, 1, 2, 0, 0]
    assert sorted(grids[0].asked("evaluate")) == sorted(grids[1].asked("evaluate"))
    assert ours.arrays["w"].data == theirs.arrays["w"].data


def test_helpers_that_would_never_be_called_are_no_methods_to_override():
    with pytest.raises(TypeError, match=r"Own\._construct_messages would never be called"):

        class Own(FedAvg):
            def _construct_messages(self, *arguments: Any) -> Any: ...


def test_numbers_of_numpy_are_numbers():
    strategy = FedAvg(
        np.float32(0.5), min_train_nodes=np.int64(2), seed=np.int32(7), drop_stragglers=np.bool_(0)
    )
    assert (strategy.fraction_train, strategy.min_train_nodes, strategy.config.seed) == (0.5, 2, 7)
    assert type(strategy.config.seed) is int
    assert type(SynchronousConfig(seed=np.int64(3)).seed) is int  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"min_train_nodes = 2\.0\): must be of type int"):
        FedAvg(min_train_nodes=np.float64(2))


def test_positional_arguments_of_others_are_refused():
    with pytest.raises(TypeError, match=r"FedAvg\(\) was given fraction_train twice"):
        FedAvg(0.5, fraction_train=0.5)
    with pytest.raises(
        TypeError, match=r"FedBuff\(\) was given 1 positional arguments: allowed are keywords"
    ):
        FedBuff(0.5)
    with pytest.raises(TypeError, match=r"was given 11 positional arguments: allowed are fraction_train, "):
        FedAvg(*[1.0] * 11)


def test_a_share_of_the_clients_works_at_once_without_rounds(caplog):
    """⌊0.7 · 3⌋ = 2 clients."""
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        by_share = FedBuff(fraction_train=0.7, buffer_size=2).start(grid(), model(), 5)
    by_number = FedBuff(concurrency=2, buffer_size=2).start(grid(), model(), 5)
    assert by_share.arrays["w"].data == by_number.arrays["w"].data
    assert caplog.text.count("fraction_train = 0.7: 2 of 3 clients work at once") == 1
