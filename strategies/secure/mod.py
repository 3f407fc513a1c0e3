"""A mod with which the clients of any Flower app take part in secure sums.

    from strategies.secure import masks_updates

    app = ClientApp(mods=[masks_updates])

A strategy with ``secure_sums = True`` sends each participant of a round four training messages, with the stage in the
record ``strategies.secure``. The mod answers three of them by itself. With the third comes the model: the app trains
on it as on any other, and the mod sends the masked update in place of the trained model, and no metrics. It stands
after ``reads_packed`` and before mods that read the model, such as Flower's for clipping and noise. The secrets of a
client are in its ``context.state`` between the stages, and are dropped with the last one.

A device whose ``node_config`` has ``only-masked=true`` refuses to train without a secure sum, whatever it is asked.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from strategies import streams
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, pack
from strategies.flower.internals import with_content
from strategies.secure.client import KEYS, MASKED, OVER, SHARES, UNMASK, ClientSession, PublicKeys
from strategies.secure.masking import Quantizer, SecureSumError

# Error code of a client that can't or won't take part in a stage (Flower's codes are below 100).
REFUSED = 106

ONLY_MASKED = "only-masked"

CallNext = Callable[[Message, Context], Message]


def masks_updates(message: Message, context: Context, call_next: CallNext) -> Message:
    """Take part in secure sums as the strategy asks; a mod for Flower."""
    if message.metadata.message_type.partition(".")[0] != messages.TRAIN or not message.has_content():
        return call_next(message, context)
    asked = message.content.get(messages.SECURE)
    if not isinstance(asked, ConfigRecord):
        if context.node_config.get(ONLY_MASKED):
            return _refusal(message, f"{ONLY_MASKED} = true: it was asked for an update without a secure sum")
        return call_next(message, context)
    try:
        return _answer(message, context, call_next, dict(asked))
    except (SecureSumError, ArraysMismatchError) as error:
        return _refusal(message, str(error))
    except (KeyError, TypeError, ValueError) as error:  # a server may send any fields
        return _refusal(message, f"the stage's fields are wrong ({type(error).__name__}: {error})")


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(REFUSED, f"secure sum: {reason}"), reply_to=message)


def _answer(message: Message, context: Context, call_next: CallNext, asked: dict[str, Any]) -> Message:
    stage = asked["stage"]
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
            shares = session.reveal(asked.get("here", []), asked.get("gone", []))
            content = _fields(clients=list(shares), shares=list(shares.values()))
        else:
            raise SecureSumError(f"no stage is called {messages.clean(str(stage), 40)!r}")
    _keep(context, asked["session"], session)
    return Message(content, reply_to=message)


def _masked(
    message: Message, context: Context, call_next: CallNext, asked: dict[str, Any], session: ClientSession
) -> RecordDict | Message:
    """Let the app train; return the masked update, or the app's own reply if it has no model."""
    key = asked["arrays"]
    sent = messages.model_of(message, key)
    if sent is None:
        raise SecureSumError("there is no model to train")
    quantizer, layout = Quantizer(asked["clipping"], asked["levels"], asked["norm"]), Layout.of(sent)
    base = layout.to_vector(sent)  # read before the app may overwrite the message's memory
    rest = {name: record for name, record in message.content.items() if name != messages.SECURE}
    reply = call_next(with_content(message, RecordDict(rest)), context)
    if not reply.has_content():
        return reply
    trained = messages.model_of(reply, key)
    if trained is None:
        raise SecureSumError("its reply has no model")
    update = layout.to_vector(trained)
    update -= base
    rng = streams.generator(asked["seed"], "secure-rounding", session.client, asked["task"])
    values = session.masked(quantizer.encode(update, _weight(reply, asked), rng))
    content = RecordDict({messages.MASKED: ArrayRecord({"values": pack(values)})})
    applied = reply.content.get(messages.APPLIED)
    if isinstance(applied, ConfigRecord):
        content[messages.APPLIED] = applied
    return content


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
    if not isinstance(array, Array) or len(array.data) > 4 * size + 4096:
        raise SecureSumError("its reply has no masked update of the model's size")
    try:
        values = array.numpy()
    except Exception:  # a client may send any bytes
        raise SecureSumError("its masked update can't be read") from None
    if values.dtype != np.uint32 or values.shape != (size,):
        raise SecureSumError("its reply has no masked update of the model's size")
    return values


def _fields(**fields: Any) -> RecordDict:
    return RecordDict({messages.SECURE: ConfigRecord({k: v for k, v in fields.items() if v != []})})


def _keep(context: Context, number: int, session: ClientSession) -> None:
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
    )
