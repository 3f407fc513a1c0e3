"""The receiver of replies alone: check, bound, clip, witness, and the contribution that comes of a reply, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord

from strategies import FedAvg, messages
from strategies.core.config import SynchronousConfig
from strategies.flower.arrays import ArraysMismatchError
from strategies.updates.pipeline import Clip
from tests.strategies.parts import begun, client, model_of, receiver, reply, safeguards

BASE = np.array([1.0, 1.0])


def received(
    part: Any, values: tuple[float, float], index: int = 0, sent: tuple[str, ...] = (), **more: Any
) -> Any:
    answer = reply(values=values, num_examples=1, **more)
    local = part.check()(client(index), answer, BASE)
    part.transforms()(local)
    return local, part.contribution(local, answer, 3, 1, sent)


@pytest.mark.parametrize(
    ("options", "update", "marked"),
    [
        ({}, [6.0, 8.0], False),
        ({"bound": 5.0}, [3.0, 4.0], True),  # ‖(6, 8)‖ = 10, halved
        ({"bound": 10.0}, [6.0, 8.0], False),
        ({"clip": Clip(5.0)}, [3.0, 4.0], False),  # which updates were longer would leak
        ({"bound": 5.0, "clip": Clip(2.5)}, [1.5, 2.0], False),
    ],
)
def test_an_update_is_bounded_and_clipped(options, update, marked):
    options = dict(options)
    config = SynchronousConfig(update_norm_bound=options.pop("bound", 0.0))
    part = receiver(begun((), config), **options)
    local, made = received(part, (7.0, 9.0))
    assert (made.update.tolist(), local.bounded) == (update, marked)
    assert (made.version, made.staleness, made.model.tolist()) == (3, 1, (BASE + update).tolist())
    assert part.bounds_updates == (config.update_norm_bound > 0 and not options)


def test_hook_and_witness_see_the_bounded_model():
    seen: list[Any] = []
    run = begun((), SynchronousConfig(update_norm_bound=5.0))
    run.options.on_client_model = lambda index, model: seen.append((index, model.tolist()))
    part = receiver(run, on_local_model=lambda client, model: seen.append((client.index, model.tolist())))
    received(part, (7.0, 9.0), index=2)
    assert seen == [(2, [4.0, 5.0])] * 2


def test_safeguards_shorten_what_is_longer_than_usual_once_three_norms_are_known():
    part, norms = receiver(begun(), safeguards("on", norm_ratio=1.5)), (1.0, 20.0, 3.0, 20.0)
    made = [received(part, (1.0, 1.0 + norm), index)[1] for index, norm in enumerate(norms)]
    # The median of two would be 10.5; that of all four is 11.5, and 1.5 times that 17.25.
    assert [each.update.tolist() for each in made] == [[0, 1], [0, 20], [0, 3], [0, 17.25]]


def test_a_reply_takes_as_many_bytes_as_the_model_what_went_beside_it_what_is_declared_and_1_mib():
    run = begun()
    run.max_extra_bytes = 100
    part = receiver(run, capabilities=replace(FedAvg.capabilities, extra_reply_bytes=10))
    assert part.most_bytes() == run.layout.most_bytes + 110 + 2**20
    with pytest.raises(ArraysMismatchError, match="its reply takes"):
        received(part, (1.0, 1.0), records={"more": ConfigRecord({"text": "x" * part.most_bytes()})})


def test_more_examples_than_described_are_refused_by_safeguards_and_else_warned_of_once(caplog):
    described = replace(client(0, 4), described=True)
    answer, part = reply(values=(1.0, 1.0), num_examples=5), receiver(begun())
    for _ in range(2):
        part.check()(described, answer, BASE)
    assert caplog.text.count("says num-examples = 5, and described itself with 4") == 1
    with pytest.raises(ArraysMismatchError, match="num-examples = 5: it described itself with 4"):
        receiver(begun(), safeguards("on")).check()(described, answer, BASE)


@pytest.mark.parametrize(
    ("applied", "missing"),
    [
        (None, "proximal-mu, constant"),
        (MetricRecord({messages.ALPHA: 0.1}), "proximal-mu, constant"),
        (model_of(1.0), "proximal-mu, constant"),
        ({messages.ALPHA: 0.1, messages.RECORDS: 3}, "constant"),
        ({messages.RECORDS: [1, 2]}, "proximal-mu, constant"),
        ({messages.ALPHA: 0.1}, "constant"),
        ({messages.ALPHA: 0.1, messages.RECORDS: ["constant"]}, ""),
    ],
)
def test_a_client_says_that_its_steps_go_by_the_rule_and_by_what_was_sent(applied, missing, caplog):
    record = ConfigRecord(applied) if isinstance(applied, dict) else applied
    records = {} if applied is None else {messages.APPLIED: record}
    part = receiver(begun(), local_rule=lambda: {messages.ALPHA: 0.1})
    received(
        part, (1.0, 1.0), sent=("constant", messages.ARRAYS), records=records
    )  # one in the model's place
    assert (f"don't say that their local steps go by {missing}:" in caplog.text) == bool(missing)
    assert len(caplog.records) == bool(missing)


def test_a_metric_of_the_servers_own_name_is_warned_of(caplog):
    received(receiver(begun()), (1.0, 1.0), failures=2)
    assert "client 0 reports a metric 'failures'" in caplog.text
