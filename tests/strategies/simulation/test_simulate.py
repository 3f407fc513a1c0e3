"""A run in worker processes: the bits of a run in this process, contexts that are kept, clients that fail."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower

from strategies import FedAvg, FedBuff, RunError, simulate
from strategies.flower import messages
from strategies.flower.internals import CRASHED, MESSAGE_UNAVAILABLE, UNKNOWN, client_apps, lacks_handler
from strategies.simulation.grid import ProcessGrid, source_of
from strategies.simulation.pool import tasks_of
from strategies.testing import MemoryGrid
from tests.strategies.simulation import counting, plain
from tests.strategies.simulation.counting import model

CLIENTS = 5


def values(arrays: ArrayRecord) -> list[Any]:
    return [array.numpy() for array in arrays.values()]


def ran(code: str) -> Any:
    """Return what came of Python code in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)


def in_this_process(strategy: Any, rounds: int) -> Any:
    grid = MemoryGrid(
        counting.app,
        [{"partition-id": i, "num-partitions": CLIENTS} for i in range(CLIENTS)],
        range(1, CLIENTS + 1),
    )
    return strategy.start(grid, model(), rounds)


@pytest.mark.parametrize("kind", [FedAvg, pytest.param(FedBuff, marks=pytest.mark.thorough)])
def test_the_bits_are_those_of_a_run_in_this_process(kind):
    options = {"buffer_size": 2} if kind is FedBuff else {}
    result = simulate(counting.app, kind(**options), CLIENTS, model(), 4, workers=2)
    expected = in_this_process(kind(**options), 4)
    assert result is not None
    for ours, theirs in zip(values(result.arrays), values(expected.arrays), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert result.evaluate_metrics_clientapp[4] == expected.evaluate_metrics_clientapp[4]


@pytest.mark.parametrize(
    ("strategy", "least"), [(FedAvg(), 2), (FedBuff(buffer_size=1), 2), (FedAvg(min_train_nodes=3), 3)]
)
def test_fewer_clients_than_the_strategy_needs_are_refused_at_once(strategy, least):
    said = rf"^{least} clients are needed \(min_available_nodes, .*\), and the simulation has 1$"
    with pytest.raises(RunError, match=said):
        simulate(counting.app, strategy, 1, model(), 1, timeout=3.0)


class OwnApp(ClientApp):
    """Handles messages by itself, so that nobody knows which."""

    def __call__(self, message: Message, context: Context) -> Message:
        return plain.app(message, context)


NOBODY = (
    "clients: no answer to query.describe (the app has no handler of it, which may be left out): ordered by"
)


def test_an_app_without_the_handler_is_not_asked_to_describe_its_clients(caplog):
    caplog.set_level(logging.INFO, "flwr.strategies")
    for app, lacks in ((plain.app, True), (counting.app, False), (OwnApp(), False)):
        assert lacks_handler(app, messages.DESCRIBE) is lacks
    made = ClientApp()
    assert any(app is made for app in client_apps())
    asked: list[str] = []
    with ProcessGrid(plain.app, CLIENTS, workers=1) as grid:
        push = grid.push_messages

        def noted(sent: Iterable[Message]) -> Iterable[str]:
            sent = list(sent)
            asked.extend(each.metadata.message_type for each in sent)
            return push(sent)

        grid.push_messages = noted  # type: ignore[method-assign]
        result = FedAvg(fraction_evaluate=0.0).start(grid, model(), 1)
    assert asked == [messages.TRAIN] * CLIENTS
    nodes: list[Any] = [{"partition-id": i} for i in range(CLIENTS)]
    memory = MemoryGrid(plain.app, nodes, range(1, CLIENTS + 1))
    expected = FedAvg(fraction_evaluate=0.0).start(memory, model(), 1)
    assert not memory.requests(messages.DESCRIBE)
    for ours, theirs in zip(values(result.arrays), values(expected.arrays), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert caplog.text.count(f"{CLIENTS} {NOBODY}") == 1
    assert caplog.text.count("it wasn't asked; describe=True asks it") == 1


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_stock_app_on_ray_logs_no_exception():
    code = (
        "from flwr.app import Array, ArrayRecord\n"
        "from flwr.serverapp import ServerApp\n"
        "import numpy as np\n"
        "from tests.strategies.simulation.plain import app\n"
        "from strategies import FedAvg\n"
        "from strategies.flower.internals import simulate\n"
        "server = ServerApp()\n"
        "@server.main()\n"
        "def main(grid, context):\n"
        "    strategy = FedAvg(min_available_nodes=3, fraction_evaluate=0.0)\n"
        "    model = ArrayRecord({'w': Array(np.zeros(2, np.float32))})\n"
        "    print('w =', strategy.start(grid, model, 1).arrays['w'].numpy()[0])\n"
        "simulate(server, app, num_supernodes=3, backend_config={'client_resources': {'num_cpus': 1}})\n"
    )
    done = ran(code)
    said = done.stdout + done.stderr
    assert "w = 1.3333" in said, said[-3000:]  # (0 · 1 + 1 · 2 + 2 · 3) / 6
    assert f"3 {NOBODY}" in said
    assert "Traceback" not in said
    assert "No query function registered" not in said


def test_contexts_are_kept_and_configs_given():
    """Round r is each client's r-th task, whichever process does it; Flower's own strategy runs as well as ours."""
    result = simulate(
        counting.app,
        flower.FedAvg(),
        CLIENTS,
        model(),
        3,
        run_config={"factor": 7},
        node_config=lambda index: {"floor": index},
        workers=2,
    )
    assert result is not None
    assert [round(metrics["tasks"]) for metrics in result.train_metrics_clientapp.values()] == [1, 2, 3]
    told = result.evaluate_metrics_clientapp[1]
    assert told["factor"] == pytest.approx(7)
    assert told["floor"] == pytest.approx(2)  # the mean of 0 to 4
    # Σ (1 + i) / (3 + i) / 15 a round
    step = sum((1 + i) / (3 + i) for i in range(CLIENTS)) / 15
    np.testing.assert_allclose(result.arrays["w"].numpy(), 3 * step, rtol=1e-6)


def test_a_server_app_is_called_with_a_grid_and_its_run_config():
    server_app, found = ServerApp(), []

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        request = Message(
            RecordDict({"arrays": model(), "config": ConfigRecord({})}),
            dst_node_id=2,
            message_type=messages.EVALUATE,
        )
        replies = list(grid.send_and_receive([request]))
        found.append((list(grid.get_node_ids()), context.run_config, replies[0].content["metrics"]["factor"]))

    assert simulate(counting.app, server_app, 2, run_config={"factor": 3}, workers=1) is None
    assert found == [([1, 2], {"factor": 3}, 3)]


@pytest.fixture(scope="module")
def grid():
    """A grid of five clients in two processes."""
    with ProcessGrid(counting.app, CLIENTS, workers=2) as made:
        yield made


def requests(ttl: float = 3600.0, **config: Any) -> list[Message]:
    config = {"server-round": 1, **config}
    return [
        Message(
            RecordDict({"arrays": model(), "config": ConfigRecord(config)}),
            dst_node_id=node_id,
            message_type=messages.TRAIN,
            ttl=ttl,
        )
        for node_id in range(1, CLIENTS + 1)
    ]


def test_replies_come_in_the_order_of_the_messages(grid):
    asked = requests()[::-1]
    replies = list(grid.send_and_receive(asked))
    assert [reply.metadata.src_node_id for reply in replies] == [5, 4, 3, 2, 1]
    pids = {reply.content["metrics"]["pid"] for reply in replies}
    assert pids <= set(grid.pool.pids)
    assert os.getpid() not in pids


def test_a_client_that_crashes_is_missing_and_others_are_not(grid):
    before = grid.context(3).state["count"]["tasks"]
    replies = list(grid.send_and_receive(requests(crash=2)))
    assert [reply.has_error() for reply in replies] == [False, False, True, False, False]
    assert replies[2].error.code == CRASHED
    assert "exit code -9" in replies[2].error.reason
    ended = list(grid.send_and_receive(requests(exit=2)))
    assert [reply.has_error() for reply in ended] == [False, False, True, False, False]
    assert "exit code 3" in ended[2].error.reason
    again = list(grid.send_and_receive(requests()))
    assert not any(reply.has_error() for reply in again)
    assert again[2].content["metrics"]["tasks"] == before + 1  # its state is that of its last reply


def test_an_exception_is_an_error_reply_and_its_traceback_is_logged_once(grid, caplog):
    with caplog.at_level(logging.ERROR, "flwr.strategies"):
        replies = [reply for _ in range(2) for reply in grid.send_and_receive(requests(**{"raise": 1}))]
    failed = [reply for reply in replies if reply.has_error()]
    assert [(reply.metadata.src_node_id, reply.error.code) for reply in failed] == [(2, UNKNOWN)] * 2
    assert failed[0].error.reason == "<class 'RuntimeError'>:<'client 1 has no data'>"
    assert caplog.text.count("RuntimeError: client 1 has no data") == 1
    assert 'counting.py", line' in caplog.text


def test_a_client_that_never_ends_is_ended_when_its_message_is_out_of_time(grid):
    replies = list(grid.send_and_receive(requests(hang=4, ttl=1.0)[4:]))
    assert [reply.error.code for reply in replies] == [MESSAGE_UNAVAILABLE]
    assert not any(reply.has_error() for reply in grid.send_and_receive(requests()))


def test_what_messages_share_is_written_once():
    shared, own = model(), [model() for _ in range(3)]
    asked = [
        Message(
            RecordDict({"own": own[i], "arrays": shared, "config": ConfigRecord({"i": i})}),
            dst_node_id=i + 1,
            message_type=messages.TRAIN,
        )
        for i in range(3)
    ]
    tasks = list(tasks_of(asked))
    assert tasks[0].shared is not None
    assert all(one.shared is other.shared for one, other in pairwise(tasks))
    assert len(asked[0].content["arrays"]) == 2  # the caller's messages stay as they are


def test_an_app_of_a_function_goes_by_cloudpickle_and_without_it_there_is_one_line(monkeypatch):
    own, seen = ClientApp(), {"factor": 3}

    @own.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1, "factor": seen["factor"]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    assert source_of(counting.app) == ("tests.strategies.simulation.counting", "app")
    (request,) = requests()[:1]
    request.metadata.message_type = messages.EVALUATE
    with ProcessGrid(own, 1) as grid:
        (reply,) = grid.send_and_receive([request])
    assert reply.content["metrics"]["factor"] == 3
    for package in ("cloudpickle", "ray.cloudpickle"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=r"write it into a module of its own, or install cloudpickle"):
        simulate(own, FedAvg(), 1, model())


def test_bad_calls_are_refused_before_a_process_starts():
    with pytest.raises(TypeError, match="needs initial_arrays"):
        simulate(counting.app, FedAvg(), 2)
    with pytest.raises(TypeError, match="a ServerApp has its own"):
        simulate(counting.app, ServerApp(), 2, model())
    with pytest.raises(ValueError, match="num_clients = 0: must be 1 or more"):
        simulate(counting.app, FedAvg(), 0, model())
    with pytest.raises(ValueError, match="workers = -1: must be 0 or more"):
        simulate(counting.app, FedAvg(), 2, model(), workers=-1)


def test_an_app_that_cannot_be_loaded_is_an_error_with_its_traceback(monkeypatch):
    monkeypatch.setattr("strategies.simulation.grid.source_of", lambda app: ("no_such_module", "app"))
    with pytest.raises(RunError, match="No module named 'no_such_module'"):
        simulate(counting.app, FedAvg(), 2, model(), workers=1)


HANGING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from strategies import FedAvg, simulate
from flwr.app import ConfigRecord
from tests.strategies.simulation.counting import app, model
import strategies.simulation.pool as pool
start = pool._Worker.start.__func__
def started(kind, *arguments):
    worker = start(kind, *arguments)
    print(worker.process.pid, flush=True)
    return worker
pool._Worker.start = classmethod(started)
def progress(answered, pushed):
    print("one has answered", flush=True)
import strategies.simulation.run as run
run._show = progress
hang = ConfigRecord({"hang": 3})
simulate(app, FedAvg(fraction_evaluate=0.0), 4, model(), 1, train_config=hang, workers=2, progress=True)
"""


def test_ctrl_c_ends_the_run_and_its_processes():
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    pids = [int(next(lines)) for _ in range(2)]
    assert next(lines) == "one has answered\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)
    assert said.rstrip().endswith("KeyboardInterrupt")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.thorough
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_bits_are_those_of_flowers_simulation_on_ray():
    """In a process of its own: Ray leaves threads behind."""
    code = (
        "from tests.strategies.simulation.counting import app, model\n"
        "from flwr.serverapp import ServerApp\n"
        "from strategies import FedAvg, simulate\n"
        "from strategies.flower.internals import simulate as on_ray\n"
        "server, found = ServerApp(), []\n"
        "@server.main()\n"
        "def main(grid, context):\n"
        "    found.append(FedAvg(min_available_nodes=5).start(grid, model(), 4))\n"
        "on_ray(server, app, num_supernodes=5, backend_config={'client_resources': {'num_cpus': 1}})\n"
        "found.append(simulate(app, FedAvg(), 5, model(), 4))\n"
        "for name in found[0].arrays:\n"
        "    assert found[0].arrays[name].data == found[1].arrays[name].data\n"
        "assert found[0].train_metrics_clientapp[4]['tasks'] == 4\n"
        "print('equal')\n"
    )
    done = ran(code)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
