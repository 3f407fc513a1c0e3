"""A site's own rules: what is asked for against them is refused in one line, and counted, before anything leaves."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedapp.client.site_rules import AGAINST_RULES, SiteRuleError, SiteRules
from fedapp.client_app import app
from fedapp.config import RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.federation.records import ASK_SUMS
from fedapp.report import read_metrics
from fedapp.server import Experiment, prepare, run
from strategies.flower import messages
from tests.fedapp.client.asking import CLIENTS, request_for

LOCAL = {"dp": "local", "dp-clipping-norm": 0.5, "dp-noise-multiplier": 2.0}
DISTRIBUTED = {
    "dp": "central",
    "dp-mechanism": "distributed",
    "dp-clipping-norm": 0.5,
    "secure-sums": True,
    "client-weights": "uniform",
}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    given = {"model": "logistic", "num-server-rounds": 3, "results-dir": str(tmp_path / "results")}
    return prepare(RunConfig.load(given), CLIENTS)


@pytest.fixture
def ask(tmp_path: Path, experiment: Experiment) -> Any:
    """Send the app on a device with rules one message with these fields in its config; return the reply."""

    def asked(
        kind: str, rules: Mapping[str, Any], secure: ConfigRecord | None = None, **config: Any
    ) -> Message:
        node = {"partition-id": 2, "num-partitions": CLIENTS, "state-path": str(tmp_path / "state"), **rules}
        fields = {name.replace("_", "-"): value for name, value in config.items()}
        request = request_for(kind, experiment, config=fields)
        if secure is not None:
            request.content[messages.SECURE] = secure
        context = Context(run_id=2, node_id=7, node_config=node, state=RecordDict(), run_config={})
        return app(request, context)

    return asked


def refused(reply: Message) -> str:
    """Return why a message was refused."""
    assert reply.has_error()
    assert reply.error.code == AGAINST_RULES
    prefix = "against this site's rules: "
    assert reply.error.reason.startswith(prefix)
    return str(reply.error.reason).removeprefix(prefix)


def counts(tmp_path: Path) -> dict[str, int]:
    return dict(json.loads((tmp_path / "state" / "site.json").read_text()))


def keyed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in values.items()}


def test_noise_that_is_required_is_in_every_update_or_nothing_leaves(ask, tmp_path, caplog):
    rules = {"require-dp": 2.0}
    reply = ask(messages.TRAIN, rules, **keyed(LOCAL))
    assert reply.has_content()
    for asked, noise in [
        ({}, "0"),
        (LOCAL | {"dp-noise-multiplier": 1.9}, "1.9"),
        (LOCAL | {"dp-clipping-norm": 0.0}, "0"),  # no clipping: noise of 2 z S = 0
        (LOCAL | {"dp-clipping-norm": float("nan")}, "0"),
        (LOCAL | {"dp": "central"}, "0"),
    ]:
        reply = ask(messages.TRAIN, rules, **keyed(asked))
        assert refused(reply) == f"require-dp = 2: it was asked for an update with noise of {noise}"
    assert counts(tmp_path)["refused"] == 5
    assert "refused (5 so far): against this site's rules: require-dp = 2: it was" in caplog.text


@pytest.mark.parametrize("kind", [messages.EVALUATE, ASK_SUMS, messages.ASK_DIRECTION])
def test_other_facts_of_the_data_leave_with_noise_alone(kind, ask):
    said = refused(ask(kind, {"require-dp": 1.0}, **keyed(LOCAL)))
    assert said == f"require-dp = 1: {kind} asks for facts of this device's data without noise"


def test_a_direction_with_noise_may_leave(ask):
    assert ask(messages.ASK_DIRECTION, {"require-dp": 1.0}, message_epsilon=1.0).has_content()


@pytest.mark.parametrize("kind", [ASK_SUMS, messages.ASK_DIRECTION])
def test_facts_that_nothing_masks_dont_leave_where_secure_sums_are_required(kind, ask):
    said = refused(ask(kind, {"require-secure-sums": True}))
    assert (
        said
        == f"require-secure-sums = true: {kind} asks for facts of this device's data, which nothing masks"
    )


def test_a_run_against_the_rules_is_refused_before_its_first_task(ask):
    assert refused(ask(messages.DESCRIBE, {"require-dp": 1.0})) == (
        "require-dp = 1: the run has dp = none; allowed are local, and central with dp-mechanism = distributed"
    )
    assert ask(messages.DESCRIBE, {"require-dp": 1.0}, **keyed(LOCAL)).has_content()
    assert ask(messages.DESCRIBE, {"require-dp": 1.0}, **keyed(DISTRIBUTED)).has_content()
    said = refused(ask(messages.DESCRIBE, {"require-secure-sums": 4}))
    assert said == "require-secure-sums = 4: the run has secure-sums = false"
    assert ask(messages.DESCRIBE, {"require-secure-sums": 4}, secure_sums=True).has_content()


@pytest.mark.parametrize(
    ("rule", "given"),
    [({"only-masked": True}, "only-masked = true"), ({"require-secure-sums": 4}, "require-secure-sums = 4")],
)
def test_a_plain_update_doesnt_leave_where_secure_sums_are_required(rule, given, ask, tmp_path):
    assert refused(ask(messages.TRAIN, rule)) == f"{given}: it was asked for an update without a secure sum"
    assert counts(tmp_path)["refused"] == 1


@pytest.mark.parametrize(("threshold", "takes_part"), [(3, False), (4, True)])
def test_a_sum_that_too_few_can_open_is_refused(threshold, takes_part, ask):
    stage = ConfigRecord({"stage": "keys", "session": 1, "client": 2, "threshold": threshold})
    reply = ask(messages.TRAIN, {"require-secure-sums": 4}, stage)
    if takes_part:
        assert reply.has_content()
    else:
        assert refused(reply) == (
            "require-secure-sums = 4: the shares of 3 others open the sum; allowed is a secure-threshold of at "
            "least 4"
        )


def test_contributions_are_counted_over_all_runs_before_they_leave(ask, tmp_path):
    rules = {"max-contributions": 2}
    for number in (1, 2):
        assert ask(messages.TRAIN, rules).has_content()
        assert ask(messages.EVALUATE, rules).has_content()
        assert counts(tmp_path)["contributions"] == number
    for kind in (messages.TRAIN, messages.DESCRIBE):
        assert refused(ask(kind, rules)) == "max-contributions = 2: so many updates have left this device"
    (tmp_path / "state" / "site.json").write_text("{")
    assert "site.json: can't be read (" in refused(ask(messages.TRAIN, rules))


def test_bytes_are_counted_over_all_runs_and_none_too_many_leaves(ask, tmp_path):
    size = messages.size_of(ask(messages.TRAIN, {}))
    assert size > 4 * 650  # the model: float32
    rules = {"max-bytes": 2 * size + 10}
    assert ask(messages.TRAIN, rules).has_content()
    assert ask(messages.TRAIN, rules).has_content()
    assert counts(tmp_path)["bytes"] == 2 * size
    said = refused(ask(messages.TRAIN, rules))
    assert said.endswith(f"{2 * size} bytes have left this device, and the reply has {size}")
    assert refused(ask(messages.TRAIN, rules)).endswith("an update is larger than the rest")  # and isn't made
    assert ask(messages.TRAIN, {"max-bytes": 3 * size + 10}).has_content()


@pytest.mark.parametrize(
    ("hours", "at", "allowed"),
    [
        ("20:00-06:00", "19:59", False),
        ("20:00-06:00", "20:00", True),
        ("20:00-06:00", "05:59", True),
        ("20:00-06:00", "06:00", False),
        ("20:00-06:00, 12:00-13:00", "12:30", True),
        ("12:00-13:00", "13:00", False),
    ],
)
def test_a_message_is_worked_on_within_the_hours_alone(hours, at, allowed, ask, monkeypatch):
    now = time.strptime(f"2026-11-28 {at}", "%Y-%m-%d %H:%M")
    monkeypatch.setattr(time, "localtime", lambda *_: now)
    reply = ask(messages.DESCRIBE, {"hours": hours})
    if allowed:
        assert reply.has_content()
    else:
        assert refused(reply) == f"hours = {hours}: it is {at} at the device"


def test_a_supernode_that_doesnt_check_apps_is_told_of(ask):
    assert refused(ask(messages.DESCRIBE, {"allow-apps": "theirs/app"})) == (
        "allow-apps: this device's SuperNode doesn't keep it; 'python -m fedapp.deploy.supernode' does"
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"require-dp": 0}, "require-dp = 0: must be a number above 0"),
        ({"require-dp": True}, "require-dp = True: must be a number above 0"),
        ({"require-dp": float("nan")}, "require-dp = nan: must be a number above 0"),
        (
            {"require-secure-sums": 1},
            "require-secure-sums = 1: allowed are true, false, and a whole number of 2 or more",
        ),
        ({"max-contributions": 1.5}, "max-contributions = 1.5: must be a whole number above 0"),
        ({"max-bytes": 10}, "max-bytes = 10: needs state-path, a folder in which the count is kept"),
        ({"hours": "8-17"}, "hours = '8-17': must be HH:MM-HH:MM, such as 20:00-06:00"),
        ({"hours": 8}, "hours = 8: must be a text of words between commas"),
        (
            {"allow-apps": "a/b, fedapp"},
            "allow-apps = 'fedapp': must be publisher/name, or the SHA-256 of an app's bundle, 64 digits 0-9a-f",
        ),
    ],
)
def test_a_rule_that_cant_be_read_lets_nothing_out(rules, said, ask):
    with pytest.raises(SiteRuleError) as raised:
        SiteRules.read(rules)
    assert str(raised.value) == said
    if "state-path" not in said:
        assert refused(ask(messages.DESCRIBE, rules)) == said


@pytest.mark.parametrize(("required", "participants"), [(0.9, 4), (1.1, 3)])
def test_the_noise_of_a_secure_sum_counts(required, participants, tmp_path):
    # 4 devices: k = 3, t = 3, and three bring z S. So this device and the three that can open its sum have √(4/3) z.
    given = {**DISTRIBUTED, "dp-noise-multiplier": 0.9, "model": "logistic", "num-server-rounds": 1}
    experiment = prepare(RunConfig.load({**given, "results-dir": str(tmp_path), "run-name": "run"}), 4)
    grid = SequentialGrid(app, 4)
    grid.contexts[1].node_config["require-dp"] = required
    run(grid, experiment)
    assert read_metrics(tmp_path / "run")[1]["participants"] == participants


def test_an_app_is_known_by_name_or_hash():
    digest = "0123456789abcdef" * 4
    rules = SiteRules.read({"allow-apps": f"ours/app, {digest}"})
    rules.check_app("ours/app", "f" * 64)
    rules.check_app("theirs/app", digest)
    with pytest.raises(
        SiteRuleError, match=r"^allow-apps: theirs/app with SHA-256 f{64} isn't one of this site's"
    ):
        rules.check_app("theirs/app", "f" * 64)
