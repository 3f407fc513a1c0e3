"""Every entry of the app's table of conflicts refuses a run config, in one line."""

from typing import Any

import pytest

from fedapp.config import ConfigError, RunConfig
from fedapp.config.conflicts import CONFLICTS, check_conflicts
from fedapp.config.key import KeyConflictError
from fedapp.server.experiment import build_strategy
from strategies.core.conflicts import Conflict

TIERS = {"tiers": "regions:2"}
DP = {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": 1.0}

# In the order of the table: keys that the entry refuses, and no entry before it.
CASES: tuple[dict[str, Any], ...] = (
    {"dataset": "npz"},
    {"dataset": "files"},
    {"dataset": "synthetic", "partitioner": "natural", "test-on": "unseen-clients"},
    {"hold-out": "last", "test-on": "unseen-clients"},
    {"dataset": "files", "data-path": "/a.csv", "missing": "mean"},
    {"local-epochs": 0},
    {"local-epochs": 1, "local-steps": 10},
    {"momentum": 0.9, "optimizer": "adam"},
    {"strategy": "scaffold", "optimizer": "adam"},
    {"strategy": "fedfix", "secure-sums": True},
    {"strategy": "rennala", "aggregation-rule": "krum"},
    {"strategy": "async-fedavg", **DP},
    {"strategy": "fedbuff", **DP, "dp-mechanism": "tree"},
    {**DP, "dp-noise-multiplier": 0.0},
    {"dp": "local", "client-evaluation": True},
    {"dp": "local", "normalize": "standardize"},
    {"strategy": "spectral", "dp": "local", "message-epsilon": 0.0},
    {"strategy": "fedbuff", "dp": "local", "dp-target-epsilon": 3.0},
    {"strategy": "fedbuff", **DP, "dp-target-epsilon": 3.0},
    {"strategy": "ditto", "fine-tune-epochs": 1},
    {"fine-tune-epochs": 2, "test-on": "held-out"},
    {"fine-tune-epochs": 1, "test-on": "own", "dp": "local"},
    {"strategy": "fedamp", "personal": "3.*"},
    {"personal": "3.*", "fine-tune-epochs": 1, "test-on": "own"},
    {"personal": "3.*", "record-divergence": True},
    {"strategy": "async-spectral", "personal": "3.*", "perturbation-beta": 0.5},
    {"secure-sums": True, "record-divergence": True},
    {**TIERS, "strategy": "scaffold"},
    {**TIERS, "client-weights": "adjacency"},
    {**TIERS, "client-weights": "uniform", "aggregation-rule": "median"},
    {**TIERS, "server-optimizer": "fedexp"},
    {**TIERS, "secure-sums": True},
    {**TIERS, "dp": "local", "dp-clipping-norm": 1.0},
    {**TIERS, "compression": "fp16"},
    {**TIERS, "update-norm-bound": 1.0},
    {**TIERS, "stragglers": 0.5},
    {**TIERS, "availability": "diurnal:0.5"},
    {**TIERS, "task-failure": 0.1},
    {**TIERS, "time-scenario": "lognormal:1"},
    {**TIERS, "fine-tune-epochs": 1, "test-on": "own"},
    {**TIERS, "personal": "3.*"},
    {**TIERS, "record-divergence": True},
    {**TIERS, "test-on": "own"},
    {**TIERS, "safeguards": "on"},
    {"tiers": "relays", "normalize": "standardize"},
)


@pytest.mark.parametrize(
    ("conflict", "values"),
    zip(CONFLICTS, CASES, strict=True),
    ids=["+".join(conflict.keys) for conflict in CONFLICTS],
)
def test_each_entry_refuses_a_config_in_one_line(conflict: Conflict, values: dict[str, Any]) -> None:
    with pytest.raises(KeyConflictError) as raised:
        check_conflicts(config := RunConfig.load(values), build_strategy(config))
    error, text = raised.value, str(raised.value)
    assert (error.keys, error.allowed) == (conflict.keys, conflict.allowed)
    given, _, rest = text.partition(": " + conflict.reason)
    assert rest == f"; allowed is {conflict.allowed}"
    assert all(f"{key} = " in given for key in conflict.keys)
    for key in set(values).intersection(conflict.keys):
        written = str(values[key]).lower() if isinstance(values[key], bool) else repr(values[key])
        assert f"{key} = {written}" in given
    assert "\n" not in text


def test_the_sentence_as_a_user_reads_it() -> None:
    with pytest.raises(ConfigError) as raised:
        RunConfig.load({"dp": "local", "client-evaluation": True})
    assert str(raised.value) == (
        "dp = 'local' with client-evaluation = true: clients' losses would be sent as they are; "
        "allowed is client-evaluation = false"
    )


def test_conflicts_of_the_strategies_are_said_in_keys_when_a_config_is_loaded() -> None:
    with pytest.raises(KeyConflictError) as raised:
        RunConfig.load({"strategy": "fedprox", "secure-sums": True, "round-deadline": 2.0})
    assert raised.value.keys == ("secure-sums", "round-deadline")
    assert raised.value.allowed == "round-deadline = 0"
    assert str(raised.value) == (
        "secure-sums = true with round-deadline = 2.0: replies that are late are left out one by one; "
        "allowed is round-deadline = 0"
    )


def test_a_sweep_with_a_run_that_cannot_be_is_refused_before_its_first_run() -> None:
    from fedapp.sweeps.plan import SweepPlan, checked

    plan = checked(
        "x", {"base": {"over-select": 0.5, "participation": "paired"}, "grid": {"seed": [0, 1]}}, SweepPlan
    )
    with pytest.raises(KeyConflictError) as raised:
        plan.runs()
    assert raised.value.keys == ("over-select", "participation")
