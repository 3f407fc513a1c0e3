"""The best model and the stop conditions: by hand on the part alone, and on every strategy of the registry."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from strategies import REGISTRY, AsyncFedAvg, FedAvg, Progress, messages
from strategies.clock import VirtualClock
from strategies.core.best_model import BestModel
from strategies.core.config import StrategyConfig
from strategies.flower.arrays import Layout
from strategies.flower.errors import RunError
from tests.strategies.parts import model_of

ROUNDS = 12

# Accuracies by aggregation: the best is at 3, 5 is as good and no better.
SCORES = (0.1, 0.3, 0.2, 0.8, 0.7, 0.8, 0.75, 0.6, 0.95, 0.5)


def part(
    scores: Mapping[int, float] | tuple[float, ...] = SCORES, **keys: Any
) -> tuple[BestModel, list[int]]:
    """Return the part, and the evaluations that it was told until it ended the run."""
    best, told = BestModel(StrategyConfig(**{"best_of": "accuracy"} | keys)), []
    for number, score in dict(enumerate(scores) if isinstance(scores, tuple) else scores).items():
        if not best.over:
            best.evaluated(number, model_of(float(number)), {"accuracy": score, "loss": 1 - score})
            told.append(number)
    return best, told


@pytest.mark.parametrize(
    ("keys", "last", "over"),
    [
        (
            {"stop_at": "accuracy>=0.8"},
            3,
            "target reached: accuracy 0.8 at aggregation 3, asked for accuracy >= 0.8",
        ),
        ({"stop_at": " loss <= .1"}, 8, "target reached: loss 0.05 at aggregation 8, asked for loss <= 0.1"),
        ({"stop_at": "accuracy>=0.96"}, 9, ""),
        (
            {"patience": 2},
            5,
            "no progress: accuracy was no better in 2 evaluations, the best is 0.8 at aggregation 3",
        ),
        (
            {"patience": 2, "best_of": "loss"},
            5,
            "no progress: loss was no better in 2 evaluations, the best is 0.2 ",
        ),
        ({"patience": 5}, 9, ""),
        ({"patience": 2, "stop_at": "accuracy>=0.8"}, 3, "target reached"),
        ({"keep": "best"}, 9, ""),
    ],
)
def test_a_run_ends_with_the_evaluation_that_decides(keys, last, over):
    best, told = part(**keys)
    assert (told[-1], best.over.startswith(over), bool(best.over)) == (last, True, bool(over))


@pytest.mark.parametrize(
    ("by", "worse"), [("accuracy", -1.0), ("loss", 1.0), ("perplexity", 1.0), ("iou", -1.0)]
)
def test_the_direction_of_a_metric_follows_from_its_name(by, worse):
    best = BestModel(StrategyConfig(keep="best", best_of=by))
    best.evaluated(0, model_of(0.0), {by: 1.0})
    best.evaluated(1, model_of(1.0), {by: 1.0 + worse / 2})
    best.evaluated(2, model_of(2.0), {by: 1.0 - worse / 2})
    assert (best.aggregation, best.arrays["w"].numpy().tolist()) == (2, [2.0])  # type: ignore[index]


def test_values_that_are_not_finite_are_no_progress_and_reach_nothing():
    best, told = part((math.nan, math.inf, -math.inf, 0.5, math.nan), keep="best", patience=5)
    assert (best.aggregation, best.value, told[-1], best.over) == (3, 0.5, 4, "")
    assert part((math.nan,) * 9, patience=3)[0].over.endswith("in 3 evaluations, none was finite")
    assert part((math.nan, 0.9), stop_at="accuracy>=0.5")[1] == [0, 1]


def test_a_metric_of_an_earlier_model_counts_for_that_model():
    best = BestModel(StrategyConfig(keep="best", best_of="client-loss"))
    best.asked(1, model_of(1.0))
    best.evaluated(1, model_of(1.0), {"loss": 3.0}, may_come=True)
    best.asked(4, model_of(4.0))
    told = {"client-loss": 0.5, "loss": 0.1, messages.EVALUATED: 1}
    best.evaluated(4, model_of(4.0), told, {"loss"}, may_come=True)
    assert (best.aggregation, best.value) == (1, 0.5)
    assert best.arrays is not None
    assert best.arrays["w"].numpy().tolist() == [1.0]


def test_a_metric_that_no_evaluation_has_is_named_with_those_that_there_are(caplog):
    said = "stop_at = 'f1': no evaluation has this metric; the metrics of this one are accuracy, loss"
    best = BestModel(StrategyConfig(stop_at="f1>=0.5"))
    metrics = {"accuracy": 0.1, "loss": 2.0, messages.FAILURES: 0.0}
    best.evaluated(0, model_of(), metrics)
    best.evaluated(1, model_of(), {**metrics, messages.PARTICIPANTS: 0})  # no metric of training either
    with pytest.raises(RunError, match=said):
        best.evaluated(1, model_of(), {**metrics, messages.PARTICIPANTS: 2})
    best.evaluated(1, model_of(), metrics, may_come=True)
    best.evaluated(2, model_of(), metrics, may_come=True)
    assert [record.getMessage() for record in caplog.records] == [said]


def test_the_state_gives_the_best_model_back_and_another_target_may_go_on():
    best, _ = part(keep="best", patience=2)
    again = BestModel(StrategyConfig(keep="best", best_of="accuracy", patience=3))
    again.restore(best.state())
    again.begin(Layout.of(model_of(0.0)))
    assert (best.over != "", again.over, again.aggregation, again.value) == (True, "", 3, 0.8)
    assert again.arrays is not None
    assert again.arrays["w"].numpy().tolist() == [3.0]
    again.evaluated(6, model_of(6.0), {"accuracy": 0.1})
    assert again.over


@pytest.mark.parametrize("text", ["accuracy", "accuracy>0.9", "accuracy>=", ">=0.9", "a>=1 b>=2", "a>=inf"])
def test_a_target_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=f"stop_at = {text!r}: must be METRIC>=NUMBER"):
        StrategyConfig(stop_at=text)


# ---- On every strategy ------------------------------------------------------------------------------------------


class Run:
    """A run with these scores by aggregation: what it reported, its states, and its result."""

    def __init__(
        self, name: str, grid: Any, model: ArrayRecord, config: Any, state: Any = None, **keys: Any
    ) -> None:
        self.seen: dict[int, bytes] = {}
        self.states: dict[int, dict[str, Any]] = {}

        def observe(progress: Progress) -> None:
            self.seen[progress.aggregation] = progress.arrays["w"].data
            self.states[progress.aggregation] = deepcopy(self.strategy.state())

        if hasattr(REGISTRY[name].Config, "buffer_size"):
            keys["buffer_size"] = 2
        options = {"eval_every": 1, "min_clients": 1, "server_lr": 0.5, "clock": VirtualClock()} | keys
        self.strategy: Any = REGISTRY[name](observer=observe, **options)
        if state is not None:
            self.strategy.restore(state)
        scores = [*SCORES, *[0.5] * ROUNDS]
        self.result = self.strategy.start(
            grid,
            model,
            num_rounds=ROUNDS,
            train_config=config,
            evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": scores[number], "loss": 1.0}),
        )


@pytest.mark.parametrize("name", REGISTRY)
def test_every_strategy_ends_early_and_returns_the_best_model_also_when_it_is_resumed(
    name, federation, model, train_config, tied
):
    def run(**more: Any) -> Run:
        keys = {"keep": "best", "best_of": "accuracy", "patience": 3} | more
        grid = federation((3.0, 2.0, -1.0), directions=tied, seed=len(more))
        return Run(name, grid, model(1.0, dtype="float32"), train_config(), **keys)

    whole, plain = run(), run(keep="last", patience=0)
    assert [*whole.seen] == list(range(7))  # 3 evaluations after the best, at 3
    assert {number: plain.seen[number] for number in whole.seen} == whole.seen
    assert whole.strategy.session.run.best.over.startswith("no progress: accuracy")
    assert whole.result.arrays["w"].data == whole.seen[3]
    assert whole.strategy.session.run.best.aggregation == 3
    assert plain.strategy.session.run.best is None
    assert not {"best", "best-model"} & plain.states[5].keys()
    for number in (2, 6):  # before the best and after it
        later = run(state=whole.states[number])
        assert later.result.arrays["w"].data == whole.result.arrays["w"].data
        assert [*later.seen] == list(range(number + 1, 7))
    assert np.isfinite(whole.strategy.session.model).all()


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_target_that_the_initial_model_reaches_ends_the_run_at_once(kind, federation, model, train_config):
    strategy = kind(stop_at="accuracy>=0.1", clock=VirtualClock())
    told = MetricRecord({"accuracy": 0.1})
    result = strategy.start(
        federation(), model(1.0), train_config=train_config(), evaluate_fn=lambda *_: told
    )
    assert (strategy.session.aggregations, result.arrays["w"].numpy().tolist()) == (0, [1.0])


def test_a_loop_around_the_strategy_is_refused(federation, model, train_config):
    with pytest.raises(RunError, match=r"stop_at = 'loss<=1', .* evaluates and ends by itself; call "):
        FedAvg(stop_at="loss<=1").configure_train(1, model(1.0), train_config(), federation())
