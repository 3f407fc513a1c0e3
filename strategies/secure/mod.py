"""A mod with which the clients of any Flower app take part in secure sums.

    from strategies.secure import masks_updates

    app = ClientApp(mods=[masks_updates])

A strategy with ``secure_sums = True`` sends each participant of a round four training messages, with the stage in the
record ``strategies.secure``. The mod answers three of them by itself. With the third comes the model: the app trains
on it as on any other, and the mod sends the masked update in place of the trained model, with the metrics that the
server names masked, too, and no others. It stands after ``unpack_arrays`` and before mods that read the model, such
as Flower's for clipping and noise. The secrets of a client are in its ``context.state`` between the stages, and are
dropped with the last one.

Without rounds a client trains first: it is asked to keep its update, of which it sends nothing. When a buffer is
full, its clients take part in the four stages, and mask what they have kept in the third.

A device whose ``node_config`` has ``require-secure-sums`` refuses to train without a secure sum, whatever it is
asked; with a number n also a sum that fewer than n others can open. ``only-masked=true`` is the same as ``true``.
One whose ``node_config`` names a folder, ``state-path``, remembers there which sums its updates were in, and refuses
to open another sum of an update from which the difference would tell it (strategies/secure/openings.py).
Only a simulated client draws its noise from the seed.
"""

import hashlib
from collections.abc import Callable, Mapping
from math import isnan, nan
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import HEADER, ArraysMismatchError, Layout, Vector, pack, unpack
from strategies.flower.internals import with_content
from strategies.flower.simulated import is_simulated
from strategies.secure.client import KEYS, MASKED, OVER, SHARES, UNMASK, ClientSession, PublicKeys
from strategies.secure.masking import LARGEST_NUMBER, Quantizer, SecureSumError
from strategies.secure.openings import Openings

# Error code of a client that can't or won't take part in a stage (Flower's codes are below 100).
REFUSED = 106

REQUIRE_SECURE_SUMS, ONLY_MASKED = "require-secure-sums", "only-masked"
FEWEST_OTHERS = 2  # others in a sum with a client's update, at least

# The folder, by the node's config, where a device keeps what outlives its SuperNode, and the record of sums in it.
STATE_PATH, OPENINGS = "state-path", "openings.jsonl"

# Fields of the stage in which updates are masked: whether each is divided by its client's path, which is summed, too;
# the names of the metrics that are summed, too; whether the update is of a task that is over, so that the client has
# kept it.
BY_PATH, METRICS, FROM_BEFORE = "by-path", "metrics", "from-before"

# Record of the context's state: the update that a client keeps, by the number of its task.
UPDATE = f"{messages.SECURE}.update"

CallNext = Callable[[Message, Context], Message]


def masks_updates(message: Message, context: Context, call_next: CallNext) -> Message:
    """Take part in secure sums as the strategy asks; a mod for Flower."""
    if message.metadata.message_type.partition(".")[0] != messages.TRAIN or not message.has_content():
        return call_next(message, context)
    asked = message.content.get(messages.SECURE)
    try:
        check_required(message, context.node_config)
        if not isinstance(asked, ConfigRecord):
            return call_next(message, context)
        return _answer(message, context, call_next, dict(asked))
    except (SecureSumError, ArraysMismatchError) as error:
        return _refusal(message, str(error))
    except (KeyError, TypeError, ValueError) as error:  # a server may send any fields
        return _refusal(message, f"the stage's fields are wrong ({type(error).__name__}: {error})")


def required_others(node_config: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key of a node's config that requires secure sums, and of how many others; 0: they aren't required.

    Raises
    ------
    SecureSumError
        If its value is neither true, false nor a number of others.
    """
    key = REQUIRE_SECURE_SUMS if REQUIRE_SECURE_SUMS in node_config else ONLY_MASKED
    value = node_config.get(key, False)
    if isinstance(value, bool):
        return key, FEWEST_OTHERS * value
    if isinstance(value, int) and value >= FEWEST_OTHERS:
        return key, value
    raise SecureSumError(
        f"{key} = {value!r}: allowed are true, false, and a whole number of {FEWEST_OTHERS} or more"
    )


def check_required(message: Message, node_config: Mapping[str, Any]) -> None:
    """Raise SecureSumError if a training message asks for less than a node's config requires of secure sums."""
    key, others = required_others(node_config)
    if not others:
        return
    record, required = message.content.get(messages.SECURE), f"{key} = {str(node_config[key]).lower()}"
    if not isinstance(record, ConfigRecord):
        raise SecureSumError(f"{required}: it was asked for an update without a secure sum")
    asked = cast(dict[str, Any], dict(record))
    if asked["stage"] == KEYS and asked["threshold"] < others:
        raise SecureSumError(
            f"{required}: the shares of {asked['threshold']} others open the sum; allowed is a secure-threshold of "
            f"at least {others}"
        )


def noise_of_sum(message: Message, context: Context) -> float:
    """Return the noise multiplier z that the clients bring to the sum of a request to mask, at the least.

    A sum with this client's update is opened with the shares of as many others as the threshold says, each of whom
    has sent an update with noise of the same deviation. z is the deviation of their noise and this client's over
    the largest norm that this client's weighted update may have.

    Raises
    ------
    SecureSumError
        If the request asks for anything without noise in the sum, or this client knows nothing of the sum.
    """
    asked = cast(dict[str, Any], dict(cast(ConfigRecord, message.content[messages.SECURE])))
    if asked.get(METRICS):
        raise SecureSumError("metrics have no noise in a sum")
    number = 1 + _kept(context, asked["session"]).threshold
    one = asked["deviation"] * 2 * asked["clipping"] / asked["levels"]
    longest = asked["norm"] * max(1.0, float(asked.get("weight", 1.0)))
    return float(one * number**0.5 / longest) if longest > 0 else 0.0


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(REFUSED, f"secure sum: {reason}"), reply_to=message)


def _answer(message: Message, context: Context, call_next: CallNext, asked: dict[str, Any]) -> Message:
    stage = asked["stage"]
    if stage == messages.KEEP:
        return _keep_update(message, context, call_next, asked)
    if stage == KEYS:
        session = ClientSession(asked["client"], asked["threshold"])
        keys = session.keys()
        content = _fields(seal=keys.seal, mask=keys.mask)
    else:
        session = _kept(context, asked["session"])
        if stage == SHARES:
            keys_of = zip(asked["clients"], asked["seal"], asked["mask"], strict=True)
            dealt = session.share({each: PublicKeys(seal, mask) for each, seal, mask in keys_of})
            content = _fields(
                clients=list(dealt.sealed), sealed=list(dealt.sealed.values()), commitment=dealt.commitment
            )
        elif stage == MASKED:
            session.open(dict(zip(asked["clients"], asked["sealed"], strict=True)))
            found = _masked(message, context, call_next, asked, session)
            if isinstance(found, Message):
                return found
            content = found
        elif stage == UNMASK:
            _remember(context, asked, session)
            shares = session.reveal(asked.get("here", []), asked.get("gone", []))
            content = _fields(clients=list(shares), shares=list(shares.values()))
        else:
            raise SecureSumError(f"no stage is called {messages.clean(str(stage), 40)!r}")
    _store(context, asked["session"], session)
    return Message(content, reply_to=message)


def _trained(
    message: Message, context: Context, call_next: CallNext, asked: dict[str, Any]
) -> tuple[Vector, Message, int] | Message:
    """Let the app train; return its update (D,), its reply and a digest of the model that was sent.

    The reply alone if it has no model.
    """
    key = asked["arrays"]
    sent = messages.model_of(message, key)
    if sent is None:
        raise SecureSumError("there is no model to train")
    layout = Layout.of(sent)
    base = layout.to_vector(sent)  # read before the app may overwrite the message's memory
    digest = int.from_bytes(hashlib.sha256(base.tobytes()).digest()[:6])  # exact as a float, too
    rest = {name: record for name, record in message.content.items() if name != messages.SECURE}
    reply = call_next(with_content(message, RecordDict(rest)), context)
    if not reply.has_content():
        return reply
    trained = messages.model_of(reply, key)
    if trained is None:
        raise SecureSumError("its reply has no model")
    update = layout.to_vector(trained)
    update -= base
    return update, reply, digest


def _keep_update(message: Message, context: Context, call_next: CallNext, asked: dict[str, Any]) -> Message:
    """Let the app train, and keep its update until it is asked for a masked one; an earlier one is dropped."""
    context.state.pop(UPDATE, None)
    found = _trained(message, context, call_next, asked)
    if isinstance(found, Message):
        return found
    update, reply, digest = found
    measured = np.array([digest, *_measured(reply, asked.get(METRICS, []))])
    context.state[UPDATE] = ArrayRecord({str(asked["task"]): pack(update), METRICS: pack(measured)})
    content = _fields(task=asked["task"])
    _say_applied(content, reply)
    return Message(content, reply_to=message)


def _kept_update(context: Context, task: int) -> tuple[Vector, int, list[float]]:
    """Return the update (D,), its model's digest and the metrics of a task, which are forgotten: masked once."""
    record = context.state.pop(UPDATE, None)
    if not isinstance(record, ArrayRecord) or str(task) not in record:
        raise SecureSumError(f"this client keeps no update of its task {task}")
    digest, *measured = unpack(record[METRICS]).tolist()
    return unpack(record[str(task)]), int(digest), measured


def _masked(
    message: Message, context: Context, call_next: CallNext, asked: dict[str, Any], session: ClientSession
) -> RecordDict | Message:
    """Return the masked update, of training now or before; or the app's own reply to training without a model."""
    content, numbers = RecordDict(), list[float]()
    if asked.get(FROM_BEFORE):
        update, session.model, measured = _kept_update(context, asked["task"])
        weight, counts = float(asked["weight"]), 1.0
    else:
        found = _trained(message, context, call_next, asked)
        if isinstance(found, Message):
            return found
        update, reply, session.model = found
        measured, weight = _measured(reply, asked.get(METRICS, [])), _weight(reply, asked)
        counts = weight
        if asked.get(BY_PATH):
            path = _path(reply)
            update /= path
            numbers.append(weight * path)
        _say_applied(content, reply)
    for value in measured:
        known = abs(counts * value) <= LARGEST_NUMBER  # not NaN
        numbers += (counts * value, counts) if known else (0.0, 0.0)
    quantizer = Quantizer(*(asked[name] for name in ("clipping", "levels", "norm", "deviation")))
    rng = streams.generator(asked["seed"], "secure-rounding", session.client, asked["task"])
    noise = _noise(context, asked, session.client) if quantizer.deviation else None
    values = session.masked(quantizer.encode(update, weight, rng, numbers, noise))
    content[messages.MASKED] = ArrayRecord({"values": pack(values)})
    return content


def _noise(context: Context, asked: dict[str, Any], client: int) -> np.random.Generator:
    """Return the generator of a client's noise: of a run that is to be repeated the run's, which the server knows."""
    if asked["repeatable"] and is_simulated(context) and not required_others(context.node_config)[1]:
        return streams.generator(asked["seed"], "distributed-noise", client, asked["task"])
    return streams.unpredictable()


def _remember(context: Context, asked: dict[str, Any], session: ClientSession) -> None:
    """Note the sum that is about to be opened; raise SecureSumError if it and an earlier one tell few updates."""
    if (folder := context.node_config.get(STATE_PATH)) is None:
        return
    versions = dict(zip(asked["clients"], asked["versions"], strict=True))
    if session.client not in versions or session.held.keys() & versions.keys() != set(asked.get("here", [])):
        raise SecureSumError("the clients of the sum aren't those whose shares are asked for")
    versions[session.client] = session.model
    path = Path(str(folder), OPENINGS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        openings = Openings(path, (session.client, session.model))
        reason = openings.refusal(list(versions.items()), session.threshold)
    except (OSError, ValueError) as error:
        raise SecureSumError(f"{STATE_PATH} = {str(folder)!r}: {OPENINGS} can't be used ({error})") from None
    if reason:
        raise SecureSumError(reason)


def _measured(reply: Message, names: list[str]) -> list[float]:
    """Return the app's metrics of these names; NaN for a metric that is missing, or is no number."""
    metrics = messages.metrics_of(reply)
    values = (metrics.get(name) for name in names)
    return [float(value) if isinstance(value, int | float) else nan for value in values]


def _say_applied(content: RecordDict, reply: Message) -> None:
    """Report the fields that the app's local steps used, with the client's path hidden."""
    applied = reply.content.get(messages.APPLIED)
    if isinstance(applied, ConfigRecord):
        hidden = {messages.PATH: MASKED} if messages.PATH in applied else {}
        content[messages.APPLIED] = ConfigRecord({**applied, **hidden})


def _path(reply: Message) -> float:
    """Return how far the client's local steps went; SecureSumError if its app doesn't tell."""
    path = messages.path_of(reply.content.get(messages.APPLIED))
    if isnan(path):
        raise SecureSumError(
            f"its app doesn't tell how far its local steps went ({messages.PATH!r} in the record "
            f"{messages.APPLIED!r} of its reply)"
        )
    return path


def _weight(reply: Message, asked: dict[str, Any]) -> float:
    """Return the client's weight in [0, 1]: the server's, or its number of examples over the most that count."""
    if "weight" in asked:
        return float(asked["weight"])
    key, most = asked["weighted-by"], asked["examples"]
    size = messages.weight_of(messages.metrics_of(reply), key)
    if size is None:
        raise SecureSumError(
            f"its reply has no metric {key!r}, which says how much it counts (weighted_by_key)"
        )
    return float(min(size, most) / most)


def values_of(reply: Message, size: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """Return the masked values (size,) of a reply; SecureSumError if it hasn't any."""
    record = reply.content.get(messages.MASKED)
    array = record.get("values") if isinstance(record, ArrayRecord) else None
    if not isinstance(array, Array) or len(array.data) > 4 * size + HEADER:
        raise SecureSumError("its reply has no masked update of the model's size")
    try:
        values = array.numpy()
    except Exception:  # a client may send any bytes
        raise SecureSumError("its masked update can't be read") from None
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or values.shape != (size,):
        raise SecureSumError("its reply has no masked update of the model's size")
    return values


def _fields(**fields: Any) -> RecordDict:
    return RecordDict({messages.SECURE: ConfigRecord({k: v for k, v in fields.items() if v != []})})


def _store(context: Context, number: int, session: ClientSession) -> None:
    """Keep a session's secrets in the context's state until it is over."""
    if session.stage == OVER:
        del context.state[messages.SECURE]
        return
    fields: dict[str, Any] = {
        "session": number,
        "client": session.client,
        "threshold": session.threshold,
        "stage": session.stage,
        "seal-key": session.seal_key,
        "mask-key": session.mask_key,
        "seed": session.seed,
        "model": session.model,
        "neighbours": list(session.neighbours),
        "keys": [key for keys in session.neighbours.values() for key in (keys.seal, keys.mask)],
        "held": list(session.held),
        "shares": [share for shares in session.held.values() for share in shares],
    }
    context.state[messages.SECURE] = ConfigRecord({k: v for k, v in fields.items() if v != []})


def _kept(context: Context, number: int) -> ClientSession:
    """Return the session of this number that the context's state has."""
    record = context.state.get(messages.SECURE)
    kept = cast(dict[str, Any], dict(record) if isinstance(record, ConfigRecord) else {})
    if kept.get("session") != number:
        raise SecureSumError("this client knows nothing of it: its first stage didn't reach it")
    keys, shares = kept.get("keys", []), kept.get("shares", [])
    known, held = zip(keys[::2], keys[1::2], strict=True), zip(shares[::2], shares[1::2], strict=True)
    return ClientSession(
        kept["client"],
        kept["threshold"],
        kept["stage"],
        kept["seal-key"],
        kept["mask-key"],
        kept["seed"],
        {each: PublicKeys(*keys) for each, keys in zip(kept.get("neighbours", []), known, strict=True)},
        dict(zip(kept.get("held", []), held, strict=True)),
        kept["model"],
    )
