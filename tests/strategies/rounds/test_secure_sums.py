"""Rounds of secure sums: the models of plain rounds, whoever goes in which stage, and what refuses to be one."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from strategies import (
    REGISTRY,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FederatedStrategy,
    FedNova,
    FedProx,
    RunError,
    SynchronousStrategy,
    messages,
)
from strategies.clock import WallClock
from strategies.core.conflicts import ConflictError
from strategies.secure import masks_updates, mod
from strategies.secure.client import ClientSession
from strategies.secure.masking import Quantizer, SecureSumError
from strategies.secure.mod import ONLY_MASKED
from strategies.secure.openings import Openings
from strategies.updates.sums import BlockSum
from tests.strategies.secure.runs import CENTRES, CLIPPING, MODS, PRIVATE, SECURE, SIZES, Make, Runs

STEPS = (1, 2, 3, 4, 2, 1)


@pytest.fixture
def run(federation: Make, model: Make, train_config: Make, values_of: Make) -> Runs:
    return Runs(federation, model, train_config, values_of)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedAvg, {}),
        (FedAvg, {"client_weights": "uniform", "fraction_train": 0.7, "participation": "uniform"}),
        (FedAvg, {"participation": "poisson", "fraction_train": 0.8}),
        (FedAvg, {"server_optimizer": "momentum"}),
        (FedAvg, {"server_optimizer": "yogi"}),
        (FedProx, {"proximal_mu": 0.3}),
        (FedAvgM, {"server_momentum": 0.5}),
        (FedAdam, {"eta": 0.1}),
        (Ditto, {}),
        (FedNova, {"steps": STEPS}),
        (
            FedNova,
            {
                "steps": STEPS,
                "fraction_train": 0.7,
                "participation": "uniform",
                "server_optimizer": "momentum",
            },
        ),
        (FedNova, {"steps": STEPS, "describes": False, "examples_bound": 5}),
    ],
)
def test_methods_that_need_sums_make_the_models_of_plain_rounds(
    run: Make, kind: type[FederatedStrategy], options: dict[str, Any]
) -> None:
    plain, before, _ = run(kind, **options)
    secure, metrics, _ = run(kind, **options, **SECURE)
    assert secure == pytest.approx(plain, abs=50 * Quantizer.for_sum(CLIPPING, 6).error(6))
    assert secure != plain  # by the quantisation
    for number, found in metrics.items():
        assert found["participants"] == before[number]["participants"]
        assert (found["failures"], found["clipped-updates"]) == (0, 0)
        assert found["train-loss"] == pytest.approx(before[number]["train-loss"], rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"dp_clipping_norm": 0.5},
        {"dp_clipping_norm": 0.5, "fraction_train": 0.7, "participation": "uniform"},
        {},  # the norm adapts by the sum of who was longer
    ],
)
def test_with_central_noise_clients_clip_and_the_model_is_that_of_a_plain_run(
    run: Make, options: dict[str, Any]
) -> None:
    plain, before, _ = run(**PRIVATE, **options)
    secure, metrics, _ = run(**PRIVATE, **options, secure_sums=True)
    assert secure == pytest.approx(plain, abs=1e-6)
    norms = [[found.get("dp-clipping-norm") for found in each.values()] for each in (before, metrics)]
    assert norms[0] == norms[1]
    assert all("clipped-updates" not in found for found in metrics.values())


def test_a_hidden_draw_has_rounds_that_have_sums(federation: Make, model: Make, values_of: Make) -> None:
    def go(copies: int, fraction: float, secure: bool) -> list[float]:
        options = {**PRIVATE, "dp_clipping_norm": 0.5, "participation": "poisson", "fraction_train": fraction}
        strategy = FedAvg(**options, secure_sums=secure)
        strategy.run_options.deterministic_noise = True
        grid = federation(CENTRES * copies, SIZES * copies, mods=MODS)
        return values_of(strategy.start(grid, model(1.0), 2).arrays)

    assert go(5, 0.7, True) == pytest.approx(go(5, 0.7, False), abs=1e-6)
    with pytest.raises(RunError, match=r"fraction_train = 0.5: of 6 clients fewer than 3 are drawn .* 0.34"):
        go(1, 0.5, True)


def test_a_run_has_one_result_whatever_masks_and_order(run: Make) -> None:
    assert run(seed_of_grid=1, **SECURE)[0] == run(seed_of_grid=2, **SECURE)[0]


def test_a_path_leaves_its_client_in_the_sum_alone_and_a_client_without_one_is_left_out(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    said = []

    def notes(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if reply.has_content() and messages.APPLIED in reply.content:
            said.append(dict(reply.content[messages.APPLIED]))
        return reply

    def forgets(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 4 and messages.APPLIED in reply.content:
            del reply.content[messages.APPLIED][messages.PATH]
        return reply

    _, metrics, _ = run(FedNova, rounds=1, steps=STEPS, mods=(notes, masks_updates, forgets), **SECURE)
    assert said == [{messages.PATH: "masked"}] * 5
    assert metrics[1]["failures"] == 1
    assert "its app doesn't tell how far its local steps went ('strategies.path' in the record" in caplog.text


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_a_third_may_go_in_any_stage(run: Make, stage: str) -> None:
    goes = {1: stage, 4: stage}
    secure, metrics, _ = run(rounds=1, goes=goes, **SECURE)
    stay = [i for i in range(6) if stage == "unmask" or i not in goes]
    d = np.array(SIZES)[stay] / sum(np.array(SIZES)[stay])
    expected = [start + sum(d * 0.5 * (np.array(CENTRES)[stay] - start)) for start in (1.0, -1.0)]
    assert secure == pytest.approx(expected, abs=2 * Quantizer.for_sum(CLIPPING, 6).error(6))
    assert metrics[1]["failures"] == 6 - len(stay)


EMPTY_ZIP = b"PK\5\6" + bytes(18)  # which NumPy reads as no array, but an archive of none


def _no_array(reply: Message) -> None:
    if messages.MASKED in reply.content:
        reply.content[messages.MASKED] = ArrayRecord(
            {"values": Array("uint32", (5,), "numpy.ndarray", EMPTY_ZIP)}
        )


def _one_key(reply: Message) -> None:
    record = reply.content.get(messages.SECURE)
    if record is not None and "seal" in record and "mask" in record:
        record["mask"] = record["seal"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_array, "its reply has no masked update of the model's size"),
        (_one_key, "its two public keys are one"),
    ],
)
def test_who_answers_a_stage_with_what_is_none_is_left_out_alone(
    run: Make, change: Callable[[Message], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lies(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if reply.has_content() and context.node_config["partition-id"] == 0:
            change(reply)
        return reply

    _, metrics, _ = run(rounds=2, mods=(lies, *MODS), **SECURE)
    assert [(found["participants"], found["failures"]) for found in metrics.values()] == [(5, 1)] * 2
    assert said in caplog.text


def test_where_more_go_the_model_stays_and_one_line_says_so(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError, match=r"no client's work was accepted in 2 aggregations.* secret came, and"):
        run(rounds=2, goes=dict.fromkeys(range(4), "unmask"), **SECURE)
    lines = [r.message for r in caplog.records if r.message.startswith("round 1: left out")]
    assert len(lines) == 1
    assert "secure sum: 2 shares of client" in lines[0] or "secure sum: 1 shares of client" in lines[0]
    silent = r"round 1: secure sum: clients that masked .* no share: 0 \(node \d+\), 1 .*, 2 .*, 3 "
    assert re.search(silent, caplog.text)


def test_the_server_sees_no_update_no_metric_and_no_size_that_it_wasnt_told(run: Make) -> None:
    grid = run(rounds=1, examples_bound=10, describes=False, **SECURE)[2]
    asked = [m.content[messages.SECURE] for m in grid.requests() if messages.SECURE in m.content]
    assert {record["stage"] for record in asked} == {"keys", "shares", "masked", "unmask"}
    assert len(asked) == 4 * 6
    assert all(
        messages.SECURE not in node.context.state for node in grid.nodes.values()
    )  # secrets are dropped


def test_sizes_that_only_clients_know_are_summed_masked(run: Make) -> None:
    plain = run(describes=False)[0]
    secure = run(describes=False, examples_bound=5, **SECURE)[0]
    assert secure == pytest.approx(plain, abs=1e-6)
    with pytest.raises(RunError, match=r"doesn't say how many examples .* allowed are examples_bound > 0"):
        run(describes=False, **SECURE)


def test_metrics_are_summed_by_their_names_over_the_clients_that_have_them(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def more(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply, place = call_next(message, context), context.node_config["partition-id"]
        if reply.has_content() and "metrics" in reply.content and place < 4:
            reply.content["metrics"]["score"] = (-2.5, 0.5, float("nan"), 1e30)[place]
        return reply

    names = "score,missing,num-examples"
    options = {"mods": (masks_updates, more), "rounds": 2, "secure_metrics": names}
    _, metrics, _ = run(**options, client_weights="uniform", **SECURE)
    assert metrics[1]["score"] == pytest.approx(-1.0)  # of the two that are numbers in range
    assert metrics[1]["num-examples"] == pytest.approx(np.mean(SIZES))
    assert not {"train-loss", "missing"} & set(metrics[1])
    assert caplog.text.count("secure_metrics: no client has a metric 'missing', as a number") == 1


def test_values_out_of_range_are_counted(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    _, metrics, _ = run(rounds=1, client_weights="uniform", secure_sums=True, secure_clipping=2.5)
    assert metrics[1]["clipped-updates"] == 1  # Δ = (3, 4) for the centre 7, 2 at most for the others
    assert "secure_clipping = 2.5: 1 clients had weighted values beyond it" in caplog.text


def test_an_app_without_the_mod_is_told_what_it_lacks(run: Make) -> None:
    with pytest.raises(RunError, match=r"masks_updates isn't a mod of its ClientApp"):
        run(mods=(), **SECURE)


def test_a_device_that_only_masks_refuses_a_plain_round(run: Make, federation: Make, model: Make) -> None:
    grid = federation(CENTRES, SIZES, mods=MODS)
    for node in grid.nodes.values():
        node.context.node_config[ONLY_MASKED] = True
    with pytest.raises(RunError, match="only-masked = true: it was asked for an update without a secure sum"):
        FedAvg().start(grid, model(1.0), 1)
    assert FedAvg(**SECURE).start(grid, model(1.0), 1).train_metrics_clientapp[1]["participants"] == 6


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in REGISTRY.values()
        if issubclass(each, SynchronousStrategy)
        and (each.capabilities.reads_updates or not each.capabilities.aggregates_on_arrival)
    ],
)
def test_a_method_that_needs_single_updates_is_refused(kind: type[FederatedStrategy]) -> None:
    with pytest.raises(ConflictError) as raised:
        kind(secure_sums=True)
    assert raised.value.keys == ("secure_sums", "strategy")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"secure_threshold": 6}, r"secure_threshold = 6: each of 6 clients in a sum has 5 neighbours"),
        ({"secure_neighbours": 6}, r"secure_neighbours = 6: 6 clients are in a sum"),
        ({"participation": "uniform", "fraction_train": 0.3}, "secure_sums: 2 clients in a sum"),
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
    run.refuses(said, **SECURE, **options)


def test_a_model_of_which_a_part_travels_is_refused(federation: Make) -> None:
    arrays = ArrayRecord({"w": Array(np.ones(2)), "frozen": Array(np.ones(3))})
    with pytest.raises(
        RunError, match="trained names some of the model's arrays, and clients mask whole models"
    ):
        FedAvg(trained=["w"], **SECURE).start(federation(CENTRES, SIZES, mods=MODS), arrays, 1)


def test_an_engine_that_sums_past_the_mods_is_refused(run: Make, federation: Make, model: Make) -> None:
    grid = federation(CENTRES, SIZES, mods=MODS)
    grid.can_sum, grid.sums = (lambda request: True), (lambda request: iter(list[BlockSum]()))
    with pytest.raises(RunError, match="trains clients past the mods of their app"):
        FedAvg(**SECURE).start(grid, model(1.0), 1)


def test_a_loop_around_the_strategy_is_refused(federation: Make, model: Make) -> None:
    grid, strategy = federation(CENTRES, SIZES, mods=MODS), FedAvg(**SECURE)
    with pytest.raises(RunError, match=r"secure_sums = True: .* reads single updates; call"):
        list(strategy.configure_train(1, model(1.0), ConfigRecord(), grid))


def test_a_run_that_goes_on_has_the_same_model(run: Make) -> None:
    states: dict[int, Any] = {}
    options = {"server_optimizer": "adam", **SECURE}
    whole = run(rounds=4, states=states, **options)[0]
    assert run(rounds=4, state=states[2], **options)[0] == whole


def test_a_repeated_round_without_one_client_is_not_opened(
    run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of a resumed run subtracts a sum without client 4 from the one with it, which was opened before."""
    file, states = tmp_path / "openings.jsonl", dict[int, Any]()
    whole = run(rounds=3, states=states, openings=Openings(file), **SECURE)[0]
    assert len(file.read_text("ascii").splitlines()) == 3
    before = run(rounds=1, **SECURE)[0]
    # Without the record the attack has its second sum.
    assert run(rounds=2, state=states[1], goes={4: "masked"}, **SECURE)[0] != before
    for _ in range(2):  # the record outlives the process
        attacked, _, _ = run(rounds=3, state=states[1], goes={4: "masked"}, openings=Openings(file), **SECURE)
        assert attacked == before
    assert "it differs by 1 updates from a sum of the same updates that was opened before" in caplog.text
    assert run(rounds=3, state=states[1], openings=Openings(file), **SECURE)[0] == whole  # the same clients


def test_clients_remember_their_sums_where_the_server_restores_an_older_checkpoint(
    run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack of the test before, by a server without its record; the clients' processes are new, too."""
    states = dict[int, Any]()
    whole = run(rounds=3, states=states, remember=tmp_path, **SECURE)[0]
    assert len((tmp_path / "0" / "openings.jsonl").read_text("ascii").splitlines()) == 3
    before = run(rounds=1, **SECURE)[0]
    attacked, _, _ = run(rounds=2, state=states[1], goes={4: "masked"}, remember=tmp_path, **SECURE)
    assert attacked == before
    assert "sum of the same updates that was opened before" in caplog.text
    assert run(rounds=3, state=states[1], remember=tmp_path, **SECURE)[0] == whole  # the same clients
    # Other updates, of a run from another model, are no matter.
    other = {"server_lr": 0.5, **SECURE}
    assert run(rounds=2, goes={4: "masked"}, remember=tmp_path / "new", **other)[0] != before


def test_clients_of_a_buffer_remember_their_sums(
    run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"rounds": 1, "buffer_size": 6, "remember": tmp_path, **SECURE}
    first = run(FedBuff, **options)[0]
    assert run(FedBuff, **options)[0] == first  # the same clients
    with pytest.raises(RunError):  # no model was made
        run(FedBuff, goes={4: "masked"}, **options)
    assert "sum of the same updates that was opened before" in caplog.text


def test_a_client_refuses_to_open_a_sum_whose_clients_are_told_wrongly(tmp_path: Path) -> None:
    context = Context(1, 1, {"state-path": str(tmp_path)}, RecordDict(), {})
    session = ClientSession(0, 2, "unmask", held={1: (b"s", b"k"), 2: (b"s", b"k")}, model=9)
    asked = {"clients": [0, 1], "versions": [5, 5], "here": [1, 2], "gone": []}
    with pytest.raises(SecureSumError, match="aren't those whose shares are asked for"):
        mod._remember(context, asked, session)
    mod._remember(context, {**asked, "here": [1], "gone": [2]}, session)
    with pytest.raises(SecureSumError, match="it differs by 1 updates"):
        mod._remember(context, {**asked, "clients": [0, 1, 2], "versions": [5, 5, 5]}, session)
    session.model = 10
    mod._remember(context, {**asked, "clients": [0, 1, 2], "versions": [5, 5, 5]}, session)


def test_sums_that_share_updates_are_opened_if_they_are_equal_or_differ_by_many() -> None:
    openings = Openings()
    assert not openings.refusal([(0, 5), (1, 5), (2, 4)], 3)
    assert not openings.refusal([(2, 4), (1, 5), (0, 5)], 3)  # the same
    assert openings.refusal(
        [(0, 5), (1, 5), (3, 5)], 3
    )  # another client in the buffer of a repeated aggregation
    assert openings.refusal([(0, 5), (1, 5)], 3)
    assert not openings.refusal([(0, 5), (3, 5), (4, 5)], 3)
    assert not openings.refusal([(0, 6), (1, 6), (2, 6)], 3)  # other updates of the same clients


def test_on_devices_no_norm_follows_masked_counts(run: Make) -> None:
    run.refuses(
        "dp_clipping_norm = 0, secure_sums = True: of masked counts", clock=WallClock(), **SECURE, **PRIVATE
    )


def test_on_devices_a_line_says_that_no_length_is_bounded(run, caplog) -> None:
    run(rounds=1, clock=WallClock(), **SECURE)
    assert (
        caplog.text.count("nobody sees how long an update is, so that norm_ratio_bound = 1.5 bounds none")
        == 1
    )


def test_lost_tasks_of_virtual_time_are_dropouts(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").setLevel(logging.INFO)
    options = {"task_failure": 0.2, "seed": 3, "server_lr": 1.0}
    plain, before, _ = run(rounds=5, **options)
    secure, metrics, _ = run(rounds=5, **options, **SECURE)
    assert sum(found.get("lost-tasks", 0) for found in metrics.values()) > 0
    assert [found["participants"] for found in metrics.values()] == [
        found["participants"] for found in before.values()
    ]
    assert secure == pytest.approx(plain, abs=1e-6)
