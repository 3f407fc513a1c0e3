"""A strategy of the user's own, by module and class, whose parameters are keys of the run config."""

import pickle
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

import fedapp.config.run_config as run_config
from custom.half_life import HalfLife
from fedapp import cli, client_app, server
from fedapp.config import ConfigError, RunConfig, defaults, own_keys
from fedapp.config.document import document
from fedapp.config.options import read_options
from fedapp.config.run_config import key_of
from fedapp.engine.sequential import SequentialGrid
from fedapp.report.client_tables import last_clients
from strategies import AsynchronousConfig, FedAvg, StrategyConfig, parameter
from tests.runs import summary_of

HALF_LIFE = "custom.half_life:HalfLife"


def finish(values: dict[str, Any], tmp_path: Path, name: str = "run") -> Path:
    given = {
        "model": "logistic",
        "num-server-rounds": 4,
        "results-dir": str(tmp_path),
        "run-name": name,
        **values,
    }
    experiment = server.prepare(RunConfig.load(given), 3)
    return server.run(SequentialGrid(client_app.app, 3), experiment).path


def test_its_parameter_is_a_key_that_acts_and_is_recorded(tmp_path):
    one = finish({"strategy": HALF_LIFE, "half-life": 0.5}, tmp_path, "one")
    other = finish({"strategy": HALF_LIFE, "half-life": 5}, tmp_path, "other")
    assert tomllib.loads((one / "config.toml").read_text())["half-life"] == 0.5
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert summary_of(one)["unread-keys"] == []
    last = last_clients(one)
    # τ = 0.2, 0.6, 1; d_i = p_i 2^(−τ_i / 0.5)
    p, d = last["importance"], last["weight"]
    assert d == pytest.approx([p[0] * 2**-0.4, p[1] * 2**-1.2, p[2] * 2**-2.0])


def test_its_config_goes_to_other_processes():
    config = RunConfig.load({"strategy": HALF_LIFE, "half-life": 0.5, "lr": 0.2})
    again = pickle.loads(pickle.dumps(config))
    assert (again, again.half_life, type(again)) == (config, 0.5, type(config))


def test_a_run_of_it_goes_on(tmp_path):
    values = {"strategy": HALF_LIFE, "half-life": 0.5, "checkpoint-every": 1}
    path = finish(values, tmp_path)
    again = RunConfig.load({"resume": str(path), "num-server-rounds": 6})
    server.run(SequentialGrid(client_app.app, 3), server.prepare(again, 3))
    whole = finish({**values, "num-server-rounds": 6}, tmp_path, "whole")
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": HALF_LIFE, "half-life": "long"}, "half-life = 'long': must be a number"),
        ({"strategy": "fedavg", "half-life": 1.0}, "unknown key 'half-life'"),
        ({"strategy": "custom.nothing:It"}, "strategy = 'custom.nothing:It': can't be imported"),
        (
            {"strategy": "custom.half_life:Nothing"},
            "strategy = 'custom.half_life:Nothing': can't be imported",
        ),
        ({"strategy": "custom.half_life:np"}, "must be a subclass of strategies.FederatedStrategy"),
        ({"strategy": "fedavg:"}, "strategy = 'fedavg:': can't be imported"),
    ],
)
def test_what_is_wrong_is_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_field_that_no_key_can_hold_is_named():
    @dataclass(frozen=True)
    class Config(StrategyConfig):
        weights: tuple[float, ...] = ()

    class Odd(FedAvg):
        pass

    Odd.Config = Config
    with pytest.raises(ConfigError, match=r"Odd\.Config\.weights: must be a bool, int, float, str"):
        run_config.schema_with(Odd)


def test_a_field_that_is_called_like_a_key_of_other_things_is_refused():
    @dataclass(frozen=True)
    class Config(FedAvg.Config):
        momentum: float = parameter(0.9, "of the server", ge=0, lt=1)

    class Heavy(FedAvg):
        pass

    Heavy.Config = Config
    for keys in (own_keys, run_config.schema_with):
        with pytest.raises(ConfigError) as caught:
            keys(Heavy)
        assert str(caught.value) == (
            "Heavy.Config.momentum: momentum is a key of every run, and isn't the strategy's; the field must be "
            "called something else"
        )


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (int, parameter(3, "rounds until slow clients are left out", ge=0)),
        (float, 0.5),
    ],
)
def test_a_field_that_declares_a_key_of_all_strategies_anew_is_refused(kind: type, declared: Any) -> None:
    body = {"__annotations__": {"patience": kind}, "patience": declared, "__module__": __name__}
    made = dataclass(frozen=True)(type("Config", (FedAvg.Config,), body))
    mine = type("Mine", (FedAvg,), {"Config": made})
    for keys in (own_keys, run_config.schema_with):
        with pytest.raises(
            ConfigError, match=r"^Mine\.Config\.patience: patience is a key of every such strategy"
        ):
            keys(mine)


@dataclass(frozen=True)
class SlowConfig(FedAvg.Config):
    server_lr: float = 0.5
    buffer_size: int = parameter(7, "of its own, by the name of another method's", ge=1)
    min_clients: int = 1


class Slow(FedAvg):
    Config = SlowConfig


def test_a_default_that_does_not_stand_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "slow_of_mine", SimpleNamespace(Slow=Slow))

    def told(**given: Any) -> list[str]:
        caplog.clear()
        server.prepare(RunConfig.load({"strategy": "slow_of_mine:Slow", "model": "logistic", **given}), 3)
        return [line for line in caplog.messages if "stands" in line]

    assert told() == [
        "server-lr = 0.0: stands, as the run config always has a value; the default of slow_of_mine:Slow, 0.5, "
        "counts only if given"
    ]
    assert told(**{"server-lr": 0.5, "buffer-size": 3}) == []
    assert told(strategy="fedavg") == told(strategy=HALF_LIFE) == []


@pytest.mark.parametrize(("given", "used"), [({}, 7), ({"buffer-size": 0}, 7), ({"buffer-size": 3}, 3)])
def test_a_buffer_size_of_0_is_the_methods_own(given, used, monkeypatch):
    monkeypatch.setitem(sys.modules, "slow_of_mine", SimpleNamespace(Slow=Slow))
    values = {"strategy": "slow_of_mine:Slow", "model": "logistic", **given}
    experiment = server.prepare(RunConfig.load(values), 3)
    assert isinstance(experiment.strategy, Slow)
    assert experiment.strategy.config.buffer_size == experiment.config.buffer_size == used


def test_a_key_of_it_in_pyproject_may_stay_when_the_strategy_is_swapped(tmp_path, monkeypatch):
    # Flower passes on only keys that stand there.
    own = {**defaults(), "half-life": 1.0}
    monkeypatch.setattr(run_config, "defaults", lambda: own)
    run_config.schema_with.cache_clear()
    try:
        path = finish({"strategy": "fedavg", "half-life": 3.0}, tmp_path)
    finally:
        run_config.schema_with.cache_clear()
    assert summary_of(path)["unread-keys"] == ["half-life"]


def test_the_documented_keys_are_those_declared():
    path = Path(__file__).parents[3] / "docs" / "config.md"
    assert path.read_text("utf-8") == document(), "fedapp keys > docs/config.md"


# ---- What its fields say of themselves ------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedConfig(AsynchronousConfig):
    """Parameters of `Tuned`.

    Parameters
    ----------
    half_life : float
        Seconds until a contribution
        counts half.
    tick, tock : float, int
        Both of them.
    """

    half_life: float = parameter(1.0, gt=0, le=100)
    tick: float = parameter(0.5, "Δt, seconds between two aggregations", ge=0.125)
    tock: int = parameter(1, choices=(1, 2, 4))
    shape: Literal["exponential", "linear"] = "exponential"
    loud: bool = False


class Tuned(HalfLife):
    Config = TunedConfig


TUNED = f"{__name__}:Tuned"


@pytest.fixture
def tuned(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, SimpleNamespace(Tuned=Tuned)))
    return TUNED


def test_its_keys_are_told_with_range_choices_and_meaning(tuned):
    keys = own_keys(Tuned)
    assert {key: (keys.allowed(key), key_of(keys, key).meaning) for key in keys.key_names()} == {
        "half-life": ("a number in (0, 100]", "Seconds until a contribution counts half"),
        "tick": ("a number >= 0.125", "Δt, seconds between two aggregations"),
        "tock": ("one of 1, 2, 4", "Both of them"),
        "shape": ("one of exponential, linear", "of Tuned"),
        "loud": ("true or false", "of Tuned"),
    }
    printed = CliRunner().invoke(cli.app, ["keys", "--strategy", tuned]).stdout.splitlines()
    row = "| `half-life` | Seconds until a contribution counts half | `1.0`; in (0, 100] | Tuned |"
    assert row in printed
    assert '| `shape` | of Tuned | `"exponential"`; exponential, linear | Tuned |' in printed
    assert sum(line.startswith("| `") for line in printed) == 5
    assert "`concurrency`" in printed[-1]


def test_a_strategy_without_keys_of_its_own_says_so():
    printed = CliRunner().invoke(cli.app, ["keys", "--strategy", "fedprox"]).stdout
    assert "`fedprox` has no keys of its own" in printed
    wrong = CliRunner().invoke(cli.app, ["keys", "--strategy", "fedproxy"])
    assert wrong.exit_code == 1
    assert "error: strategy = 'fedproxy': must be one of" in wrong.output


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("half-life", 0, "a number in (0, 100]"),
        ("half-life", 101.0, "a number in (0, 100]"),
        ("half-life", float("nan"), "a number in (0, 100]"),
        ("half-life", True, "a number in (0, 100]"),
        ("tick", 0.1, "a number >= 0.125"),
        ("tock", 3, "one of 1, 2, 4"),
        ("tock", 2.0, "one of 1, 2, 4"),
        ("shape", "square", "one of exponential, linear"),
        ("loud", 1, "true or false"),
    ],
)
def test_config_and_constructor_refuse_the_same(tuned, key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load({"strategy": tuned, key: value})
    assert str(caught.value) == f"{key} = {value!r}: must be {allowed}"
    name = key.replace("-", "_")
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{name} = {value!r}")):
        Tuned(**{name: value})
    if key != "loud":  # of which nothing is declared
        with pytest.raises(ValueError, match=re.escape(f"{name} = {value!r}: must be {allowed}")):
            Tuned(TunedConfig(**{name: value}))


def test_what_is_allowed_is_taken(tuned):
    given = {"half-life": 100, "tick": 0.125, "tock": 4, "shape": "linear", "loud": True}
    config = RunConfig.load({"strategy": tuned, **given})
    assert {key: config.flat()[key] for key in given} == given
    assert Tuned(**{key.replace("-", "_"): value for key, value in given.items()}).config.tock == 4


def test_a_default_that_is_not_allowed_is_an_error_where_it_stands():
    for wrong in (
        lambda: parameter(0.0, gt=0),
        lambda: parameter("c", choices=("a", "b")),
        lambda: parameter(1, gt=0, ge=0),
        lambda: parameter("a", ge=0),
        lambda: parameter(1, ge=0, choices=(1, 2)),
    ):
        with pytest.raises(ValueError, match=r"^parameter\("):
            wrong()

    @dataclass(frozen=True)
    class Config(StrategyConfig):
        way: Literal["a", "b"] = "c"  # type: ignore[assignment]

    class Astray(FedAvg):
        pass

    Astray.Config = Config
    with pytest.raises(ConfigError, match=r"Astray\.Config\.way = 'c': must be one of a, b"):
        own_keys(Astray)


# ---- Its keys in one text, as flwr run needs them -------------------------------------------------------------


def test_keys_in_one_text_are_the_same_as_by_themselves():
    for text in ("half-life=2.0 tick=0.25", "  half-life=2.0\ttick=0.25 ", "tick=0.25 half-life=2"):
        config = RunConfig.load({"strategy": HALF_LIFE, "strategy-config": text})
        assert config == RunConfig.load({"strategy": HALF_LIFE, "half-life": 2.0, "tick": 0.25})
        assert config.flat()["strategy-config"] == ""
    both = {"strategy": HALF_LIFE, "strategy-config": "half-life=2.0", "half-life": 2.0}
    assert RunConfig.load(both).flat()["half-life"] == 2.0


def test_a_text_in_it_has_quotation_marks_of_the_other_kind(tuned):
    given = read_options("-c", [f"strategy='{tuned}' strategy-config=\"shape='linear' loud=true\""])
    flat = RunConfig.load(given).flat()
    assert (flat["shape"], flat["loud"]) == ("linear", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "half-lief=2.0",
            "strategy-config = 'half-lief=2.0': unknown key 'half-lief': did you mean 'half-life'?",
        ),
        ("lr=0.5", "strategy-config = 'lr=0.5': lr is no key of the strategy alone: give it by itself"),
        ("half-life", "strategy-config = 'half-life': 'half-life' is not of the form key=value"),
        ("half-life=1 half-life=2", "half-life is given twice, as 1 and 2"),
        ("half-life=long", "strategy-config = 'half-life=long': "),
        ("half-life=-1", "half-life = -1: must be a number > 0"),
        ("half-life='2'", "half-life = '2': must be a number > 0"),
        ("own.toml", "strategy-config = 'own.toml': 'own.toml' is not of the form key=value"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(text, message):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load({"strategy": HALF_LIFE, "strategy-config": text})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_in_it_and_by_itself_must_be_the_same():
    with pytest.raises(ConfigError, match=r"half-life is given twice, as 3\.0 and 2\.0"):
        RunConfig.load({"strategy": HALF_LIFE, "strategy-config": "half-life=2.0", "half-life": 3.0})


def test_with_a_strategy_that_has_none_it_is_named_as_unread(tmp_path):
    path = finish({"strategy": "fedavg", "strategy-config": "half-life=2.0"}, tmp_path)
    assert summary_of(path)["unread-keys"] == ["strategy-config"]


def test_a_run_goes_on_with_it_or_without_but_not_with_another(tmp_path):
    given = {"strategy": HALF_LIFE, "strategy-config": "half-life=0.5", "checkpoint-every": 1}
    path = finish(given, tmp_path)
    recorded = tomllib.loads((path / "config.toml").read_text())
    assert (recorded["half-life"], recorded["strategy-config"]) == (0.5, "")
    for again in ({}, {"strategy-config": "half-life=0.5"}, {"half-life": 0.5}, given):
        config = RunConfig.load({"resume": str(path), "num-server-rounds": 6, **again})
        assert config.flat()["half-life"] == 0.5
    with pytest.raises(ConfigError, match=r"another config than half-life = 2\.0 \(it has 0\.5\)"):
        RunConfig.load({"resume": str(path), "strategy-config": "half-life=2.0"})
