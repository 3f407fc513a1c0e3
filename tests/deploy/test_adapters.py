"""Adapters of a transformer by FedBuff on real processes: only the adapters are sent, and they learn."""

from pathlib import Path

import pytest

from custom import text
from fedapp.deploy.local import LocalDeployment
from tests.runs import arrays_of, lines_of, summary_of

TASKS, SECONDS = 6, 800.0
CONFIG = {
    "strategy": "fedbuff",
    "buffer-size": 2,
    "dataset": "custom.text:load",
    "model": "custom.text:with_adapters",
    "partitioner": "natural",
    "metrics": "accuracy,perplexity",
    "optimizer": "adamw",
    "lr": 0.01,
    "num-server-rounds": TASKS // 2,
    "clock": "wall",
    "min-clients": 2,
    "round-timeout": 200.0,
    "run-name": "run",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_devices_send_and_get_the_adapters_alone(
    tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> None:
    pytest.importorskip("peft", reason="peft isn't installed")  # and with it transformers
    folder = tmp_path_factory.mktemp("a")
    path, log = folder / "results" / "run", folder / "run.log"
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    with LocalDeployment(folder / "d", nodes) as deployment:
        deployment.start()
        with log.open("wb") as output:
            config = {**CONFIG, "results-dir": str(folder / "results")}
            process = deployment.start_run(repository, config, stdout=output, stderr=output)
        assert process.wait(SECONDS) == 0, log.read_text()
    summary, model = summary_of(path), arrays_of(path)
    assert (summary["status"], summary["engine"]) == ("finished", "deployment"), log.read_text()
    trained = sum(array.nbytes for name, array in model.items() if "lora_" in name)
    whole = sum(array.nbytes for array in model.values())
    assert (trained, whole > 14 * trained) == (4 * 8192, True)
    # FedBuff's server waits for no task that is under way when the run ends, and hands out one for each that is done.
    assert TASKS * trained <= summary["bytes-up"] <= 1.1 * (TASKS + 2) * trained
    assert TASKS * trained <= summary["bytes-down"] <= 1.1 * (TASKS + 4) * trained
    first, last = (lines_of(path)[place]["perplexity"] for place in (0, -1))
    assert last < first
    frozen = text.with_adapters().state_dict()
    assert set(model) <= set(frozen)
