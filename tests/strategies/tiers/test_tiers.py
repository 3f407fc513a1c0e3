"""Regions as clients: the flat run's model, HierFAVG by its formula, and regions without rounds."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from strategies import AsyncFedAvg, FedAvg, FedProx, RunError, Scaffold, messages
from strategies.secure import masks_updates
from strategies.testing import MemoryGrid
from strategies.tiers.grid import TieredGrid, devices_of_regions
from strategies.tiers.relay import Relay
from strategies.tiers.times import RegionTimes

CENTRES, SIZES, CURVATURES = (
    (3.0, 2.0, -1.0, 0.5, 4.0, -2.0),
    (1, 2, 5, 3, 4, 1),
    (1.0, 0.5, 2.0, 1.5, 0.8, 1.2),
)
STEPS = ConfigRecord({"lr": 0.1, "local-steps": 2})


@pytest.fixture
def devices(federation):
    return federation(CENTRES, SIZES, CURVATURES, num_partitions=6)


def hierfavg(w, regions, kappa_1, kappa_2, rounds, weights=SIZES, lr=0.1):
    """HierFAVG (Liu et al. 2020, algorithm 1) on f_i(w) = a_i/2 (w − c_i)²: κ₁ steps, κ₂ edge aggregations."""
    weights = np.asarray(weights, float)
    for _ in range(rounds):
        of_regions = []
        for region in regions:
            w_r = w
            for _ in range(kappa_2):
                local = []
                for i in region:
                    w_i = w_r
                    for _ in range(kappa_1):
                        w_i = w_i - lr * CURVATURES[i] * (w_i - CENTRES[i])
                    local.append(w_i)
                w_r = np.average(local, weights=weights[list(region)])
            of_regions.append(w_r)
        w = np.average(of_regions, weights=[weights[list(region)].sum() for region in regions])
    return w


def test_the_devices_of_regions_are_consecutive_and_as_many_in_each() -> None:
    assert devices_of_regions(10, 4) == [range(3), range(3, 5), range(5, 8), range(8, 10)]
    with pytest.raises(ValueError, match="3 regions of 2 clients; allowed are 1 to 2"):
        devices_of_regions(2, 3)


@pytest.mark.parametrize("kind", ["samples", "uniform"])
@pytest.mark.parametrize(
    "method", [lambda **k: FedProx(proximal_mu=0.3, server_optimizer="adam", **k), lambda **k: FedAvg(**k)]
)
def test_one_edge_round_makes_the_flat_runs_model_and_metrics(
    federation, devices, model, method, kind
) -> None:
    flat_grid = federation(CENTRES, SIZES, CURVATURES, num_partitions=6)
    flat = method(client_weights=kind, describe=True).start(flat_grid, model(1.0, -2.0), 4, 5.0, STEPS)
    tiered = method(describe=True).start(
        TieredGrid(devices, 2, client_weights=kind), model(1.0, -2.0), 4, 5.0, STEPS
    )
    np.testing.assert_allclose(tiered.arrays["w"].numpy(), flat.arrays["w"].numpy(), rtol=1e-12)
    for kept in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for number, metrics in getattr(flat, kept).items():
            found = getattr(tiered, kept)[number]
            for name in {"train-loss", "loss"} & metrics.keys():
                assert found[name] == pytest.approx(metrics[name], rel=1e-12)
    assert tiered.train_metrics_clientapp[4]["participants"] == 2
    # Each device's tasks, and their random draws, are those of the flat run.
    fields = messages.CLIENT, messages.TASK, messages.SERVER_ROUND
    asked = {tuple(m.content["config"][f] for f in fields) for m in devices.requests()}
    assert asked == {(i, t, t) for i in range(6) for t in range(1, 5)}


def test_edge_rounds_are_hierfavg(devices, model) -> None:
    tiered = FedAvg(describe=True).start(TieredGrid(devices, 3, edge_rounds=3), model(1.0), 4, 5.0, STEPS)
    regions = [(0, 1), (2, 3), (4, 5)]
    expected = hierfavg(1.0, regions, 2, 3, 4)
    assert expected != pytest.approx(hierfavg(1.0, regions, 2, 1, 12), rel=1e-3)  # which another κ₂ is not
    assert tiered.arrays["w"].numpy()[0] == pytest.approx(expected, rel=1e-12)
    # Tasks are numbered on; the learning rate's round is that of the root.
    of_first = [m.content["config"] for m in devices.requests() if m.content["config"][messages.CLIENT] == 0]
    assert [c[messages.TASK] for c in of_first] == list(range(1, 13))
    assert [c[messages.SERVER_ROUND] for c in of_first] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_regions_that_the_root_draws_count_as_their_devices_would(federation, devices, model) -> None:
    flat_grid = federation(CENTRES, SIZES, CURVATURES, num_partitions=6)
    flat = FedAvg(describe=True, participation="fixed:0,1,4,5").start(flat_grid, model(), 3, 5.0, STEPS)
    drawn = FedAvg(describe=True, participation="fixed:0,2").start(
        TieredGrid(devices, 3), model(), 3, 5.0, STEPS
    )
    np.testing.assert_allclose(drawn.arrays["w"].numpy(), flat.arrays["w"].numpy(), rtol=1e-12)


def test_a_device_that_fails_is_missing_in_its_region_alone_and_a_region_without_devices_in_the_round(
    devices, model
) -> None:
    devices.lose(0, "unavailable")
    devices.lose(4, "unavailable")
    devices.lose(5, "unavailable")
    result = FedAvg(describe=True).start(TieredGrid(devices, 3), model(), 1, 5.0, STEPS)
    assert result.train_metrics_clientapp[1]["failures"] == 1
    # Region 0 is device 1 with the weight of both, 3 of 11; region 1 has 8.
    w_1 = hierfavg(1.0, [(1,)], 2, 1, 1)
    w_23 = hierfavg(1.0, [(2, 3)], 2, 1, 1)
    assert result.arrays["w"].numpy()[0] == pytest.approx((3 * w_1 + 8 * w_23) / 11, rel=1e-12)


def test_a_regions_task_takes_as_long_as_the_slowest_device_of_each_of_its_rounds() -> None:
    regions = devices_of_regions(6, 2)
    # F80: 0.2, 0.36, 0.52 and 0.68, 0.84, 1.
    fixed = RegionTimes("F80", regions, 2)
    assert fixed.means == pytest.approx([1.04, 2.0])
    assert fixed.task_times([0, 1], 3) == pytest.approx([1.04, 2.0])
    drawn = RegionTimes("exponential:F0", regions, 1, seed=1)
    # The mean of the largest of three exponential times of mean 1 is 1 + 1/2 + 1/3.
    assert drawn.means == pytest.approx([11 / 6] * 2, rel=0.2)
    assert drawn.task_time(0, 7) == max(drawn._devices.task_time(i, 7) for i in range(3))


def test_without_rounds_regions_answer_in_their_own_time(devices, model, tmp_path, federation) -> None:
    (tmp_path / "times.csv").write_text("client,seconds\n0,1.04\n1,2.0\n")
    regions = [(0, 1, 2), (3, 4, 5)]

    def region(message, context):
        """Answer for a region by the formula."""
        if message.metadata.message_type != messages.TRAIN:
            metrics = {"partition-id": context.node_config["partition-id"], "num-examples": 8}
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
        w = message.content["arrays"]["w"].numpy()[0]
        own = regions[context.node_config["partition-id"]]
        arrays = ArrayRecord({"w": Array(np.array([hierfavg(w, [own], 2, 2, 1)]))})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 8})}), reply_to=message
        )

    def run(grid, scenario):
        times = []
        options = {"time_scenario": scenario, "describe": True, "fraction_evaluate": 0.0}
        strategy = AsyncFedAvg(observer=lambda progress: times.append(progress.time), **options)
        return strategy.start(grid, model(), 5, 5.0, STEPS).arrays["w"].numpy(), times

    tiered, when = run(TieredGrid(devices, 2, edge_rounds=2), "F80")
    expected, _ = run(
        MemoryGrid(region, [{"partition-id": r} for r in range(2)]), f"trace:{tmp_path}/times.csv"
    )
    assert when == pytest.approx([0, 1.04, 2.0, 2.08, 3.12, 4.0])
    np.testing.assert_allclose(tiered, expected, rtol=1e-12)


@pytest.fixture
def some_devices(federation):
    """Make a grid of some of the six devices."""

    def make(some, **options):
        of = [[each[i] for i in some] for each in (CENTRES, SIZES, CURVATURES)]
        grid = federation(*of, **options)
        for node, i in zip(grid.nodes.values(), some, strict=True):
            node.context.node_config["partition-id"] = i
        return grid

    return make


def test_a_round_that_was_broken_off_in_a_region_counts_neither_then_nor_later(some_devices, model) -> None:
    grids = [some_devices(range(3)), some_devices(range(3, 6))]
    relays = [Relay(grid) for grid in grids]
    pull, is_broken = grids[1].pull_messages, []

    def break_off(*arguments, **options):
        if is_broken:
            raise KeyboardInterrupt
        return pull(*arguments, **options)

    grids[1].pull_messages = break_off  # once the devices have been sent their tasks

    def answer(message, context):
        region, config = context.node_config["partition-id"], message.content["config"]
        trains = message.metadata.message_type == messages.TRAIN
        is_broken[:] = [True] if trains and region == 1 and config[messages.SERVER_ROUND] == 2 else []
        try:
            return relays[region](message, context.node_config)
        except KeyboardInterrupt:
            return Message(Error(0, "broken off"), reply_to=message)

    root = MemoryGrid(answer, [{"partition-id": r, "num-partitions": 2} for r in range(2)])
    result = FedAvg(describe=True, fraction_evaluate=0.0).start(root, model(1.0), 3, 5.0, STEPS)
    w = hierfavg(1.0, [range(6)], 2, 1, 1)
    w = hierfavg(w, [range(3)], 2, 1, 1)
    w = hierfavg(w, [range(6)], 2, 1, 1)
    assert result.arrays["w"].numpy()[0] == pytest.approx(w, rel=1e-12)
    assert [metrics["participants"] for metrics in result.train_metrics_clientapp.values()] == [2, 1, 2]


def test_relays_that_answer_for_nodes_of_another_grid_make_the_flat_runs_model(some_devices, model) -> None:
    relays = [Relay(some_devices(range(3))), Relay(some_devices(range(3, 6)))]

    def answer(message, context):
        return relays[context.node_config["partition-id"]](message, context.node_config)

    root = MemoryGrid(answer, [{"partition-id": r, "num-partitions": 2} for r in range(2)])
    tiered = FedAvg(describe=True, server_optimizer="momentum").start(root, model(), 3, 5.0, STEPS)
    flat = FedAvg(describe=True, server_optimizer="momentum").start(
        some_devices(range(6)), model(), 3, 5.0, STEPS
    )
    np.testing.assert_allclose(tiered.arrays["w"].numpy(), flat.arrays["w"].numpy(), rtol=1e-12)
    assert [metrics["participants"] for metrics in tiered.train_metrics_clientapp.values()] == [2] * 3


@pytest.mark.parametrize("kind", ["samples", "uniform"])
def test_a_region_can_have_secure_sums_of_its_devices(some_devices, model, kind) -> None:
    grids = [some_devices(own, mods=(masks_updates,)) for own in (range(3), range(3, 6))]
    for grid in grids:  # the devices refuse whatever else they are asked to train
        for node in grid.nodes.values():
            node.context.node_config["require-secure-sums"] = 2
    relays = [Relay(grid, secure_sums=True, secure_clipping=20.0) for grid in grids]
    fields = ConfigRecord({**STEPS, messages.WEIGHTS: kind})
    tiered = FedAvg(describe=True, fraction_evaluate=0.0).start(around(relays), model(), 3, 5.0, fields)
    flat = FedAvg(describe=True, fraction_evaluate=0.0, client_weights=kind).start(
        some_devices(range(6)), model(), 3, 5.0, STEPS
    )
    np.testing.assert_allclose(tiered.arrays["w"].numpy(), flat.arrays["w"].numpy(), rtol=0, atol=1e-6)
    plain = [Relay(grid) for grid in grids]
    with pytest.raises(RunError, match="no client's work was accepted"):
        FedAvg(describe=True, fraction_evaluate=0.0).start(around(plain), model(), 1, 5.0, fields)


def around(relays):
    """Return a Grid whose nodes answer by relays."""

    def answer(message, context):
        return relays[context.node_config["partition-id"]](message, context.node_config)

    return MemoryGrid(
        answer, [{"partition-id": r, "num-partitions": len(relays)} for r in range(len(relays))]
    )


@pytest.mark.parametrize("kind", ["samples", "uniform"])
def test_a_tree_of_relays_makes_the_flat_runs_model(some_devices, model, kind) -> None:
    # The root's clients are two relays, of which the first has two relays of its own, and the second one.
    fields = ConfigRecord({**STEPS, messages.EDGE_ROUNDS: 1, messages.WEIGHTS: kind})
    small = [Relay(some_devices(own), min_clients=1) for own in (range(2), range(2, 3), range(3, 6))]
    tree = around(
        [Relay(around(small[:2]), of_relays=1), Relay(around(small[2:]), of_relays=1, min_clients=1)]
    )
    tiered = FedAvg(describe=True, server_optimizer="momentum").start(tree, model(), 3, 5.0, fields)
    flat = FedAvg(describe=True, server_optimizer="momentum", client_weights=kind).start(
        some_devices(range(6)), model(), 3, 5.0, STEPS
    )
    np.testing.assert_allclose(tiered.arrays["w"].numpy(), flat.arrays["w"].numpy(), rtol=1e-12)
    for number, metrics in flat.evaluate_metrics_clientapp.items():
        found = tiered.evaluate_metrics_clientapp[number]
        assert found["loss"] == pytest.approx(metrics["loss"], rel=1e-12)


def test_rounds_of_a_tree_of_relays_are_those_of_each_level(some_devices, model) -> None:
    # Two rounds in each of the root's regions, and three for each of them in the smaller ones.
    small = [Relay(some_devices(own), min_clients=1) for own in (range(2), range(2, 4), range(4, 6))]
    tree = around(
        [Relay(around(small[:2]), of_relays=3), Relay(around(small[2:]), of_relays=3, min_clients=1)]
    )
    fields = ConfigRecord({**STEPS, messages.EDGE_ROUNDS: 2})
    result = FedAvg(describe=True, fraction_evaluate=0.0).start(tree, model(1.0), 2, 5.0, fields)
    w = 1.0
    for _ in range(2):
        regions = []
        for own in ([(0, 1), (2, 3)], [(4, 5)]):
            w_r = w
            for _ in range(2):
                weights = [sum(SIZES[i] for i in each) for each in own]
                w_r = np.average([hierfavg(w_r, [each], 2, 3, 1) for each in own], weights=weights)
            regions.append(w_r)
        w = np.average(regions, weights=[sum(SIZES[:4]), sum(SIZES[4:])])
    assert result.arrays["w"].numpy()[0] == pytest.approx(w, rel=1e-12)
    asked = [m.content["config"] for m in small[0]._grid.requests()]
    assert [c[messages.TASK] for c in asked if c[messages.CLIENT] == 0] == list(range(1, 13))


def test_a_method_of_single_devices_is_refused_before_any_trains(devices, model) -> None:
    with pytest.raises(
        RunError, match=r"tiers: the method sends strategies.path, constant to single devices"
    ):
        Scaffold(describe=True).start(TieredGrid(devices, 2), model(), 1, 5.0, STEPS)
    assert not devices.requests()
