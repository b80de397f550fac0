"""The decoder of Protobuf values with the registry's header to columns.

All values are read as one message of the latest version. Its fields are found by number in older
and newer versions. The schema of a value's id only says which message the value is. A message of
another name would be misread, so it is a bad record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pyarrow as pa
from confluent_kafka import Message
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.kafka.registry import CompiledSchema
from onceflow.core.arrow.kinds import is_list
from onceflow.core.errors import ConfigError
from onceflow.formats import registry_schemas
from onceflow.formats.decoding import Decoded
from onceflow.formats.fitting import Faults, Fitting
from onceflow.formats.protobuf.schema import (
    TIMESTAMP,
    WRAPPERS,
    MessagePath,
    class_of,
    columns_of_message,
    compile_schema,
    decode_error,
    find_reread,
    is_map,
    is_nullable,
    is_repeated,
    message_of,
    message_with_numbers,
    messages_of,
)
from onceflow.formats.registry_schemas import NoSchema, RegistryDecoder, SchemaCache

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_FIRST_MESSAGE_BYTES = registry_schemas.HEADER_BYTES + 1
"""The offset of the message in a value that is the first message of its schema."""
_SECONDS = range(-62_135_596_800, 253_402_300_800)
_NANOS = range(1_000_000_000)
"""The range of a Timestamp, the years 1 to 9999: these seconds and nanoseconds."""
_COLUMN_NANOS = range(1 - 2**63, 2**63)
"""The range of a column of nanoseconds. pandas reads the number below it as a missing value."""

_Value: TypeAlias = Callable[[Any], Any]


class ProtobufDecoder(RegistryDecoder):
    """A decoder of values to columns by one message."""

    def __init__(
        self, columns: pa.Schema, schema: CompiledSchema, message: str | None, schemas: SchemaCache
    ) -> None:
        """Decode to `columns` of the message called `message`, or the first one, of `schema`.

        Raises:
            ConfigError: Protobuf is not installed, the schema has no such message, the message has
                no such field, or a column's type does not suit its field.
        """
        super().__init__(schemas)
        described = message_of(schema.descriptors, message)
        self._name = described.full_name
        self._described = described
        self._messages: dict[int, dict[MessagePath, str] | str] = {
            schema.kept.id: messages_of(schema.descriptors)
        }
        """The messages of each schema by id, or the reason why there are none."""
        # Use one message object for all values: a new object for each value doubles the time.
        message_class = class_of(message_with_numbers(schema.descriptors, described))
        self._message = message_class()
        # The method of the class: a field of the same name hides that of the message.
        self._parse: Callable[[bytes], object] = partial(
            message_class.ParseFromString, self._message
        )
        self._errors = (ValueError, decode_error())
        self._fitting, self._written = fitting_of(described, columns)
        self._row = _make_row_reader(described, self._written)

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return the columns of `values`, and the faults of those that cannot be read."""
        faults: Faults = {}
        values = self.leave_out_ids_in_headers(values, messages, faults)
        kept, rows = self._rows(values, faults)
        try:
            members = self._build_members(rows)
        except pa.ArrowInvalid:
            kept, rows = self._drop_unreadable(kept, rows, faults)
            members = self._build_members(rows)
        late: Faults = {}
        columns = self._fitting.columns(members, len(rows), late)
        return Decoded(columns, kept, faults).drop_rows(late)

    def _build_members(self, rows: Sequence[tuple[Any, ...]]) -> dict[str, pa.Array]:
        fields = zip(*rows, strict=True) if rows else iter([()] * len(self._written))
        return {
            field.name: pa.array(column, type=field.type)
            for field, column in zip(self._written, fields, strict=True)
        }

    def _drop_unreadable(
        self, kept: Sequence[int], rows: Sequence[tuple[Any, ...]], faults: Faults
    ) -> tuple[Sequence[int], list[tuple[Any, ...]]]:
        """Return the rows without those that Arrow refuses, and add these to `faults`.

        With proto2 Protobuf itself does not check that a string is UTF-8.
        """
        readable: list[tuple[int, tuple[Any, ...]]] = []
        for at, row in zip(kept, rows, strict=True):
            try:
                self._build_members([row])
            except pa.ArrowInvalid as error:
                faults.setdefault(at, str(error))
            else:
                readable.append((at, row))
        return [at for at, _ in readable], [row for _, row in readable]

    def _rows(
        self, values: Sequence[bytes | None], faults: Faults
    ) -> tuple[Sequence[int], list[tuple[Any, ...]]]:
        """Return the indices and fields of the readable `values`. Add the others to `faults`."""
        message, parse, row = self._message, self._parse, self._row
        rows: list[tuple[Any, ...]] = []
        # Usually all values begin with the same bytes. Then the header is checked once, and each
        # message follows the header.
        if self._all_first(values):
            try:
                for value in values:
                    parse((value or b"")[_FIRST_MESSAGE_BYTES:])
                    rows.append(row(message))
            except self._errors:
                rows.clear()
            else:
                return range(len(values)), rows
        kept: list[int] = []
        for at, value in enumerate(values):
            try:
                parse(self._body(value))
                rows.append(row(message))
            except self._errors as error:
                faults.setdefault(at, str(error))
            else:
                kept.append(at)
        return kept, rows

    def _all_first(self, values: Sequence[bytes | None]) -> bool:
        """Return True if all values are the message to read, and it is the first of one schema."""
        starts = {None if value is None else value[:_FIRST_MESSAGE_BYTES] for value in values}
        start = next(iter(starts), None)
        # A single zero after the id means the path [0], the first message of the schema.
        if len(starts) != 1 or start is None or start[registry_schemas.HEADER_BYTES :] != b"\0":
            return False
        try:
            self._body(start)
        except ValueError:
            return False
        return True

    def _body(self, value: bytes | None) -> bytes:
        """Return the message after the header.

        Raises:
            ValueError: There is no header, or it names another message than the one to read.
        """
        if value is None:
            raise ValueError(registry_schemas.TOMBSTONE)
        schema_id = registry_schemas.schema_id_of(value)
        if schema_id is None:
            raise ValueError(registry_schemas.UNFRAMED)
        messages = self._find_messages(schema_id)
        path, start = registry_schemas.message_indexes(value)
        name = messages.get(path)
        if name != self._name:
            actual = f"message {list(path)}, which its schema lacks" if name is None else name
            raise ValueError(
                f"its schema id {schema_id}: it is {actual}, but {self._name} is expected"
            )
        return value[start:]

    def _find_messages(self, schema_id: int) -> dict[MessagePath, str]:
        """Return the messages of a schema.

        Raises:
            ValueError: The registry does not know the schema, or it is not Protobuf.
        """
        if schema_id not in self._messages:
            # Keep a fault, too: it applies to every value with this id, so the registry is not
            # asked again.
            self._messages[schema_id] = self._messages_or_fault(schema_id)
        messages = self._messages[schema_id]
        if isinstance(messages, str):
            raise ValueError(messages)
        return messages

    def _messages_or_fault(self, schema_id: int) -> dict[MessagePath, str] | str:
        schema = self.schemas[schema_id]
        if isinstance(schema, NoSchema):
            return schema.reason
        try:
            descriptors = compile_schema(schema)
            names = messages_of(descriptors)
            if self._name in names.values():
                written = message_of(descriptors, self._name)
                reread = find_reread(written, self._described, self._written.names)
                if reread is not None:
                    return f"its schema id {schema_id}: {reread}"
        except ConfigError as error:
            return f"its schema id {schema_id}: {error}"
        return names


class MessageDecoder(ProtobufDecoder):
    """A decoder of values to one column of structs."""

    def __init__(self, schema: CompiledSchema, schemas: SchemaCache) -> None:
        """Decode the first message of `schema`. Raises the errors of `ProtobufDecoder`."""
        self._fields = columns_of_message(message_of(schema.descriptors))
        super().__init__(self._fields, schema, None, schemas)

    @override
    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        decoded = super().decode(values, messages)
        structs: pa.Array
        if self._fields.names:
            structs = pa.StructArray.from_arrays(list(decoded.columns), fields=list(self._fields))
        else:
            # Arrow takes the number of structs from their members, and there are none.
            structs = pa.array([{}] * len(decoded.kept), pa.struct([]))
        return replace(decoded, columns=[structs])


def fitting_of(message: Descriptor, columns: pa.Schema) -> tuple[Fitting, pa.Schema]:
    """Return the mapping of the fields of `message` to `columns`, and the fields' own schema.

    Raises:
        ConfigError: There is no such field, or the column cannot hold its values.
    """
    columns_of_fields = columns_of_message(message, columns.names)
    written = pa.schema(
        [
            column.with_type(_with_nanos(column.type, columns.field(column.name).type))
            for column in columns_of_fields
        ]
    )
    fitting = Fitting(written, columns, aliases={}, defaults={})
    if fitting.fault is not None:
        raise ConfigError(f"message {message.full_name}: {fitting.fault}")
    return fitting, written


def _with_nanos(have: pa.DataType, want: pa.DataType) -> pa.DataType:
    """Return `have` with instants in nanoseconds wherever `want` has nanoseconds."""
    if arrow.is_timestamp(have) and arrow.is_timestamp(want) and want.unit == "ns":
        return pa.timestamp("ns", have.tz)
    if arrow.is_map(have) and arrow.is_map(want):
        item = have.item_field.with_type(_with_nanos(have.item_type, want.item_type))
        return pa.map_(have.key_type, item)
    if arrow.is_list(have) and is_list(want):
        item = have.value_field
        return pa.list_(item.with_type(_with_nanos(item.type, want.value_type)))
    if arrow.is_struct(have) and arrow.is_struct(want):
        types = {field.name: field.type for field in want}
        return pa.struct(
            [
                field.with_type(_with_nanos(field.type, types.get(field.name, field.type)))
                for field in have
            ]
        )
    return have


def _make_row_reader(message: Descriptor, columns: pa.Schema) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads `columns` from a message, which can be reused afterwards."""
    fields = [message.fields_by_name[name] for name in columns.names]
    if all(map(_is_plain, fields)) and len(fields) > 1:
        getter: Callable[[Any], tuple[Any, ...]] = attrgetter(*columns.names)
        return getter
    readers = list(map(_make_value_reader, fields, columns.types))
    return lambda message: tuple([read(message) for read in readers])


def _is_plain(field: FieldDescriptor) -> bool:
    described: Any = field
    kinds = (described.enum_type, described.message_type)
    return not (is_repeated(field) or is_nullable(field)) and kinds == (None, None)


def _make_value_reader(field: FieldDescriptor, kind: pa.DataType) -> _Value:
    """Return a function that reads the value of `field` from a message, for `kind`."""
    get = attrgetter(field.name)
    described: Any = field
    if is_map(field):
        read = _single(described.message_type.fields_by_name["value"], kind.item_type)
        return lambda message: [(key, read(value)) for key, value in get(message).items()]
    if is_repeated(field):
        item = _single(field, kind.value_type)
        return lambda message: list(map(item, get(message)))
    read = _single(field, kind)
    if not is_nullable(field):
        return get if read is _same else lambda message: read(get(message))
    name = field.name
    # Without HasField an absent field would be read as its default.
    return lambda message: read(get(message)) if _has_field(message, name) else None


def _has_field(message: Any, name: str) -> bool:
    # As `_parse`: a field may be called HasField.
    return bool(cast("Any", type(message)).HasField(message, name))


def _same(value: Any) -> Any:
    return value


def _single(field: FieldDescriptor, kind: pa.DataType) -> _Value:
    described: Any = field
    if described.enum_type is not None:
        numbers = described.enum_type.values_by_number
        names = {number: enum_value.name for number, enum_value in numbers.items()}
        # A value that a newer version has added has no name here. Its number is read instead; see
        # `message_with_numbers`.
        return lambda number: names.get(number, str(number))
    message: Descriptor | None = described.message_type
    if message is None:
        return _same
    if message.full_name == TIMESTAMP:
        return _nanoseconds if kind.unit == "ns" else _microseconds
    if message.full_name in WRAPPERS:
        return attrgetter("value")
    return _struct(message, kind)


def _struct(message: Descriptor, kind: pa.DataType) -> _Value:
    members = [
        (message_field.name, _make_value_reader(message_field, member.type))
        for message_field, member in zip(message.fields, kind, strict=True)
    ]
    return lambda value: {name: member(value) for name, member in members}


def _nanoseconds(value: Any) -> int:
    nanoseconds = _since_1970(value)
    if nanoseconds not in _COLUMN_NANOS:
        raise ValueError(
            f"a Timestamp of {value.seconds} s since 1970 is beyond the years 1677 to 2262, which a"
            " column of nanoseconds holds"
        )
    return nanoseconds


def _microseconds(value: Any) -> int:
    microseconds, remainder = divmod(_since_1970(value), 1000)
    if remainder:
        raise ValueError(
            f"a Timestamp with {value.nanos} ns is finer than its column's unit, microseconds; give"
            " the column nanoseconds by schema=, as in pa.timestamp('ns', 'UTC')"
        )
    return microseconds


def _since_1970(value: Any) -> int:
    """Return the nanoseconds of a Timestamp since 1970.

    Raises:
        ValueError: The Timestamp is not valid.
    """
    if value.seconds not in _SECONDS or value.nanos not in _NANOS:
        raise ValueError(
            f"a Timestamp has {value.seconds} s and {value.nanos} ns; Protobuf allows the years 1"
            " to 9999, and 0 to 999999999 ns"
        )
    nanoseconds: int = value.seconds * 1_000_000_000 + value.nanos
    return nanoseconds
