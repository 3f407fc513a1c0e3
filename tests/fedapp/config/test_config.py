"""The run config, key by key: what each accepts, and the one line that says why it refuses a value."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from fedapp.config import ConfigError, RunConfig, defaults, in_keys
from fedapp.data import DATASETS, PARTITIONERS, TEST_ON
from fedapp.data.loading import FORMS
from fedapp.names import ALLOWED_METRICS as METRICS
from fedapp.names import INITS, LOSSES, MODELS
from fedapp.training.augment import AUGMENTATIONS
from strategies import REGISTRY
from strategies.rounds.participation import SCHEMES
from strategies.updates.aggregation import RULES

KEYS = RunConfig.key_names()

COUNT, COUNTING = "a whole number >= 0", "a whole number >= 1"
POSITIVE, NON_NEGATIVE = "a number > 0", "a number >= 0"
NAN, INF = float("nan"), float("inf")

NO_COUNT = [-1, 1.5, 2.0, True, "3", NAN]
NO_COUNTING = [0, *NO_COUNT]
NO_NON_NEGATIVE = [-1, -1e-9, NAN, INF, True, "0.1"]
NO_POSITIVE = [0, 0.0, *NO_NON_NEGATIVE]
MODERATE, NO_MODERATE = "a number from 1e-6 to 1e6", [1e-7, 1e7, *NO_POSITIVE]
NO_UNIT = [-0.1, 1.1, 2, NAN, INF, False, "0.5"]
NO_FLAG = [0, 1, 1.0, "true", ""]
NO_TEXT = [0, 1.5, True]


def one_of(*names: str) -> str:
    return "one of " + ", ".join(names)


STRATEGIES = (
    "fedavg",
    "fedprox",
    "spectral",
    "fednova",
    "scaffold",
    "feddyn",
    "mifa",
    "ditto",
    "fedamp",
    "async-fedavg",
    "fedfix",
    "fedbuff",
    "fedasync",
    "delay-adaptive",
    "ringmaster",
    "rennala",
    "ca2fl",
    "ace",
    "fadas",
)
DEVICES = one_of("auto", "cpu", "cuda")
SCENARIOS = (
    "F0 to F99, exponential or half-normal, alone or with :F0 to :F99, trace:FILE, profile:FILE, lognormal:S, "
    "zipf:S, pareto:S (and SPEED,DOWN,UP,LATENCY after a comma)"
)
AVAILABILITIES = "always, trace:FILE, diurnal:SHARE[,PERIOD[,SPREAD]], bernoulli:P[,SECONDS]"
SCHEDULES = "constant, inverse, inverse-sqrt, cosine or exponential:RATE with RATE in (0, 1]"
HETEROGENEITIES = (
    "none, list:E,E,…, range:A-B, uniform:A-B, lognormal:VARIANCE or speed; E, A, B whole numbers >= 1"
)
FOLDER = "a folder name that begins with a letter, a digit or _, without / and control characters"

# key → (what the message says is allowed, values refused, values accepted)
EVERY_KEY: dict[str, tuple[str, list[Any], list[Any]]] = {
    "strategy": (
        f"{one_of(*STRATEGIES)}, or module:Class of your own",
        ["fedavgg", "FedAvg", "", 1, True],
        list(STRATEGIES),
    ),
    "strategy-config": ("a text", NO_TEXT, [""]),
    "num-server-rounds": (COUNT, NO_COUNT, [0, 100_000]),
    "time-budget": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 0.5, 3]),
    "round-timeout": (POSITIVE, NO_POSITIVE, [1, 0.5]),
    "min-clients": (COUNTING, NO_COUNTING, [1, 20]),
    "client-weights": (
        one_of("samples", "uniform", "adjacency"),
        ["", "sample", 0],
        ["samples", "uniform", "adjacency"],
    ),
    "participation": ("a text", NO_TEXT, ["full", "md", "fixed:0,3"]),
    "fraction-train": ("a number in (0, 1]", [0, *NO_UNIT], [1e-6, 0.5, 1, 1.0]),
    "stragglers": ("a number in [0, 1]", NO_UNIT, [0, 0.5, 1]),
    "drop-stragglers": ("true or false", NO_FLAG, [True, False]),
    "round-deadline": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 0.5, 60]),
    "over-select": ("a number from 0 to 100", [-0.1, 101, float("nan"), "0.3", True], [0, 0.3, 1, 100]),
    "late": (one_of("drop", "next"), ["", "later", 0], ["drop", "next"]),
    "client-records": (
        "one of auto, always, last, never",
        ["", "sometimes", True],
        ["auto", "always", "last", "never"],
    ),
    "client-evaluation": ("true or false", NO_FLAG, [True, False]),
    "figures": ("true or false", NO_FLAG, [True, False]),
    "proximal-mu": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 0.0, 10]),
    "perturbation-beta": ("a number in [0, 1]", NO_UNIT, [0, 0.5, 1]),
    "message-floor": ("a number in (0, 1)", [0, 1, 1.0, *NO_UNIT], [1e-300, 0.5]),
    "neighbours": (COUNT, NO_COUNT, [0, 5]),
    "feddyn-alpha": ("a number from 1e-6 to 1e6", [0, 1e-7, *NO_MODERATE], [1e-6, 0.01, 1]),
    "ditto-lambda": (
        "0, or a number from 1e-6 to 1e6",
        [1e-7, *(value for value in NO_MODERATE if value != 0)],
        [0, 0.1, 1e6],
    ),
    "fedamp-sigma": (POSITIVE, NO_POSITIVE, [0.1, 1]),
    "fedamp-alpha": ("a number in [0, 1]", NO_UNIT, [0, 1, 0.5]),
    "fine-tune-epochs": ("a whole number from 0 to 1000000", [10**6 + 1, *NO_COUNT], [0, 10]),
    "neighbour-memory": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 0.5, 16]),
    "message-epsilon": ("a number from 0 to 1e6", [1e7, *NO_NON_NEGATIVE], [0, 0.1, 8]),
    "message-delta": ("a number in (0, 1)", [0, 1, 1.0, *NO_UNIT], [1e-9, 0.5]),
    "aggregation-weights": (
        one_of("time-based", "observed", "identical"),
        ["time", "", 1],
        ["time-based", "observed", "identical"],
    ),
    "fedfix-interval": (POSITIVE, NO_POSITIVE, [0.5, 2]),
    "buffer-size": (COUNTING, NO_COUNTING, [1, 10]),
    "concurrency": (COUNT, NO_COUNT, [0, 5]),
    "staleness-discount": (
        "constant, polynomial:A or hinge:A,B with numbers A, B >= 0",
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
            1,
        ],
        ["constant", "polynomial:0.5", "polynomial:0", "polynomial:.5", "hinge:10,4", "hinge:1e-1,2."],
    ),
    "mixing-alpha": ("a number in (0, 1]", [0, *NO_UNIT], [1e-6, 0.6, 1, 1.0]),
    "delay-threshold": (COUNT, NO_COUNT, [0, 10]),
    "server-lr": (
        "0, or a number from 1e-6 to 1e6",
        [value for value in NO_MODERATE if value != 0],
        [0, 1, 0.1],
    ),
    "server-optimizer": (
        one_of("sgd", "momentum", "adagrad", "adam", "amsgrad", "yogi", "fedexp"),
        ["SGD", "", "adam\n", 1],
        ["sgd", "momentum", "adagrad", "adam", "amsgrad", "yogi", "fedexp"],
    ),
    "compression": (
        "none, fp16, int8, topk:F with F in (0, 1], or qsgd:BITS with BITS 1 to 16",
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
            8,
        ],
        ["none", "fp16", "int8", "topk:0.01", "topk:1", "topk:1e-3", "qsgd:1", "qsgd:16"],
    ),
    "clock": (one_of("auto", "virtual", "wall"), ["real", "", 0], ["auto", "virtual", "wall"]),
    "time-scenario": (
        SCENARIOS,
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
            80,
            "half-normal:0",
            "profile:",
            "lognormal",
            "lognormal:a",
            "zipf:2,",
            "pareto:-1",
            "lognormal:1,2,3,4,5,6",
        ],
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
    ),
    "task-work": (one_of("examples", "flop"), ["flops", "", 1], ["examples", "flop"]),
    "availability": (
        AVAILABILITIES,
        ["never", "", "trace:", "diurnal", "diurnal:a", "bernoulli:0.5,", "bernoulli:1,2,3", "Always", 1],
        [
            "always",
            "trace:there.csv",
            "diurnal:0.3",
            "diurnal:0.3,100,0.1",
            "bernoulli:0.5",
            "bernoulli:.5,10",
        ],
    ),
    "task-failure": ("a number in [0, 1)", [-0.1, 1, "a"], [0, 0.5]),
    "dataset": (
        f"{one_of(*DATASETS)}, {FORMS}",
        ["imagenet", "MNIST", "", 1, "hf:", "hf:a\n", "a:", ":a", "a.:b", "a:b\n"],
        [
            *DATASETS,
            "synthetic:0.5,1",
            "hf:owner/name",
            "hf:glue:sst2",
            "hf:/data/own",
            "custom.diabetes:load",
        ],
    ),
    "data-path": ("a text", NO_TEXT, ["", "/tmp/x.npz"]),
    "input-column": ("a text", NO_TEXT, ["", "img", "a,b"]),
    "label-column": ("a text", NO_TEXT, ["label", "a,b"]),
    "group-column": ("a text", NO_TEXT, ["", "writer"]),
    "normalize": (
        "true, false, symmetric or standardize",
        [*NO_FLAG, "Symmetric"],
        [True, False, "symmetric", "standardize"],
    ),
    "augment": (one_of(*AUGMENTATIONS), ["", "crop+flip", True], list(AUGMENTATIONS)),
    "test-fraction": ("a number in (0, 1)", [0, 1, 1.0, *NO_UNIT], [0.01, 0.99]),
    "test-on": (one_of(*TEST_ON), ["heldout", "", 1], list(TEST_ON)),
    "partitioner": (one_of(*PARTITIONERS), ["IID", "", 1], list(PARTITIONERS)),
    "class-imbalance": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 10, 0.5]),
    "data-imbalance": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 1, 0.5]),
    "min-samples": (COUNTING, NO_COUNTING, [1, 2]),
    "dirichlet-alpha": (POSITIVE, NO_POSITIVE, [0.1, 1]),
    "similarity": ("a number in [0, 1]", NO_UNIT, [0, 0.1, 1]),
    "model": (
        f"one of {', '.join(MODELS)}, or module:name of your own",
        ["mlp2", "ml", "mlp\n", "", 1, "custom.nets:", ":Net"],
        [*MODELS, "custom.nets:ConvNet"],
    ),
    "loss": (
        f"one of {', '.join(LOSSES)}, or module:name of your own",
        ["ce", "", 1, "custom.losses:"],
        [*LOSSES, "custom.losses:focal"],
    ),
    "metrics": (METRICS, ["", "accuracy,", 1, "top 5"], ["auto", "none", "accuracy, top5", "a.b:c,mae"]),
    "optimizer": (
        "one of sgd, adam, adamw, the name of a class of torch.optim in lower case, or module:Class of your own",
        ["", "a b", "custom:", 1],
        ["sgd", "adam", "adamw", "rmsprop", "custom.own:Mine"],
    ),
    "optimizer-options": ("a text", [1, True, "\0"], ["", "eps=1e-6"]),
    "init": (", ".join(INITS), ["zero", "", 0], list(INITS)),
    "local-epochs": ("a whole number from 0 to 1000000", [10**6 + 1, *NO_COUNT], [0, 10]),
    "local-steps": ("a whole number from 0 to 1000000", [10**6 + 1, *NO_COUNT], [0, 10]),
    "step-heterogeneity": (
        HETEROGENEITIES,
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
            3,
        ],
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
    ),
    "normalize-steps": ("true or false", NO_FLAG, [True, False]),
    "batch-size": (COUNT, NO_COUNT, [0, 256]),
    "lr": (POSITIVE, NO_POSITIVE, [1, 0.001]),
    "lr-schedule": (
        SCHEDULES,
        [
            "Constant",
            "",
            "exponential",
            "exponential:0",
            "exponential:0.0",
            "exponential:1.5",
            "exponential:-1",
            1,
        ],
        [
            "constant",
            "inverse",
            "inverse-sqrt",
            "cosine",
            "exponential:0.99",
            "exponential:.5",
            "exponential:1",
        ],
    ),
    "momentum": ("a number in [0, 1)", [1, 1.0, *NO_UNIT], [0, 0.9]),
    "l2": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 1e-4]),
    "clip-norm": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 5]),
    "safeguards": (one_of("auto", "on", "off"), ["On", "", True], ["auto", "on", "off"]),
    "size-ratio-bound": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 5]),
    "examples-bound": (COUNT, NO_COUNT, [0, 1000]),
    "arrival-weight-bound": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 2]),
    "norm-ratio-bound": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 5]),
    "update-norm-bound": (NON_NEGATIVE, NO_NON_NEGATIVE, [0, 5]),
    "aggregation-rule": (one_of(*RULES), ["Mean", "", 1], list(RULES)),
    "faulty-clients": (COUNT, NO_COUNT, [0, 3]),
    "dp": (one_of("none", "central", "local"), ["yes", "", True], ["none", "central", "local"]),
    "dp-clipping-norm": (POSITIVE, NO_POSITIVE, [1, 0.1]),
    "dp-noise-multiplier": (MODERATE, NO_MODERATE, [1, 0.1]),
    "dp-delta": ("a number in (0, 1)", [0, 1, 1.0, *NO_UNIT], [1e-9, 0.5]),
    "seed": (COUNT, NO_COUNT, [0, 2**62]),
    "eval-every": (COUNTING, NO_COUNTING, [1, 10]),
    "checkpoint-every": (COUNT, NO_COUNT, [0, 1]),
    "resume": ("a text", NO_TEXT, [""]),
    "record-divergence": ("true or false", NO_FLAG, [True, False]),
    "server-device": (DEVICES, ["gpu", "cuda:0", "", 0], ["auto", "cpu", "cuda"]),
    "client-device": (DEVICES, ["gpu", "cuda:0", "", 0], ["auto", "cpu", "cuda"]),
    "tf32": ("true or false", NO_FLAG, [True, False]),
    "client-threads": ("a whole number from 0 to 1024", [1025, *NO_COUNT], [0, 4]),
    "results-dir": ("a text", NO_TEXT, ["results", "/tmp/über"]),
    "tracker": (
        one_of("none", "tensorboard", "wandb"),
        ["", "mlflow", False],
        ["none", "tensorboard", "wandb"],
    ),
    "log-format": (one_of("text", "json"), ["", "JSON", True], ["text", "json"]),
    "metrics-port": ("a whole number from 0 to 65535", [65536, *NO_COUNT], [0, 9100]),
    "metrics-host": ("a text", NO_TEXT, ["127.0.0.1", "::1", "metrics.example.org"]),
    "run-name": (
        FOLDER,
        ["a/b", "/a", "..", ".hidden", "a\\b", "-rf", " ", "a\n", 1],
        ["", "run-1", "v1.2", "älter", "a b"],
    ),
}


def cases(column: int) -> list[Any]:
    return [
        pytest.param(key, value, id=f"{key}={value!r}")
        for key, row in EVERY_KEY.items()
        for value in row[column]
    ]


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(values)
    return str(caught.value)


# Key by key ------------------------------------------------------------------------------------------------


def test_the_table_above_has_every_key() -> None:
    assert sorted(EVERY_KEY) == sorted(KEYS)


def test_every_key_has_a_default_and_every_default_a_key() -> None:
    assert sorted(defaults()) == sorted(KEYS)


def test_defaults_are_those_of_pyproject() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    assert RunConfig.load().flat() == pyproject["tool"]["flwr"]["app"]["config"]


@pytest.mark.parametrize(("key", "value"), cases(1))
def test_a_refused_value_gives_one_line_with_key_value_and_what_is_allowed(key: str, value: Any) -> None:
    assert refusal({key: value}) == f"{key} = {value!r}: must be {EVERY_KEY[key][0]}"


@pytest.mark.parametrize(("key", "value"), cases(2))
def test_an_allowed_value_is_kept(key: str, value: Any) -> None:
    config = RunConfig.read({**defaults(), key: value})
    assert config.flat()[key] == value
    kind = type(value if isinstance(value, str) else defaults()[key])  # an int given for a float becomes one
    assert type(config.flat()[key]) is kind


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.read({other: value for other, value in defaults().items() if other != key})
    assert str(caught.value) == f"{key}: must be set"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_no_key_takes_a_list_a_table_or_nothing(key: str, value: Any) -> None:
    assert refusal({key: value}).startswith(f"{key} = {value!r}: must be ")


@given(st.floats())
def test_lr_takes_every_positive_number_and_nothing_else(lr: float) -> None:
    if 0 < lr < INF:
        assert RunConfig.load({"lr": lr}).lr == lr
    else:
        assert refusal({"lr": lr}) == f"lr = {lr!r}: must be a number > 0"


def test_a_seed_beyond_64_bits_is_refused() -> None:
    # torch.manual_seed takes no more than 2^64 - 1, a Flower message no more than 2^63 - 1.
    assert refusal({"seed": 2**63}).startswith(f"seed = {2**63}: must be ")


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
        refusal({"learn": 4}) == "unknown key 'learn': near are lr, late, stragglers; `fedapp keys` lists all"
    )


def test_every_unknown_key_has_its_line() -> None:
    assert refusal({"momentun": 0.9, "seeds": 1}).splitlines() == [
        "unknown key 'momentun': did you mean 'momentum'?",
        "unknown key 'seeds': did you mean 'seed'?",
    ]


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 1), (3, 10)])
def test_one_of_local_epochs_and_local_steps_is_zero(epochs: int, steps: int) -> None:
    assert refusal({"local-epochs": epochs, "local-steps": steps}) == (
        f"local-epochs = {epochs}, local-steps = {steps}: one of the two must be 0 and the other 1 or more"
    )


def test_steps_in_place_of_epochs() -> None:
    config = RunConfig.load({"local-epochs": 0, "local-steps": 7})
    assert (config.local_epochs, config.local_steps) == (0, 7)


@pytest.mark.parametrize("scheme", ["full", "paired", "fixed:0,1"])
def test_a_fraction_goes_with_a_random_draw_only(scheme: str) -> None:
    text = refusal({"participation": scheme, "fraction-train": 0.5})
    name = scheme.partition(":")[0]
    assert text == f"fraction-train = 0.5: goes with participation uniform, md or flower, not with {name!r}"


@pytest.mark.parametrize("scheme", ["uniform", "md"])
def test_a_fraction_of_a_random_draw(scheme: str) -> None:
    assert RunConfig.load({"participation": scheme, "fraction-train": 0.5}).fraction_train == 0.5


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
    assert refusal({"dataset": "npz"}) == "data-path = '': dataset npz needs the path of an .npz file"
    assert RunConfig.load({"dataset": "npz", "data-path": "x.npz"}).data_path == "x.npz"
    assert refusal({"dataset": "files"}).startswith(
        "data-path = '': dataset files needs the path of a .npz, .csv"
    )


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
        "strategy": st.sampled_from(STRATEGIES),
        "lr": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "l2": st.floats(min_value=0, allow_infinity=False),
        "momentum": st.floats(min_value=0, max_value=1, exclude_max=True),
        "fedfix-interval": st.integers(1, 100),
        "seed": st.integers(0, 2**63 - 1),
        "batch-size": st.integers(0, 10_000),
        "normalize": st.sampled_from([True, False, "symmetric", "standardize"]),
        "results-dir": st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        "run-name": st.from_regex(r"\A[a-z0-9äöü][a-z0-9 .='\"]*\Z"),
    },
)


@given(configs)
def test_a_config_survives_toml(values: dict[str, Any]) -> None:
    config = RunConfig.load(values)
    assert RunConfig.load(tomllib.loads(tomli_w.dumps(config.flat()))) == config


@given(configs)
def test_a_config_survives_a_message_record(values: dict[str, Any]) -> None:
    config = RunConfig.load(values)
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
