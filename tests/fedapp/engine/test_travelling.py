"""Only what is trained travels: bytes, the same result as when all arrays travel, on the engines of one process."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedapp import federation, server
from fedapp.config import RunConfig, read_run
from fedapp.engine.run import make_grid
from fedapp.models import ModelError
from fedapp.own import register
from fedapp.training.state import names_of
from tests.runs import arrays_of, lines_of, same_files, summary_of
from tests.selection import covering

CLIENTS = 5
ENGINES = ("sequential", "vectorized")


class Masked(nn.Module):
    """650 trained of 1,284,810 parameters, behind a frozen net, and attention with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Flatten(), nn.Linear(64, 228), nn.ReLU(), nn.Linear(228, 4332), nn.ReLU())
        self.body = nn.Sequential(*layers, nn.Linear(4332, 64)).requires_grad_(False)
        self.head = nn.Linear(64, 10)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        attention = torch.softmax(h.unsqueeze(2) * h.unsqueeze(1) + self.mask, -1)
        found: Tensor = self.head((attention @ h.unsqueeze(2)).squeeze(2))
        return found


class Adapted(nn.Module):
    """A frozen layer, and what two small matrices add to it (E. Hu et al., 2022: LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.base(x) + self.up(self.down(x)))
        return found


def masked() -> nn.Module:
    return Masked()


def adapted() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Adapted(64, 512, 2), Adapted(512, 512, 2), nn.Linear(512, 10))


TRAINED = {masked: (650, 1_284_810), adapted: (8_330, 304_266)}  # parameters of each: trained, and all


class Parts(nn.Module):
    """A net whose parameters are frozen as a list says, with running statistics, a counter and a constant."""

    seen: Tensor

    def __init__(self, frozen: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 6))
        self.register_buffer("seen", torch.zeros(()))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        found: Tensor = self.last(self.norm(self.first(x.flatten(1))) * self.scale)
        return found


@pytest.fixture
def go(configure, tmp_path):
    """Make a short run; ``whole``: all arrays of the model travel, and none is compared with the client's own."""
    numbers = itertools.count()

    def run(
        model: Callable[..., nn.Module],
        engine: str = "sequential",
        *,
        whole: bool = False,
        should_stop: Callable[[], bool] | None = None,
        observers: tuple[server.Observer, ...] = (),
        **values: Any,
    ) -> Path:
        given = {"figures": False, "num_server_rounds": 2, "model": register(model)}
        given["run_name"] = f"{next(numbers)}"
        given = {"results_dir": str(tmp_path), "checkpoint_every": 1, "eval_every": 1, **given, **values}
        given = {key: given[key] for key in given if "resume" not in values or key in values}
        federation.renew()
        experiment = server.prepare(configure(**given), CLIENTS)
        if whole:
            names = names_of(experiment.model)
            experiment = replace(experiment, travelling=tuple(names.own(experiment.model.state_dict())))
            strategy = experiment.strategy
            strategy.flower_options = replace(strategy.flower_options, untrained=names.fixed)
        more = {} if should_stop is None else {"should_stop": should_stop}
        return server.run(make_grid(engine, CLIENTS), experiment, observers=observers, **more).path

    return run


# Bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "model"), covering(ENGINES, TRAINED, together=1))
def test_the_bytes_of_a_round_are_those_of_what_is_trained(go, engine, model):
    trained, every = TRAINED[model]
    assert sum(each.numel() for each in model().parameters()) == every
    assert sum(each.numel() for each in model().parameters() if each.requires_grad) == trained
    for bytes_each, compression in ((4, "none"), (1, "int8")):
        path = go(model, engine, num_server_rounds=1, compression=compression)
        needed = CLIENTS * trained
        assert 4 * needed <= summary_of(path)["bytes-down"] <= 1.1 * 4 * needed
        assert bytes_each * needed <= summary_of(path)["bytes-up"] <= 1.1 * bytes_each * needed
        assert (path / "checkpoint/00000001/model.npy").stat().st_size <= 1.1 * 8 * trained + 256
        made, found = {name: value.shape for name, value in model().state_dict().items()}, arrays_of(path)
        assert {name: value.shape for name, value in found.items()} == made


class Halved(nn.Module):
    """A frozen net and a buffer in bfloat16, and a trained layer."""

    def __init__(self, by: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(64, 16, dtype=torch.bfloat16).requires_grad_(False)
        self.head, self.by = nn.Linear(16, 10), by
        self.register_buffer("shift", torch.ones(16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        if self.by and self.training:
            self.shift += self.by
        found: Tensor = self.head((self.body(x.flatten(1).bfloat16()) + self.shift).float())
        return found


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_arrays_may_be_of_a_type_that_does_not_travel(go, engine):
    path = go(Halved, engine, num_server_rounds=4, lr=0.2)
    found = safetensors.torch.load_file(path / "model.safetensors")
    kept = Halved().state_dict()["shift"]
    assert (found["body.weight"].dtype, found["head.weight"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found["shift"], kept)
    lines = lines_of(path)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    headers = 256
    assert summary_of(path)["bytes-up"] <= 4 * CLIENTS * (4 * 170 + headers)  # four rounds of the head alone


def test_a_buffer_of_a_type_that_does_not_travel_is_named_where_training_changes_it(go):
    with pytest.raises(
        ModelError, match=r"its buffer shift is torch\.bfloat16, in which nothing can be sent; run"
    ):
        go(partial(Halved, 0.5))


def test_a_model_is_evaluated_with_its_mask_as_by_hand(go):
    path = go(masked)
    net = masked()
    net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in arrays_of(path).items()})
    assert net.mask.isinf().any()
    x, y = federation.held_out_tensors(RunConfig.recorded(read_run(str(path))[0]), CLIENTS, federation.CPU)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net.eval()(x), y)
    assert lines_of(path)[-1]["loss"] == pytest.approx(float(loss), rel=1e-6)


# The same result as when all arrays travel -------------------------------------------------

NAMES = ("first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias")
BYTES = ("bytes-up", "bytes-down", "bytes-kept", "bytes-server")


def assert_same_but_for_bytes(one: Path, other: Path) -> None:
    assert same_files(one, other, "model.safetensors")
    for line, like in zip(lines_of(one), lines_of(other), strict=True):
        assert {**line, **dict.fromkeys(BYTES)} == {**like, **dict.fromkeys(BYTES)}


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frozen=st.lists(st.sampled_from(NAMES), unique=True, max_size=5).map(tuple),
    others=st.sampled_from(
        [
            {},
            {"strategy": "scaffold"},
            {"strategy": "fedbuff", "buffer_size": 2, "compression": "topk:0.1"},
            {"strategy": "async-fedavg", "time_scenario": "F80"},
            {"strategy": "fedprox", "compression": "int8", "momentum": 0.5},
            {"strategy": "ditto", "test_on": "own"},
        ]
    ),
)
def test_whatever_is_frozen_the_result_is_that_of_sending_all(go, engine, frozen, others):
    one, other = (go(lambda: Parts(frozen), engine, whole=whole, **others) for whole in (False, True))
    assert_same_but_for_bytes(one, other)
    model = arrays_of(one)
    assert model["seen"] > 0
    assert np.abs(model["norm.running_mean"]).max() > 0
    initial = Parts(frozen).state_dict()
    assert np.array_equal(model["scale"], initial["scale"].numpy())
    apart = 4 * sum(initial[name].numel() for name in (*frozen, "scale"))
    assert summary_of(one)["bytes-down"] <= summary_of(other)["bytes-down"] - apart


@pytest.mark.parametrize(("engine", "strategy"), covering(ENGINES, ["fedavg", "fedbuff"], together=1))
def test_a_run_that_was_broken_off_goes_on_to_the_same_model(go, engine, strategy):
    def make() -> nn.Module:
        return Parts(NAMES[:2])

    class Halfway(server.Observer):
        is_started = False

        def record(self, entry: Any) -> None:
            self.is_started = self.is_started or entry.progress.aggregation >= 2

    watch, given = Halfway(), {"strategy": strategy, "buffer_size": 2, "num_server_rounds": 4}
    part = go(make, engine, observers=(watch,), should_stop=lambda: watch.is_started, **given)
    assert lines_of(part)[-1]["aggregation"] < 4
    again, straight = go(make, engine, resume=str(part)), go(make, engine, **given)
    assert_same_but_for_bytes(again, straight)
