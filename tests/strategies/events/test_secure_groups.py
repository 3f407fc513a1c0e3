"""FedBuff with secure sums: the models of plain buffers, a round where all are in it, and who goes in which stage."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord

from strategies import REGISTRY, AsynchronousStrategy, FedBuff, RunError, messages
from strategies.clock import WallClock
from strategies.core.config import SecureConfig
from strategies.secure import masks_updates
from strategies.secure.masking import Quantizer
from strategies.updates.sums import BlockSum
from tests.strategies.secure.runs import CENTRES, CLIPPING, MODS, PRIVATE, SECURE, SIZES, Make, Runs

ALL = {"buffer_size": 6, **SECURE}


@pytest.fixture
def run(federation: Make, model: Make, train_config: Make, values_of: Make) -> Runs:
    return Runs(federation, model, train_config, values_of)


@pytest.mark.parametrize(
    "options", [{}, {"client_weights": "uniform"}, {"server_optimizer": "yogi"}, {"real_time": True}]
)
def test_a_group_of_all_clients_is_a_secure_round_bit_for_bit(run: Make, options: dict[str, Any]) -> None:
    of_rounds = {name: value for name, value in options.items() if name != "real_time"}
    clock = {"clock": WallClock()} if options.get("real_time") else {}
    assert run(FedBuff, **ALL, **of_rounds, **clock)[0] == run(**SECURE, **of_rounds)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness_discount": "polynomial:0.5"},
        {"aggregation_weights": "identical", "client_weights": "uniform", "concurrency": 4},
        {"server_optimizer": "momentum", "aggregation_weights": "observed"},
        {"task_failure": 0.2, "seed": 3},
    ],
)
def test_a_buffer_makes_the_models_of_a_plain_one(run: Make, options: dict[str, Any]) -> None:
    options = {"buffer_size": 3, "rounds": 8, **options}
    plain, before, _ = run(FedBuff, **options)
    secure, metrics, _ = run(FedBuff, **options, **SECURE)
    assert secure == pytest.approx(plain, abs=100 * Quantizer.for_sum(CLIPPING, 3).error(3))
    assert secure != plain  # by the quantisation
    assert max(found["staleness-max"] for found in metrics.values()) > 0
    for number, found in metrics.items():
        names = "contributions", "failures", "staleness-mean", "weights-distance"
        assert [found[name] for name in names] == [before[number][name] for name in names]
        assert "clipped-updates" not in found
        assert found["train-loss"] == pytest.approx(before[number]["train-loss"], rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"aggregation_weights": "identical", "dp_max_contributions": 4}])
def test_with_central_noise_clients_clip_and_the_model_is_that_of_a_plain_run(
    run: Make, options: dict[str, Any]
) -> None:
    options = {**PRIVATE, "dp_clipping_norm": 0.5, "buffer_size": 3, "rounds": 5, **options}
    assert run(FedBuff, **options, secure_sums=True)[0] == pytest.approx(run(FedBuff, **options)[0], abs=1e-6)


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_a_third_may_go_in_any_stage(run: Make, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    goes = {1: stage, 4: stage}
    secure, metrics, _ = run(FedBuff, rounds=1, goes=goes, **ALL)
    stay = [i for i in range(6) if stage == "unmask" or i not in goes]
    d = np.array(SIZES)[stay] / sum(np.array(SIZES)[stay])
    expected = [start + sum(d * 0.5 * (np.array(CENTRES)[stay] - start)) for start in (1.0, -1.0)]
    assert secure == pytest.approx(expected, abs=2 * Quantizer.for_sum(CLIPPING, 6).error(6))
    assert (metrics[1]["contributions"], metrics[1]["failures"]) == (len(stay), 6 - len(stay))
    assert caplog.text.count("went away") == 6 - len(stay)  # one line each


def test_who_goes_again_and_again_is_dropped_and_the_others_go_on(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = run(FedBuff, rounds=5, goes={1: "keys"}, eval_every=1, **ALL)[1]
    assert [found["contributions"] for found in metrics.values()] == [5] * 5
    assert [found["failures"] for found in metrics.values()] == [1, 1, 1, 0, 0]
    assert "is dropped after 3 misses in a row" in caplog.text


def test_where_more_go_the_model_stays_and_one_line_says_so(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError, match=r"no client's work was accepted in 2 aggregations.* secret came, and"):
        run(FedBuff, rounds=2, goes=dict.fromkeys(range(4), "unmask"), **ALL)
    lines = [r.message for r in caplog.records if r.message.startswith("aggregation 1: left out client")]
    assert len(lines) == 1
    assert "secure sum: 2 shares of client" in lines[0] or "secure sum: 1 shares of client" in lines[0]
    silent = r"aggregation 1: secure sum: clients that masked .* no share: 0 \(node \d+\), 1 .*, 2 .*, 3 "
    assert re.search(silent, caplog.text)


def test_a_client_that_isnt_there_when_the_buffer_is_full_is_a_dropout(
    run: Make, there: Make, caplog: pytest.LogCaptureFixture
) -> None:
    # Three work in the first second, and three in the second; client 0 leaves after its own work.
    rows = "\n".join(["client,start,end", "0,0,1.5", *(f"{client},0,100" for client in range(1, 6))])
    options = {"buffer_size": 6, "concurrency": 3, "server_lr": 1.0, "seed": 5, **SECURE}
    _, metrics, _ = run(FedBuff, rounds=1, **options, **there(rows + "\n"))
    assert (metrics[1]["contributions"], metrics[1]["lost-tasks"]) == (5, 1)
    assert "it went away before its update was summed" in caplog.text


def test_nothing_leaves_a_client_before_its_update_is_masked_and_it_keeps_nothing_after(run: Make) -> None:
    replies: dict[str, list[Message]] = {}

    def notes(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        record = message.content.get(messages.SECURE)
        if record is not None:
            replies.setdefault(str(record["stage"]), []).append(reply)
        return reply

    grid = run(FedBuff, rounds=1, mods=(notes, masks_updates), **ALL)[2]
    assert {stage: len(each) for stage, each in replies.items()} == dict.fromkeys(
        ("keep", "keys", "shares", "masked", "unmask"), 6
    )
    for stage, each in replies.items():
        records = [record for reply in each for record in reply.content.values()]
        assert not any(isinstance(record, MetricRecord) for record in records)
        arrays = [name for record in records if isinstance(record, ArrayRecord) for name in record]
        assert arrays == (["values"] * 6 if stage == "masked" else [])
    assert all(not node.context.state for node in grid.nodes.values())


def test_a_run_that_goes_on_has_the_same_model(run: Make) -> None:
    states: dict[int, Any] = {}
    options = {"buffer_size": 3, "server_optimizer": "adam", "staleness_discount": "polynomial:0.5", **SECURE}
    whole = run(FedBuff, rounds=7, states=states, **options)[0]
    assert run(FedBuff, rounds=7, state=states[3], **options)[0] == whole


@pytest.mark.parametrize("moment", ["while a buffer fills", "while updates are summed"])
def test_a_run_that_is_stopped_goes_on_with_work_that_clients_kept(run: Make, moment: str) -> None:
    made, masked, states = list[FedBuff](), list[int](), dict[int, Any]()

    class Watched(FedBuff):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    def notes(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        record = message.content.get(messages.SECURE)
        if record is not None and record["stage"] == "masked":
            masked.append(1)
        return call_next(message, context)

    def should_stop() -> bool:
        filling = made[-1].session.aggregations == 3 and len(made[-1].session.task_table.buffer) == 2
        return filling if moment == "while a buffer fills" else len(masked) > 3 * 3

    options = {"buffer_size": 3, "server_optimizer": "adam", **SECURE}
    whole = run(FedBuff, rounds=7, **options)[0]
    run(Watched, rounds=7, states=states, mods=(notes, masks_updates), should_stop=should_stop, **options)
    assert max(states) == 3
    waiting = made[-1].session.task_table.kept
    assert len(waiting) == (2 if moment == "while a buffer fills" else 3)
    assert run(Watched, rounds=7, state=states[3], **options)[0] == whole


def test_a_run_has_one_result_whatever_masks_and_order(run: Make) -> None:
    one, other = (run(FedBuff, buffer_size=4, seed_of_grid=seed, **SECURE)[0] for seed in (1, 2))
    assert one == other


def test_an_app_without_the_mod_is_told_what_it_lacks(run: Make) -> None:
    with pytest.raises(RunError, match=r"masks_updates isn't a mod of its ClientApp"):
        run(FedBuff, mods=(), **ALL)


def test_without_rounds_a_buffer_alone_has_sums() -> None:
    able = {
        name
        for name, kind in REGISTRY.items()
        if issubclass(kind, AsynchronousStrategy) and issubclass(kind.Config, SecureConfig)
    }
    assert able == {"fedbuff"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer_size": 2}, "buffer_size = 2 with secure_sums: a sum is of 3 clients or more"),
        ({"buffer_size": 4, "secure_threshold": 4}, "secure_threshold = 4: each of 4 clients in a sum has 3"),
        (
            {"describes": False},
            "client 0 .* doesn't say how many examples it has before it trains; allowed is",
        ),
        (
            {"on_client_model": lambda index, model: None},
            "on_client_model sees single models; allowed is none",
        ),
        ({"untrained": ("w",)}, r"the model has arrays that aren't trained \(w\)"),
    ],
)
def test_what_cant_be_is_refused_before_a_client_trains(
    run: Runs, options: dict[str, Any], said: str
) -> None:
    run.refuses(said, FedBuff, **{**SECURE, **options})


def test_an_engine_that_sums_past_the_mods_is_refused(federation: Make, model: Make) -> None:
    grid = federation(CENTRES, SIZES, mods=MODS)
    grid.can_sum, grid.sums = (lambda request: True), (lambda request: iter(list[BlockSum]()))
    with pytest.raises(RunError, match="trains clients past the mods of their app"):
        FedBuff(**SECURE).start(grid, model(1.0), 1)


def test_m_of_so_many_clients_is_three_at_least() -> None:
    for number, m in {3: 3, 10: 3, 50: 5}.items():
        strategy = FedBuff(**SECURE)
        strategy.check(number)
        assert strategy.m == m
