"""Secure sums in the app: the model of a plain run, an engine that can, and what is refused before a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapp.config import ConfigError, RunConfig
from fedapp.config.options import SimulationConfig
from fedapp.engine.run import chosen_engine, run_on
from tests.runs import close, lines_of

CLIENTS = 6
BUFFERS = {"strategy": "fedbuff", "buffer_size": 4, "num_server_rounds": 6}


@pytest.fixture
def go(tmp_path: Path, configure: Callable[..., RunConfig]) -> Callable[..., Path]:
    """Run the app on an engine of this process; return the run's folder."""

    def make(engine: str = "sequential", **values: Any) -> Path:
        known = {"dataset": "synthetic", "model": "logistic", "num_server_rounds": 3, "strategy": "fedavg"}
        config = configure(**{"results_dir": str(tmp_path), **known, **values})
        simulation = SimulationConfig.read({"num-supernodes": CLIENTS})
        return run_on(engine, config, simulation).path

    return make


@pytest.mark.parametrize(
    "values",
    [{}, *({"strategy": name} for name in ("ditto", "fednova")), {"server_optimizer": "adam"}, BUFFERS],
)
def test_the_model_is_that_of_a_plain_run(go: Callable[..., Path], values: dict[str, Any]) -> None:
    plain, secure = go(**values), go("auto", secure_sums=True, **values)
    assert close(secure, plain)
    before, found = (lines_of(run)[-1] for run in (plain, secure))
    assert found["loss"] == pytest.approx(before["loss"], rel=1e-4)
    if values is not BUFFERS:
        assert (found["participants"], found["clipped-updates"]) == (CLIENTS, 0)
    assert found["train-loss"] == pytest.approx(before["train-loss"], rel=1e-5)
    assert found["bytes-up"] > before["bytes-up"]


def test_an_engine_is_chosen_whose_clients_mask() -> None:
    assert chosen_engine("auto", SimulationConfig.read({}), secure_sums=True)[0] in ("sequential", "ray")
    with pytest.raises(ConfigError, match="engine = 'vectorized': its clients train together"):
        chosen_engine("vectorized", secure_sums=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "fedfix"}, "secure-sums = true with strategy = 'fedfix': "),
        ({"strategy": "scaffold"}, "secure-sums = true with strategy = 'scaffold': "),
        ({"record_divergence": True}, "secure-sums = true with record-divergence = true: "),
        ({"secure_threshold": 7}, "secure-threshold = 7: each of 6 clients in a sum has 5 neighbours"),
    ],
)
def test_what_cant_be_leaves_no_folder(
    go: Callable[..., Path], tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        go(secure_sums=True, **values)
    assert not list(tmp_path.iterdir())
