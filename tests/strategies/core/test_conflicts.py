"""Every entry of the table of conflicts refuses a strategy, in one line with keys, values and what is allowed."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest

from strategies import (
    REGISTRY,
    AsyncFedAvg,
    AsynchronousConfig,
    AsynchronousStrategy,
    FedAdam,
    FedAMP,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedCompass,
    FederatedStrategy,
    FedFix,
    FedMedian,
    Krum,
    Scaffold,
    WallClock,
)
from strategies.core.capabilities import Capabilities
from strategies.core.config import PrivateConfig
from strategies.core.conflicts import CONFLICTS, Conflict, ConflictError, check_conflicts
from strategies.updates.server_optimizer import FedExP


class Choosing(FedAvg):
    """A method that draws a round's participants by itself."""

    def select(self, clients: Any, rng: Any) -> Any:
        return clients, None


class Weighing(AsynchronousStrategy):
    """A method without rounds that weighs contributions by itself."""

    Config = AsynchronousConfig

    def weigh(self, contributions: Any) -> list[float]:
        return [1.0] * len(contributions)


class Discounting(AsynchronousStrategy):
    """A method without rounds whose code discounts stale contributions."""

    Config = AsynchronousConfig

    def discount(self, staleness: int) -> float:
        return 1 / (1 + staleness)


class Receiving(FedBuff):
    """A method that looks at single models."""

    def on_local_model(self, client: Any, local_model: Any) -> None:
        return None


class WorkingOn(FedBuff):
    """A method whose clients work on while their work waits."""

    trains_while_waiting = True


class Averaging(FedBuff):
    """A method without rounds that puts updates together by itself."""

    def aggregate(self, model: Any, contributions: Any, weights: Any) -> Any:
        return model


class Leaking(FedBuff):
    """A method without rounds that sends clients models of others."""

    leaks_models = True


MEDIAN = {"aggregation_rule": "median"}
EQUAL = {"client_weights": "uniform", "aggregation_weights": "identical"}
DP = {"dp": "central", "client_weights": "uniform", "dp_clipping_norm": 1.0}
POISSON = {**DP, "participation": "poisson", "fraction_train": 0.5}
TREE = {**DP, "dp_mechanism": "tree"}
NOISY = {**DP, "dp_mechanism": "distributed", "secure_sums": True}
SECURE = {"secure_sums": True}


def any_function(records: Any, key: str) -> Any:
    """Stand for a function of training metrics."""


# In the order of the table: a strategy and its options that the entry refuses, and no entry before it.
CASES: tuple[tuple[type[FederatedStrategy], dict[str, Any]], ...] = (
    (FedBuff, {"participation": "uniform"}),
    (FedAvg, {"participation": "tag:gpu"}),
    (FedAvg, {"participation": "paired", "fraction_train": 0.5}),
    (FedAvg, {"participation": "turns", "fraction_train": 0.3}),
    (FedBuff, {"fraction_train": 0.5, "concurrency": 2}),
    (FedAvg, {"participation": "uniform", "fraction_train": 0.5, "min_train_nodes": 3}),
    (FedAvg, {"participation": "turns", "fraction_train": 0.5, "availability": "bernoulli:0.5"}),
    (FedAvg, {"participation": "paired", "task_failure": 0.1}),
    (FedAvg, {"stragglers": 1.0, "drop_stragglers": True}),
    (FedAvg, {"stragglers": 0.5, "round_deadline": 2.0}),
    (FedAvg, {"stragglers": 0.5, "over_select": 0.3}),
    (FedAvg, {"participation": "paired", "round_deadline": 2.0}),
    (FedAvg, {"over_select": 0.5, "participation": "fixed:0,1"}),
    (Choosing, {"over_select": 0.5, "participation": "uniform", "fraction_train": 0.5}),
    (FedMedian, {"aggregation_rule": "krum"}),
    (Krum, {"faulty_clients": 1}),
    (FedAMP, MEDIAN),
    (Weighing, MEDIAN),
    (FedFix, MEDIAN),
    (FedAvg, {**MEDIAN, **DP}),
    (FedAvg, MEDIAN),
    (FedAvg, {**MEDIAN, "client_weights": "uniform", "participation": "md"}),
    (FedMedian, {"participation": "poisson", "fraction_train": 0.5}),
    (FedBuff, {**MEDIAN, "client_weights": "uniform"}),
    (FedBuff, {**MEDIAN, **EQUAL, "staleness_discount": "polynomial:0.5"}),
    (Discounting, {**MEDIAN, **EQUAL}),
    (Leaking, DP),
    (Scaffold, DP),
    (Averaging, DP),
    (FedAvg, {"dp": "central"}),
    (FedAvg, {**DP, "participation": "md"}),
    (FedBuff, {**DP, "dp_clipping_norm": 0.0}),
    (Choosing, POISSON),
    (FedAvg, {**POISSON, "round_deadline": 1.0}),
    (FedAvg, {**POISSON, "stragglers": 0.5}),
    (FedAvg, {**TREE, "participation": "uniform", "fraction_train": 0.5}),
    (Choosing, TREE),
    (FedAvg, {**TREE, "dp_clipping_norm": 0.0}),
    (FedAvg, {**TREE, "round_deadline": 3.0}),
    (FedAvg, {**NOISY, "secure_sums": False}),
    (FedAvg, {**NOISY, "dp_clipping_norm": 0.0}),
    (FedAvg, {**NOISY, "dp_noise_multiplier": 0.0}),
    (FedAvgM, {"server_optimizer": "adam"}),
    (FedAdam, {"server_lr": 0.5}),
    (FedMedian, {"server_optimizer": "fedexp"}),
    (FedAvg, {"server_optimizer": "fedexp", **DP}),
    (FedBuff, {"server_optimizer": "fedexp"}),
    (Scaffold, SECURE),
    (Receiving, SECURE),
    (FedMedian, SECURE),
    (FedAvg, {**SECURE, "round_deadline": 3.0}),
    (FedAvg, {**SECURE, "over_select": 0.5, "participation": "uniform", "fraction_train": 0.5}),
    (FedAvg, {**SECURE, "server_optimizer": "fedexp"}),
    (FedAvg, {**SECURE, "compression": "topk:0.1"}),
    (FedAvg, {**SECURE, "update_norm_bound": 1.0}),
    (FedBuff, {**SECURE, "safeguards": "on"}),
    (FedAvg, {**SECURE, "train_metrics_aggr_fn": any_function}),
    (FedFix, {"aggregation_weights": "identical"}),
    (FedCompass, {"min_local_steps": 9, "max_local_steps": 8}),
)


@pytest.mark.parametrize(
    ("conflict", "kind", "options"),
    [(conflict, *case) for conflict, case in zip(CONFLICTS, CASES, strict=True)],
    ids=["+".join(conflict.keys) for conflict in CONFLICTS],
)
def test_each_entry_refuses_a_strategy_in_one_line(
    conflict: Conflict, kind: type[FederatedStrategy], options: dict[str, Any]
) -> None:
    with pytest.raises(ConflictError) as raised:
        kind(**options)
    error, text = raised.value, str(raised.value)
    assert (error.keys, error.allowed) == (conflict.keys, conflict.allowed)
    given, _, rest = text.partition(": " + conflict.reason)
    assert rest == f"; allowed is {conflict.allowed}"
    for key in conflict.keys:
        value = options.get(key)
        assert kind.__name__ in given if key == "strategy" else key in given or "FedMedian" in given
        assert value is None or (getattr(value, "__name__", None) or repr(value)) in given
    assert "\n" not in text
    assert text[0].isalpha()


def test_the_sentence_as_a_user_reads_it() -> None:
    with pytest.raises(ValueError, match="round_deadline") as raised:
        FedAvg(participation="turns", fraction_train=0.5, round_deadline=2.0)
    assert str(raised.value) == (
        "round_deadline = 2.0 with participation = 'turns': the scheme says which client takes part in which round, "
        "and a client that is late can be at work still; allowed is round_deadline = 0, or participation = full, "
        "uniform, md, flower, fixed:…"
    )
    with pytest.raises(ValueError, match="rule") as raised:
        FedAvg(aggregation_rule="krum", faulty_clients=1, client_weights="uniform", secure_sums=True)
    assert str(raised.value) == (
        "secure_sums = True with aggregation_rule = 'krum': a robust rule compares single updates; "
        "allowed is aggregation_rule = mean, or secure_sums = false"
    )


def test_an_error_survives_its_way_between_processes() -> None:
    with pytest.raises(ConflictError) as raised:
        FedAvg(stragglers=1.0, drop_stragglers=True)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.keys, again.allowed) == (
        str(raised.value),
        raised.value.keys,
        raised.value.allowed,
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_no_method_is_refused_with_its_defaults(name: str) -> None:
    kind = REGISTRY[name]
    check_conflicts(name, kind.capabilities, kind.Config())


def test_without_rounds_a_fraction_says_how_many_work_at_once() -> None:
    assert FedBuff(fraction_train=0.5).fraction_train == 0.5


def test_availability_counts_in_virtual_time_alone() -> None:
    options = {"participation": "turns", "fraction_train": 0.5, "availability": "bernoulli:0.5"}
    FedAvg(clock=WallClock(), **options)
    with pytest.raises(ConflictError):
        FedAvg(**options)


def test_an_attribute_that_is_set_is_checked_and_a_refused_one_changes_nothing() -> None:
    strategy = FedAvg(**TREE)
    with pytest.raises(ConflictError) as raised:
        strategy.fraction_train = 0.5
    assert raised.value.keys == ("dp", "dp_mechanism", "participation")
    assert (strategy.fraction_train, strategy.config.participation) == (1.0, "full")


def test_an_optimizer_of_ones_own_that_reads_lengths_has_the_same_conflicts() -> None:
    @dataclass(frozen=True)
    class Config(FedAvg.Config):
        def new_optimizer(self) -> FedExP:
            return FedExP(1.0)

    class Own(FedAvg):
        pass

    Own.Config = Config
    with pytest.raises(ConflictError) as raised:
        Own(secure_sums=True)
    assert raised.value.keys == ("secure_sums", "server_optimizer")


def test_a_method_that_works_on_reads_single_updates() -> None:
    with pytest.raises(ConflictError) as raised:
        WorkingOn(secure_sums=True)
    assert raised.value.keys == ("secure_sums", "strategy")


def test_fields_that_a_config_lacks_conflict_with_nothing() -> None:
    @dataclass(frozen=True)
    class Few(PrivateConfig, AsynchronousConfig):
        pass

    able = replace(Capabilities.of(AsyncFedAvg), default_aggregation_weights="identical")
    check_conflicts("Few", able, Few(client_weights="uniform", dp="central", dp_clipping_norm=1.0))
