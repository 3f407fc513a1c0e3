"""What a worker answers is what the process itself would, to the last bit, and the process imports nothing heavy."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.common.serde import message_to_proto

from fedapp.client.handlers import CANNOT_TAKE_PART
from fedapp.client_app import app
from fedapp.federation import to_arrays
from fedapp.server import prepare
from fedapp.worker.asking import VARIABLE
from fedapp.worker.sources import PACKAGES
from strategies.flower import messages
from strategies.flower.internals import context_to_bytes, message_from_bytes, message_to_bytes
from strategies.flower.packing import is_packed, pack_record
from tests.fedapp.client.asking import NODE, context_of, trained
from tests.fedapp.worker.conftest import ROOT

KINDS = (messages.DESCRIBE, messages.ASK_DIRECTION, messages.TRAIN, messages.EVALUATE)


def said(reply: Message) -> bytes:
    """Return a reply as it is sent, but for when it was made."""
    proto = message_to_proto(reply)
    proto.metadata.created_at = proto.metadata.ttl = 0
    return proto.SerializeToString(deterministic=True)


# A device's noise comes from the operating system: without any, answers are equal to the last bit.
CLIPPED = {"dp-clipping-norm": 0.01, "dp-noise-multiplier": 0.0}


# The same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_answers_as_the_process_itself(kind, worker, request_to, use, monkeypatch, caplog):
    request = request_to(kind, config={"message-epsilon": 0.0, "dp": "local"})
    use("")
    own = app(request, context_of())
    assert own.has_content()
    use(worker.path)
    monkeypatch.setattr("fedapp.client.handlers.handle", None)
    for _ in range(2):  # the second time with data and model that it has kept
        assert said(app(request, context_of())) == said(own)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "values", [{"model": "mlp"}, {"model": "cnn"}, {"model": "mlp", "seed": 3, "lr": 0.5}]
)
def test_companions_and_other_models_are_as_without_a_worker(values, worker, request_to, use, configure):
    experiment = prepare(configure(batch_size=32, momentum=0.9, **values), 5)
    neighbours = to_arrays({n: v + 0.1 for n, v in experiment.model.state_dict().items()})
    request = request_to(messages.TRAIN, experiment, neighbours=neighbours, alpha=0.3, beta=0.5)
    replies = []
    for path in ("", worker.path):
        use(path)
        replies.append(app(request, context_of()))
    assert said(replies[0]) == said(replies[1])
    assert trained(replies[0]).keys() == experiment.model.state_dict().keys()


@pytest.mark.parametrize("dp", ["none", "central", "local"])
def test_a_packed_model_is_answered_packed_with_the_same_bits(dp, worker, request_to, use, only_the_worker):
    use(worker.path)
    plain = request_to(messages.TRAIN, config={"dp": dp, **CLIPPED})
    packed = request_to(messages.TRAIN, config={"dp": dp, **CLIPPED})
    packed.content[messages.ARRAYS] = pack_record(plain.content.array_records[messages.ARRAYS])
    replies = [app(request, context_of()) for request in (plain, packed)]
    records = [reply.content.array_records[messages.ARRAYS] for reply in replies]
    assert [is_packed(record) for record in records] == [False, True]
    assert pack_record(records[0]) == records[1]


def test_what_the_user_can_mend_is_the_same_error_reply_and_line_of_the_device_s_log(
    worker, request_to, use, only_the_worker, caplog
):
    use(worker.path)
    with caplog.at_level(logging.INFO, "flwr"):
        reply = app(request_to(messages.DESCRIBE), context_of({**NODE, "partition-id": 5}))
    assert (reply.error.code, reply.error.reason) == (CANNOT_TAKE_PART, "partition-id = 5: must be 0 to 4")
    lines = [(record.name, record.levelno, record.getMessage()) for record in caplog.records]
    assert lines == [
        ("flwr.fedapp", logging.WARNING, "This client can't take part: partition-id = 5: must be 0 to 4")
    ]


def test_an_unknown_type_is_the_app_s_own_error(worker, request_to, use, only_the_worker):
    use(worker.path)
    with pytest.raises(ValueError, match="No query function registered with name 'other'"):
        app(request_to("query.other"), context_of())


def test_the_context_s_state_comes_back(odd_worker, request_to, use):
    use(odd_worker.path)
    context = context_of()
    context.state["mine"] = ConfigRecord({"kept": b"as it is"})
    for number in (1, 2):
        assert app(request_to(messages.DESCRIBE, config={"deed": "remember"}), context).has_content()
        assert context.state.array_records["count"]["n"].numpy() == number
    assert context.state.config_records["mine"] == {"kept": b"as it is"}


# What the process imports ----------------------------------------------------------------------------------------

PROCESS = """
import pathlib, sys
from flwr.supernode.cli import flwr_clientapp  # what Flower's process begins with
from fedapp.client_app import app
from strategies.flower import internals as flower
message, context, reply = (pathlib.Path(sys.argv[1], name) for name in ("message", "context", "reply"))
answer = app(flower.message_from_bytes(message.read_bytes()), flower.context_from_bytes(context.read_bytes()))
reply.write_bytes(flower.message_to_bytes(answer))
heavy = {"torch", "torchvision", "sklearn", "scipy", "pandas", "pyarrow", "PIL", "matplotlib"}
print(*sorted(heavy & sys.modules.keys()))
"""


def in_a_process(folder: Path, message: Message, worker: Path) -> tuple[Message, str, str]:
    """Let a fresh process answer; return the reply, the heavy modules that it imported, and its log."""
    (folder / "message").write_bytes(message_to_bytes(message))
    (folder / "context").write_bytes(context_to_bytes(context_of()))
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(worker)},
        text=True,
        capture_output=True,
        check=True,
    )
    return message_from_bytes((folder / "reply").read_bytes()), done.stdout.strip(), done.stderr


def test_with_a_worker_the_process_imports_nothing_heavy(worker, request_to, use, tmp_path):
    request = request_to(messages.TRAIN)
    use("")
    own = app(request, context_of())
    reply, heavy, log = in_a_process(tmp_path, request, worker.path)
    assert heavy == ""
    assert "No worker" not in log
    assert said(reply) == said(own)


def test_where_the_worker_is_gone_the_process_works_and_says_so_once(request_to, use, tmp_path, caplog):
    request = request_to(messages.DESCRIBE)
    use("")
    own = app(request, context_of())
    use(tmp_path / "gone")
    assert said(app(request, context_of())) == said(own)
    (line,) = caplog.messages
    assert line.startswith(
        f"No worker for this message, its own process works: {tmp_path / 'gone'}: FileNotFoundError"
    )


# The same app ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    """A copy of the app, to be changed."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / "app" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "app")
    return tmp_path / "app"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "package",
    ["custom", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fedapp", "strategies"))],
)
def test_a_worker_of_another_version_is_not_asked(package, copied, start_worker, request_to, use, caplog):
    (copied / package / "new.py").write_text("")
    use(start_worker(PYTHONPATH=str(copied)).path)
    assert app(request_to(messages.DESCRIBE), context_of()).has_content()
    assert len(caplog.records) == 1
    assert "own process works" in caplog.text
    assert "it runs another version of the app than this message's bundle" in caplog.text


@pytest.mark.thorough
def test_a_worker_whose_own_app_changes_ends_to_be_started_anew(
    copied, start_worker, request_to, use, caplog
):
    running = start_worker(PYTHONPATH=str(copied))
    use(running.path)
    request = request_to(messages.DESCRIBE)
    app(request, context_of())
    assert caplog.text == ""  # a copy elsewhere is the same app
    with (copied / "strategies" / "fedavg.py").open("a") as file:
        file.write("\n")
    assert app(request, context_of()).has_content()
    assert "its app has changed on disk since it started: it ends" in caplog.text
    assert running.process.wait(60) == 0
    assert not running.path.exists()


# Data ------------------------------------------------------------------------------------------------------------


def test_data_that_change_are_read_again_and_paths_are_the_process_s(
    worker, request_to, use, save_npz, configure, only_the_worker, tmp_path, monkeypatch
):
    path = save_npz("own.npz", test=True)
    experiment = prepare(configure(dataset="npz", data_path=path, model="logistic"), 1)
    use(worker.path)
    monkeypatch.chdir(tmp_path)

    def examples() -> object:
        reply = app(request_to(messages.DESCRIBE, experiment), context_of({"data-path": "own.npz"}))
        return messages.metrics_of(reply)[messages.NUM_EXAMPLES]

    assert [examples(), examples()] == [30, 30]
    content = dict(np.load(path))
    np.savez(path, **{**content, "x_train": content["x_train"][:20], "y_train": content["y_train"][:20]})
    assert examples() == 20


# Several ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_messages_at_once_are_worked_on_one_by_one(odd_worker, request_to, use, only_the_worker):
    use(odd_worker.path)
    requests = [request_to(messages.TRAIN, client=client) for client in range(4)]
    replies: dict[int, Message] = {}

    def answer(number: int) -> None:
        replies[number] = app(requests[number], context_of())

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [request.metadata.message_id for request in requests]
    assert [replies[number].metadata.reply_to_message_id for number in range(4)] == names
    lines = [line.split() for line in odd_worker.log.read_text().splitlines()]
    own = [line for line in lines if line[-1:] and line[-1] in names]
    assert [word for word, _ in own] == ["begins", "ends"] * 4
    assert all(begun == ended for (_, begun), (_, ended) in zip(own[::2], own[1::2], strict=True))
