"""When a run that came to its end has diverged, and that no run that learns is taken for one."""

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp import server
from fedapp.api.command import parser_of, run
from fedapp.config import RunConfig
from fedapp.engine.run import make_grid
from fedapp.report import read_metrics
from fedapp.report.files import read_summary
from fedapp.server.failure import WorseThanGuessingError, judge
from fedapp.server.length import with_length
from strategies import Contribution, DelayAdaptive, FedBuff, Ringmaster
from tests.selection import only

LINES = st.lists(
    st.fixed_dictionaries(
        {"loss": st.none() | st.floats(0, 1e30), "accuracy": st.floats(0, 1)},
        optional={"train-loss": st.none() | st.floats(0, 1e30)},
    ),
    max_size=20,
)


def curve(*rows: tuple[float | None, float, float | None]) -> list[dict[str, Any]]:
    return [dict(zip(("loss", "accuracy", "train-loss"), row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    "rows",
    [
        [(2.3, 0.1, None), (16.9, 0.137, 4.0)],
        [(2.3, 0.1, None), (1.9, 0.4, 1.8), *[(7.0, 0.16, 3.0)] * 4],
        [(2.3, 0.1, None), (None, 0.1, None)],
        [(2.3, 0.1, None), (30.0, 0.1, 0.2)],  # clients fit what they have, the model is ruined
        [(2.3, 0.1, None), (7.0, 0.32, 3.0)],  # a quarter of the way from 0.1 to 1 is 0.325
        [(2.3, 0.5, None), (7.0, 0.6, 3.0)],  # and from what it begins with 0.625
        [(2.3, 0.1, None), (7.0, 0.1, 2.31)],  # ln 10 is 2.303
        [(2.3, 0.1, None), *[(1.0, 0.7, 0.9)] * 6, *[(20.0, 0.1, 9.0)] * 2],  # a quarter of eight are two
    ],
)
def test_worse_than_guessing_is_diverged(rows, configure):
    with pytest.raises(WorseThanGuessingError, match=r"the steps are too large \(lr = 0.1\)$"):
        judge(curve(*rows), 10, configure())


@pytest.mark.parametrize(
    "rows",
    [
        [(2.3, 0.1, None)],
        [(2.3, 0.1, None), (1.5, 0.5, 1.4)],
        [(2.3, 0.1, None), (4.0, 0.93, 0.1)],  # sure of itself, and wrong in few places
        [(2.3, 0.1, None), (7.0, 0.2, 0.5)],  # overfits: its clients learn
        [(2.3, 0.1, None), (2.6, 0.1, 1.7)],  # learns nothing
        [(2.3, 0.1, None), (9.0, 0.1, None)],  # noise, for the sake of privacy: nobody tells how clients fare
        [(2.3, 0.1, None), *[(1.0, 0.7, 0.9)] * 7, (20.0, 0.1, 9.0)],  # one bad round at the end
        [(9.0, 0.1, None), (17.0, 0.12, 5.0)],  # begins badly
        [(2.3, 0.1, None), (7.0, 0.33, 3.0)],
        [(2.3, 0.1, None), (7.0, 0.1, 2.29)],
        [(2.3, 0.1, None), (22.9, 0.1, 0.2)],  # less than ten times ln 10
    ],
)
def test_what_learns_or_only_learns_nothing_is_not(rows, configure):
    judge(curve(*rows), 10, configure())


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([2.0, 20.1], True),
        ([2.0, 19.9], False),
        ([2.0, None], True),
        ([0.0, 5.0], False),  # ten times nothing
        ([None, 5.0], False),
        ([2.0, *[1.0] * 7, 90.0], True),  # the middle of the last two, 45.5
        ([2.0, *[1.0] * 9, 90.0], False),  # and of the last three, 1
        ([2.0], False),
    ],
)
@pytest.mark.parametrize(("loss", "classes"), [("mse", 0), ("huber", 10), ("cross-entropy", 0)])
def test_where_guessing_costs_nothing_known_it_is_ten_times_the_first_loss(
    loss, classes, losses, diverged, configure
):
    lines = [{"loss": each} for each in losses]
    config = configure(loss=loss, server_lr=0.5, dp="local", dp_noise_multiplier=2.0)
    if not diverged:
        judge(lines, classes, config)
        return
    said = (
        r"the steps are too large \(server-lr = 0.5, lr = 0.1\), or the noise is \(dp-noise-multiplier = 2\)$"
    )
    with pytest.raises(WorseThanGuessingError, match=said):
        judge(lines, classes, config)


@given(LINES, st.integers(2, 100))
def test_a_loss_below_that_of_guessing_is_never_diverged(lines, classes):
    for line in lines:
        line["loss"] = min(line["loss"] or 0.0, math.log(classes))
    judge(lines, classes, RunConfig.load({}))


@pytest.mark.parametrize(
    ("given_keys", "status", "reason"),
    [
        ("lr=100 num-server-rounds=4", "diverged", "the steps are too large (lr = 100)"),
        ("lr=1e30 num-server-rounds=2", "diverged", "the clients' steps are too large (lr)"),
        ("lr=1e30 strategy=async-fedavg", "diverged", "the clients' steps are too large (lr)"),
        ("lr=0.1 num-server-rounds=2", "finished", ""),
    ],
)
def test_the_exit_code_and_the_status_say_so(given_keys, status, reason, tmp_path, capsys):
    arguments = ["--engine", "vectorized", "-c", f"{given_keys} results-dir={tmp_path} run-name=run"]
    code = run(parser_of(None, "").parse_args(arguments))
    summary = read_summary(tmp_path / "run")
    assert (code, summary["status"]) == (int(status != "finished"), status)
    assert str(summary.get("reason", "")).endswith(reason)
    assert summary.get("complete", True) == ("1e30" not in given_keys)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said == ([f"error: {summary['reason']}"] if reason else [])
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.figures
def test_figures_are_drawn_if_they_are_wanted(tmp_path, capsys):
    for wanted in ("true", "false"):
        given = f"num-server-rounds=1 figures={wanted} results-dir={tmp_path} run-name=with-{wanted}"
        assert run(parser_of(None, "").parse_args(["--engine", "vectorized", "-c", given])) == 0
    drawn = {path.name for path in (tmp_path / "with-true").glob("*.png")}
    assert drawn == {"curves.png", "partition.png", "timeline.png"}
    assert list((tmp_path / "with-false").glob("*.png")) == []
    out = capsys.readouterr().out
    assert str(tmp_path / "with-true" / "curves.png") in out
    assert str(tmp_path / "with-false" / "model.safetensors") in out
    assert str(tmp_path / "with-false" / "curves.png") not in out


@pytest.mark.parametrize(
    "strategy",
    only(["fedavg", "fedbuff", "fedprox", "spectral", "async-fedavg", "fedfix", "ringmaster", "rennala"], 2),
)
def test_every_strategy_learns_as_it_comes(strategy, tmp_path):
    config = RunConfig.load({"strategy": strategy, "results-dir": str(tmp_path), "run-name": "run"})
    path = server.run(make_grid("vectorized", 20), server.prepare(config, 20)).path
    last = read_metrics(path)[-1]
    # Those two throw most work away, that of slow clients above all.
    assert last["accuracy"] > (0.7 if strategy in ("ringmaster", "rennala") else 0.85)
    assert 38 <= last["time"] <= 42  # of 40 rounds, the slowest client's task being 1 s


def test_how_long_a_run_is_can_be_said(configure):
    asked = server.prepare(configure(strategy="async-fedavg", num_server_rounds=7, eval_every=2), 20).config
    assert (asked.num_server_rounds, asked.eval_every) == (7, 2)
    own = server.prepare(
        configure(strategy="async-fedavg", num_server_rounds=0, time_scenario="F0"), 20
    ).config
    assert (own.num_server_rounds, own.eval_every) == (800, 20)
    some = server.prepare(
        configure(strategy="fedbuff", num_server_rounds=0, time_scenario="F0", concurrency=10, buffer_size=4),
        20,
    ).config
    assert some.num_server_rounds == 100
    # Of ten clients at work, whose tasks end all at once, each is nine models late at most, and R = 5 drops half.
    late = {"num_server_rounds": 0, "time_scenario": "F0", "concurrency": 10}
    half = server.prepare(configure(strategy="ringmaster", delay_threshold=5, **late), 20).config
    assert half.num_server_rounds == pytest.approx(200, rel=0.02)
    real = server.prepare(configure(strategy="fedfix", num_server_rounds=0), 20, on_devices=True).config
    assert real.num_server_rounds == 40


def test_how_long_a_run_is_rests_on_what_a_strategy_of_ones_own_says(configure, caplog):
    class Threshold(Ringmaster):
        def is_fresh_enough(self, staleness: int) -> bool:
            return staleness < 5

    class Older(DelayAdaptive):
        def accept(self, contribution: Contribution) -> bool:
            return contribution.staleness < 5

    class Buffers(FedBuff):
        def is_fresh_enough(self, staleness: int) -> bool:
            return staleness < 5

    config = configure(num_server_rounds=0, time_scenario="F0")
    ten = {"concurrency": 10}
    assert with_length(config, Threshold(**ten), 20).num_server_rounds == pytest.approx(200, rel=0.02)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert with_length(config, Older(**ten), 20).num_server_rounds == 400
    assert "how much work Older throws away isn't known beforehand" in caplog.text
    assert "`fresh` in place of `accept` tells" in caplog.text
    # Whoever waits for the buffer doesn't work meanwhile.
    assert with_length(config, Buffers(buffer_size=4), 20).num_server_rounds == 200
    assert "how much work Buffers throws away isn't known beforehand" in caplog.text
