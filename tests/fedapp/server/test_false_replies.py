"""What the app makes of a device's false reply, and of its own defaults without rounds on IID data."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.flower import messages
from tests.fedapp.server.conftest import NAMES, Devices
from tests.runs import lines_of, summary_of, vector_of
from tests.selection import only


class Spoiled(Devices):
    """Devices of which the first one sends what it trained as a function of a reply has changed it."""

    def __init__(self, spoil):
        super().__init__(NAMES)
        self.liar, self.spoil = min(self.contexts), spoil

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            if reply.metadata.src_node_id == self.liar and messages.ARRAYS in reply.content:
                self.spoil(reply.content)
            yield reply


def as_int8(content):
    shapes = {"1.weight": (10, 64), "1.bias": (10,)}
    content[messages.ARRAYS] = ArrayRecord({name: Array(np.ones(s, np.int8)) for name, s in shapes.items()})


def with_another_record(content):
    content["more"] = ArrayRecord({"more": Array(np.zeros(600_000, np.float32))})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(as_int8, "int8"), (with_another_record, "bytes")],
    ids=["int8 arrays for a float32 model", "a record that nobody asked for"],
)
def test_a_false_reply_is_left_out_and_said(go, spoil, said, caplog):
    honest = vector_of(go(run_name="honest", num_server_rounds=1))
    path = go(grid=Spoiled(spoil), num_server_rounds=1)
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(lines) == 1
    assert NAMES[0] in lines[0]
    assert said in lines[0]
    assert lines_of(path)[-1]["participants"] == len(NAMES) - 1
    assert not np.array_equal(vector_of(path), honest)
    assert np.isfinite(vector_of(path)).all()


@pytest.mark.parametrize("strategy", only(["fedfix", "fedbuff"], 1))
def test_defaults_without_rounds_are_steady_with_momentum_on_iid_data(simulated, strategy):
    path = simulated(strategy)
    assert "unstable" not in summary_of(path)
    assert summary_of(path)["accuracy"] > summary_of(simulated("fedavg"))["accuracy"] - 0.05


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return the folder of a run of a strategy with its defaults, on ten clients that divide the digits evenly."""
    from fedapp import server
    from fedapp.config import RunConfig
    from fedapp.engine.run import make_grid

    made = {}

    def run(strategy):
        if strategy not in made:
            given = {"strategy": strategy, "partitioner": "iid", "model": "mlp", "lr": 0.05, "momentum": 0.9}
            given |= {"time-scenario": "F80", "num-server-rounds": 0, "figures": False}
            given |= {"results-dir": str(tmp_path_factory.mktemp("results"))}
            experiment = server.prepare(RunConfig.load(given), 10)
            made[strategy] = server.run(make_grid("vectorized", 10), experiment).path
        return made[strategy]

    return run
