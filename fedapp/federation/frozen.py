"""Frozen parameters by digest: the local model's if equal, otherwise the server's."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from weakref import WeakKeyDictionary

from torch import nn

from fedapp.models import ModelError
from fedapp.training.travelling import OtherArraysError, digest_of, with_frozen

MOST = 2  # models whose frozen arrays a process holds beside its own

_offered: OrderedDict[str, Callable[[], bytes]] = OrderedDict()
_made: "WeakKeyDictionary[nn.Module, dict[str, nn.Module]]" = WeakKeyDictionary()


class FrozenMissingError(Exception):
    """The server's frozen arrays differ from this process's, and this process doesn't have the server's."""


class OtherModelError(ModelError):
    """The server's frozen arrays don't fit this process's model."""


def offer(digest: str, read: Callable[[], bytes]) -> None:
    """Offer the models of this process the frozen arrays of a digest; ``read`` returns them, a safetensors file."""
    _offered[digest] = read
    _offered.move_to_end(digest)
    while len(_offered) > MOST:
        _offered.popitem(last=False)


def offered(digest: str) -> Callable[[], bytes] | None:
    """Return the function that reads a digest's frozen arrays; None if they aren't offered in this process."""
    return _offered.get(digest)


def forget_offered() -> None:
    """Drop the frozen arrays that were offered, and the models that took them."""
    _offered.clear()
    _made.clear()


def agreeing(name: str, model: nn.Module, sent: Collection[str], digest: str) -> nn.Module:
    """Return the model, or a copy of it, with frozen arrays of this digest; the model itself if all arrays are sent.

    Parameters
    ----------
    name : str
        Value of the run-config key `model`, for errors.
    sent : collection of str
        Names of the arrays that the server sends.

    Raises
    ------
    FrozenMissingError
        If the model's frozen arrays have another digest, and no arrays of this digest are offered.
    OtherModelError
        If the arrays that are offered don't fit the model.
    """
    if digest_of(model, sent) in ("", digest):
        return model
    made = _made.setdefault(model, {})
    if digest not in made:
        if (read := _offered.get(digest)) is None:
            raise FrozenMissingError(
                f"model = {name!r}: this client's frozen arrays are others than the server's"
            )
        try:
            other = with_frozen(model, sent, read())
        except OtherArraysError as error:
            raise OtherModelError(f"model = {name!r}: {error}") from None
        if digest_of(other, sent) != digest:
            raise OtherModelError(f"model = {name!r}: its frozen arrays aren't those that the server named")
        made.clear()  # of an earlier run
        made[digest] = other
    return made[digest]
