"""A SuperNode that answers for a region: the region's run, in a process of its own, is on a socket."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fedapp import client_app
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import prepare
from fedapp.server.experiment import task_config
from fedapp.server.tiers import fields_for_relays
from strategies import FedAvg, RunError
from strategies.testing import MemoryGrid
from tests.fedapp.worker.conftest import RunningWorker

SCRIPT = str(Path(__file__).parent / "region.py")


@pytest.fixture
def root(tmp_path):
    """Two relays to three devices each."""
    with ExitStack() as stack:
        running = []
        for region in range(2):
            (folder := tmp_path / str(region)).mkdir()
            running.append(RunningWorker(folder, SCRIPT, str(region)))
            stack.callback(running[-1].end)
        configs = [
            {"partition-id": region, "num-partitions": 2, "relay": str(running[region].wait().path)}
            for region in range(2)
        ]
        grid = MemoryGrid(client_app.app, configs)
        grid.running, grid.folder, grid.stack = running, tmp_path, stack
        yield grid


def test_two_regions_of_three_devices_make_the_model_of_six(root, configure, caplog) -> None:
    values = {"model": "logistic", "lr_schedule": "cosine", "num_server_rounds": 3}
    experiment = prepare(configure(**values), 6)

    def trained(grid, weights="samples", rounds=3, min_clients=2, **fields):
        options = {"fraction_evaluate": 0.0, "client_weights": weights, "min_clients": min_clients}
        strategy = FedAvg(describe=True, **options)
        config = task_config(experiment)
        config.update(fields)
        result = strategy.start(grid, experiment.initial_arrays(), rounds, 60.0, config)
        return np.concatenate([array.numpy().ravel() for array in result.arrays.values()]), result

    for weights in ("samples", "uniform"):  # of the region's devices, as the root says
        asked = fields_for_relays(configure(tiers="relays", client_weights=weights))
        flat, _ = trained(SequentialGrid(client_app.app, 6), weights)
        np.testing.assert_allclose(trained(root, **asked)[0], flat, rtol=0, atol=1e-6)
    # With secure sums in the regions; a device that requires them takes part.
    with ExitStack() as stack:
        masked = []
        for region in range(2):
            (folder := root.folder / f"masked-{region}").mkdir()
            keys = '{"secure-sums": true, "secure-clipping": 10.0}'
            masked.append(RunningWorker(folder, SCRIPT, str(region), KEYS=keys))
            stack.callback(masked[-1].end)
        places = [
            {"partition-id": place, "num-partitions": 2, "relay": str(each.wait().path)}
            for place, each in enumerate(masked)
        ]
        found = trained(MemoryGrid(client_app.app, places), **asked)[0]
        np.testing.assert_allclose(found, flat, rtol=0, atol=1e-4)
        assert not np.array_equal(found, trained(root, **asked)[0])  # rounded to a secure sum's levels
    # The same below one more relay, whose clients are the two; the root waits for one client.
    (folder := root.folder / "above").mkdir()
    above = RunningWorker(folder, SCRIPT, *(str(each.path) for each in root.running))
    root.stack.callback(above.end)
    tree = MemoryGrid(
        client_app.app, [{"partition-id": 0, "num-partitions": 1, "relay": str(above.wait().path)}]
    )
    np.testing.assert_allclose(trained(tree, min_clients=1, **asked)[0], flat, rtol=0, atol=1e-6)
    # A run that doesn't know of relays is refused, as is a run for relays by clients that are none.
    devices = MemoryGrid(client_app.app, [{"partition-id": i, "num-partitions": 2} for i in range(2)])
    for grid, fields, reason in (
        (root, {}, "this client is a relay, which answers for a region; allowed is tiers = relays"),
        (devices, asked, "this client is a device and no relay"),
    ):
        with pytest.raises(RunError, match="no client can take part"):
            trained(grid, **fields)
        assert reason in caplog.text
    # A region whose run is killed is missing in its round, and its SuperNode doesn't train in its place.
    root.running[1].process.kill()
    root.running[1].process.wait()
    alone, result = trained(root, rounds=1, **asked)
    assert result.train_metrics_clientapp[1]["participants"] == 1
    assert np.isfinite(alone).all()
