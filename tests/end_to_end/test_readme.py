"""What the README shows works as it stands there."""

import json
import re

import pytest

from fedapp import client_app, server_app
from fedapp.config import RunConfig, defaults
from fedapp.engine.sequential import SequentialGrid
from strategies import REGISTRY


def test_the_scheme_of_ones_own_is_a_strategy_of_the_app(repository, tmp_path, monkeypatch):
    code = re.search(r"```python\n(import numpy.*?)```", (repository / "README.md").read_text(), re.S)
    names: dict = {}
    exec(code[1], names)
    monkeypatch.setitem(REGISTRY, "mine", names["TwiceASecond"])

    def run(name: str, strategy: str) -> bytes:
        config = {
            "strategy": strategy,
            "num-server-rounds": 6,
            "results-dir": str(tmp_path),
            "run-name": name,
        }
        experiment = server_app.prepare(RunConfig.load(config), 4)
        path = server_app.run(SequentialGrid(client_app.app, 4), experiment).path
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert metrics[-1]["weights-distance"] == pytest.approx(0, abs=1e-12)
        return (path / "model.safetensors").read_bytes()

    # With F80 and Δt = 0.5 no τ_i / Δt is a whole number by rounding: it is FedFix.
    assert run("mine", "mine") == run("fedfix", "fedfix")


def test_every_key_and_strategy_named_in_the_readme_exists(repository):
    readme = (repository / "README.md").read_text()
    shown = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", readme)) | set(
        re.findall(r"([a-z]+(?:-[a-z]+)+)=", readme)
    )
    known = set(defaults()) | set(REGISTRY)
    federation = {"num-supernodes", "client-resources-num-gpus", "client-resources-num-cpus"}
    node = {"partition-id", "num-partitions"}
    values = {"label-quantity-skew", "held-out", "unseen-clients", "femnist-digits"}
    assert shown <= known | federation | node | values
