"""The declaration of a strategy's parameters: each is a field of its Config, and is declared nowhere else.

    @dataclass(frozen=True)
    class HalfLifeConfig(AsynchronousConfig):
        '''Parameters of HalfLife.

        Parameters
        ----------
        half_life : float
            Time by which a contribution's weight halves.
        '''

        half_life: float = parameter(1.0, gt=0, unit="seconds")
        shape: Literal["exponential", "linear"] = "exponential"

The field says the type (``float | Literal["auto"]``: a number, or this text), the default, the range and the unit;
the section "Parameters" of the docstring says the meaning. The constructor refuses other values, such as
``HalfLife(half_life=-1)``. An app that makes keys out of them, as ``fedapp`` does, reads them with ``parameters_of``.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from strategies.flower.messages import LARGEST

Value = bool | int | float | str

KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

# The section of the run config's documentation that a parameter belongs to.
Topic = Literal["method", "protection", "run"]

_DECLARED = "strategies.parameter"  # the key of a declaration in the metadata of a field


@dataclass(frozen=True)
class Range:
    """The values of a type that are allowed: all where nothing is said, finite numbers where there are bounds.

    Attributes
    ----------
    gt, ge, lt, le : float, optional
        Bounds of a number.
    or_zero : bool
        Whether 0 is allowed beside the numbers within the bounds.
    choices : tuple
        All that is allowed, if there are any.
    pattern, words : str
        A regular expression that a text matches, and the same in words.
    or_text : str
        A text that is allowed beside the numbers within the bounds; "" if there is none.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    or_zero: bool = False
    choices: tuple[Value, ...] = ()
    pattern: str = ""
    words: str = ""
    or_text: str = ""

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return "\0" not in value and (not self.pattern or re.fullmatch(self.pattern, value) is not None)
        if not self.bounded or (self.or_zero and value == 0):
            return True
        return (
            abs(value) < math.inf
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    @property
    def bounded(self) -> bool:
        """Whether it has bounds of numbers."""
        return not (self.gt is self.ge is self.lt is self.le is None)

    def __str__(self) -> str:
        """Say the range in words, such as ``in (0, 1]``; "" if all is allowed."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.words:
            return self.words
        low, high = self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le
        if low is None or high is None:
            signs = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
            return next((f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None), "")
        return f"in {'(' if self.ge is None else '['}{low:g}, {high:g}{')' if self.le is None else ']'}"


@dataclass(frozen=True)
class Declaration:
    """What ``parameter`` declares about a field beside its name, type and default."""

    range: Range = Range()
    meaning: str = ""
    unit: str = ""
    topic: Topic = "method"


@dataclass(frozen=True)
class Parameter:
    """A field of a strategy's Config that is a number, a text or a flag.

    Attributes
    ----------
    name : str
        Name of the field.
    kind : type
        bool, int, float or str.
    default : bool, int, float or str
        ``dataclasses.MISSING`` if there is none.
    range : Range
        The values of that type that are allowed.
    meaning : str
        The meaning given to ``parameter``, or else in the section "Parameters" of the class's docstring, or else "".
    unit : str
        Unit of a number, such as ``seconds``; "" if it has none.
    topic : str
        ``method``; ``protection`` (from faulty clients, and of their data); ``run``.
    """

    name: str
    kind: type
    default: Any
    range: Range
    meaning: str = ""
    unit: str = ""
    topic: Topic = "method"

    @property
    def allowed(self) -> str:
        """The values that the parameter accepts, in words."""
        if self.range.choices or self.range.words:
            return str(self.range)
        zero = "0, or " if self.range.or_zero else ""
        text = f", or {self.range.or_text}" if self.range.or_text else ""
        return f"{zero}{KINDS[self.kind]} {self.range}".strip() + text

    def check(self, value: Any) -> None:
        """Raise ValueError if the parameter doesn't accept a value: of another type, out of range, or NaN."""
        if self.range.or_text and value == self.range.or_text:
            return
        fits: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        right = isinstance(value, fits) and (self.kind is bool or not isinstance(value, bool))
        if not right or (self.kind is float and math.isnan(value)) or value not in self.range:
            raise ValueError(f"{self.name} = {value!r}: must be {self.allowed}")
        if self.kind is int and abs(value) > LARGEST:
            raise ValueError(f"{self.name} = {value!r}: must be {self.allowed} and at most {LARGEST}")


def parameter(
    default: Value,
    meaning: str = "",
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    or_zero: bool = False,
    choices: Sequence[Value] = (),
    pattern: str = "",
    words: str = "",
    unit: str = "",
    topic: Topic = "method",
) -> Any:
    """Declare a field of a Config, with what it accepts.

    Parameters
    ----------
    default : bool, int, float or str
        Its value where none is given.
    meaning : str
        One sentence; by default what the class's docstring says of it in the section "Parameters".
    gt, ge, lt, le : float
        Bounds of a number: above, at least, below, at most.
    or_zero : bool
        Whether 0 is allowed beside the numbers within the bounds.
    choices : sequence
        All that is allowed; ``Literal["a", "b"]`` as the field's type says the same.
    pattern, words : str
        A regular expression that a text must match, and what an error says is allowed.
    unit : str
        Of a number, such as ``seconds``.
    topic : str
        The section of the run config's documentation: ``method``, ``protection`` or ``run``.

    Raises
    ------
    ValueError
        If bounds are said twice or of no number, or the default is not allowed.
    """
    allowed = Range(gt, ge, lt, le, or_zero, tuple(choices), pattern, words)
    if type(default) not in KINDS or (allowed.bounded and isinstance(default, bool | str)):
        raise ValueError(
            f"parameter({default!r}): must be a number, a text or a flag, and bounds are of numbers"
        )
    doubled = (gt is not None and ge is not None) or (lt is not None and le is not None)
    if doubled or (choices and allowed != Range(choices=tuple(choices))):
        raise ValueError(
            f"parameter({default!r}): takes one of gt and ge, one of lt and le, or choices, which stand alone"
        )
    if bool(pattern) != bool(words):
        raise ValueError(f"parameter({default!r}): a pattern goes with words that say what it allows")
    if default not in allowed:
        raise ValueError(f"parameter({default!r}): the default must be {allowed}, as all values")
    return field(default=default, metadata={_DECLARED: Declaration(allowed, meaning, unit, topic)})


def parameters_of(config: type) -> Mapping[str, Parameter]:
    """Return the fields of a Config that are numbers, texts or flags, by name.

    A class that gives a field of its base another default, and says nothing else of it, keeps what the base declares.

    Raises
    ------
    ValueError
        If the default of a field is not one of the choices of its type.
    """
    if config not in _READ:  # a quick command asks for each of them many times
        _READ[config] = _read(config)
    return dict(_READ[config])


_READ: dict[type, dict[str, Parameter]] = {}


def _read(config: type) -> dict[str, Parameter]:
    hints, meanings = get_type_hints(config), _documented(config)
    found = {}
    for item in fields(config):
        said = _declaration(config, item)
        declared = said or Declaration()
        hint, text = _or_text(hints[item.name])
        kind, choices = _kind_of(hint)
        if kind is None:
            continue
        allowed = replace(Range(choices=choices) if choices else declared.range, or_text=text)
        meaning = declared.meaning or meanings.get(item.name, "")
        made = Parameter(item.name, kind, item.default, allowed, meaning, declared.unit, declared.topic)
        if item.default is not MISSING and (said is not None or choices):
            made.check(item.default)
        found[item.name] = made
    return found


def check_parameters(config: Any) -> None:
    """Raise ValueError if a field of a Config has a value that ``parameter`` or a ``Literal`` doesn't allow."""
    kind = type(config)
    known = parameters_of(kind)
    for item in fields(config):
        if item.name in known and (known[item.name].range.choices or _declaration(kind, item)):
            known[item.name].check(getattr(config, item.name))


def _declaration(config: type, item: Field[Any]) -> Declaration | None:
    """Return the declaration of a field by a Config, or by its nearest base that has one; None if none has."""
    for kind in config.__mro__:
        found = getattr(kind, "__dataclass_fields__", {}).get(item.name)
        if found is not None and _DECLARED in found.metadata:
            declared: Declaration = found.metadata[_DECLARED]
            return declared
    return None


def _or_text(hint: Any) -> tuple[Any, str]:
    """Return the type of a field's numbers, and the text that it allows beside numbers, "" if there is none."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each in (int, float)]
        texts = [text for each in get_args(hint) if get_origin(each) is Literal for text in get_args(each)]
        if len(kinds) == len(texts) == 1 and len(get_args(hint)) == 2 and isinstance(texts[0], str):
            return kinds[0], texts[0]
    return hint, ""


def _kind_of(hint: Any) -> tuple[type | None, tuple[Value, ...]]:
    """Return a field's type, None unless it is a simple one, and the choices of its ``Literal``."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        kinds = {type(choice) for choice in choices}
        return (kinds.pop() if len(kinds) == 1 and kinds <= KINDS.keys() else None), choices
    return (hint if hint in KINDS else None), ()


def _documented(config: type) -> dict[str, str]:
    """Return the meanings of parameters in the docstrings of a class and its bases, by name, without a full stop."""
    said: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        text = inspect.cleandoc(kind.__doc__ or "")
        section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S.*\n-+$|\Z)", text, re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^(\S.*)\n((?:[ \t]+\S.*\n?|\n)+)", section[1] if section else "", re.MULTILINE)
        for names, meaning in entries:
            line = " ".join(meaning.split()).rstrip(".")
            said |= {name.strip(): line for name in names.partition(":")[0].split(",")}
    return said
