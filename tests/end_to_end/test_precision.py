"""Training in bfloat16 in the whole app: the same bits on every engine, float32 on the wire and in evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedapp.config import ConfigError, RunConfig
from fedapp.own import OwnPartError, register
from tests.runs import arrays_of, same_files, summary_of

Go = Callable[..., Path]
CONFIG = {"precision": "bf16", "model": "mlp", "num-server-rounds": 3, "batch-size": 32, "figures": False}


OWN_ROWS = {"fine-tune-epochs": 1, "test-on": "own"}


@pytest.mark.parametrize("keys", [{}, {"strategy": "fedbuff", "buffer-size": 2}, OWN_ROWS])
def test_in_one_process_the_engines_give_the_same_bits(run_app: Go, keys: dict[str, Any]) -> None:
    one, other = (run_app(CONFIG | keys, engine=name, name=name) for name in ("sequential", "vectorized"))
    assert same_files(one, other)
    assert {array.dtype for array in arrays_of(one).values()} == {np.dtype("float32")}
    plain = run_app(CONFIG | keys | {"precision": "fp32"}, name="plain")
    found, expected = (summary_of(path) for path in (one, plain))
    assert found["bytes-up"] == expected["bytes-up"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)
    assert not same_files(one, plain, "model.safetensors")


@pytest.mark.ci
@pytest.mark.thorough
def test_ray_gives_the_same_bits(simulate: Callable[..., Any]) -> None:
    ray, sequential = (simulate(CONFIG, engine=engine) for engine in ("ray", "sequential"))
    assert ray.returncode == 0, ray.output
    assert ray.model == sequential.model


class Watched(nn.Module):
    """Notes whether it is called in training, and under autocast."""

    seen: set[tuple[bool, bool]] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        Watched.seen.add((self.training, torch.is_autocast_enabled("cpu")))
        outputs: Tensor = self.output(x.flatten(1))
        return outputs


def test_it_is_evaluated_in_float32(run_app: Go, caplog: pytest.LogCaptureFixture) -> None:
    Watched.seen.clear()
    with caplog.at_level("INFO", "flwr.fedapp"):
        run_app(CONFIG, model=register(Watched))
    assert {(True, True), (False, False)} <= Watched.seen
    assert (False, True) not in Watched.seen
    assert sum("precision = 'bf16': clients train by" in line for line in caplog.messages) == 1


class Mixed(Watched):
    """Puts what a product makes into memory of float32, which doesn't go under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.zeros(len(x), 10, device=x.device)
        outputs[torch.arange(len(x), device=x.device)] = self.output(x.flatten(1))
        return outputs


def test_a_model_that_autocast_breaks_is_named_before_the_run(run_app: Go) -> None:
    run_app(CONFIG, model=register(Mixed), precision="fp32")
    with pytest.raises(OwnPartError, match=r"^model = .* with precision = 'bf16' \(RuntimeError: Index put"):
        run_app(CONFIG, model=register(Mixed), name="other")


def test_another_precision_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^precision = 'fp16': must be one of fp32, bf16; did you mean 'bf16'"
    ):
        RunConfig.load({"precision": "fp16"})
