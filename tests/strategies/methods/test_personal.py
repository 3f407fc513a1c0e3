"""Models of clients' own, as the server sees them: FedAMP's means, and what Ditto asks of clients, and never."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import Ditto, FedAMP, FedAvg, RunError
from strategies.clients import client_metrics
from strategies.core.client_vectors import pooled, squared_distances
from strategies.core.conflicts import ConflictError
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT
from strategies.flower.higher_is_better import higher_is_better
from strategies.methods.fedamp import attention
from strategies.streams import generator
from strategies.testing import MemoryGrid

C = 4
MIDDLES = [3.0, 2.0, -1.0, 0.5]


def app(keeps: bool = True) -> ClientApp:
    """An app of quadratics ½ ‖w − c_i‖², whose clients keep v beside w as Ditto has it, with steps of ½."""
    made = ClientApp()

    def step(w: np.ndarray, context: Context, pull: float, anchor: np.ndarray) -> np.ndarray:
        return w - 0.5 * (w - MIDDLES[int(context.node_config["partition-id"])] + pull * (w - anchor))

    def record(w: np.ndarray) -> ArrayRecord:
        return ArrayRecord({"w": Array(w.astype(np.float32))})

    @made.query("describe")
    def describe(message: Message, context: Context) -> Message:
        node = context.node_config
        metrics = {"partition-id": node["partition-id"], "num-partitions": C, "num-examples": 2}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content.config_records["config"]
        sent = message.content.array_records["arrays"]["w"].numpy().astype(float)
        if messages.PERSONAL in config:
            kept = context.state.get("v")
            v = kept["w"].numpy().astype(float) if isinstance(kept, ArrayRecord) else sent
            context.state["v"] = record(step(v, context, float(config[messages.PERSONAL]), sent))
        applied = {key: config[key] for key in (messages.PERSONAL, messages.ALPHA) if key in config}
        pull = float(config.get(messages.ALPHA, 0.0))
        content = RecordDict(
            {
                "arrays": record(step(sent, context, pull, sent)),
                "metrics": MetricRecord({"num-examples": 2}),
                messages.APPLIED: ConfigRecord(applied),
            }
        )
        return Message(content, reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content: dict[str, Any] = {"num-examples": 2, "loss": 1.0}
        own = message.content.get(messages.PERSONAL_MODEL, context.state.get("v"))
        if isinstance(own, ArrayRecord):
            content["personal-loss"] = float(own["w"].numpy()[0])
        return Message(RecordDict({"metrics": MetricRecord(content)}), reply_to=message)

    if keeps:

        @made.query("kept")
        def kept(message: Message, context: Context) -> Message:
            content = RecordDict()
            if (arrays := messages.arrays_of(message)) is not None:
                context.state["v"] = arrays
            elif "v" in context.state:
                content["arrays"] = context.state["v"]
            return Message(content, reply_to=message)

    return made


def grid(keeps: bool = True) -> MemoryGrid:
    return MemoryGrid(app(keeps), [{"partition-id": i} for i in range(C)])


def start(strategy: Any, on: MemoryGrid, rounds: int = 3) -> Any:
    model = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    return strategy.start(on, model, num_rounds=rounds, timeout=30.0)


def kept_by(on: MemoryGrid) -> dict[int, float]:
    return {
        i: float(on.node(i).context.state["v"]["w"].numpy()[0])  # type: ignore[index]
        for i in range(C)
        if "v" in on.node(i).context.state
    }


# ---- FedAMP --------------------------------------------------------------------------------------------------------


def test_the_attention_by_hand():
    squares = np.array([[0.0, 2.0, 8.0], [8.0, 2.0, 0.0]])
    xi = attention(squares, [0, 2], 2.0, 0.6)
    a, b = 0.2 * np.exp(-1), 0.2 * np.exp(-4)
    np.testing.assert_allclose(xi, [[1 - a - b, a, b], [b, a, 1 - a - b]])
    assert attention(squares, [0, 2], 2.0, 0.0).tolist() == [[1, 0, 0], [0, 0, 1]]
    # However many are alike, a client's own model counts no less than theirs.
    alike = attention(np.zeros((5, 5)), list(range(5)), 1e-3, 1.0)
    np.testing.assert_allclose(alike, np.full((5, 5), 0.2))


@pytest.mark.parametrize("block", [1 << 26, 200])
def test_distances_and_means_of_models_in_blocks(block, monkeypatch):
    monkeypatch.setattr("strategies.core.client_vectors.BLOCK", block)
    rng = generator(0, "distances")
    models = (1000 + rng.normal(size=(6, 11))).astype(np.float32)  # far from 0, near each other
    rows, own = [4, 0, 2, 5], [1, 3]
    chosen = models[rows].astype(float)
    left_out = np.array([2, 10])
    trained = np.delete(chosen, left_out, axis=1)
    squares = ((trained[own][:, None] - trained[None]) ** 2).sum(2)
    found = squared_distances(models, rows, own, left_out)
    np.testing.assert_allclose(found, squares, rtol=1e-9, atol=1e-12)
    assert found[0, 1] == found[1, 3] == 0.0
    weights = rng.random((2, 4))
    np.testing.assert_allclose(pooled(weights, models, rows), weights @ chosen, rtol=1e-12)


def test_fedamp_sends_each_its_own_mean_and_takes_what_comes_as_its_model():
    on, strategy = grid(), FedAMP(fedamp_sigma=1.0, fedamp_alpha=0.8, proximal_mu=0.0)
    result = start(strategy, on, rounds=3)
    w = np.zeros(C)
    for server_round in (1, 2, 3):
        xi = 0.2 * np.exp(-2 * (w[:, None] - w[None]) ** 2)  # two values a model
        np.fill_diagonal(xi, 0.0)
        np.fill_diagonal(xi, 1 - xi.sum(1))
        u = xi @ w
        for message in on.requests(server_round=server_round):
            (i,) = on.nodes[message.metadata.dst_node_id].context.node_config.values()
            assert list(message.content.array_records) == ["arrays"]  # in place of the global model
            assert message.content.array_records["arrays"]["w"].numpy() == pytest.approx(u[int(i)], abs=1e-6)
        w = u - 0.5 * (u - MIDDLES)
    assert result.arrays["w"].numpy() == pytest.approx(w.mean(), abs=1e-6)
    scored = [
        m.content.array_records[messages.PERSONAL_MODEL]["w"].numpy()[0] for m in on.requests("evaluate")
    ]
    assert scored[-C:] == pytest.approx(w[on.asked("evaluate")[-C:]], abs=1e-6)


def test_a_second_run_begins_without_the_clients_of_the_first():
    seen: list[dict[str, float]] = []
    strategy = FedAMP(observer=lambda progress: seen.append(dict(progress.metrics)))
    for _ in range(2):
        start(strategy, grid(), rounds=1)
    assert seen[:2] == seen[2:]


def test_of_those_that_take_part_alone_models_change():
    on, strategy = grid(), FedAMP(participation="fixed:0,2", fedamp_alpha=0.0, proximal_mu=0.0)
    start(strategy, on, rounds=1)
    models = strategy.session.client_vectors("models")
    assert [models.get(i)[0] for i in range(C)] == [1.5, 0.0, -0.5, 0.0]


def test_without_attention_each_of_fedamps_clients_trains_alone_to_the_last_bit():
    on, strategy = grid(), FedAMP(fedamp_alpha=0.0, proximal_mu=0.0)
    start(strategy, on, rounds=5)
    alone = np.zeros(C, np.float32)
    for _ in range(5):
        alone = (alone - 0.5 * (alone.astype(float) - MIDDLES)).astype(np.float32)
    assert [strategy.session.client_vectors("models").get(i)[0] for i in range(C)] == alone.tolist()


@pytest.mark.parametrize(
    ("key", "value"), [("aggregation_rule", "median"), ("dp", "central"), ("server_optimizer", "fedexp")]
)
def test_what_fedamp_cannot_be_is_refused(key, value):
    with pytest.raises(ConflictError) as raised:
        FedAMP(client_weights="uniform", **{key: value})
    assert raised.value.keys == (key, "strategy")


# ---- Ditto ---------------------------------------------------------------------------------------------------------


def test_ditto_is_fedavg_to_the_server_and_its_clients_keep_their_own():
    on, plain = grid(), grid()
    ditto, fedavg = start(Ditto(ditto_lambda=0.4), on), start(FedAvg(), plain)
    assert ditto.arrays["w"].numpy().tobytes() == fedavg.arrays["w"].numpy().tobytes()
    W, v = 0.0, np.zeros(C)
    for _ in range(3):
        v = v - 0.5 * (v - MIDDLES + 0.4 * (v - W))
        W = W - 0.5 * (W - np.mean(MIDDLES))
    assert list(kept_by(on).values()) == pytest.approx(v, abs=1e-6)
    assert ditto.evaluate_metrics_clientapp[3]["personal-loss"] == pytest.approx(v.mean(), abs=1e-6)
    assert not kept_by(plain)
    assert all(list(m.content.array_records) == ["arrays"] for m in on.requests())  # of one model's size


def test_a_simulation_that_goes_on_hands_back_what_its_clients_kept():
    states: list[dict[str, Any]] = []
    whole, first, second = grid(), grid(), grid()
    start(Ditto(), whole, rounds=5)
    begun = Ditto()
    begun.run_options.observer = lambda progress: (
        states.append(begun.state()) if progress.aggregation == 2 else None
    )
    start(begun, first, rounds=2)
    resumed = Ditto()
    resumed.restore(states[-1])
    start(resumed, second, rounds=5)
    assert kept_by(second) == kept_by(whole) != kept_by(first)
    assert len(second.requests(messages.ASK_KEPT)) == C  # once


def test_only_those_that_have_trained_have_something_to_hand_back():
    states: list[dict[str, Any]] = []
    on, other = grid(), grid()
    begun = Ditto(participation="fixed:1,3")
    begun.run_options.observer = lambda progress: states.append(begun.state())
    start(begun, on, rounds=1)
    assert states[0]["personal-clients"] == []  # before the first round nobody has one
    assert states[-1]["personal-clients"] == [1, 3]
    resumed = Ditto(participation="fixed:0")
    resumed.restore(states[-1])
    start(resumed, other, rounds=2)
    assert set(kept_by(other)) == {0, 1, 3}


def test_clients_that_cannot_say_what_they_keep_are_named_once(caplog):
    on, strategy = grid(keeps=False), Ditto()
    strategy.run_options.observer = lambda progress: strategy.state() and None
    start(strategy, on)
    said = [r.getMessage() for r in caplog.records if "what they keep" in r.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("a run that goes on begins their own models anew")


def test_devices_are_never_asked_and_know_the_run_by_a_number_of_its_own():
    states: list[dict[str, Any]] = []
    on, other = grid(), grid()
    on.engine = other.engine = DEPLOYMENT
    strategy = Ditto(client_weights="uniform")
    strategy.run_options.observer = lambda progress: states.append(strategy.state())
    start(strategy, on, rounds=2)
    assert on.requests(messages.ASK_KEPT) == []
    assert "personal" not in states[-1]

    def numbers(of: MemoryGrid) -> set[Any]:
        asked = [*of.requests(), *of.requests("evaluate")]
        return {m.content.config_records["config"][messages.KEPT_FOR] for m in asked}

    (number,) = numbers(on)
    assert number > 0
    resumed = Ditto(client_weights="uniform")
    resumed.restore(states[-1])
    start(resumed, other, rounds=3)
    assert numbers(other) == {number}
    start(Ditto(client_weights="uniform"), other, rounds=1)
    assert len(numbers(other)) == 2  # another run has another


def test_clients_that_do_not_say_that_they_keep_a_model_are_named(federation, train_config, caplog):
    arrays = ArrayRecord({"w": Array(np.zeros(1))})
    Ditto(fraction_evaluate=0.0).start(federation(), arrays, num_rounds=2, train_config=train_config())
    said = [r.getMessage() for r in caplog.records if messages.PERSONAL in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("clients don't say that their local steps go by strategies.personal:")


def test_fedamp_is_no_method_for_a_wrapper():
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    with pytest.raises(
        RunError, match="FedAMP: each client is sent a mean of the others' models, which a wrapper"
    ):
        start(DifferentialPrivacyServerSideFixedClipping(FedAMP(fraction_evaluate=0.0), 0.1, 1.0, C), grid())


# ---- What is told of clients ----------------------------------------------------------------------------------


def test_jains_index_is_of_scores_alone():
    assert client_metrics.spread("accuracy", [0.5] * 7)["client-accuracy-jain"] == pytest.approx(1.0)
    assert client_metrics.spread("accuracy", [1.0, 0.0, 0.0, 0.0])["client-accuracy-jain"] == pytest.approx(
        0.25
    )
    told = client_metrics.spread("personal-accuracy", [0.2, 0.4])
    assert told["personal-accuracy-jain"] == pytest.approx(0.36 / (2 * 0.2))
    assert {"personal-accuracy-mean", "personal-accuracy-worst-tenth"} < set(told)
    for metric, values in (
        ("loss", [1.0, 2.0]),
        ("r2", [-0.1, 0.5]),
        ("accuracy", [0.0, 0.0]),
        ("rmse", [1.0]),
    ):
        assert not any("jain" in name for name in client_metrics.spread(metric, values))
    assert not any("jain" in name for name in client_metrics.spread("accuracy", [0.5, float("nan")]))


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        ("personal-loss-mean", True),
        ("personal-rmse", True),
        ("personal-accuracy-worst-tenth", False),
        ("client-accuracy-jain", False),
        ("personal-accuracy-std", True),
    ],
)
def test_which_way_a_metric_of_own_models_is_worse(metric, less):
    assert higher_is_better(metric) is (not less)
