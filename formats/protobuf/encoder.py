"""The encoding of rows as Protobuf messages, by the schema that the registry has for them."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache, partial
from operator import ne
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.exact_arrays import cast_exactly
from onceflow.core.arrow.instants import BEYOND_PYTHON
from onceflow.core.arrow.kinds import holds, is_list, to_plain_type
from onceflow.formats import faulty_parts
from onceflow.formats.protobuf import schema
from onceflow.formats.registry_schemas import check_fields

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_SECOND = dt.timedelta(seconds=1)

_Convert: TypeAlias = Callable[[Any], Any]
_ConvertAll: TypeAlias = Callable[[Sequence[Any]], list[Any]]

_NULL_OF_MANY = (
    "a null {0}, which Protobuf does not have; readers would see an empty one. Replace it by an"
    " empty {0} before the sink"
)


class ProtobufValues:
    """An encoder of rows of some columns as one message."""

    def __init__(self, columns: pa.Schema, descriptors: bytes, message: str | None) -> None:
        """Prepare to write `columns` as the message called `message`, or as the first message.

        Raises:
            ConfigError: The schema has no such message, the message has no field for a column, or a
                required field has no column.
        """
        message_type = schema.message_of(descriptors, message)
        _check_columns(list(columns), message_type)
        self._error = schema.encode_error()
        self._names = columns.names
        self._fields = [
            pa.field(column.name, _to_python_times(to_plain_type(column.type)))
            for column in columns
        ]
        """The types to which columns are cast."""
        self._members = _Members(message_type, columns.names, dot="")

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one message for each row, each after `header`.

        Raises:
            ValueError: A value does not fit its field. Also raises the others of `ENCODING_ERRORS`.
                If there is one row, the error names the part at fault.
        """
        try:
            values = [
                convert(_read_part(column, field.type))
                for column, field, convert in zip(
                    columns, self._fields, self._members.converters, strict=True
                )
            ]
            names, make = self._names, self._members.make
            # The method of the class: a field of the same name hides that of the message.
            serialize = make.SerializeToString
            return [
                header + serialize(make(**dict(zip(names, row, strict=True))))
                for row in zip(*values, strict=True)
            ]
        except self._error as error:
            raise ValueError(str(error)) from error
        except faulty_parts.ENCODING_ERRORS as error:
            raise self._name_fault(columns, error) from error

    def _name_fault(self, columns: Sequence[pa.Array], error: Exception) -> Exception:
        """Return `error` with the path of the part at fault, if `columns` have one row."""
        named = faulty_parts.find_faulty_part(columns, self._fields, _read_part, error)
        if isinstance(named, faulty_parts.FaultyPart) or any(
            len(column) != 1 for column in columns
        ):
            return named
        row = (
            _read_part(column, field.type)[0]
            for column, field in zip(columns, self._fields, strict=True)
        )
        return self._members.find_fault(dict(zip(self._names, row, strict=True)), named)


def _read_part(column: pa.Array, kind: pa.DataType) -> list[Any]:
    # A Python time ends at microseconds, and pyarrow cuts off further digits.
    exact = cast_exactly(column, kind) if holds(column.type, _is_cast) else column
    values: list[Any] = exact.to_pylist()
    return values


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
        return pa.struct([field.with_type(_to_python_times(field.type)) for field in kind])
    if arrow.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC")
    return pa.time64("us") if arrow.is_time64(kind) else kind


def _is_cast(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return True
    if arrow.is_timestamp(kind):
        # Python or pandas may not be able to represent the local time of an instant.
        return kind.tz not in (None, "UTC")
    return bool(arrow.is_time64(kind) and kind.unit == "ns")


def _check_columns(columns: Sequence[pa.Field], message: Descriptor) -> None:
    required = [
        field.name
        for field in schema.to_proto(message).field
        if field.label == field.LABEL_REQUIRED
    ]
    names = [arrow_field.name for arrow_field in columns]
    check_fields(names, message.fields_by_name, required, f"message {message.full_name}")
    for column in columns:
        kind, inner = _item_type(column.type), schema.inner_message(column.name, message)
        if arrow.is_struct(kind) and inner is not None:
            _check_columns(list(kind), inner)


def _item_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of one value of a list or a map, or `kind` itself."""
    if arrow.is_map(kind):
        return kind.item_type
    return kind.value_type if is_list(kind) else kind


class _Members:
    """The fields of a message to which values are written."""

    def __init__(self, message: Descriptor, names: Sequence[str], dot: str = ".") -> None:
        """Prepare to write the fields `names`. Their paths begin with `dot`."""
        self.make = schema.class_of(message)
        self._dot = dot
        self._members = {name: _member_converter(message.fields_by_name[name]) for name in names}

    @property
    def converters(self) -> Sequence[_ConvertAll]:
        """The converters, each for all values of one field."""
        return list(self._members.values())

    def build(self, values: Mapping[str, Any]) -> Any:
        """Return the message that has `values`.

        Raises:
            FaultyPart: A field cannot hold its value.
        """
        members = self._members
        try:
            return self.make(**{name: members[name]([value])[0] for name, value in values.items()})
        except faulty_parts.ENCODING_ERRORS as error:
            raise self.find_fault(values, error) from error

    def find_fault(self, values: Mapping[str, Any], error: Exception) -> Exception:
        """Return the reason why a value cannot be written, with its path, or else `error`."""
        for name, value in values.items():
            try:
                self.make(**{name: self._members[name]([value])[0]})
            except faulty_parts.ENCODING_ERRORS as fault:
                return faulty_parts.prefix_path(self._dot + name, fault)
        return error


def _member_converter(field: FieldDescriptor) -> _ConvertAll:
    """Return a function that converts Arrow values or nulls to values of `field` in a message."""
    convert = _converter(field)
    if schema.is_repeated(field):
        return lambda values: list(map(convert, values))
    return lambda values: [None if value is None else convert(value) for value in values]


def _converter(field: FieldDescriptor) -> _Convert:
    """Return a function that converts an Arrow value to a value of `field` in a message."""
    if schema.is_map(field):
        return _map_converter(field)
    if not schema.is_repeated(field):
        return _single_converter(field)
    to_item = _item_converter(field)

    def convert_items(items: Any) -> Any:
        if items is None:
            raise ValueError(_NULL_OF_MANY.format("list"))
        try:
            return list(map(to_item, items))
        except faulty_parts.ENCODING_ERRORS as error:
            raise faulty_parts.prefix_path(faulty_parts.ITEMS, error) from error

    return convert_items


def _map_converter(field: FieldDescriptor) -> _Convert:
    described: Any = field
    fields = described.message_type.fields_by_name
    to_key, to_value = _single_converter(fields["key"]), _item_converter(fields["value"])

    def convert_entries(pairs: Any) -> Any:
        if pairs is None:
            raise ValueError(_NULL_OF_MANY.format("map"))
        part = faulty_parts.KEYS
        try:
            keys = [to_key(key) for key, _ in pairs]
            part = faulty_parts.ENTRIES
            values = [to_value(value) for _, value in pairs]
        except faulty_parts.ENCODING_ERRORS as error:
            raise faulty_parts.prefix_path(part, error) from error
        return _without_doubles(dict(zip(keys, values, strict=True)), pairs)

    return convert_entries


def _item_converter(field: FieldDescriptor) -> _Convert:
    """Return a function that converts an item of a list or map, and raises ValueError for null."""
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
    make = schema.class_of(message)
    if message.full_name == schema.TIMESTAMP:
        return lambda value: make(**_timestamp(value))
    if message.full_name in schema.WRAPPERS:
        wrap = _single_converter(message.fields_by_name["value"])
        return lambda value: make(value=wrap(value))
    # Create it at the first value, because a message may contain itself. The nesting of values is
    # finite.
    make_members = cache(partial(_Members, message, [member.name for member in message.fields]))
    return lambda value: make_members().build(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if not isinstance(value, dt.date | dt.time):
        return value
    # Only NaT differs from itself. pandas creates it from the lowest number of nanoseconds.
    if ne(value, value):
        raise ValueError(BEYOND_PYTHON)
    return value.isoformat()


def _to_float(value: Any, *, code: str) -> Any:
    """Return `value` for a float or a double. A float is rounded; an integer must be exact.

    Raises:
        ValueError: The field cannot hold the value; Protobuf would write infinity.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _plain(value)
    try:
        (held,) = struct.unpack(code, struct.pack(code, value))
    except (OverflowError, struct.error):
        held = None
    if held is None or (isinstance(value, int) and held != value):
        raise ValueError(f"{value!r}, which a {'float' if code == '<f' else 'double'} cannot hold")
    return value


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not a bool, and Protobuf would store true or false instead")
    return value


_EXACT: dict[int, _Convert] = {
    1: partial(_to_float, code="<d"),
    2: partial(_to_float, code="<f"),
    8: _to_bool,
}
"""The functions that refuse values which a field cannot hold, by descriptor.proto's numbers."""


def _timestamp(value: Any) -> dict[str, int]:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise ValueError(
            f"{value!r} is a {type(value).__name__}, and a Timestamp needs a datetime with a time"
            " zone"
        )
    since = value - _EPOCH
    nanos = since.microseconds * 1000 + getattr(value, "nanosecond", 0)
    return {"seconds": since // _SECOND, "nanos": nanos}
