"""Flower's strategies under their names: Flower's keywords and results, and a page that names all of them."""

import inspect
import math
import pickle
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

import strategies
from strategies import Bulyan, FedAdam, FedAvg, FedAvgM, FedProx, Krum, QFedAvg, RunError
from strategies.core.config import FlowerOptions
from strategies.core.conflicts import ConflictError
from strategies.testing import MemoryGrid
from tests.strategies.flower.test_stock_app import grid, model

PAGE = (Path(__file__).parents[3] / "docs" / "flower.md").read_text("utf-8")
SECTION = PAGE.split("## Flower's strategies by name\n")[1].split("\n## ")[0]


def smallest(contents: list[RecordDict], faulty: int, number: int) -> list[RecordDict]:
    return sorted(contents, key=lambda content: next(iter(content["arrays"].values())).numpy()[0])[:number]


# Keywords of each, beside the defaults.
SAME: dict[str, list[dict[str, Any]]] = {
    "FedAdam": [{}, {"eta": 0.03, "beta_1": 0.5, "beta_2": 0.9, "tau": 0.01}],
    "FedAdagrad": [{}, {"eta": 0.3, "tau": 0.1}],
    "FedYogi": [{}, {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.9, "tau": 0.01}],
    "FedAvgM": [{}, {"server_learning_rate": 0.5, "server_momentum": 0.7}],
    "QFedAvg": [{"client_learning_rate": 0.5}, {"client_learning_rate": 0.1, "q": 2.0}],
    "FedMedian": [{}],
    "FedTrimmedAvg": [{}, {"beta": 0.34}],
    "Krum": [{}, {"num_malicious_nodes": 2}],
    "MultiKrum": [{"num_malicious_nodes": 1, "num_nodes_to_select": 3}],
    "Bulyan": [{}, {"num_malicious_nodes": 1}, {"num_malicious_nodes": 1, "selection_rule": smallest}],
}
ROBUST = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")
CASES = [(name, options) for name, cases in SAME.items() for options in cases]


def test_the_page_has_every_name_of_flowers():
    ours, others = SECTION.split(" are classes of ")
    here = set(re.findall(r"`(\w+)`", ours))
    assert here | set(re.findall(r"`(\w+)`", others)) >= set(flower.__all__)
    assert here == set(flower.__all__) & set(strategies.__all__)
    (keywords,) = re.findall(r"`FedAvg(\(.*?\))`", others, re.S)
    eval(f"FedAvg{keywords}", {"FedAvg": FedAvg})  # they are accepted


CONFIG = ConfigRecord({"local-steps": 2})


# Of the page: by how much the models may differ in float32 near weights of 1.
IN_FLOAT32 = {"FedAvg": 2e-6, "FedAvgM": 5e-6, "FedYogi": 5e-6, "FedAdam": 3e-5, "FedAdagrad": 1e-4}


def near_one(dtype: str, lr: float) -> Any:
    """Return a grid of clients with a step of ``lr`` towards centres about 1."""

    def work(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        content = RecordDict({"metrics": MetricRecord({"num-examples": number + 1})})
        w = message.content.array_records["arrays"]["w"].numpy().astype(np.float64)
        centre = np.random.default_rng(number).normal(1.0, 1.0, len(w))
        content["arrays"] = ArrayRecord({"w": Array((w - lr * (w - centre)).astype(dtype))})
        return Message(content, reply_to=message)

    return MemoryGrid(work, [{"partition-id": i, "num-partitions": 5} for i in range(5)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_models_near_one_differ_by_the_rounding_that_the_page_names(name, dtype):
    options: dict[str, Any] = {"server_momentum": 0.9} if name == "FedAvgM" else {}
    for lr in (0.5, 1e-4):
        made = []
        for room in (strategies, flower):
            initial = np.random.default_rng(99).normal(1.0, 0.3, 500).astype(dtype)
            strategy = getattr(room, name)(fraction_evaluate=0.0, **options)
            arrays = ArrayRecord({"w": Array(initial)})
            result = strategy.start(near_one(dtype, lr), arrays, num_rounds=8, timeout=10)
            made.append(result.arrays["w"].numpy())
        assert np.abs(made[0] - made[1]).max() <= (1e-12 if dtype == "float64" else IN_FLOAT32[name])


def test_the_page_names_those_differences():
    said = " ".join(SECTION.split())
    for value in ("1e-12", "2e-6", "5e-6", "3e-5", "1e-4"):
        assert value in said


def test_the_adaptive_wrapper_moves_the_norm_as_the_page_says():
    inner = FedAvg(fraction_evaluate=0.0)
    wrapper = flower.DifferentialPrivacyServerSideAdaptiveClipping(
        inner,
        noise_multiplier=0.0,
        num_sampled_clients=3,
        initial_clipping_norm=1.0,
        clipped_count_stddev=0.0,
    )
    # Every update, of norm √2 or more, is longer than the norm 1; the rate is 0.2, the quantile 0.5: exp(±0.1).
    wrapper.start(far(), model(), num_rounds=1)
    wrong = version("flwr").startswith(("1.41", "1.42"))
    assert wrapper.clipping_norm == pytest.approx(0.905 if wrong else 1.105, abs=1e-3)
    assert "0.905 instead of 1.105" in PAGE


def far() -> Any:
    """Return a grid of clients that reply with the model + 10."""

    def work(message: Message, context: Context) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(w + np.float32(10))})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return MemoryGrid(work, [{"partition-id": i, "num-partitions": 3} for i in range(3)])


@cache
def by_fedavg(clients: int) -> np.ndarray:
    return (
        FedAvg().start(grid(clients=clients), model(), num_rounds=8, train_config=CONFIG).arrays["w"].numpy()
    )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_model_is_flowers_over_8_rounds_in_float32(name, options):
    clients = 7 if name in ROBUST else 3
    ours, theirs = (
        getattr(room, name)(**options).start(
            grid(clients=clients), model(), num_rounds=8, train_config=CONFIG
        )
        for room in (strategies, flower)
    )
    got, expected = (result.arrays["w"].numpy() for result in (ours, theirs))
    assert got == pytest.approx(expected, abs=1e-6)
    assert np.abs(got - 1).max() > 1e-4  # the model has moved
    unlike = name != "FedAvgM" or options
    assert (np.abs(by_fedavg(clients) - got).max() > 1e-6) == bool(unlike)


@pytest.mark.parametrize("name", SAME)
def test_arguments_have_flowers_names_defaults_and_order(name):
    ours, theirs = getattr(strategies, name), getattr(flower, name)
    parameters = list(inspect.signature(theirs).parameters.values())
    order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(ours.Config.positional) == order
    for each in parameters:
        if each.default is not each.empty and each.default is not None:
            known = ours.Config() if hasattr(ours.Config(), each.name) else FlowerOptions()
            expected = 0 if each.name == "min_available_nodes" else each.default
            assert getattr(known, each.name) == expected


def test_attributes_are_read_and_set_before_a_run():
    strategy, given = FedAdam(), FedAdam(eta=0.03, beta_1=0.5)
    strategy.eta, strategy.beta_1 = 0.03, 0.5
    assert (strategy.eta, strategy.beta_2) == (0.03, 0.99)
    results = [each.start(grid(), model(), num_rounds=3) for each in (strategy, given)]
    assert results[0].arrays["w"].data == results[1].arrays["w"].data


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", *SAME])
def test_every_keyword_of_flowers_is_an_attribute(name):
    strategy = getattr(strategies, name)(**SAME.get(name, [{}])[0])
    for keyword in inspect.signature(getattr(flower, name)).parameters:
        setattr(strategy, keyword, getattr(strategy, keyword))
        assert keyword not in vars(strategy)  # where nothing reads it


def test_a_pull_that_is_set_is_sent():
    strategy, clients = FedProx(), grid()
    strategy.proximal_mu = 0.5
    strategy.start(clients, model(), num_rounds=1)
    assert {each.content["config"]["proximal-mu"] for each in clients.requests()} == {0.5}


def test_keys_of_another_server_optimizer_are_refused():
    for kind, key, value in ((FedAdam, "server_lr", 0.5), (FedAvgM, "server_optimizer", "adam")):
        with pytest.raises(ConflictError) as raised:
            kind(**{key: value})
        assert raised.value.keys == (key, "strategy")
    with pytest.raises(TypeError, match=r"QFedAvg\(\) needs client_learning_rate"):
        QFedAvg()


def test_a_robust_rule_is_alone_and_its_keywords_are_read_when_a_run_begins(caplog):
    with pytest.raises(ConflictError) as raised:
        Krum(faulty_clients=1)
    assert raised.value.keys == ("faulty_clients", "strategy")
    with pytest.raises(ConflictError, match=r"^Krum, num_malicious_nodes = 0 with dp = 'central': "):
        Krum(dp="central")
    strategy = Bulyan()
    strategy.num_malicious_nodes = 1
    with pytest.raises(
        RunError, match=r"^Bulyan, num_malicious_nodes = 1: needs 7 clients a round or more, 6 take"
    ):
        strategy.start(grid(clients=6), model(), num_rounds=1)
    Krum(num_malicious_nodes=2).start(grid(clients=6), model(), num_rounds=1)
    assert "num_malicious_nodes = 2: Krum tolerates fewer with 6 clients; 7 or more are needed" in caplog.text


def test_a_missing_loss_is_named():
    with pytest.raises(RunError, match=r"train_loss_key = 'loss': the reply of client \d"):
        QFedAvg(0.5, train_loss_key="loss").start(grid(), model(), num_rounds=1)


@pytest.mark.parametrize("loss", [-0.5, math.nan])
def test_a_loss_without_a_power_is_refused(loss):
    def spoil(message: Message, context: Context, content: RecordDict) -> RecordDict:
        content.metric_records["metrics"]["train_loss"] = loss
        return content

    with pytest.raises(
        RunError, match=rf"client \d \(node \d+\) has {loss}; QFedAvg takes losses to the power q"
    ):
        QFedAvg(0.5).start(grid(spoil), model(), num_rounds=1)


PRIVATE: dict[str, dict[str, Any]] = {
    "DifferentialPrivacyServerSideFixedClipping": {"clipping_norm": 0.5},
    "DifferentialPrivacyServerSideAdaptiveClipping": {"initial_clipping_norm": 0.5},
    "DifferentialPrivacyClientSideFixedClipping": {"clipping_norm": 0.5},
    "DifferentialPrivacyClientSideAdaptiveClipping": {"initial_clipping_norm": 0.5},
}


@pytest.mark.parametrize("name", PRIVATE)
def test_flowers_wrappers_for_privacy_make_the_same_of_our_rounds_as_of_flowers(name):
    mods = [fixedclipping_mod] * ("ClientSideFixed" in name) + [adaptiveclipping_mod] * (
        "ClientSideAda" in name
    )

    def run(inner: Any) -> Any:
        np.random.seed(1)  # the wrappers' noise is NumPy's global generator's
        wrapper = getattr(flower, name)(inner, noise_multiplier=0.01, num_sampled_clients=7, **PRIVATE[name])
        result = wrapper.start(grid(mods=mods, clients=7), model(), num_rounds=20)
        return result.arrays["w"].numpy()

    got, expected = run(FedAvg()), run(flower.FedAvg())
    assert got == pytest.approx(expected, abs=1e-6)
    assert (
        np.abs(got - FedAvg().start(grid(clients=7), model(), num_rounds=20).arrays["w"].numpy()).max() > 1e-4
    )


def test_the_number_of_the_round_is_known_in_a_loop_around_the_strategy_too():
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(FedAdam(), 0.0, 1e9, 3)
    around = wrapped.start(grid(), model(), num_rounds=5)
    own = FedAdam().start(grid(), model(), num_rounds=5)
    assert around.arrays["w"].numpy() == pytest.approx(own.arrays["w"].numpy(), abs=1e-6)


def test_a_resumed_run_goes_on_with_the_same_moments():
    states: list[Any] = []
    first = FedAdam(observer=lambda progress: states.append(pickle.dumps(first.state())))
    whole = first.start(grid(), model(), num_rounds=5)
    again = FedAdam()
    again.restore(pickle.loads(states[2]))
    assert again.start(grid(), model(), num_rounds=5).arrays["w"].data == whole.arrays["w"].data
