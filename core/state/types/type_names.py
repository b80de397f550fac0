"""The meaning of type names: their columns, their Python types, and the types that widen them.

A name is one or several elements with "|" between them. An element is a word, which may have names
in brackets with "," between them. `signatures.type_name` returns these names.

Types have the names of `signatures.type_name`. A type *widens* another if each of the other's
values can be read as one of its own: `float` and `int | None` widen `int`, and `list[float]` widens
`list[int]`. A class widens another of the same name if each new field has a default, and the type
of each common field is equal or widened. Removed fields are ignored.

Some types widen others for some values only: an integer beyond 2^53 may not be a float, and a field
that no longer has a default may be missing. Then all values are read when the state opens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import pyarrow as pa

from onceflow.core.state.types.serializers import LIST_PREFIX, TTL_PREFIX, serializer_of
from onceflow.core.state.types.signatures import (
    ClassType,
    NamedType,
    NamedTypes,
    NameElement,
    NameField,
    NameFields,
    ParsedName,
    text_of,
)

PYTHON_FORMAT = "msgpack/1:"
"""The prefix of the signature of a Python type; the type's name follows."""
DECIMAL = pa.decimal128(38, 18)
"""The type for decimals of any scale, as for tables of databases."""


@dataclass(frozen=True, slots=True)
class StateType:
    """A column's type, and the function that converts a value's bytes for `pa.array`."""

    arrow: pa.DataType
    value: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class _Known:
    python: Any
    arrow: pa.DataType
    plain: Callable[[Any], Any] = lambda value: value
    """Converts a value that is not None to one that `pa.array` accepts."""


def _in_utc(instant: datetime) -> datetime:
    return instant if instant.tzinfo else instant.replace(tzinfo=timezone.utc)


_SCALARS: dict[str, _Known] = {
    "int": _Known(int, pa.int64()),
    "float": _Known(float, pa.float64()),
    "str": _Known(str, pa.string()),
    "bytes": _Known(bytes, pa.binary()),
    "bool": _Known(bool, pa.bool_()),
    "date": _Known(date, pa.date32()),
    "datetime": _Known(datetime, pa.timestamp("us", "UTC"), _in_utc),
    "time": _Known(time, pa.string(), time.isoformat),
    "timedelta": _Known(timedelta, pa.duration("us")),
    "Decimal": _Known(Decimal, DECIMAL),
    "UUID": _Known(UUID, pa.string(), str),
}
_WORD = re.compile(r"[\w.]+")


def state_type(name: str) -> StateType | None:
    """Return the column type for values of the type called `name`.

    Return None if only the user's program has the class of that type.

    Numbers beyond 64 bits do not fit into their column: `pa.array` raises for them.
    """
    known, following = _alternatives(name)
    if known is None or following:
        return None
    decode, plain = serializer_of(known.python).decode, known.plain

    def to_plain_value(data: bytes) -> Any:
        value = decode(data)
        return None if value is None else plain(value)

    return StateType(known.arrow, to_plain_value)


def python_type_of(name: str) -> Any | None:
    """Return the Python type called `name`, or None if only the user's program has its class."""
    known, following = _alternatives(name)
    return None if known is None or following else known.python


def _alternatives(text: str) -> tuple[_Known | None, str]:
    """Parse the type at the start of `text`. Return it and the remaining text."""
    types: list[_Known | None] = []
    optional = False
    while True:
        if text.startswith("none"):
            optional, text = True, text[4:]
        else:
            known, text = _element(text)
            types.append(known)
        if not text.startswith("|"):
            break
        text = text[1:]
    (known, *others) = types or [None]
    if known is None or others:
        return None, text
    if not optional:
        return known, text
    plain = known.plain
    return _Known(known.python | None, known.arrow, lambda v: None if v is None else plain(v)), text


def _element(text: str) -> tuple[_Known | None, str]:
    match = _WORD.match(text)
    if match is None:
        return None, text
    word, text = match[0], text[match.end() :]
    if not text.startswith("["):
        return _SCALARS.get(word), text
    arguments: list[_Known | None] = []
    while text[:1] in ("[", ","):
        argument, text = _alternatives(text[1:])
        arguments.append(argument)
    return _generic(word, arguments), text[1:]


def _generic(word: str, arguments: list[_Known | None]) -> _Known | None:
    match word, arguments:
        case (("list" | "set" | "frozenset"), [_Known() as element]):
            plain = element.plain
            return _Known(
                list[element.python],  # type: ignore[name-defined]
                pa.list_(element.arrow),
                lambda values: [plain(value) for value in values],
            )
        case "dict", [_Known() as key, _Known() as item]:
            of_key, of_item = key.plain, item.plain
            return _Known(
                dict[key.python, item.python],  # type: ignore[name-defined]
                pa.map_(key.arrow, item.arrow),
                lambda entries: [(of_key(k), of_item(v)) for k, v in entries.items()],
            )
        case _:
            return None


_MAP_ARROW = " -> "
_OF_ELEMENTS = frozenset({"list", "set", "frozenset", "tuple"})
_INT, _FLOAT = NamedType("int"), NamedType("float")


def reads_as(stored: str, asked: str) -> bool:
    """Return True if values of signature `stored` can be read with signature `asked`.

    A time to live may be added, but not removed.
    """
    return stored == asked or explain_misfit(stored, asked) is None


def explain_misfit(stored: str, asked: str) -> str | None:
    """Return the reason why values of signature `stored` cannot be read with `asked`, or None.

    The text is empty if the two signatures explain the reason.
    """
    return _compare(stored, asked)[0]


def depends_on_values(stored: str, asked: str) -> bool:
    """Return True if `asked` widens `stored` for some of its values only."""
    return stored != asked and _compare(stored, asked)[1]


@lru_cache(maxsize=256)
def _compare(stored: str, asked: str) -> tuple[str | None, bool]:
    old_key, _, old = stored.rpartition(_MAP_ARROW)
    new_key, _, new = asked.rpartition(_MAP_ARROW)
    expires, expired_before = new.startswith(TTL_PREFIX), old.startswith(TTL_PREFIX)
    if old_key != new_key or (expired_before and not expires):
        return "", False
    old, new = old.removeprefix(TTL_PREFIX), new.removeprefix(TTL_PREFIX)
    if old.startswith(LIST_PREFIX) and new.startswith(LIST_PREFIX):
        old, new = old.removeprefix(LIST_PREFIX), new.removeprefix(LIST_PREFIX)
    if old == new:
        return None, False
    if not (old.startswith(PYTHON_FORMAT) and new.startswith(PYTHON_FORMAT)):
        return "", False
    comparison = _Comparison(
        ParsedName(old.removeprefix(PYTHON_FORMAT)), ParsedName(new.removeprefix(PYTHON_FORMAT))
    )
    return comparison.misfit(), comparison.depends_on_values


class _Comparison:
    """A comparison of two types: if one widens the other, and for which values."""

    def __init__(self, stored: ParsedName, asked: ParsedName) -> None:
        self._stored = stored
        self._asked = asked
        self._met: set[tuple[int, int]] = set()
        """The pairs of classes that are or were compared. Classes may contain themselves."""
        self.depends_on_values = False

    def misfit(self) -> str | None:
        """Return the reason why `asked` does not widen `stored`, or None."""
        return self._compare_types(self._stored.type, self._asked.type, "")

    def _compare_types(self, stored: NamedTypes, asked: NamedTypes, where: str) -> str | None:
        """Return the reason why `asked`, of field `where`, does not widen `stored`, or None."""
        for old in stored:
            alike = [new for new in asked if new.word == old.word]
            if not alike and old == _INT and _FLOAT in asked:
                self.depends_on_values = True
                continue
            reasons = [self._compare_elements(old, new) for new in alike]
            if None not in reasons:
                inside = next(filter(None, reasons), "")
                types = f"{where} was {text_of(stored)} and is {text_of(asked)}" if where else ""
                return inside or types
        return None

    def _compare_elements(self, old: NameElement, new: NameElement) -> str | None:
        """Return the reason why `new` does not widen `old`, or None.

        Both types begin with the same word.
        """
        match old, new:
            case ClassType(), ClassType():
                return self._compare_classes(old, new)
            case NamedType(arguments=()), ClassType():
                # The version that wrote it did not store the fields: the values must be read.
                self.depends_on_values = True
                return None
            case NamedType(), NamedType():
                return self._compare_generics(old, new)
            case _:
                return ""

    def _compare_generics(self, old: NamedType, new: NamedType) -> str | None:
        pairs = list(zip(old.arguments, new.arguments, strict=False))
        if len(old.arguments) != len(new.arguments):
            return ""
        if old.word == "dict" and pairs:
            if text_of(old.arguments[0]) != text_of(new.arguments[0]):
                return ""
        elif old.word not in _OF_ELEMENTS:
            return None if old == new else ""
        reasons = (self._compare_types(*pair, "") for pair in pairs)
        return next((reason for reason in reasons if reason is not None), None)

    def _compare_classes(self, old: ClassType, new: ClassType) -> str | None:
        pair = (old.number, new.number)
        if pair in self._met:
            return None
        self._met.add(pair)
        kept, asked = self._stored.fields[old.number], self._asked.fields[new.number]
        if kept.by_position or asked.by_position:
            moved = _explain_moved_field(new.word, kept, asked)
            if moved is not None:
                return moved
        for name, field in asked.named.items():
            reason = self._compare_field(kept.named.get(name), field, f"{new.word}.{name}")
            if reason is not None:
                return reason
        return None

    def _compare_field(self, old: NameField | None, new: NameField, where: str) -> str | None:
        if old is None:
            return None if new.optional else f"field `{where}` is new and has no default"
        self.depends_on_values |= old.optional and not new.optional
        return self._compare_types(old.type, new.type, f"field `{where}`")


def _explain_moved_field(word: str, kept: NameFields, asked: NameFields) -> str | None:
    """Return the reason why fields stored by position are not in their old order, or None."""
    if kept.by_position != asked.by_position:
        before, now = ("by position", "by name")[:: 1 if kept.by_position else -1]
        return f"the fields of {word} were stored {before}, but are now declared {now}"
    for number, (old, new) in enumerate(zip(kept.named, asked.named, strict=False), 1):
        if old != new:
            return (
                f"field {number} of {word} was `{old}` and is now `{new}`, but fields are matched"
                " by position"
            )
    return None
