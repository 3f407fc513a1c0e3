"""What a SuperLink takes: the arithmetic, a device's answers, and (slow) whole deployments."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from strategies.flower import messages
from studies.benchmarks import superlink
from studies.benchmarks.light_devices import answer
from studies.benchmarks.superlink import (
    Mark,
    Result,
    command_of,
    cpu_seconds,
    draw,
    keep,
    rounds_in,
    summarise,
    table,
)

MEMORY = {"SuperLink": 170.0, "ServerApp": 810.0}
RESULT = Result(8, True, "logistic", 4.0, 0.25, 0.03, 0.02, 0.004, MEMORY, 5.0)


@pytest.fixture
def request_to_device(monkeypatch):
    for name, value in {"_task_id": 1, "_run_id": 1, "_node_id": 0}.items():
        monkeypatch.setattr(TaskIdentity, name, value)

    def make(kind):
        arrays = ArrayRecord({"w": Array(np.full(3, 2.0, dtype=np.float32))})
        content = RecordDict({messages.ARRAYS: arrays, messages.CONFIG: ConfigRecord({})})
        return Message(content, dst_node_id=7, message_type=kind)

    return make


def test_a_light_device_says_which_part_of_the_data_is_its_own(request_to_device):
    metrics = messages.metrics_of(answer(request_to_device(messages.DESCRIBE), index=2, devices=5))
    assert (metrics[messages.PARTITION_ID], metrics[messages.NUM_PARTITIONS]) == (2, 5)


def test_a_light_device_answers_with_a_model_of_its_own(request_to_device):
    replies = [answer(request_to_device(messages.TRAIN), index, 2) for index in (0, 1)]
    models = [messages.arrays_of(reply)["w"].numpy() for reply in replies]
    assert [model.dtype for model in models] == [np.float32, np.float32]
    assert not np.array_equal(*models)  # the SuperLink would store equal ones once
    np.testing.assert_allclose(models, 2.0, rtol=1e-5)
    assert replies[1].metadata.dst_node_id == 0


def test_an_exchange_costs_what_was_used_after_the_first_round():
    # The initial model at 10 s, then rounds at 40, 44, 50 and 53 s: they take 4, 6 and 3 s, and 30 s don't count.
    marks = [
        Mark(10, 1.0, 2.0, 0.0),
        Mark(40, 9.0, 3.0, 5.0),
        Mark(44, 10.0, 3.1, 6.0),
        Mark(50, 11.0, 3.2, 7.0),
        Mark(53, 12.0, 3.6, 17.0),
    ]
    watch = SimpleNamespace(marks=marks, memory={"SuperLink": 100.0}, database=2.5)
    result = summarise(watch, devices=2, light=False, model="logistic", idle=0.1)
    assert result.round_seconds == 4
    # Three rounds of two devices are six exchanges.
    assert result.superlink_cpu == pytest.approx((12 - 9) / 6)
    assert result.server_app_cpu == pytest.approx((3.6 - 3.0) / 6)
    assert result.device_cpu == pytest.approx((17 - 5) / 6)
    assert (result.idle_cpu, result.memory, result.database) == (0.1, {"SuperLink": 100.0}, 2.5)


def test_a_process_has_used_cpu_time_and_one_that_is_gone_none():
    assert 0 < cpu_seconds([os.getpid()]) <= cpu_seconds([os.getpid(), os.getppid()])
    assert cpu_seconds([2**22 + 1]) == 0
    assert "python" in command_of(os.getpid())
    assert command_of(2**22 + 1) == ""


def test_rounds_are_complete_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert rounds_in(path) == 0
    path.write_text('{"aggregation": 0}\n{"aggregation": 1}\n{"aggre')
    assert rounds_in(path) == 2


def test_the_table_has_a_line_per_deployment_and_the_figure_its_models(tmp_path):
    *_, line = table([RESULT]).splitlines()
    # 8 devices in 4 s are 2 exchanges a second; there was no SuperExec, SuperNode or ClientApp to see.
    assert (
        line
        == "| 8 light | logistic | 4.0 | 2.0 | - | 250 | 30 | 0.02 | 4.0 | 170 | - | 810 | - | - | - | 5 |"
    )
    assert draw([RESULT], tmp_path / "figure.png").stat().st_size > 1000


def test_results_of_several_calls_are_kept_together(tmp_path):
    other = replace(RESULT, light=False, devices=2)
    assert keep(tmp_path / "results.json", [RESULT]) == [RESULT]
    assert keep(tmp_path / "results.json", [other]) == [RESULT, other]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [["--light", "--models", "mlp-1m"], ["--models", "logistic"]])
def test_a_deployment_is_measured_and_ended(kind, tmp_path, capsys):
    path = tmp_path / "results.json"
    superlink.main(["--nodes", "1", "--rounds", "1", "--json", str(path), *kind])
    [result] = json.loads(path.read_text())
    assert result["round_seconds"] > 0
    assert result["superlink_cpu"] > 0
    assert result["server_app_cpu"] > 0
    assert result["memory"]["SuperLink"] > 50
    if result["light"]:
        assert result["memory"]["ClientApp"] == 0
        assert 0 < result["device_cpu"] < 0.5
    else:
        assert result["memory"]["ClientApp"] > 50
        assert result["device_cpu"] > 0.5  # importing torch alone takes more
    assert "| 1" in capsys.readouterr().out
