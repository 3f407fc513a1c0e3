"""The app on real SuperNodes: the bits of a simulation; and asynchronous, though one of them dies and comes back."""

import pytest
import safetensors.numpy

from fedapp.report.client_tables import by_evaluation
from tests.runs import count_of, lines_of, summary_of
from tests.waiting import wait_until


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.ci), "bf16"])
def test_deployed_supernodes_give_the_same_bits_as_a_simulation(devices, simulate, tmp_path, precision):
    # A simulation has no safeguards by default.
    config = {"num-server-rounds": 2, "precision": precision, "safeguards": "off"}
    place = {"results-dir": str(tmp_path), "run-name": "run"}
    devices.start_run(config | place, tmp_path / "log").wait(timeout=300)
    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    assert summary_of(tmp_path / "run")["engine"] == "deployment"
    other = simulate(config, federation="num-supernodes=3", engine="sequential")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == other.model
    assert len(safetensors.numpy.load_file(tmp_path / "run" / "model.safetensors")) == 4


# The last one: the SuperNode that comes back is a new one to the SuperLink.
@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.timeout(500)
def test_async_training_completes_although_a_supernode_is_killed_and_restarted(devices, tmp_path):
    # Data of very different sizes: devices of different real speeds.
    config = {
        "strategy": "async-fedavg",
        "server-lr": 0.3,
        "num-server-rounds": 14,
        "data-imbalance": 2.0,
        "class-imbalance": 0.5,
        "local-epochs": 20,
        "round-timeout": 40.0,
        "results-dir": str(tmp_path),
        "run-name": "run",
    }
    run = devices.start_run(config, tmp_path / "log")
    wait_until(lambda: count_of(tmp_path / "run") >= 4, "no progress")
    devices.processes[1].kill()
    devices.processes[1].wait(timeout=30)
    killed_at = count_of(tmp_path / "run")
    devices.start(1)
    run.wait(timeout=300)

    output = (tmp_path / "log").read_text()
    assert f"Run directory: {tmp_path / 'run'}" in output, output
    lines = lines_of(tmp_path / "run")
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert [line["aggregation"] for line in lines] == list(range(15))
    # Each arrival was counted once, and the weights used the observed task times.
    known = by_evaluation(tmp_path / "run")
    assert sum(known[14]["participation"]) == 14
    assert all(time > 0 for time in known[3]["task-time"])
    assert all(known[14]["task-time"][index] > 0 for index in (0, 2))  # the other may be away
    assert lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.2
    # The killed one is counted again before the end, or the run ended before the SuperLink knew that it had gone.
    before, after = (known[at]["participation"][1] for at in (killed_at - 1, 14))
    assert after > before or "also says partition-id = 1" in output, output
