"""Device profiles and availability through the whole app: times by hand, and a numpy simulation of the models."""

import csv
import io

import numpy as np
import pytest

from fedapp import server
from fedapp.config import ConfigError, RunConfig
from fedapp.report.client_tables import last_clients
from tests.end_to_end.softmax import KEYS, Problem, assert_close
from tests.runs import arrays_of, lines_of, same_files
from tests.strategies.events.fleet_reference import Reference

CLIENTS, STEPS, SERVER_LR = 5, 3, 0.1
SPEEDS, DOWN, UP, LATENCY = [900.0, 2100.0, 400.0, 1300.0, 700.0], 3e5, 1e5, 0.05
PERIOD = 9.7
STRETCHES = [[(0.0, 5.1)], [(1.3, 9.1)], [(0.0, PERIOD)], [(0.0, 2.9), (4.1, 8.3)], [(3.7, 9.3)]]
LOGISTIC = {**KEYS, "local-steps": STEPS}


@pytest.fixture
def fleet(tmp_path):
    with (tmp_path / "devices.csv").open("w", newline="") as file:
        csv.writer(file).writerows([i, speed, DOWN, UP, LATENCY] for i, speed in enumerate(SPEEDS))
    with (tmp_path / "there.csv").open("w", newline="") as file:
        csv.writer(file).writerows([i, a, b, PERIOD] for i, own in enumerate(STRETCHES) for a, b in own)
    return {
        "time-scenario": f"profile:{tmp_path / 'devices.csv'}",
        "availability": f"trace:{tmp_path / 'there.csv'}",
    }


def model_bytes(path):
    """Return the size of the model's arrays as .npy, which messages hold."""
    total = 0
    for array in arrays_of(path).values():
        buffer = io.BytesIO()
        np.save(buffer, array)
        total += len(buffer.getvalue())
    return total


def seconds(sizes, passes, size, down=1):
    """Return work / speed + bits down / down + bits up / up + latency."""
    return [
        n * own / speed + 8 * down * size / DOWN + 8 * size / UP + LATENCY
        for n, own, speed in zip(sizes, passes, SPEEDS, strict=True)
    ]


@pytest.mark.parametrize("strategy", ["async-fedavg", "fedbuff", "fedfix"])
def test_the_app_equals_an_independent_simulation(run_app, fleet, strategy):
    number, m, interval = 40, 3, 0.8
    config = {
        **LOGISTIC,
        **fleet,
        "strategy": strategy,
        "num-server-rounds": number,
        "eval-every": 10,
        "server-lr": SERVER_LR,
        "buffer-size": m,
        "fedfix-interval": interval,
    }
    path = run_app(config, CLIENTS)
    problem = Problem(path)
    sizes = [len(rows) for rows in problem.train]
    expected = Reference(seconds(sizes, [STEPS] * CLIENTS, model_bytes(path)), STRETCHES, PERIOD)
    expected.run({"async-fedavg": "async"}.get(strategy, strategy), number, m=m, interval=interval)
    told = last_clients(path)
    times = [expected.aggregations[n - 1][0] for n in (10, 20, 30, 40)]
    assert [line["time"] for line in lines_of(path)[1:]] == pytest.approx(times, rel=1e-9)
    assert told["participation"] == [
        sum(i in came for _, came in expected.aggregations) for i in range(CLIENTS)
    ]
    lost = [who for when, who in expected.lost if when <= times[-1] + 1e-9]
    assert len(lost) > 3
    assert told["lost"] == [lost.count(i) for i in range(CLIENTS)]
    models = [np.zeros((10, 65))]
    for n, (_, came) in enumerate(expected.aggregations):
        moves = 0.0
        for i, staleness in came.items():
            sent = models[n - staleness]
            moves = moves + told["weight"][i] * (problem.descend(i, sent, STEPS) - sent)
        models.append(models[-1] + SERVER_LR * moves)
    assert_close(path, models[-1])


@pytest.mark.parametrize(
    ("strategy", "down", "engine"),
    [
        ("fedavg", 1, "sequential"),
        ("spectral", 2, "vectorized"),
        ("scaffold", 2, "sequential"),
        ("fednova", 1, "vectorized"),
    ],
)
def test_a_round_is_as_long_as_its_work_and_bytes_by_hand(run_app, fleet, strategy, down, engine):
    # E_k of their own, in epochs; what goes beside the model counts.
    work = [2, 1, 1, 3, 2]
    config = {
        "model": "logistic",
        "batch-size": 64,
        "strategy": strategy,
        "num-server-rounds": 3,
        "step-heterogeneity": "list:" + ",".join(map(str, work)),
        "time-scenario": fleet["time-scenario"],
    }
    path = run_app(config, CLIENTS, engine=engine)
    sizes = [len(rows) for rows in Problem(path).train]
    longest = max(seconds(sizes, work, model_bytes(path), down))
    assert [line["time"] for line in lines_of(path)] == pytest.approx(
        [longest * n for n in range(4)], rel=1e-9
    )


def test_operations_are_counted_where_speeds_are_operations(run_app, fleet):
    # Logistic regression on 64 pixels: 64 × 10 products of 2 operations each, three times for a step.
    own = {"time-scenario": fleet["time-scenario"], "task-work": "flop", "num-server-rounds": 2}
    path = run_app(LOGISTIC | own, CLIENTS)
    sizes = [len(rows) for rows in Problem(path).train]
    longest = max(seconds(sizes, [STEPS * 3 * 2 * 64 * 10] * CLIENTS, model_bytes(path)))
    assert lines_of(path)[-1]["time"] == pytest.approx(2 * longest, rel=1e-9)


@pytest.mark.usefixtures("short_forecasts")
@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff"])
def test_the_engines_agree_and_a_run_goes_on_where_it_was(run_app, fleet, strategy):
    config = {
        **LOGISTIC,
        **fleet,
        "strategy": strategy,
        "num-server-rounds": 8,
        "eval-every": 2,
        "checkpoint-every": 1,
        "server-lr": 0.5,
        "buffer-size": 2,
        "task-failure": 0.2,
        "aggregation-weights": "observed",
    }
    whole = run_app(config, CLIENTS, name="whole")
    vectorized = run_app(config, CLIENTS, name="vectorized", engine="vectorized")
    for one, other in zip(lines_of(whole), lines_of(vectorized), strict=True):
        assert one["time"] == other["time"]
        assert one.get("lost-tasks") == other.get("lost-tasks")
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    short = run_app(config, CLIENTS, name="short", num_server_rounds=4)
    rest = run_app({"resume": str(short), "num-server-rounds": 8}, CLIENTS)
    assert same_files(rest, whole, "model.safetensors")
    assert lines_of(rest)[-1]["time"] == lines_of(whole)[-1]["time"]


def test_a_run_without_a_length_is_as_long_as_forty_rounds_of_the_profile(fleet):
    config = RunConfig.load({**LOGISTIC, **fleet, "strategy": "async-fedavg", "num-server-rounds": 0})
    experiment = server.prepare(config, CLIENTS)
    sizes = experiment.partition.sizes.tolist()
    own = seconds(sizes, [STEPS] * CLIENTS, 10 * 64 * 4 + 128 + 10 * 4 + 128)  # each array with its header
    assert experiment.config.num_server_rounds == int(np.ceil(40 * sum(max(own) / time for time in own)))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"time-scenario": "profile:/no/such"}, "time-scenario = 'profile:/no/such': is no file"),
        ({"availability": "trace:/no/such"}, "availability = 'trace:/no/such': is no file"),
        (
            {"availability": "diurnal:2"},
            "availability = 'diurnal:2': the first number must be above 0, at most 1",
        ),
        (
            {"availability": "diurnal:0.5", "participation": "paired"},
            "participation = 'paired' with availability = 'diurnal:0.5': ",
        ),
        (
            {"task-work": "flop", "time-scenario": "lognormal:1"},
            "task-work = 'flop': time-scenario = 'lognormal:1' says no speed in operations a second",
        ),
    ],
)
def test_what_cant_be_is_said_before_a_client_starts(values, text):
    with pytest.raises(ConfigError) as error:
        server.prepare(RunConfig.load({**LOGISTIC, "num-server-rounds": 2, **values}), CLIENTS)
    assert text in str(error.value)
