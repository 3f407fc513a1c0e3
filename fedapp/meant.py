"""What somebody may have meant by a key or a value that there isn't."""

import difflib
import re
from collections.abc import Sequence

NUM_CLIENTS = "num-clients"

# How `flwr run` is told the number of clients.
CLIENTS_BY = "--federation-config num-supernodes=N"

# What nobody reads who wants one of them, if there are more.
_FEW = 20
_OF_FLOWER = "num-supernodes"  # Flower's name

# Other names of keys: of papers, of Flower, of PyTorch.
OTHER_NAMES = {
    "learning-rate": "lr",
    "eta": "lr",
    "epochs": "local-epochs",
    "steps": "local-steps",
    "rounds": "num-server-rounds",
    "num-rounds": "num-server-rounds",
    "clients": NUM_CLIENTS,
    "mu": "proximal-mu",
    "weight-decay": "l2",
}

# Values that are those of other keys, or several.
_VALUES = {
    ("strategy", "fedadam"): "strategy=fedavg server-optimizer=adam",
    ("strategy", "fedyogi"): "strategy=fedavg server-optimizer=yogi",
    ("strategy", "fedadagrad"): "strategy=fedavg server-optimizer=adagrad",
    ("strategy", "fedavgm"): "strategy=fedavg server-optimizer=momentum",
    ("strategy", "diloco"): "strategy=fedavg server-optimizer=nesterov",
    ("strategy", "fedexp"): "strategy=fedavg server-optimizer=fedexp",
    ("strategy", "fedmedian"): "strategy=fedavg aggregation-rule=median",
    ("strategy", "fedtrimmedavg"): "strategy=fedavg aggregation-rule=trimmed-mean",
    ("strategy", "krum"): "strategy=fedavg aggregation-rule=krum",
    ("strategy", "multikrum"): "strategy=fedavg aggregation-rule=multi-krum",
    ("strategy", "bulyan"): "strategy=fedavg aggregation-rule=bulyan",
    ("strategy", "fedvarp"): "strategy=fedstale stale-weight=1",
    ("loss", "ce"): "cross-entropy",
    ("loss", "crossentropy"): "cross-entropy",
}

# Keys whose values may be a user's own part, module:name.
_OWN = ("strategy", "model", "loss", "metrics", "optimizer", "dataset")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w*)")


def clients_as(text: str, name: str) -> str:
    """Return an error about the number of clients with the key by which the number was given."""
    return f"{name}{text.removeprefix(_OF_FLOWER)}" if text.startswith(_OF_FLOWER) else text


def key_meant(key: str, keys: Sequence[str]) -> str:
    """Return the key that was meant, one of some; "" if none is near."""
    known = OTHER_NAMES.get(key, "")
    return known if known in keys else next(iter(difflib.get_close_matches(key, keys, n=1)), "")


def unknown_key(key: str, keys: Sequence[str]) -> str:
    """Say that there is no such key, and what may have been meant."""
    meant = key_meant(key, (*keys, NUM_CLIENTS))
    if key in (NUM_CLIENTS, "num-supernodes"):  # which looks like other keys
        hint = f"clients are counted by {CLIENTS_BY}"
    elif meant:
        hint = f"did you mean {meant!r}?"
    elif len(keys) > _FEW:
        near = difflib.get_close_matches(key, keys, n=3, cutoff=0.4)
        hint = "; ".join([*([f"near are {', '.join(near)}"] if near else []), "`fedapp keys` lists all"])
    else:
        hint = f"allowed are {', '.join(keys)}"
    return f"unknown key {key!r}: {hint}"


def value_meant(key: str, value: object, allowed: str) -> str:
    """Return a question that names the value that was meant, to be added to an error; "" if none is near.

    Parameters
    ----------
    allowed
        What the key accepts, in words: ``one of a, b, c, or module:name of your own``.
    """
    if not isinstance(value, str):
        return ""
    word = value.lower()
    meant = _VALUES.get((key, word.replace("-", "").replace("_", "")), "")
    if not meant and key in _OWN and (dotted := _DOTTED.fullmatch(value)):
        meant = f"{dotted[1]}:{dotted[2]}"
    if not meant and allowed.startswith("one of "):
        listed = re.split(r", or |; ", allowed.removeprefix("one of "))[0]
        names = re.findall(r"[^\s,]+", listed)
        meant = next(iter(difflib.get_close_matches(word.replace("_", "-"), names, n=1, cutoff=0.6)), "")
    return f"; did you mean {meant!r}?" if meant else ""
