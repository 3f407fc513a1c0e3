"""What the fields of a strategy's Config accept and mean, said where they stand.

    @dataclass(frozen=True)
    class HalfLifeConfig(AsynchronousConfig):
        '''Parameters of HalfLife.

        Parameters
        ----------
        half_life : float
            Seconds by which a contribution's weight halves.
        '''

        half_life: float = parameter(1.0, gt=0)
        shape: Literal["exponential", "linear"] = "exponential"

The constructor refuses other values, such as ``HalfLife(half_life=-1)``, and whoever makes keys or options of the
fields, as the app ``fedapp`` does, finds here what to say of them.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

Value = bool | int | float | str

KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

_DECLARED = "strategies.parameter"  # in the metadata of a field


@dataclass(frozen=True)
class Range:
    """Values that are allowed: numbers within bounds, or one of some; nothing said allows all."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[Value, ...] = ()

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        """Say the range in words, such as ``in (0, 1]``; "" if all is allowed."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        low, high = self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le
        if low is None or high is None:
            signs = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
            return next((f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None), "")
        return f"in {'(' if self.ge is None else '['}{low:g}, {high:g}{')' if self.le is None else ']'}"


@dataclass(frozen=True)
class Parameter:
    """A field of a strategy's Config that is a number, a text or a flag.

    Attributes
    ----------
    name : str
        The field's.
    kind : type
        bool, int, float or str.
    default : bool, int, float or str
        ``dataclasses.MISSING`` if there is none.
    range : Range
        What is allowed of that type.
    meaning : str
        What the field says it means, or the section "Parameters" of its class; "" if neither does.
    """

    name: str
    kind: type
    default: Any
    range: Range
    meaning: str

    @property
    def allowed(self) -> str:
        """What it accepts, in words."""
        if self.range.choices:
            return str(self.range)
        return f"{KINDS[self.kind]} {self.range}".strip()

    def check(self, value: Any) -> None:
        """Raise ValueError if it accepts another value than this: of another type, out of range, or no number."""
        fits: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        right = isinstance(value, fits) and (self.kind is bool or not isinstance(value, bool))
        if not right or (self.kind is float and math.isnan(value)) or value not in self.range:
            raise ValueError(f"{self.name} = {value!r}: must be {self.allowed}")


def parameter(
    default: Value,
    meaning: str = "",
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: Sequence[Value] = (),
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
    choices : sequence
        All that is allowed; ``Literal["a", "b"]`` as the field's type says the same.

    Raises
    ------
    ValueError
        If bounds are said twice or of no number, or the default is not allowed.
    """
    allowed = Range(gt, ge, lt, le, tuple(choices))
    if type(default) not in KINDS or (not choices and str(allowed) and isinstance(default, bool | str)):
        raise ValueError(
            f"parameter({default!r}): must be a number, a text or a flag, and bounds are of numbers"
        )
    doubled = (gt is not None and ge is not None) or (lt is not None and le is not None)
    if doubled or (choices and allowed != Range(choices=tuple(choices))):
        raise ValueError(
            f"parameter({default!r}): takes one of gt and ge, one of lt and le, or choices, which stand alone"
        )
    if default not in allowed:
        raise ValueError(f"parameter({default!r}): the default must be {allowed}, as all values")
    return field(default=default, metadata={_DECLARED: (allowed, meaning)})


def parameters_of(config: type) -> dict[str, Parameter]:
    """Return the fields of a Config that are numbers, texts or flags, by name.

    Raises
    ------
    ValueError
        If the default of a field is not one of the choices of its type.
    """
    hints, meanings = get_type_hints(config), _documented(config)
    found = {}
    for item in fields(config):
        allowed, meaning = item.metadata.get(_DECLARED, (Range(), ""))
        kind, choices = _kind_of(hints[item.name])
        if kind is None:
            continue
        if choices:
            allowed = Range(choices=choices)
        made = Parameter(item.name, kind, item.default, allowed, meaning or meanings.get(item.name, ""))
        if item.default is not MISSING and _is_declared(item, choices):
            made.check(item.default)
        found[item.name] = made
    return found


def check_parameters(config: Any, given: Mapping[str, str] | None = None) -> None:
    """Raise ValueError if a field of this Config isn't what ``parameter`` or a ``Literal`` allows.

    ``given`` has other names by which fields were said.
    """
    kinds = parameters_of(type(config))
    for item in fields(config):
        known = kinds.get(item.name)
        if known is not None and _is_declared(item, known.range.choices):
            name = (given or {}).get(item.name, item.name)
            replace(known, name=name).check(getattr(config, item.name))


def _is_declared(item: Field[Any], choices: tuple[Value, ...]) -> bool:
    return bool(choices) or _DECLARED in item.metadata


def _kind_of(hint: Any) -> tuple[type | None, tuple[Value, ...]]:
    """Return a field's simple type, None if it has another, and the choices that it names itself."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        kinds = {type(choice) for choice in choices}
        return (kinds.pop() if len(kinds) == 1 and kinds <= KINDS.keys() else None), choices
    return (hint if hint in KINDS else None), ()


def _documented(config: type) -> dict[str, str]:
    """Return what a class and its bases say of their parameters, by name, each in one line without its full stop."""
    said: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        text = inspect.cleandoc(kind.__doc__ or "")
        section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S.*\n-+$|\Z)", text, re.MULTILINE | re.DOTALL)
        entries = re.findall(r"^(\S.*)\n((?:[ \t]+\S.*\n?|\n)+)", section[1] if section else "", re.MULTILINE)
        for names, meaning in entries:
            line = " ".join(meaning.split()).rstrip(".")
            said |= {name.strip(): line for name in names.partition(":")[0].split(",")}
    return said
