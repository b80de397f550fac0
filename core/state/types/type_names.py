"""Converts the names of types in signatures to columns and Python types.

A name is one or several elements with "|" between them. An element is a word, which may have names
in brackets with "," between them. `signatures.type_name` returns these names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from onceflow.core.state.types.serializers import serializer_of

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
    """Return the column for values of the type called `name`, or None if it needs the user's class.

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
    """Return the type called `name`, or None if it needs the user's class."""
    known, following = _alternatives(name)
    return None if known is None or following else known.python


def _alternatives(text: str) -> tuple[_Known | None, str]:
    """Return the type at the start of `text`, and the text behind it."""
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
