"""What the README shows works as it stands there."""

import re
import sys
import types

from fedapp import client_app, server
from fedapp.config import RunConfig, defaults
from fedapp.engine.sequential import SequentialGrid
from strategies import REGISTRY


def test_the_scheme_of_ones_own_is_a_strategy_of_the_app(repository, tmp_path, monkeypatch):
    code = re.search(r"```python\n(from dataclasses.*?)```", (repository / "README.md").read_text(), re.S)
    names: dict = {"__name__": "readme"}
    monkeypatch.setitem(sys.modules, "readme", types.ModuleType("readme"))
    exec(code[1], names)
    monkeypatch.setitem(REGISTRY, "mine", names["HalfLife"])

    def run(name: str, strategy: str) -> bytes:
        config = {
            "strategy": strategy,
            "half-life": 2.0,
            "num-server-rounds": 6,
            "results-dir": str(tmp_path),
            "run-name": name,
        }
        experiment = server.prepare(RunConfig.load(config), 4)
        path = server.run(SequentialGrid(client_app.app, 4), experiment).path
        return (path / "model.safetensors").read_bytes()

    assert run("mine", "mine") == run("custom", "custom.half_life:HalfLife")


def test_every_key_and_strategy_named_in_the_readme_exists(repository):
    readme = (repository / "README.md").read_text()
    shown = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", readme)) | set(
        re.findall(r"([a-z]+(?:-[a-z]+)+)=", readme)
    )
    known = set(defaults()) | set(REGISTRY) | {"half-life"}
    federation = {"num-supernodes", "client-resources-num-gpus", "client-resources-num-cpus"}
    node = {"partition-id", "num-partitions"}
    values = {"label-quantity-skew", "held-out", "unseen-clients", "femnist-digits"}
    assert shown <= known | federation | node | values
