"""Many clients at once under vmap: tokens, pixels, several inputs and outputs come out as in the readable engine."""

from typing import Any

import pytest

from custom import pictures, text
from fedapp import client_app, server
from fedapp.api.values import load_config
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.training import autograd, trainer
from tests import own_models
from tests.runs import close

CLIENTS = 12
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"dataset": own_models.texts, "model": own_models.NextToken, "loss": own_models.per_token},
    "pixels": {"dataset": pictures.load, "model": pictures.UNet},
    "several": {
        "dataset": own_models.baskets,
        "model": own_models.TwoHeads,
        "loss": own_models.of_heads,
        "metrics": own_models.hits,
    },
    "adapters": {"dataset": text.load, "model": text.with_adapters},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_under_vmap_as_one_by_one(kind, tmp_path, monkeypatch):
    if kind == "adapters":
        pytest.importorskip("peft", reason="peft isn't installed")
        pytest.importorskip("transformers", reason="transformers isn't installed")
    together: list[int] = []

    def counted(tasks: Any) -> Any:
        together.append(len(tasks))
        return autograd.train_vmapped(tasks)

    monkeypatch.setitem(trainer._TOGETHER, "vmapped", counted)
    given = {
        "num_server_rounds": 1,
        "results_dir": str(tmp_path),
        "lr": 0.05,
        "partitioner": "iid",
        "batch_size": 5,
    }
    paths = []
    for name, grid in (
        ("one", SequentialGrid(client_app.app, CLIENTS)),
        (
            "all",
            VectorizedGrid(
                client_app.app, CLIENTS, trainer.Trainer(None if kind == "adapters" else "vmapped", 1)
            ),
        ),
    ):
        config = load_config({**KINDS[kind], **given, "run_name": name})
        paths.append(server.run(grid, server.prepare(config, CLIENTS)).path)
    assert close(*paths)
    assert max(together) > 1
