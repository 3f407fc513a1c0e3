"""The strategies in an app that was written after Flower's documentation: the same keywords, replies and arithmetic.

The clients are as Flower's guides have them: no handler of ours, a metric ``num-examples`` and metrics of their own.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import InconsistentMessageReplies

from strategies import (
    REGISTRY,
    AsyncFedAvg,
    DivergedError,
    FedAvg,
    FedBuff,
    FedFix,
    FedProx,
    RunError,
    Scaffold,
    Spectral,
    VirtualClock,
    WallClock,
)
from strategies.core.conflicts import ConflictError
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid

CENTRES, SIZES = (3.0, 2.0, -1.0, 0.7, 1.6, -2.5, 4.1), (1, 2, 5, 3, 2, 1, 4)
Reply = Callable[[Message, Context, RecordDict], RecordDict]


def stock(spoil: Reply = lambda message, context, content: content, mods: Any = None) -> ClientApp:
    """Return an app in which client i minimises (w − c_i)² / 2; ``spoil`` changes its replies."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config, i = message.content.config_records["config"], int(context.node_config["partition-id"])
        record = next(iter(message.content.array_records.values()))
        start = record["w"].numpy()
        w = start.astype(np.float64)
        for _ in range(int(config.get("local-steps", 1))):
            pull = float(config.get("proximal-mu", 0.0)) * (w - start)
            w = w - 0.5 * (w - CENTRES[i] + pull)
        metrics = {"train_loss": float((w[0] - CENTRES[i]) ** 2), "steps": 3 + i, "num-examples": SIZES[i]}
        content = RecordDict(
            {"arrays": ArrayRecord({"w": Array(w.astype(start.dtype))}), "metrics": MetricRecord(metrics)}
        )
        return Message(spoil(message, context, content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        w = next(iter(message.content.array_records.values()))["w"].numpy()
        metrics = {
            "loss": float((w[0] - CENTRES[i]) ** 2),
            "num-examples": SIZES[i],
            "by-class": [1.0, float(i)],
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def grid(*spoil: Reply, mods: Any = None, devices: bool = False, clients: int = 3) -> MemoryGrid:
    made = MemoryGrid(stock(*spoil, mods=mods), [{"partition-id": i} for i in range(clients)])
    if devices:
        made.engine = DEPLOYMENT
    return made


def model(w: float = 1.0) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.array([w, w], np.float32))})


def value(result: Any) -> float:
    return float(result.arrays["w"].numpy()[0])


# ---- Flower's arithmetic -------------------------------------------------------------------------------------------


PAIRS: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
    (flower.FedAvg, FedAvg, {}, {}),
    (flower.FedProx, FedProx, {"proximal_mu": 0.3}, {}),
    (flower.FedMedian, FedAvg, {}, {"client_weights": "uniform", "aggregation_rule": "median"}),
    (
        flower.FedTrimmedAvg,
        FedAvg,
        {},
        {"client_weights": "uniform", "aggregation_rule": "trimmed-mean", "faulty_clients": 1},
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "both", "own"), PAIRS, ids=lambda v: getattr(v, "__name__", ""))
def test_it_is_flowers_arithmetic(theirs, ours, both, own):
    more = {"beta": 0.34} if theirs is flower.FedTrimmedAvg else {}
    config = ConfigRecord({"local-steps": 2})
    expected = theirs(**both, **more).start(grid(), model(), num_rounds=3, train_config=config)
    result = ours(**both, **own).start(grid(), model(), num_rounds=3, train_config=config)
    assert value(result) == pytest.approx(value(expected), abs=1e-6)
    if not own:  # Flower's rules weigh metrics by examples, whatever they do with the models
        for number in (1, 2, 3):
            told = result.train_metrics_clientapp[number]
            assert {key: told[key] for key in ("train_loss", "steps")} == pytest.approx(
                dict(expected.train_metrics_clientapp[number]), rel=1e-5
            )
            evaluated = result.evaluate_metrics_clientapp[number]
            assert evaluated["loss"] == pytest.approx(
                expected.evaluate_metrics_clientapp[number]["loss"], rel=1e-5
            )
            assert evaluated["by-class"] == pytest.approx(
                expected.evaluate_metrics_clientapp[number]["by-class"]
            )


@pytest.mark.parametrize("ours", [False, True])
def test_flowers_privacy_round_it_clips_alike(ours):
    # Δ = 1, .5, −1 in both coordinates, clipped to norm .5: ±.5/√2; (1 + 2 − 5)/8 · .5/√2
    inner = FedAvg() if ours else flower.FedAvg()
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(
        inner, noise_multiplier=0.0, clipping_norm=0.5, num_sampled_clients=3
    )
    result = wrapped.start(grid(), model(), num_rounds=1)
    assert value(result) == pytest.approx(1 - 2 / 8 * 0.5 / 2**0.5, abs=1e-6)


@pytest.mark.parametrize("describes", [False, True])
def test_a_fraction_is_drawn_and_weighed_as_flower_does(describes):
    app = stock()
    if describes:

        @app.query("describe")
        def describe(message: Message, context: Context) -> Message:
            i = int(context.node_config["partition-id"])
            metrics = MetricRecord({"partition-id": i, "num-examples": SIZES[i]})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    assert FedAvg(fraction_train=0.5).config.participation == "flower"
    made = MemoryGrid(app, [{"partition-id": i} for i in range(3)], node_ids=[10, 20, 30])
    result = FedAvg(fraction_train=0.7, seed=1).start(made, model(), num_rounds=1)
    (a, b) = made.asked()
    p = [SIZES[i] / (SIZES[a] + SIZES[b]) for i in (a, b)]
    assert value(result) == pytest.approx(
        1 + sum(q * (CENTRES[i] - 1) / 2 for q, i in zip(p, (a, b), strict=True))
    )


def test_weights_that_rest_on_all_sizes_want_the_handler():
    with pytest.raises(
        RunError, match=r"^participation = 'uniform': its weights rest on the number of examples"
    ):
        FedAvg(participation="uniform", fraction_train=0.5).start(grid(), model(), num_rounds=1)


def test_a_draw_of_ones_own_keeps_its_weights():
    class First(FedAvg):
        def select(self, clients: Any, rng: Any) -> Any:
            return clients[:1], [0.25]

    made = grid()
    result = First().start(made, model(), num_rounds=1)
    assert value(result) == pytest.approx(1 + 0.25 * (CENTRES[made.asked()[0]] - 1) / 2)


# ---- Keywords ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REGISTRY.values())
def test_a_wrong_keyword_is_a_type_error_at_once(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) has no keyword 'fraction_trian': "):
        kind(fraction_trian=0.5)
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__}\(min_evaluate_nodes = '2'\): must be of type int$"
    ):
        kind(min_evaluate_nodes="2")
    with pytest.raises(TypeError, match=r"must be of type float|allowed are keywords, and a config"):
        kind({"seed": 1})
    with pytest.raises(ValueError, match=r"^fraction_evaluate = 2\.0: must be 0 to 1$"):
        kind(fraction_evaluate=2.0)


def test_the_least_number_of_clients_is_waited_for_and_draws_that_do_not_know_it_refuse_it():
    assert FedAvg(min_train_nodes=7).config.min_clients == 7
    assert AsyncFedAvg(min_evaluate_nodes=5).config.min_clients == 5
    assert FedAvg(FedAvg.Config(min_clients=1), fraction_evaluate=0.0).config.min_clients == 1
    with pytest.raises(ConflictError) as raised:
        FedAvg(min_train_nodes=3, participation="uniform", fraction_train=0.5)
    assert raised.value.keys == ("min_train_nodes", "participation")


@pytest.mark.parametrize("base", [FedAvg, AsyncFedAvg])
def test_a_model_of_ones_own_that_is_none_is_an_error(base):
    def aggregate(self: Any, model: Any, contributions: Any, weights: Any) -> Any:
        return model * np.nan

    with pytest.raises(DivergedError, match="aggregation 1 made a model that isn't finite"):
        type("Own", (base,), {"aggregate": aggregate})().start(grid(), model(), num_rounds=2)


def test_a_robust_rule_wants_enough_of_those_that_are_drawn():
    strategy = FedAvg(
        client_weights="uniform", aggregation_rule="median", faulty_clients=1, fraction_train=0.3
    )
    with pytest.raises(ValueError, match="needs 3 clients a round or more, 2 take part"):
        strategy.check(5)


def test_keywords_change_a_config_and_have_flowers_names():
    strategy = FedProx(
        FedProx.Config(proximal_mu=0.5, seed=3), seed=4, min_available_nodes=7, min_evaluate_nodes=1
    )
    assert (strategy.config.proximal_mu, strategy.config.seed, strategy.config.min_clients) == (0.5, 4, 7)
    assert strategy.session.run.flower.min_evaluate_nodes == 1


def test_records_and_weights_under_names_of_ones_own():
    plain, sent = stock(), []

    def app(message: Message, context: Context) -> Message:
        sent.append(sorted(message.content))
        content = RecordDict({"config": message.content["cfg"]})
        if "model" in message.content:
            content["arrays"] = message.content["model"]
        message.content = content
        reply = plain(message, context)
        metrics = reply.content.metric_records["metrics"]
        told = MetricRecord({"rows": metrics["num-examples"]})
        reply.content = RecordDict({"model": reply.content["arrays"], "told": told})
        return reply

    made = grid()
    made.app = app  # type: ignore[assignment]
    names = {"arrayrecord_key": "model", "configrecord_key": "cfg", "weighted_by_key": "rows"}
    strategy = FedAvg(fraction_evaluate=0.0, describe=True, **names)
    assert value(strategy.start(made, model(), num_rounds=1)) == pytest.approx(0.625)
    assert sent == [["cfg"], *[["cfg", "model"]] * 3]


# ---- Weights that clients tell -------------------------------------------------------------------------------------


def drop_size(*clients: int) -> Reply:
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        if context.node_config["partition-id"] in clients:
            del content.metric_records["metrics"]["num-examples"]
        return content

    return spoil


def test_without_any_size_it_is_an_error_as_in_flower():
    with pytest.raises(InconsistentMessageReplies):
        flower.FedAvg().start(grid(drop_size(0, 1, 2)), model(), num_rounds=1)
    with pytest.raises(RunError, match=r"no client counts: its reply has no metric 'num-examples'"):
        FedAvg().start(grid(drop_size(0, 1, 2)), model(), num_rounds=1)
    assert value(FedAvg(client_weights="uniform").start(grid(drop_size(0, 1, 2)), model(), num_rounds=1)) == (
        pytest.approx(1 + (1 + 0.5 - 1) / 3)
    )


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedFix])
def test_without_rounds_too(kind):
    with pytest.raises(RunError, match="no client is left"):
        kind().start(grid(drop_size(0, 1, 2)), model(), num_rounds=3)


def test_who_does_not_say_its_size_is_left_out_and_named(caplog):
    result = FedAvg().start(grid(drop_size(0)), model(), num_rounds=1)
    assert value(result) == pytest.approx(1 + (2 * 0.5 - 5) / 7)
    assert "its reply has no metric 'num-examples', which says how much it counts" in caplog.text


@pytest.mark.parametrize("said", [-1, float("nan"), float("inf"), [1, 2]])
def test_a_weight_that_is_none_leaves_its_client_out(said, caplog):
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        if context.node_config["partition-id"] == 0:
            content.metric_records["metrics"]["num-examples"] = said
        return content

    result = FedAvg().start(grid(spoil), model(), num_rounds=1)
    assert value(result) == pytest.approx(1 + (2 * 0.5 - 5) / 7)
    assert "must be a positive number" in caplog.text


def test_fractions_count_as_they_are():
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        content.metric_records["metrics"]["num-examples"] = (0.5, 0.25, 0.25)[
            int(context.node_config["partition-id"])
        ]
        return content

    assert value(FedAvg().start(grid(spoil), model(), num_rounds=1)) == pytest.approx(1 + 0.5 + 0.125 - 0.25)


# ---- Replies that are meant well -----------------------------------------------------------------------------------


def test_another_record_name_is_understood():
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        return RecordDict({"weights": content["arrays"], "metrics": content["metrics"]})

    assert value(FedAvg().start(grid(spoil), model(), num_rounds=1)) == pytest.approx(0.625)


def test_whole_numbers_for_floats_are_left_out_with_one_line(caplog):
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        if context.node_config["partition-id"] == 0:
            w = content.array_records["arrays"]["w"].numpy().astype("int8")
            content["arrays"] = ArrayRecord({"w": Array(w)})
        return content

    result = FedAvg().start(grid(spoil), model(), num_rounds=1)
    assert result.arrays["w"].dtype == "float32"
    assert value(result) == pytest.approx(1 + (2 * 0.5 - 5 * 1) / 7)  # without client 0
    (line,) = [r.getMessage() for r in caplog.records if "round 1: left out" in r.getMessage()]
    assert line.endswith("array 'w' is int8[2], the model's is float32[2]")


def test_an_override_is_given_a_list_of_replies():
    class Counting(FedAvg):
        seen: tuple[int, ...] = ()

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.seen = (len(list(replies)), len(list(replies)))  # Flower's users do look twice
            return super().aggregate_train(server_round, replies)

    strategy = Counting()
    assert value(strategy.start(grid(), model(), num_rounds=1)) == pytest.approx(0.625)
    assert strategy.seen == (3, 3)


def test_an_override_may_send_messages_of_its_own():
    class Marked(FedAvg):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            for request in super().configure_train(*args):
                content = RecordDict({**request.content, "note": ConfigRecord({"text": "hello"})})
                yield Message(content, dst_node_id=request.metadata.dst_node_id, message_type=messages.TRAIN)

    assert value(Marked().start(grid(), model(), num_rounds=1)) == pytest.approx(0.625)


@pytest.mark.parametrize("hook", ["configure_train", "aggregate_train"])
@pytest.mark.parametrize("kind", [AsyncFedAvg, FedFix, FedBuff])
def test_without_rounds_flowers_hooks_are_refused_with_what_there_is_instead(kind, hook):
    own = type("Own", (kind,), {hook: lambda self, *args: None})
    with pytest.raises(
        TypeError, match=rf"^Own\.{hook} would never be called, as there are no rounds: override"
    ):
        own()


# ---- The handshake -------------------------------------------------------------------------------------------------


def looks_at_round(message: Message, context: Context, call_next: Any) -> Message:
    assert message.content.config_records["config"]["server-round"] >= 1
    return call_next(message, context)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "mod",
    [looks_at_round, fixedclipping_mod, LocalDpMod(5.0, 1.0, 1e9, 0.1)],
    ids=["of one's own", "clipping", "local privacy"],
)
@pytest.mark.parametrize("kind", [FedAvg, FedFix])
def test_a_mod_of_the_app_does_not_break_it(kind, mod):
    made = grid(mods=[mod])
    result = kind(fraction_evaluate=0.0).start(
        made, model(), num_rounds=1, train_config=ConfigRecord({"clipping_norm": 1e9})
    )
    assert value(result) != 1.0


def test_in_a_simulation_one_traceback_tells_it_all():
    made = grid()
    FedAvg(describe=True).start(made, model(), num_rounds=1)
    assert len(made.requests(messages.DESCRIBE)) == 1


@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("kind", [FedAvg, FedProx, Scaffold])
def test_a_stock_app_is_asked_nothing(kind, devices, caplog):
    caplog.set_level(logging.INFO)
    made = grid(devices=devices)
    made.app = lambda message, context, app=made.app: app(message, context)  # nobody knows the app
    kind(safeguards="off").start(made, model(), num_rounds=1)
    assert {message.metadata.message_type for message in made.sent} == {"train", "evaluate"}
    assert "it wasn't asked; describe=True asks it" in caplog.text


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg(describe=True),
        FedAvg(time_scenario="F0"),
        FedAvg(client_weights="uniform", participation="uniform", fraction_train=0.5),
        FedBuff(server_lr=1.0),
    ],
)
def test_who_needs_descriptions_asks_for_them(strategy):
    made = grid()
    made.app = lambda message, context, app=made.app: app(message, context)
    strategy.start(made, model(), num_rounds=1)
    assert made.requests(messages.DESCRIBE)


def test_described_clients_have_fixed_indices_and_a_seed_repeats_the_run():
    def runs(**options: Any) -> list[list[int]]:
        cohorts = []
        for seed in range(4):  # of the nodes' ids
            app = stock()

            @app.query("describe")
            def describe(message: Message, context: Context) -> Message:
                i = int(context.node_config["partition-id"])
                metrics = MetricRecord({"partition-id": i, "num-examples": SIZES[i]})
                return Message(RecordDict({"metrics": metrics}), reply_to=message)

            nodes = [{"partition-id": i, "num-partitions": 7} for i in range(7)]
            made = MemoryGrid(lambda m, c, app=app: app(m, c), nodes, seed=seed)
            FedAvg(fraction_train=0.3, fraction_evaluate=0.0, **options).start(made, model(), num_rounds=2)
            cohorts.append(sorted(made.asked(server_round=1)))
        return cohorts

    assert len({tuple(each) for each in runs(describe=True)}) == 1
    assert len({tuple(each) for each in runs()}) > 1


def test_a_fleet_in_which_only_some_have_the_handler(caplog):
    app, plain = stock(), stock()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": SIZES[i]})}), reply_to=message)

    made = MemoryGrid(app, [{"partition-id": i} for i in range(3)], node_ids=[10, 20, 30])
    made.engine = DEPLOYMENT
    made.app = lambda m, c: (plain if c.node_id == 10 else app)(m, c)  # type: ignore[assignment, return-value]
    result = FedAvg(safeguards="off", describe=True).start(made, model(), num_rounds=1)
    assert value(result) == pytest.approx(0.625)
    assert "node 10: no answer to query.describe" in caplog.text


# ---- What is sent, and what is done with it ------------------------------------------------------------------------


def test_nothing_of_the_users_config_is_overwritten():
    made, mine = grid(), {"client": 7, "task": "mnist", "alpha": 0.1, "beta": 2}
    FedProx(proximal_mu=0.3).start(made, model(), num_rounds=1, train_config=ConfigRecord(dict(mine)))
    for request in made.requests():
        sent = request.content.config_records["config"]
        assert {key: sent[key] for key in mine} == mine
        assert {key for key in sent if key not in mine} == {
            "server-round",
            "proximal-mu",
            "strategies.client",
            "strategies.task",
        }


def test_metrics_by_functions_of_ones_own():
    def count(contents: list[RecordDict], key: str) -> MetricRecord:
        assert all(key in content.metric_records["metrics"] for content in contents)
        return MetricRecord({"replies": len(contents)})

    options = {"train_metrics_aggr_fn": count, "evaluate_metrics_aggr_fn": count}
    result = FedAvg(**options).start(grid(), model(), num_rounds=2)
    assert [m["replies"] for m in result.train_metrics_clientapp.values()] == [3, 3]
    assert [dict(m) for m in result.evaluate_metrics_clientapp.values()] == [{"replies": 3}, {"replies": 3}]
    result = FedBuff(buffer_size=3, **options).start(grid(), model(), num_rounds=2)
    assert [m["replies"] for m in result.train_metrics_clientapp.values()] == [3, 3]


def test_without_rounds_a_function_of_metrics_holds_no_arrays():
    seen: list[list[str]] = []

    def names(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.extend(list(content) for content in contents)
        return MetricRecord()

    FedBuff(buffer_size=3, train_metrics_aggr_fn=names).start(grid(), model(), num_rounds=1)
    assert seen == [["metrics"]] * 3


@pytest.mark.parametrize("kind", [FedAvg, FedFix, AsyncFedAvg, FedBuff])
def test_a_run_that_nobody_watches_says_how_it_goes(kind, caplog):
    own = {"buffer_size": 2} if kind is FedBuff else {}
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        kind(**own).start(grid(), model(), num_rounds=3)
    word = "round" if kind is FedAvg else "aggregation"
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{word} ")]
    assert lines
    assert kind is not FedAvg or "train_loss" in lines[1]


# ---- The clock, and defaults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("kind", [AsyncFedAvg, FedFix, FedAvg])
def test_the_clock_follows_from_where_it_runs(kind, devices, caplog):
    strategy = kind(fraction_evaluate=0.0, **({"fedfix_interval": 0.05} if kind is FedFix else {}))
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        for _ in range(2):  # a second run begins anew
            strategy.start(grid(devices=devices), model(), num_rounds=2)
            assert isinstance(strategy.session.clock, WallClock if devices else VirtualClock)
            assert strategy.session.aggregations == 2
    said = "real time, on devices" if devices else "virtual time, in a simulation"
    assert caplog.text.count(f"clock: {said}") == (
        0 if kind is FedAvg else 2
    )  # no time matters to its rounds


@pytest.mark.parametrize("clients", [4, 20])
def test_asynchronous_fedavg_is_stable_at_its_defaults(clients):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy()
        content = {
            "arrays": ArrayRecord({"w": Array(w - 0.9 * (w - 1))}),
            "m": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    made = MemoryGrid(app, [{} for _ in range(clients)])
    result = AsyncFedAvg(fraction_evaluate=0.0).start(made, model(0.0), num_rounds=300)
    assert value(result) == pytest.approx(1.0, abs=0.05)


def test_an_interval_with_nothing_in_it_is_no_aggregation_on_devices_either():
    made = grid(devices=True)
    for node in made.nodes.values():
        node.delay = 0.3
    result = FedFix(fedfix_interval=0.02, fraction_evaluate=0.0).start(made, model(), num_rounds=1)
    assert value(result) != 1.0


@pytest.mark.parametrize("kind", [FedAvg, FedFix])
def test_a_run_in_which_nothing_was_accepted_is_an_error(kind):
    def fail(message: Message, context: Context, content: RecordDict) -> RecordDict:
        raise RuntimeError("out of memory")

    with pytest.raises(RunError):
        kind(fraction_evaluate=0.0).start(grid(fail), model(), num_rounds=2)


# ---- Wrappers ------------------------------------------------------------------------------------------------------


def wrappers(inner: Any) -> list[Any]:
    return [
        flower.DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 3),
        flower.DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 1.0, 3),
        flower.DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 3),
    ]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", [AsyncFedAvg, FedFix, FedBuff])
def test_without_rounds_a_wrapper_is_refused(kind, place):
    with pytest.raises(RunError, match="has no rounds: call its own start"):
        wrappers(kind())[place].start(grid(), model(), num_rounds=1)


@pytest.mark.parametrize("place", range(3))
def test_neighbours_do_not_slip_past_a_wrapper(place):
    made = grid()
    with pytest.raises(
        RunError,
        match=r"^Spectral: perturbation_beta = 0\.5, allowed there is 1: each client is sent a mean of its "
        "neighbours'",
    ):
        wrappers(Spectral())[place].start(made, model(), num_rounds=1)
    assert made.requests() == []


# ---- Evaluation in real time ---------------------------------------------------------------------------------------


def test_a_run_without_rounds_does_not_wait_for_clients_that_evaluate():
    made, seen = grid(devices=True), []
    slow = 0.03

    def pushed(requests: Iterable[Message], push: Any = made.push_messages) -> Any:
        ids = []
        for request in requests:  # evaluating takes long, training doesn't
            node = made.nodes[request.metadata.dst_node_id]
            node.delay = slow if request.metadata.message_type == messages.EVALUATE else 0.002
            ids += push([request])
        return ids

    made.push_messages = pushed  # type: ignore[method-assign]
    strategy = AsyncFedAvg(observer=lambda progress: seen.append(dict(progress.metrics)), eval_every=1)
    result = strategy.start(made, model(), num_rounds=100)
    told = [m[messages.EVALUATED] for m in seen if messages.EVALUATED in m]
    assert told
    assert told[0] == 1  # the first that was asked for, told with a later model's report
    evaluated = list(result.evaluate_metrics_clientapp)
    assert evaluated[0] == 1
    assert evaluated[-1] == 100  # the last model's is waited for
    assert len(evaluated) < 60
