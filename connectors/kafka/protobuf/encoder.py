"""Rows as Protobuf messages: the schema that columns have, and values written by one.

A column that may be null is an optional field. What Protobuf has no type for (decimals, dates,
times, timestamps without a zone) is text, as in JSON; a list or a map that is null is empty.

Fields are known by their numbers: a column keeps the one that the subject's latest version has for
it, a new one gets the next that no version has had, and one that is taken away leaves its own
reserved.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.protobuf.schema import (
    TIMESTAMP,
    WRAPPERS,
    class_of,
    encode_error,
    is_map,
    is_repeated,
    message_of,
)
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_SECOND = dt.timedelta(seconds=1)
_FIRST_OF_PROTOBUF, _NEXT_OF_PROTOBUF = 19_000, 20_000
"""Numbers that Protobuf keeps for itself."""

_SIMPLE: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (arrow.is_boolean, "bool"),
    (arrow.is_int64, "int64"),
    (arrow.is_uint64, "uint64"),
    (arrow.is_uint32, "uint32"),
    (arrow.is_integer, "int32"),
    (arrow.is_float32, "float"),
    (arrow.is_float64, "double"),
    (arrow.is_string, "string"),
    (arrow.is_large_string, "string"),
    (arrow.is_string_view, "string"),
    (arrow.is_binary, "bytes"),
    (arrow.is_large_binary, "bytes"),
    (arrow.is_binary_view, "bytes"),
    (arrow.is_fixed_size_binary, "bytes"),
    (arrow.is_decimal, "string"),
    (arrow.is_date, "string"),
    (arrow.is_time, "string"),
)
_KEYS = frozenset({"bool", "int64", "uint64", "uint32", "int32", "string"})


def protobuf_text(columns: pa.Schema, name: str, latest: Descriptor | None = None) -> str:
    """Return the schema of messages with `columns`, called `name`.

    Args:
        columns: Of the rows.
        name: Of the message, unless `latest` has another one.
        latest: The message of the subject's latest version, whose numbers hold.

    Raises:
        ConfigError: A column has a name or a type that Protobuf does not have.
    """
    called = re.sub(r"[^A-Za-z0-9_]", "_", name) if latest is None else latest.name
    package = "" if latest is None else str(latest.file.package)
    if called[:1].isdigit():
        called = f"_{called}"
    body = "\n".join(_message(list(columns), called, latest))
    head = ['syntax = "proto3";']
    if package:
        head.append(f"package {package};")
    if TIMESTAMP in body:
        head.append('import "google/protobuf/timestamp.proto";')
    return "\n".join([*head, body, ""])


def _message(fields: Sequence[pa.Field], name: str, latest: Descriptor | None) -> Iterator[str]:
    numbers = _Numbers(latest)
    yield f"message {name} {{"
    for field in fields:
        if not _NAME.fullmatch(field.name):
            raise ConfigError(
                f"column {field.name!r} has a name that Protobuf does not allow: letters, digits"
                " and _, beginning with a letter or _; rename it before the sink"
            )
        inner = _inner_message(field, latest)
        inside: list[str] = []
        kind = _type(field.type, field.name, inner, inside)
        yield from (f"  {line}" for line in inside)
        word = "optional " if field.nullable and not _is_many(field.type) else ""
        yield f"  {word}{kind} {field.name} = {numbers.of(field.name)};"
    for gone in numbers.gone([field.name for field in fields]):
        yield f"  reserved {', '.join(gone)};"
    yield "}"


class _Numbers:
    """The numbers of a message's fields."""

    def __init__(self, latest: Descriptor | None) -> None:
        self._known: dict[str, int] = {}
        self._reserved: list[tuple[int, int]] = []
        self._names: set[str] = set()
        if latest is not None:
            described = _described(latest)
            self._known = {one.name: one.number for one in described.field}
            self._reserved = [(one.start, one.end) for one in described.reserved_range]
            self._names = set(described.reserved_name)
        taken = [*self._known.values(), *(end - 1 for _, end in self._reserved)]
        self._last = max(taken, default=0)

    def of(self, name: str) -> int:
        """Return the number of a field: its own, or the next."""
        if name not in self._known:
            self._last += 1
            if _FIRST_OF_PROTOBUF <= self._last < _NEXT_OF_PROTOBUF:
                self._last = _NEXT_OF_PROTOBUF
            self._known[name] = self._last
        return self._known[name]

    def gone(self, names: Iterable[str]) -> list[list[str]]:
        """Return the numbers, and the names, of fields that were, as far as there are any."""
        present = set(names)
        lost = self._known.keys() - present
        ranges = [*self._reserved, *((self._known[one], self._known[one] + 1) for one in lost)]
        numbers = [
            str(start) if end == start + 1 else f"{start} to {end - 1}"
            for start, end in sorted(ranges)
        ]
        quoted = [f'"{name}"' for name in sorted((self._names | lost) - present)]
        return [one for one in (numbers, quoted) if one]


def _described(message: Descriptor) -> Any:
    from google.protobuf.descriptor_pb2 import DescriptorProto

    found = DescriptorProto()
    message.CopyToProto(found)
    return found


def _inner_message(field: pa.Field, latest: Descriptor | None) -> Descriptor | None:
    """Return the message that the values of `field` are in the latest version, if they are."""
    known: Any = None if latest is None else latest.fields_by_name.get(field.name)
    if known is not None and is_map(known):
        known = known.message_type.fields_by_name["value"]
    found: Descriptor | None = None if known is None else known.message_type
    if found is None or found.full_name == TIMESTAMP or found.full_name in WRAPPERS:
        return None
    return found


def _is_many(kind: pa.DataType) -> bool:
    return bool(
        arrow.is_list(kind)
        or arrow.is_large_list(kind)
        or arrow.is_fixed_size_list(kind)
        or arrow.is_map(kind)
    )


def _type(kind: pa.DataType, column: str, latest: Descriptor | None, inside: list[str]) -> str:
    """Return the type of a field; adds to `inside` the message that it is of."""
    if arrow.is_map(kind):
        key = _single(kind.key_type, column, latest, inside)
        if key not in _KEYS:
            raise ConfigError(f"column {column!r} is {kind}, whose keys Protobuf does not have")
        return f"map<{key}, {_single(kind.item_type, column, latest, inside)}>"
    if _is_many(kind):
        return f"repeated {_single(kind.value_type, column, latest, inside)}"
    return _single(kind, column, latest, inside)


def _single(kind: pa.DataType, column: str, latest: Descriptor | None, inside: list[str]) -> str:
    if arrow.is_dictionary(kind):
        return _single(kind.value_type, column, latest, inside)
    if arrow.is_struct(kind):
        name = f"{column}_message" if latest is None else latest.name
        inside += _message([kind.field(at) for at in range(kind.num_fields)], name, latest)
        return name
    if arrow.is_timestamp(kind):
        return TIMESTAMP if kind.tz else "string"
    for is_kind, found in _SIMPLE:
        if is_kind(kind):
            return found
    raise ConfigError(f"column {column!r} is {kind}, which Protobuf does not have: cast it")


_Convert: TypeAlias = Callable[[Any], Any]


class ProtobufValues:
    """Writes rows of some columns as one message."""

    def __init__(self, columns: pa.Schema, descriptors: bytes, message: str | None) -> None:
        """Prepare to write `columns` as the message called `message`, or the first.

        Raises:
            ConfigError: The schema has no such message, or the message no field for a column, or
                a required one without a column.
        """
        described = message_of(descriptors, message)
        _require_same(list(columns), described)
        self._class = class_of(described)
        self._error = encode_error()
        self._names = columns.names
        self._converters = [_converter(described.fields_by_name[one.name]) for one in columns]

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one message a row, behind `header`.

        Raises:
            ValueError: A value does not fit its field, and the like; see `ENCODING_ERRORS`.
        """
        values = [
            [None if one is None else convert(one) for one in column.to_pylist()]
            for column, convert in zip(columns, self._converters, strict=True)
        ]
        make, names = self._class, self._names
        try:
            return [
                header + make(**dict(zip(names, row, strict=True))).SerializeToString()
                for row in zip(*values, strict=True)
            ]
        except self._error as error:
            raise ValueError(str(error)) from error


def _require_same(columns: Sequence[pa.Field], message: Descriptor) -> None:
    names = [one.name for one in columns]
    lost = sorted(set(names) - set(message.fields_by_name))
    if lost:
        raise ConfigError(
            f"message {message.full_name} has no fields for columns {lost}: drop them before the"
            " sink, or register a version that has them"
        )
    required = [one.name for one in _described(message).field if one.label == one.LABEL_REQUIRED]
    missing = sorted(set(required) - set(names))
    if missing:
        raise ConfigError(
            f"message {message.full_name} needs fields {missing}, which the rows do not have: add"
            " the columns"
        )
    for column in columns:
        kind, inner = _single_of(column.type), _inner_message(column, message)
        if arrow.is_struct(kind) and inner is not None:
            _require_same([kind.field(at) for at in range(kind.num_fields)], inner)


def _single_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of one value of a list or a map, or `kind` itself."""
    if arrow.is_map(kind):
        return kind.item_type
    return kind.value_type if _is_many(kind) else kind


def _converter(field: FieldDescriptor) -> _Convert:
    """Return what makes of a value of Arrow's what a message takes for `field`."""
    described: Any = field
    if is_map(field):
        one = _single_converter(described.message_type.fields_by_name["value"])
        return lambda pairs: _without_doubles({key: one(item) for key, item in pairs}, pairs)
    one = _single_converter(field)
    return (lambda items: list(map(one, items))) if is_repeated(field) else one


def _without_doubles(found: dict[Any, Any], pairs: Sequence[Any]) -> dict[Any, Any]:
    if len(found) != len(pairs):
        raise ValueError("a map that has a key twice")
    return found


def _single_converter(field: FieldDescriptor) -> _Convert:
    described: Any = field
    message: Descriptor | None = described.message_type
    if message is None:
        return _plain
    make = class_of(message)
    if message.full_name == TIMESTAMP:
        return lambda value: make(**_timestamp(value))
    if message.full_name in WRAPPERS:
        return lambda value: make(value=_plain(value))
    converters = {one.name: _converter(one) for one in message.fields}

    def struct(value: Any) -> Any:
        members = value.items()
        return make(
            **{name: None if one is None else converters[name](one) for name, one in members}
        )

    return struct


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return f"{value:f}"
    # A time, a date, or a timestamp without a zone.
    return value.isoformat() if isinstance(value, dt.date | dt.time) else value


def _timestamp(value: Any) -> dict[str, int]:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise ValueError(f"{value!r} is no time with a zone")
    since = value - _EPOCH
    nanos = since.microseconds * 1000 + getattr(value, "nanosecond", 0)
    return {"seconds": since // _SECOND, "nanos": nanos}
