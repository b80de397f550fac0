"""Rows as Protobuf messages, by the schema that the registry has for them."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from operator import ne
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.connectors.kafka.protobuf.schema import (
    TIMESTAMP,
    WRAPPERS,
    class_of,
    encode_error,
    inner_message,
    is_map,
    is_repeated,
    message_of,
    to_proto,
)
from onceflow.connectors.kafka.schema_rules import check_fields
from onceflow.core.arrow.exact_arrays import cast_exactly
from onceflow.core.arrow.instants import BEYOND_PYTHON
from onceflow.core.arrow.kinds import holds, is_list, to_plain_type

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_SECOND = dt.timedelta(seconds=1)

_Convert: TypeAlias = Callable[[Any], Any]


class ProtobufValues:
    """Writes rows of some columns as one message."""

    def __init__(self, columns: pa.Schema, descriptors: bytes, message: str | None) -> None:
        """Prepare to write `columns` as the message called `message`, or the first.

        Raises:
            ConfigError: The schema has no such message, or the message no field for a column, or
                a required one without a column.
        """
        message_type = message_of(descriptors, message)
        _check_columns(list(columns), message_type)
        self._class = class_of(message_type)
        self._error = encode_error()
        self._names = columns.names
        self._times = [
            _to_python_times(kind) if holds(kind, _is_cast) else None
            for kind in map(to_plain_type, columns.types)
        ]
        """The type to which a column is cast; None if its values are taken as they are."""
        self._converters = [_converter(message_type.fields_by_name[one.name]) for one in columns]

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one message a row, behind `header`.

        Raises:
            ValueError: A value does not fit its field, and the like; see `ENCODING_ERRORS`.
        """
        # A time of Python ends at microseconds, and pyarrow cuts off what is behind them.
        exact = [
            column if kind is None else cast_exactly(column, kind)
            for column, kind in zip(columns, self._times, strict=True)
        ]
        values = [
            [None if one is None else convert(one) for one in column.to_pylist()]
            for column, convert in zip(exact, self._converters, strict=True)
        ]
        make, names = self._class, self._names
        try:
            return [
                header + make(**dict(zip(names, row, strict=True))).SerializeToString()
                for row in zip(*values, strict=True)
            ]
        except self._error as error:
            raise ValueError(str(error)) from error


def _to_python_times(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with times of day in microseconds, instants in UTC, and no extensions."""
    if not holds(kind, _is_cast):
        return kind
    kind = to_plain_type(kind)
    if arrow.is_map(kind):
        item = kind.item_field.with_type(_to_python_times(kind.item_type))
        return pa.map_(kind.key_type, item)
    if is_list(kind):
        return pa.list_(kind.value_field.with_type(_to_python_times(kind.value_type)))
    if arrow.is_struct(kind):
        return pa.struct([one.with_type(_to_python_times(one.type)) for one in kind])
    if arrow.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC")
    return pa.time64("us") if arrow.is_time64(kind) else kind


def _is_cast(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return True
    if arrow.is_timestamp(kind):
        # The local time of an instant may be one that Python, or pandas, does not have.
        return kind.tz not in (None, "UTC")
    return bool(arrow.is_time64(kind) and kind.unit == "ns")


def _check_columns(columns: Sequence[pa.Field], message: Descriptor) -> None:
    required = [one.name for one in to_proto(message).field if one.label == one.LABEL_REQUIRED]
    names = [one.name for one in columns]
    check_fields(names, message.fields_by_name, required, f"message {message.full_name}")
    for column in columns:
        kind, inner = _item_type(column.type), inner_message(column.name, message)
        if arrow.is_struct(kind) and inner is not None:
            _check_columns(list(kind), inner)


def _item_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of one value of a list or a map, or `kind` itself."""
    if arrow.is_map(kind):
        return kind.item_type
    return kind.value_type if is_list(kind) else kind


def _converter(field: FieldDescriptor) -> _Convert:
    """Return what makes of a value of Arrow's what a message takes for `field`."""
    described: Any = field
    if is_map(field):
        fields = described.message_type.fields_by_name
        to_key, to_value = _single_converter(fields["key"]), _item_converter(fields["value"])
        return lambda pairs: _without_doubles(
            {to_key(key): to_value(item) for key, item in pairs}, pairs
        )
    if is_repeated(field):
        to_item = _item_converter(field)
        return lambda items: list(map(to_item, items))
    return _single_converter(field)


def _item_converter(field: FieldDescriptor) -> _Convert:
    """Return what converts an item of a list or a map, and raises ValueError for null."""
    convert = _single_converter(field)

    def convert_item(item: Any) -> Any:
        if item is None:
            raise ValueError("a null in a list or a map, which Protobuf does not have")
        return convert(item)

    return convert_item


def _without_doubles(entries: dict[Any, Any], pairs: Sequence[Any]) -> dict[Any, Any]:
    if len(entries) != len(pairs):
        raise ValueError("a map that has a key twice")
    return entries


def _single_converter(field: FieldDescriptor) -> _Convert:
    described: Any = field
    message: Descriptor | None = described.message_type
    if message is None:
        return _EXACT.get(described.type, _plain)
    make = class_of(message)
    if message.full_name == TIMESTAMP:
        return lambda value: make(**_timestamp(value))
    if message.full_name in WRAPPERS:
        wrap = _single_converter(message.fields_by_name["value"])
        return lambda value: make(value=wrap(value))
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
    if not isinstance(value, dt.date | dt.time):
        return value
    # Only NaT, which pandas makes of the lowest number of nanoseconds, differs from itself.
    if ne(value, value):
        raise ValueError(BEYOND_PYTHON)
    return value.isoformat()


def _float_of(value: Any, *, code: str) -> Any:
    """Return `value` for a float or a double: a float is rounded, an integer must be held exactly.

    Raises:
        ValueError: It is beyond what the field holds, which Protobuf makes infinity of.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _plain(value)
    try:
        (held,) = struct.unpack(code, struct.pack(code, value))
    except (OverflowError, struct.error):
        held = None
    if held is None or (isinstance(value, int) and held != value):
        raise ValueError(
            f"{value!r}, which a {'float' if code == '<f' else 'double'} does not hold"
        )
    return value


def _bool_of(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is no bool, and Protobuf makes true or false of it")
    return value


_EXACT: dict[int, _Convert] = {
    1: partial(_float_of, code="<d"),
    2: partial(_float_of, code="<f"),
    8: _bool_of,
}
"""What makes a value that the field holds, by the numbers of descriptor.proto."""


def _timestamp(value: Any) -> dict[str, int]:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise ValueError(
            f"{value!r} is a {type(value).__name__}, and a Timestamp needs a datetime with a time"
            " zone"
        )
    since = value - _EPOCH
    nanos = since.microseconds * 1000 + getattr(value, "nanosecond", 0)
    return {"seconds": since // _SECOND, "nanos": nanos}
