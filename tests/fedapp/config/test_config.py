"""The run config, key by key: what each accepts, and the one line that says why it refuses a value."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.config import ConfigError, RunConfig, defaults, in_keys
from fedapp.config.key import KeyConflictError
from fedapp.data import DATASETS, PARTITIONERS, DataError
from fedapp.names import INITS, MODELS
from fedapp.own import OwnPartError
from strategies import REGISTRY
from strategies.rounds.participation import SCHEMES

KEYS = RunConfig.key_names()
INF = float("inf")
LARGEST = 2**63 - 1  # that a Flower message holds

# What a key accepts, said in words: the pattern of the words → the bounds, and whether they are accepted themselves.
RANGES: dict[str, tuple[float, float, bool, bool]] = {
    "a number > 0": (0, INF, False, False),
    "a number >= 0": (0, INF, True, False),
    "a number >= 1": (1, INF, True, False),
    "a number in (0, 1]": (0, 1, False, True),
    "a number in [0, 1]": (0, 1, True, True),
    "a number in [0, 1)": (0, 1, True, False),
    "a number in (0, 1)": (0, 1, False, False),
    "a number in [1e-06, 1e+06]": (1e-6, 1e6, True, True),
    "0, or a number in [1e-06, 1e+06]": (1e-6, 1e6, True, True),
    "a number in [0, 100]": (0, 100, True, True),
    "a number in [0, 1e+06]": (0, 1e6, True, True),
    "a number from 0 to 1e6": (0, 1e6, True, True),
    "a whole number >= 0": (0, LARGEST, True, True),
    "a whole number >= 1": (1, LARGEST, True, True),
    "a whole number from 0 to 1000000": (0, 10**6, True, True),
    "a whole number from 0 to 65535": (0, 65535, True, True),
    "a whole number from 0 to 1024": (0, 1024, True, True),
}

# Texts of a form: key → (values accepted, values refused).
TEXTS: dict[str, tuple[list[Any], list[Any]]] = {
    "strategy": (list(REGISTRY), ["fedavgg", "FedAvg", ""]),
    "staleness-discount": (
        ["constant", "polynomial:0.5", "polynomial:0", "polynomial:.5", "hinge:10,4", "hinge:1e-1,2."],
        [
            "",
            "Constant",
            "constant:1",
            "polynomial",
            "polynomial:",
            "polynomial:-1",
            "polynomial:nan",
            "polynomial:1,2",
            "hinge:1",
            "hinge:1,2,3",
            "hinge:1, 2",
            "hinge:1,2\n",
        ],
    ),
    "compression": (
        ["none", "fp16", "int8", "topk:0.01", "topk:1", "topk:1e-3", "qsgd:1", "qsgd:16"],
        [
            "",
            "FP16",
            "int4",
            "topk",
            "topk:",
            "topk:a",
            "topk:0.1\n",
            "qsgd",
            "qsgd:",
            "qsgd:4.0",
            "qsgd:123",
        ],
    ),
    "time-scenario": (
        [
            "F0",
            "F80",
            "F99",
            "exponential",
            "exponential:F50",
            "half-normal",
            "half-normal:F0",
            "trace:times.csv",
            "profile:devices.csv",
            "lognormal:0.5",
            "zipf:1.5,1e3",
            "pareto:.5,10,1e6,1e5,0.1",
        ],
        [
            "F100",
            "F",
            "F-1",
            "f80",
            "F80 ",
            "F80\n",
            "exponential:",
            "exponential:F100",
            "trace:",
            "",
            "half-normal:0",
            "profile:",
            "lognormal",
            "lognormal:a",
            "zipf:2,",
            "pareto:-1",
            "lognormal:1,2,3,4,5,6",
        ],
    ),
    "availability": (
        [
            "always",
            "trace:there.csv",
            "diurnal:0.3",
            "diurnal:0.3,100,0.1",
            "bernoulli:0.5",
            "bernoulli:.5,10",
        ],
        ["never", "", "trace:", "diurnal", "diurnal:a", "bernoulli:0.5,", "bernoulli:1,2,3", "Always"],
    ),
    "tiers": (
        ["none", "regions:1", "regions:20"],
        ["", "regions", "regions:0", "regions:-1", "region:2", "None"],
    ),
    "csv-encoding": (["auto", "utf-8", "cp1252", "latin-1"], ["", "klingon", "utf 8"]),
    "separator": (["auto", "tab", ",", ";", "|"], ["", "a", ";;", ".", "-", '"', "\n"]),
    "decimal": (["auto", ".", ","], ["", ";", "comma"]),
    "image-size": (["", "8", "48x64"], ["0", "x8", "8x", "8x8x3", "-1", "8 x 8"]),
    "dataset": (
        [
            *DATASETS,
            *["synthetic:0.5,1", "hf:owner/name", "hf:glue:sst2", "hf:/data/own", "custom.diabetes:load"],
        ],
        ["imagenet", "MNIST", "", "hf:", "hf:a\n", "a:", ":a", "a.:b", "a:b\n"],
    ),
    "model": ([*MODELS, "custom.nets:ConvNet"], ["mlp2", "ml", "mlp\n", "", "custom.nets:", ":Net"]),
    "loss": (["cross-entropy", "custom.losses:focal"], ["ce", "", "custom.losses:"]),
    "metrics": (["auto", "none", "accuracy, top5", "a.b:c,mae"], ["", "accuracy,", "top 5"]),
    "optimizer": (["sgd", "adam", "adamw", "rmsprop", "custom.own:Mine"], ["", "a b", "custom:"]),
    "step-heterogeneity": (
        [
            "none",
            "list:3",
            "list:3,1,5",
            "range:10-1",
            "uniform:1-100",
            "lognormal:.5",
            "lognormal:1",
            "speed",
        ],
        [
            "",
            "1,2,3",
            "list:",
            "list:1,",
            "list:0,1",
            "list:1.5",
            "range:1",
            "range:0-5",
            "uniform:5",
            "lognormal:",
            "lognormal:-1",
            "lognormal:1e3",
            "speed:2",
            "fast",
            "none\n",
        ],
    ),
    "lr-schedule": (
        [
            "constant",
            "inverse",
            "inverse-sqrt",
            "cosine",
            "exponential:0.99",
            "exponential:.5",
            "exponential:1",
        ],
        [
            "Constant",
            "",
            "exponential",
            "exponential:0",
            "exponential:0.0",
            "exponential:1.5",
            "exponential:-1",
        ],
    ),
    "init": (list(INITS), ["zero", ""]),
    "normalize": ([True, False, "symmetric", "standardize"], ["Symmetric", "true", ""]),
    "partitioner": (list(PARTITIONERS), ["IID", ""]),
    "best-of": (["loss", "top5", "client-accuracy-mean"], ["", "a b", "loss\n"]),
    "stop-at": (
        ["", "accuracy>=0.9", "loss <= 1e-3", "r2>=-.5"],
        ["accuracy", "accuracy>0.9", "accuracy>=", "a>=1,b>=2", "accuracy=>0.9", "loss<=1\n"],
    ),
    "secure-metrics": (["", "train-loss", "train-loss,a:b.c"], ["a b", ",", "a,", "a,,b", "loss\n"]),
    "registered-nodes": (
        ["", "oslo:4711:0", "oslo:4711:0, bern:18446744073709551615"],
        ["oslo", "oslo:4711:", "4711", "oslo:4711:0 bern:4712:1", "oslo:-1:0", ","],
    ),
    "run-name": (
        ["", "run-1", "v1.2", "älter", "a b"],
        ["a/b", "/a", "..", ".hidden", "a\\b", "-rf", " ", "a\n"],
    ),
}
ANY = st.one_of(
    st.integers(-3, 3),
    st.sampled_from(
        [0.0, 1.0, 1e-7, 1e-6, 100, 100.5, 1024, 1025, 65535, 65536, 10**6, 10**6 + 1, 1e6, 1e7, 2**63]
    ),
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.text(max_size=8),
)


def takes(allowed: str, value: Any) -> bool:
    """Tell whether a value is what the words say."""
    if allowed == "true or false":
        return isinstance(value, bool)
    if allowed.startswith("one of "):
        return value in allowed.removeprefix("one of ").split(", ")
    if allowed == "a text":
        return isinstance(value, str) and "\0" not in value
    allowed, _, text = allowed.partition(", or ") if not allowed.startswith("0, or ") else (allowed, "", "")
    if text and value == text:
        return True
    if isinstance(value, bool) or not isinstance(value, int if "whole" in allowed else int | float):
        return False
    least, most, with_least, with_most = RANGES[allowed]
    zero = value == 0 and allowed.startswith("0, or ")
    return zero or least < value < most or (value == least and with_least) or (value == most and with_most)


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(values)
    return str(caught.value)


def said_of(key: str, value: Any) -> str:
    most = f" and at most {LARGEST}" if isinstance(value, int) and value > LARGEST else ""
    most = most if "whole number >=" in RunConfig.allowed(key) else ""
    return f"{key} = {value!r}: must be {RunConfig.allowed(key)}{most}"


def is_kept(key: str, value: Any) -> None:
    config = RunConfig.read({**defaults(), key: value})
    kind = type(value if isinstance(value, str) else defaults()[key])  # an int given for a float becomes one
    assert config.flat()[key] == kind(value)
    assert type(config.flat()[key]) is kind


# Key by key ------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_pyproject() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    assert RunConfig.load().flat() == pyproject["tool"]["flwr"]["app"]["config"]


@pytest.mark.parametrize("key", [key for key in KEYS if key not in TEXTS])
@settings(max_examples=settings.default.max_examples // 2)
@given(value=ANY)
def test_a_key_takes_what_it_says_and_nothing_else(key: str, value: Any) -> None:
    if takes(RunConfig.allowed(key), value):
        is_kept(key, value)
    else:
        assert refusal({key: value}).startswith(said_of(key, value))


@pytest.mark.parametrize("key", TEXTS)
def test_a_text_of_a_form(key: str) -> None:
    accepted, refused = TEXTS[key]
    for value in accepted:
        is_kept(key, value)
    for value in [*refused, 1.5, 7]:
        assert refusal({key: value}).startswith(said_of(key, value))


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named_and_none_takes_a_list_a_table_or_nothing(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.read({other: value for other, value in defaults().items() if other != key})
    assert str(caught.value) == f"{key}: must be set"
    for value in (None, [1], {"a": 1}):
        assert refusal({key: value}).startswith(f"{key} = {value!r}: must be ")  # type: ignore[dict-item]


@pytest.mark.parametrize("key", ["run-name", "results-dir"])
def test_a_path_with_a_null_character_is_refused(key: str) -> None:
    assert refusal({key: "a\0b"}).startswith(f"{key} = 'a\\x00b': must be ")


# Several keys ----------------------------------------------------------------------------------------------


def test_two_wrong_values_give_two_lines() -> None:
    lines = refusal({"lr": -1, "seed": "x"}).splitlines()
    assert sorted(lines) == ["lr = -1: must be a number > 0", "seed = 'x': must be a whole number >= 0"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning-rate", None),
        ("batchsize", "batch-size"),
        ("local_epochs", "local-epochs"),
        ("LR", None),
        ("stratgy", "strategy"),
        ("num-rounds", "num-server-rounds"),
        ("proximal_mu", "proximal-mu"),
        ("init-args-num-cpus", None),
    ],
)
def test_an_unknown_key_is_named_with_what_was_meant(key: str, meant: str | None) -> None:
    text = refusal({key: 1})
    assert text.startswith(f"unknown key {key!r}: ")
    assert "\n" not in text
    if meant:
        assert text == f"unknown key {key!r}: did you mean {meant!r}?"
    else:
        assert text.endswith("`fedapp keys` lists all") or "did you mean" in text


@pytest.mark.parametrize("key", ["num-clients", "num-supernodes"])
def test_the_number_of_clients_is_no_key_of_a_run(key: str) -> None:
    said = f"unknown key {key!r}: clients are counted by --federation-config num-supernodes=N"
    assert refusal({key: 4}) == said


def test_a_key_that_is_like_no_other_is_not_answered_with_all_of_them() -> None:
    assert refusal({"zzz": 4}) == "unknown key 'zzz': `fedapp keys` lists all"
    assert (
        refusal({"learn": 4})
        == "unknown key 'learn': near are lr, personal, separator; `fedapp keys` lists all"
    )


def test_every_unknown_key_has_its_line() -> None:
    assert refusal({"momentun": 0.9, "seeds": 1}).splitlines() == [
        "unknown key 'momentun': did you mean 'momentum'?",
        "unknown key 'seeds': did you mean 'seed'?",
    ]


@pytest.mark.parametrize("scheme", ["full", "paired", "fixed:0,1"])
def test_a_fraction_goes_with_a_random_draw_only(scheme: str) -> None:
    text = refusal({"participation": scheme, "fraction-train": 0.5})
    assert text == (
        f"fraction-train = 0.5 with participation = {scheme!r} and strategy = 'fedavg': the scheme draws no share of "
        "the clients; allowed is fraction-train = 1, or participation = uniform, md, poisson, turns, flower"
    )


@pytest.mark.parametrize(
    "value",
    ["half", "", "Full", "full:1", "fixed", "fixed:", "fixed:a", "fixed:-1", "fixed:1,1", "fixed:1;2"],
)
def test_a_participation_that_is_none(value: str) -> None:
    text = refusal({"participation": value})
    assert text.startswith(f"participation = {value!r}: ")
    assert "fixed:" in text
    assert "\n" not in text


def test_npz_needs_a_path() -> None:
    with pytest.raises(KeyConflictError) as raised:
        RunConfig.load({"dataset": "npz"})
    assert raised.value.keys == ("dataset", "data-path")
    assert RunConfig.load({"dataset": "npz", "data-path": "x.npz"}).data_path == "x.npz"


@pytest.mark.parametrize(
    "values",
    [{"strategy": name} for name in REGISTRY]
    + [{"client-weights": name} for name in ("samples", "uniform", "adjacency")]
    + [{"participation": "fixed:0" if scheme == "fixed" else scheme} for scheme in SCHEMES],
)
def test_what_goes_with_the_defaults(values: dict[str, Any]) -> None:
    RunConfig.load(values)


# Round trips -----------------------------------------------------------------------------------------------

configs = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.sampled_from(list(REGISTRY)),
        "lr": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "l2": st.floats(min_value=0, allow_infinity=False),
        "momentum": st.floats(min_value=0, max_value=1, exclude_max=True),
        "fedfix-interval": st.integers(1, 100) | st.just("auto"),
        "seed": st.integers(0, 2**63 - 1),
        "batch-size": st.integers(0, 10_000),
        "normalize": st.sampled_from([True, False, "symmetric", "standardize"]),
        "results-dir": st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        "run-name": st.from_regex(r"\A[a-z0-9äöü][a-z0-9 .='\"]*\Z"),
    },
)


@given(configs)
def test_a_config_survives_toml_and_a_message_record(values: dict[str, Any]) -> None:
    config = RunConfig.load(values)
    assert RunConfig.load(tomllib.loads(tomli_w.dumps(config.flat()))) == config
    assert RunConfig.load(dict(ConfigRecord(config.flat()))) == config


def test_a_config_is_immutable_and_hashable() -> None:
    config = RunConfig.load()
    with pytest.raises(ValueError, match="frozen"):
        config.lr = 0.5  # type: ignore[misc]
    assert hash(config) == hash(RunConfig.load())


def test_errors_of_the_strategies_are_said_in_keys() -> None:
    error = ValueError(
        "time_scenario = 'trace:/a/time_scenario.csv': no; server_lr = 0, client_weights, lr, x_server_lr"
    )
    assert in_keys(error) == (
        "time-scenario = 'trace:/a/time_scenario.csv': no; server-lr = 0, client-weights, lr, x_server_lr"
    )


def test_names_of_the_users_own_stay_as_they_are() -> None:
    for kind in (ConfigError, DataError, OwnPartError):
        assert in_keys(kind("the function needs data_path")) == "the function needs data_path"


def test_generated_data_have_no_natural_clients_beside_those_that_train() -> None:
    values = {"partitioner": "natural", "test-on": "unseen-clients"}
    for dataset in ("synthetic:1,1", "synthetic-iid"):
        with pytest.raises(KeyConflictError) as raised:
            RunConfig.load({"dataset": dataset, **values})
        assert raised.value.keys == ("test-on", "partitioner", "dataset", "data-path")
    RunConfig.load({"dataset": "synthetic", "data-path": "/there", **values})
