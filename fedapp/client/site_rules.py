"""A site's own rules, in its node config: the client keeps them before anything leaves, whatever a server asks for.

=======================  ============================================================================================
``require-secure-sums``  true, or the number of others: updates leave in secure sums alone (strategies/secure/mod.py)
``require-dp``           z: updates leave with noise of z at least, their own or that of a secure sum's clients
``max-contributions``    updates that leave, over all runs
``max-bytes``            bytes of the records that leave, over all runs
``hours``                when a message is worked on, by the device's clock: "20:00-06:00, 12:00-13:00"
``allow-apps``           names ``publisher/name``, and SHA-256 of bundles: the apps whose code may run
``share-logs``           true: the last lines of the device's log go to the server (fedapp/deploy/shared_logs.py)
=======================  ============================================================================================

The SuperNode keeps ``allow-apps`` itself, and leaves it out of the node config that apps see
(fedapp/deploy/supernode.py): whoever starts a run brings its code, and this app's code keeps all other rules. What
leaves is counted in a file of the node's ``state-path``, before it leaves. Imported for every message, so without
PyTorch.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message

from fedapp.client.device_log import SHARE_LOGS, STATE_PATH, write_log
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")

# Error code of a message against a site's rules (Flower's own codes are below 100).
AGAINST_RULES = 107

REQUIRE_DP, REQUIRE_SECURE_SUMS, ONLY_MASKED = "require-dp", "require-secure-sums", "only-masked"
MAX_CONTRIBUTIONS, MAX_BYTES, HOURS, ALLOW_APPS = "max-contributions", "max-bytes", "hours", "allow-apps"
RULES = (
    REQUIRE_DP,
    REQUIRE_SECURE_SUMS,
    ONLY_MASKED,
    MAX_CONTRIBUTIONS,
    MAX_BYTES,
    HOURS,
    ALLOW_APPS,
    SHARE_LOGS,
)
FILE = "site.json"  # in the folder of state-path

_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_APP = re.compile(r"[\w.-]+/[\w.-]+|[0-9a-f]{64}")

CallNext = Callable[[Message, Context], Message]


class SiteRuleError(ValueError):
    """A message is against a site's rules, or a rule can't be read; the message is one line."""


@dataclass(frozen=True)
class SiteRules:
    """The rules of a node config.

    Attributes
    ----------
    noise : float
        The least noise multiplier; 0: no noise is required.
    masked : str
        The rule that requires secure sums, as it was given; empty if none does.
    contributions, size : int
        Most updates, and most bytes; 0: no bound.
    hours : tuple of (int, int)
        First minute of the day and the one after the last, of each span; empty: always.
    apps : tuple of str
        Names and hashes of the apps that may run; empty: all.
    shares_logs : bool
        Whether whoever starts runs may read the device's log.
    folder : str
        Where counts are kept.
    """

    noise: float = 0.0
    masked: str = ""
    contributions: int = 0
    size: int = 0
    hours: tuple[tuple[int, int], ...] = ()
    apps: tuple[str, ...] = ()
    shares_logs: bool = False
    folder: str = ""

    @classmethod
    def read(cls, node_config: Mapping[str, Any]) -> "SiteRules":
        """Read the rules of a node config.

        Raises
        ------
        SiteRuleError
            If a value isn't allowed, or counts have no folder.
        """
        given = {key: node_config[key] for key in RULES if key in node_config}
        rules = cls(
            noise=_number(given, REQUIRE_DP),
            masked=_masked(given),
            contributions=int(_number(given, MAX_CONTRIBUTIONS, whole=True)),
            size=int(_number(given, MAX_BYTES, whole=True)),
            hours=tuple(_span(word) for word in _words(given, HOURS)),
            apps=tuple(_app(word) for word in _words(given, ALLOW_APPS)),
            shares_logs=_flag(given, SHARE_LOGS),
            folder=str(node_config.get(STATE_PATH, "")),
        )
        if (rules.contributions or rules.size) and not rules.folder:
            key = MAX_CONTRIBUTIONS if rules.contributions else MAX_BYTES
            raise SiteRuleError(
                f"{key} = {given[key]}: needs {STATE_PATH}, a folder in which the count is kept"
            )
        return rules

    @property
    def is_open(self) -> bool:
        """Whether there are rules, and any app may run, which may not keep them."""
        return self != SiteRules(shares_logs=self.shares_logs, folder=self.folder) and not self.apps

    def check_app(self, name: str, digest: str) -> None:
        """Raise SiteRuleError unless an app may run, by its name and the SHA-256 of its bundle."""
        if self.apps and not {name, digest} & set(self.apps):
            raise SiteRuleError(f"{ALLOW_APPS}: {name} with SHA-256 {digest} isn't one of this site's apps")

    def check_request(self, message: Message, context: Context) -> None:
        """Raise SiteRuleError if what a message asks for is against the rules."""
        self._check_hours(time.localtime())
        if not message.has_content():
            return
        kind = message.metadata.message_type
        record = message.content.get(messages.CONFIG)
        config: Mapping[str, Any] = record if isinstance(record, ConfigRecord) else {}
        self._check_counts(kind)
        if self.masked:
            self._check_masked(message, context, config)
        if self.noise:
            self._check_noise(message, context, config)

    def _check_hours(self, now: time.struct_time) -> None:
        minute = 60 * now.tm_hour + now.tm_min
        if self.hours and not any(_is_within(minute, *span) for span in self.hours):
            spans = ", ".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.hours)
            raise SiteRuleError(f"{HOURS} = {spans}: it is {_clock(minute)} at the device")

    def _check_counts(self, kind: str) -> None:
        if kind not in (messages.TRAIN, messages.DESCRIBE) or not (self.contributions or self.size):
            return
        count = Counts.read(self.folder)
        if self.contributions and count.contributions >= self.contributions:
            raise SiteRuleError(
                f"{MAX_CONTRIBUTIONS} = {self.contributions}: so many updates have left this device"
            )
        if self.size and count.full_at >= self.size:
            raise SiteRuleError(
                f"{MAX_BYTES} = {self.size}: {count.bytes} bytes have left this device, and an update is larger than "
                "the rest"
            )

    def _check_masked(self, message: Message, context: Context, config: Mapping[str, Any]) -> None:
        kind = message.metadata.message_type
        if kind == messages.DESCRIBE:
            if config.get("secure-sums") is False:
                raise SiteRuleError(f"{self.masked}: the run has secure-sums = false")
        elif kind == messages.TRAIN:
            from strategies.secure.mod import check_required  # loads libraries of cryptography

            try:
                check_required(message, context.node_config)
            except (ValueError, KeyError, TypeError) as error:
                raise SiteRuleError(str(error)) from None
        elif kind != messages.EVALUATE:
            raise SiteRuleError(
                f"{self.masked}: {kind} asks for facts of this device's data, which nothing masks"
            )

    def _check_noise(self, message: Message, context: Context, config: Mapping[str, Any]) -> None:
        kind, rule = message.metadata.message_type, f"{REQUIRE_DP} = {self.noise:g}"
        if kind == messages.DESCRIBE:
            if config.get("dp") is not None and not _promises_noise(config):
                raise SiteRuleError(
                    f"{rule}: the run has dp = {config['dp']}; allowed are local, and central with dp-mechanism = "
                    "distributed"
                )
            return
        if kind == messages.ASK_DIRECTION and float(config.get("message-epsilon", 0.0)) > 0:
            return
        if kind != messages.TRAIN:
            raise SiteRuleError(f"{rule}: {kind} asks for facts of this device's data without noise")
        if _local_noise(config) >= self.noise:
            return
        secure = message.content.get(messages.SECURE)
        stage = secure.get("stage") if isinstance(secure, ConfigRecord) else ""
        if stage in ("keys", "shares", "unmask") or (stage == "masked" and secure.get("from-before")):  # type: ignore[union-attr]
            return  # nothing of the data leaves, or an update that was kept with its noise
        if stage == "masked":
            self._check_noise_of_sum(message, context, rule)
            return
        raise SiteRuleError(f"{rule}: it was asked for an update with noise of {_local_noise(config):g}")

    def _check_noise_of_sum(self, message: Message, context: Context, rule: str) -> None:
        from strategies.secure.mod import noise_of_sum  # loads libraries of cryptography

        try:
            noise = noise_of_sum(message, context)
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise SiteRuleError(f"{rule}: {error}") from None
        if not noise >= self.noise:
            raise SiteRuleError(
                f"{rule}: this device and the fewest others that can open the secure sum have noise of {noise:.3g}"
            )


@dataclass
class Counts:
    """What has left a device, and how often a message was refused.

    Attributes
    ----------
    contributions, bytes, refused : int
    full_at : int
        The ``max-bytes`` with which an update didn't fit any more; 0: all have.
    """

    contributions: int = 0
    bytes: int = 0
    refused: int = 0
    full_at: int = 0

    @classmethod
    def read(cls, folder: str) -> "Counts":
        """Read the counts in a node's folder; they begin at 0.

        Raises
        ------
        SiteRuleError
            If the file can't be read.
        """
        file = Path(folder, FILE)
        try:
            return cls(**json.loads(file.read_text("utf-8"))) if file.exists() else cls()
        except (OSError, ValueError, TypeError) as error:
            raise SiteRuleError(f"{file}: can't be read ({error}); without it nothing leaves") from None

    def write(self, folder: str) -> None:
        """Write the counts, on the disk when this returns.

        Raises
        ------
        SiteRuleError
            If the file can't be written.
        """
        file = Path(folder, FILE)
        new = file.with_suffix(".new")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as content:
                json.dump(asdict(self), content)
                content.flush()
                os.fsync(content.fileno())
            new.replace(file)
        except OSError as error:
            raise SiteRuleError(
                f"{file}: can't be written ({error.strerror}); without it nothing leaves"
            ) from None


def keeps_site_rules(message: Message, context: Context, call_next: CallNext) -> Message:
    """Answer a message as far as the site's rules allow; a mod for Flower, before all others.

    The reply to a message against them is an error with the reason, which the device's log has, too.
    """
    if not any(key in context.node_config for key in RULES):
        return call_next(message, context)
    write_log(context.node_config)
    rules = None
    try:
        rules = SiteRules.read(context.node_config)
        if rules.apps:
            raise SiteRuleError(
                f"{ALLOW_APPS}: this device's SuperNode doesn't keep it; 'python -m fedapp.deploy.supernode' does"
            )
        rules.check_request(message, context)
        reply = call_next(message, context)
        _count(rules, message, reply)
    except SiteRuleError as error:
        return Message(refusal(str(error), _number_refused(rules.folder if rules else "")), reply_to=message)
    return reply


def refusal(reason: str, number: str) -> Error:
    """Return the error of a reply to a message against the rules, and log it; ``number``: how many there were."""
    reason = messages.clean(f"against this site's rules: {reason}".replace("\n", " "))
    log.warning("refused (%s): %s", number, reason)
    return Error(AGAINST_RULES, reason)


def _number_refused(folder: str) -> str:
    """Count a refused message in a node's folder; return the count for the log."""
    if not folder:
        return f"not counted, there is no {STATE_PATH}"
    try:
        counts = Counts.read(folder)
        counts.refused += 1
        counts.write(folder)
    except SiteRuleError as error:
        return str(error)
    return f"{counts.refused} so far"


def _count(rules: SiteRules, message: Message, reply: Message) -> None:
    """Count a reply before it leaves; raise SiteRuleError if it is too many bytes."""
    if not reply.has_content() or not (rules.contributions or rules.size):
        return
    counts, size = Counts.read(rules.folder), messages.size_of(reply)
    if rules.size and counts.bytes + size > rules.size:
        if message.metadata.message_type == messages.TRAIN:
            counts.full_at = rules.size
            counts.write(rules.folder)
        raise SiteRuleError(
            f"{MAX_BYTES} = {rules.size}: {counts.bytes} bytes have left this device, and the reply has {size}"
        )
    counts.bytes += size
    # A secure sum's other stages have no arrays.
    counts.contributions += message.metadata.message_type == messages.TRAIN and bool(
        messages.array_records(reply)
    )
    counts.write(rules.folder)


def _promises_noise(config: Mapping[str, Any]) -> bool:
    return config["dp"] == "local" or (
        config["dp"] == "central" and config.get("dp-mechanism") == "distributed"
    )


def _local_noise(config: Mapping[str, Any]) -> float:
    """Return the noise multiplier with which the app sends an update that it was asked for like this; 0: no noise."""
    norm, noise = config.get("dp-clipping-norm", 0.0), config.get("dp-noise-multiplier", 0.0)
    told = all(isinstance(value, int | float) and 0 < value < float("inf") for value in (norm, noise))
    return float(noise) if config.get("dp") == "local" and told else 0.0


def _number(given: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = given.get(key)
    if value is None:
        return 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not 0 < value < 2**63
    ):
        raise SiteRuleError(f"{key} = {value!r}: must be a {'whole ' if whole else ''}number above 0")
    return float(value) if not whole else value


def _flag(given: Mapping[str, Any], key: str) -> bool:
    if not isinstance(value := given.get(key, False), bool):
        raise SiteRuleError(f"{key} = {value!r}: must be true or false")
    return value


def _masked(given: Mapping[str, Any]) -> str:
    if not {REQUIRE_SECURE_SUMS, ONLY_MASKED} & given.keys():
        return ""
    from strategies.secure.mod import required_others

    try:
        key, others = required_others(given)
    except ValueError as error:
        raise SiteRuleError(str(error)) from None
    return f"{key} = {str(given[key]).lower()}" if others else ""


def _words(given: Mapping[str, Any], key: str) -> list[str]:
    value = given.get(key, ())
    if value == ():
        return []
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else []
    if not all(words) or not words:
        raise SiteRuleError(f"{key} = {value!r}: must be a text of words between commas")
    return words


def _span(word: str) -> tuple[int, int]:
    if (found := _SPAN.fullmatch(word)) is None:
        raise SiteRuleError(f"{HOURS} = {word!r}: must be HH:MM-HH:MM, such as 20:00-06:00")
    hour, minute, end_hour, end_minute = map(int, found.groups())
    return 60 * hour + minute, 60 * end_hour + end_minute


def _app(word: str) -> str:
    if not _APP.fullmatch(word):
        raise SiteRuleError(
            f"{ALLOW_APPS} = {word!r}: must be publisher/name, or the SHA-256 of an app's bundle, 64 digits 0-9a-f"
        )
    return word


def _is_within(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin <= end else minute >= begin or minute < end


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
