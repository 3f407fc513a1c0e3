"""What a run begins with: models that are none, and strategies that were copied or pickled."""

import pickle
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from strategies import REGISTRY, AsyncFedAvg, DivergedError, FedAvg, FedBuff, FedFix, RunError, WallClock
from strategies.core.run_state import State
from strategies.testing import MemoryGrid


def grid(step: float = 1.0, kind: type[MemoryGrid] = MemoryGrid) -> MemoryGrid:
    """Return two clients that move every array by a step."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"]
        arrays = ArrayRecord(
            {name: Array(array.numpy() + array.numpy().dtype.type(step)) for name, array in sent.items()}
        )
        return Message(
            RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    return kind(app, [{"partition-id": i} for i in range(2)])


def arrays(**named: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in named.items()})


INSTEAD = "; arrays that never change may hold any values if trained names the others$"
NAMED = [
    (np.float32([0, -np.inf]), rf"array 'mask' holds values that aren't finite \(NaN or infinity\){INSTEAD}"),
    (
        np.full(2, np.finfo(np.float32).min),
        rf"array 'mask' has the norm 4\.8e\+38, whose square overflows float32{INSTEAD}",
    ),
    (
        np.full(2, np.finfo(np.float64).min),
        rf"array 'mask' has the norm inf, whose square overflows float32{INSTEAD}",
    ),
    (np.zeros(2, np.complex64), "array 'mask' is complex64; allowed are real numbers of NumPy's own"),
]


@pytest.mark.parametrize(("mask", "why"), NAMED)
@pytest.mark.parametrize("kind", [FedAvg, FedFix])
def test_an_initial_array_that_is_no_model_is_named(kind, mask, why):
    initial = arrays(weight=np.zeros(2, np.float32), mask=mask)
    with pytest.raises(ValueError, match=f"^the initial arrays are no model to train: {why}"):
        kind(fraction_evaluate=0.0).start(grid(), initial, num_rounds=1)


def test_an_initial_array_that_is_not_trained_may_hold_any_values():
    initial = arrays(weight=np.zeros(2, np.float32), mask=np.float32([0, -np.inf]))
    result = FedAvg(trained="weight", fraction_evaluate=0.0).start(grid(), initial, num_rounds=1)
    assert result.arrays["mask"].data == initial["mask"].data
    assert result.arrays["weight"].numpy().tolist() == [1, 1]


def test_nor_is_one_in_a_wrapper():
    wrapped = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 2)
    with pytest.raises(
        ValueError, match=r"^the initial arrays are no model to train: array 'w' holds values that"
    ):
        wrapped.start(grid(), arrays(w=np.float32([np.nan])), num_rounds=1)


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
@pytest.mark.parametrize("beside", [{}, {"b": np.zeros(1, np.float32)}])
def test_a_float16_model_that_overflows_has_diverged(kind, beside):
    # Two steps of 4e4 are 8e4, which float16 doesn't have.
    initial = arrays(w=np.zeros(2, np.float16), **beside)
    strategy = kind(fraction_evaluate=0.0, server_lr=2.0)
    with pytest.raises(DivergedError, match="made a model that isn't finite, or too large to train on"):
        strategy.start(grid(4e4), initial, num_rounds=5)


# ---- Copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REGISTRY.values())
def test_a_strategy_can_be_pickled(kind):
    made = kind(seed=3)
    again = pickle.loads(pickle.dumps(made))
    assert again.config == made.config
    assert again.session.safeguards.active is made.session.safeguards.active


def test_a_strategy_with_a_deadline_can_be_pickled():
    made = FedAvg(round_deadline=1.0, over_select=0.5, participation="uniform", fraction_train=0.5)
    assert pickle.loads(pickle.dumps(made)).config == made.config


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_copy_keeps_its_own_books(kind):
    made = kind(fraction_evaluate=0.0)
    copied = deepcopy(made)
    copied.session.clock = WallClock()
    assert copied.session.safeguards.active
    assert not made.session.safeguards.active
    copied = deepcopy(made)
    copied.start(grid(), arrays(w=np.zeros(1)), num_rounds=2)
    assert copied.session.client_stats.costs()["device-seconds"] > 0
    assert made.session.client_stats.costs() == {}


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"clock": "virtual"}, r"FedFix\(clock = 'virtual'\): must be VirtualClock\(\) or WallClock\(\)"),
        (
            {"clock": WallClock},
            r"FedFix\(clock = <class .*WallClock'>\): must be VirtualClock\(\) or WallClock\(\)",
        ),
        ({"observer": 3}, r"FedFix\(observer = 3\): must be callable"),
        ({"on_client_model": "x"}, r"FedFix\(on_client_model = 'x'\): must be callable"),
        ({"should_stop": None}, r"FedFix\(should_stop = None\): must be callable"),
    ],
)
def test_what_is_no_clock_or_cant_be_called_is_refused(keywords: dict[str, Any], said: str):
    with pytest.raises(TypeError, match=f"^{said}$"):
        FedFix(**keywords)


class Slow(MemoryGrid):
    """Clients of a grid that come late: until they are there, the clock runs 1000 s a look."""

    clock: WallClock

    def get_node_ids(self) -> Iterable[int]:
        if not (there := list(super().get_node_ids())):
            self.clock.resume(self.clock.now() + 1000)
        return there


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_in_real_time_a_run_and_its_budget_begin_when_the_clients_are_there(kind):
    def run(num_rounds: int, state: State | None = None) -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        late, clock = grid(kind=Slow), WallClock()
        late.clock = clock  # type: ignore[attr-defined]
        for node in late.nodes.values():
            node.joins_after = 2
        clock.resume(500.0)  # the preparation took so long
        strategy = kind(
            clock=clock,
            time_budget=400.0,
            observer=lambda p: seen.append((p.aggregation, p.time)),
            min_clients=2,
        )
        if state is not None:
            strategy.restore(state)
        strategy.start(late, arrays(w=np.zeros(2, np.float32)), num_rounds=num_rounds)
        states.append(strategy.state())
        return seen

    states: list[State] = []
    numbers, times = zip(*run(3), strict=True)
    assert numbers == (0, 1, 2, 3)
    assert 0 <= times[0] < times[-1] < 400
    numbers, later = zip(*run(5, states[0]), strict=True)
    assert numbers == (4, 5)
    assert times[-1] <= later[0] < later[-1] < 400


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
def test_local_noise_needs_clients_that_are_asked_for_it(kind):
    strategy, model = kind(dp="local", dp_clipping_norm=0.1), arrays(w=np.zeros(2, np.float32))
    with pytest.raises(RunError, match=r"dp = 'local': clients add this noise, and their requests don't ask"):
        strategy.start(grid(), model, num_rounds=1)
    strategy.start(grid(), model, num_rounds=1, train_config=ConfigRecord({"dp": "local"}))
    with pytest.raises(RunError, match=r"dp = 'local'"):
        list(FedAvg(dp="local").configure_train(1, model, ConfigRecord(), grid()))
