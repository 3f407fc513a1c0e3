"""Devices addressed by tag and by name: a run has them as its clients and no others, with rounds and without."""

from typing import Any

import numpy as np
import pytest

from strategies import AsyncFedAvg, FedAvg
from strategies.clients.attendance import in_vain
from strategies.clients.registered import NodeRecord, addressed_nodes
from strategies.core.conflicts import ConflictError
from strategies.flower.errors import RunError
from strategies.flower.grids import RAY
from tests.strategies.clients.test_claims import devices

__all__ = ["devices"]  # a fixture

RECORD = "oslo:10:0+hospital, bern:20:1+hospital+gpu, lima:30:2+gpu"


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
@pytest.mark.parametrize("participation", ["tag:hospital", "name:bern,oslo"])
def test_a_run_is_as_if_there_were_no_other_devices(
    kind, participation, devices, add_node, model, train_config
):
    def run(addressed: str, away: int | None) -> tuple[Any, Any]:
        grid = devices(node_ids=[10, 20, 30], num_partitions=3)
        if away is not None:
            grid.nodes[away].present = False
        strategy = kind(
            fraction_evaluate=0.0, registered_nodes=RECORD, participation=addressed, min_clients=2
        )
        strategy.start(grid, model(1.0), num_rounds=3, timeout=5.0, train_config=train_config(2, 0.1))
        return strategy, grid

    some, _ = run(participation, None)
    alone, _ = run("full", 30)
    if kind is FedAvg:  # whose result doesn't depend on the time that a device takes
        np.testing.assert_array_equal(some.session.model, alone.session.model)
        everybody, _ = run("full", None)
        assert not np.array_equal(some.session.model, everybody.session.model)
    # Nobody else was asked, and nobody else is missed at the end.
    assert {client.index for client in some.session.clients} == {0, 1}
    assert dict(some.session.client_stats.items()).keys() == {0, 1}
    assert "node 30 (lima)" not in [
        who for who, _ in in_vain(some.session.population.roster, some.session.client_stats)
    ]
    assert "node 30 (lima)" in [
        who for who, _ in in_vain(alone.session.population.roster, alone.session.client_stats)
    ]


@pytest.mark.parametrize(
    ("participation", "nodes"),
    [
        ("full", None),
        ("fixed:0", None),
        ("tag:gpu", {20, 30}),
        ("tag:gpu,hospital", {10, 20, 30}),
        ("name:lima", {30}),
    ],
)
def test_of_several_tags_a_device_has_at_least_one(participation, nodes):
    assert addressed_nodes(participation, NodeRecord(RECORD), 1) == nodes


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
@pytest.mark.parametrize(
    ("participation", "record", "text"),
    [
        ("tag:hospitl", RECORD, "no registered device has the tag 'hospitl'; allowed are gpu, hospital"),
        ("tag:", RECORD, "no registered device has the tag ''; allowed are gpu, hospital"),
        ("name:rome", RECORD, "no registered device has the name 'rome'; allowed are bern, lima, oslo"),
        (
            "tag:gpu",
            "oslo:10",
            "no registered device has the tag 'gpu'; allowed are none, as no device has a tag",
        ),
    ],
)
def test_an_unknown_tag_or_name_is_one_line(kind, participation, record, text):
    with pytest.raises(ValueError, match=rf"^participation = '{participation}': {text}$"):
        kind(participation=participation, registered_nodes=record)


def test_a_run_does_not_wait_for_more_devices_than_it_addresses():
    with pytest.raises(
        ValueError, match=r"^min_clients = 2: participation = 'name:oslo' addresses 1 registered"
    ):
        FedAvg(participation="name:oslo", registered_nodes=RECORD)
    with pytest.raises(ConflictError) as raised:
        FedAvg(participation="tag:gpu", registered_nodes=RECORD, fraction_train=0.5)
    assert raised.value.keys == ("fraction_train", "participation", "strategy")


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_in_a_simulation_no_device_is_registered(kind, devices, model):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    grid.engine = RAY
    with pytest.raises(
        RunError, match=r"participation = 'tag:gpu': addresses registered devices, and a simulation"
    ):
        kind(participation="tag:gpu", registered_nodes=RECORD).start(
            grid, model(1.0), num_rounds=1, timeout=5.0
        )
