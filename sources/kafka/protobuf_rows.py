"""Values in Protobuf with the registry's header, as columns.

All are read as one message of the latest version: by their numbers its fields are found in older
and newer versions. The schema of a value's id only says which of its messages the value is; one of
another name would be read as nonsense, and is a bad record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.errors import ConfigError
from onceflow.core.formats.protobuf_schema import (
    TIMESTAMP,
    WRAPPERS,
    MessagePath,
    class_of,
    columns_of_message,
    compiled,
    decode_error,
    is_map,
    is_nullable,
    is_repeated,
    message_of,
    messages_of,
)
from onceflow.core.formats.registry import KeptSchema
from onceflow.core.formats.wire import (
    HEADER_BYTES,
    TOMBSTONE,
    UNFRAMED,
    message_indexes,
    schema_id_of,
)
from onceflow.core.protocol.invariant import InvariantViolation
from onceflow.sources.kafka.avro_rows import ExpectedSchemas
from onceflow.sources.kafka.decoded_rows import Decoded
from onceflow.sources.kafka.fitting import Faults, Fitting
from onceflow.sources.kafka.schema_cache import NoSchema, SchemaCache
from onceflow.sources.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_FIRST_MESSAGE_BYTES = HEADER_BYTES + 1
"""Where a value that is the first message of its schema begins."""
_SECONDS = range(-62_135_596_800, 253_402_300_800)
_NANOS = range(1_000_000_000)
"""What a Timestamp may hold: the years 1 to 9999."""

_Value: TypeAlias = Callable[[Any], Any]


class ProtobufDecoder:
    """Decodes values to columns by one message."""

    def __init__(
        self, columns: pa.Schema, descriptors: bytes, message: str | None, schemas: SchemaCache
    ) -> None:
        """Decode to `columns` of the message called `message`, or the first, of `descriptors`.

        Raises:
            ConfigError: Protobuf is not installed, the schema has no such message, the message no
                such field, or a column is of a type that its field cannot have.
        """
        described = message_of(descriptors, message)
        self._name = described.full_name
        self._schemas = schemas
        self._expected = ExpectedSchemas(schemas)
        self._compiled: dict[int, dict[MessagePath, str] | str] = {}
        self._parse: _Value = class_of(described).FromString
        self._errors = (ValueError, decode_error())
        self._fitting, written = fitting_of(described, columns)
        self._members = [
            (one.name, one.type, _value_of(described.fields_by_name[one.name])) for one in written
        ]

    def knows(self, schema: KeptSchema, descriptors: bytes) -> None:
        """Take what `schema` is compiled to, instead of compiling it."""
        self._compiled[schema.id] = messages_of(descriptors)

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Have the schemas of `values` fetched."""
        self._expected.expect(values, messages)

    def ready(self) -> bool:
        """Return whether they are; as `SchemaCache.ready` raises."""
        return self._schemas.ready()

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return what `values` are."""
        del messages
        faults: Faults = {}
        kept, parsed = self._parsed(values, faults)
        try:
            members = self._arrays(parsed)
        except (ValueError, OverflowError, pa.ArrowException):
            kept, parsed = self._readable(kept, parsed, faults)
            members = self._arrays(parsed)
        late: Faults = {}
        columns = self._fitting.columns(members, len(parsed), late)
        if late:
            faults |= {kept[row]: why for row, why in late.items()}
            good = pa.array([row not in late for row in range(len(kept))], pa.bool_())
            columns = [column.filter(good) for column in columns]
            kept = [at for row, at in enumerate(kept) if row not in late]
        return Decoded(columns, kept, faults)

    def _parsed(
        self, values: Sequence[bytes | None], faults: Faults
    ) -> tuple[Sequence[int], list[Any]]:
        """Return the places and the messages of `values`; tells `faults` of the others."""
        parse = self._parse
        if self._all_first(values):
            try:
                return range(len(values)), [
                    parse(value[_FIRST_MESSAGE_BYTES:]) for value in values if value is not None
                ]
            except self._errors:
                pass
        kept: list[int] = []
        parsed: list[Any] = []
        for at, value in enumerate(values):
            try:
                parsed.append(parse(self._body(value)))
            except self._errors as error:
                faults[at] = str(error)
            else:
                kept.append(at)
        return kept, parsed

    def _all_first(self, values: Sequence[bytes | None]) -> bool:
        """Return whether all are the message that is read, and the first one of one schema."""
        starts = {None if one is None else one[:_FIRST_MESSAGE_BYTES] for one in values}
        start = next(iter(starts), None)
        if len(starts) != 1 or start is None or start[HEADER_BYTES:] != b"\0":
            return False
        try:
            self._body(start)
        except ValueError:
            return False
        return True

    def _body(self, value: bytes | None) -> bytes:
        """Return the message behind the header.

        Raises:
            ValueError: There is no header, or it names another message than the one that is read.
        """
        if value is None:
            raise ValueError(TOMBSTONE)
        schema_id = schema_id_of(value)
        if schema_id is None:
            raise ValueError(UNFRAMED)
        messages = self._messages_of(schema_id)
        path, start = message_indexes(value)
        name = messages.get(path)
        if name != self._name:
            found = f"message {list(path)}, which its schema lacks" if name is None else name
            raise ValueError(f"its schema id {schema_id}: it is {found}, and {self._name} is read")
        return value[start:]

    def _messages_of(self, schema_id: int) -> dict[MessagePath, str]:
        """Return the messages of a schema.

        Raises:
            ValueError: The registry does not know it, or it is no Protobuf schema.
        """
        if schema_id not in self._compiled:
            self._compiled[schema_id] = self._messages_or_fault(schema_id)
        found = self._compiled[schema_id]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _messages_or_fault(self, schema_id: int) -> dict[MessagePath, str] | str:
        schema = self._schemas[schema_id]
        if isinstance(schema, NoSchema):
            return schema.reason
        try:
            return messages_of(compiled(schema))
        except ConfigError as error:
            return f"its schema id {schema_id}: {error}"

    def _arrays(self, parsed: Sequence[Any]) -> dict[str, pa.Array]:
        """Return each field of all messages; raises where one holds what its type does not."""
        return {
            name: pa.array(list(map(value, parsed)), type=kind)
            for name, kind, value in self._members
        }

    def _readable(
        self, kept: Sequence[int], parsed: Sequence[Any], faults: Faults
    ) -> tuple[list[int], list[Any]]:
        """Return those messages whose fields can be read; tells `faults` of the others."""
        good: list[tuple[int, Any]] = []
        for at, one in zip(kept, parsed, strict=True):
            try:
                self._arrays([one])
            except (ValueError, OverflowError, pa.ArrowException) as error:
                faults[at] = str(error)
            else:
                good.append((at, one))
        return [at for at, _ in good], [one for _, one in good]


def protobuf_decoder(settings: KafkaSettings) -> ProtobufDecoder:
    """Return what decodes to the columns of `settings`.

    Raises:
        ConfigError: The registry's client, or Protobuf, is not installed, or refuses an option.
    """
    if settings.registry is None or settings.reader_schema is None:
        raise InvariantViolation("values in Protobuf are read without a schema")
    decoder = ProtobufDecoder(
        settings.columns,
        settings.reader_descriptors,
        settings.message,
        SchemaCache(settings.registry, settings.deadline_s),
    )
    decoder.knows(settings.reader_schema, settings.reader_descriptors)
    return decoder


def fitting_of(message: Descriptor, columns: pa.Schema) -> tuple[Fitting, pa.Schema]:
    """Return how the fields of `message` become `columns`, and what they hold.

    Raises:
        ConfigError: There is no such field, or its values have no place in the column.
    """
    written = columns_of_message(message, columns.names)
    fitting = Fitting(written, columns, aliases={}, defaults={})
    if fitting.fault is not None:
        raise ConfigError(f"message {message.full_name}: {fitting.fault}")
    return fitting, written


def _value_of(field: FieldDescriptor) -> _Value:
    """Return what reads the value of `field` from a message, as Arrow takes it."""
    get = attrgetter(field.name)
    described: Any = field
    if is_map(field):
        one = _single(described.message_type.fields_by_name["value"])
        return lambda message: [(key, one(value)) for key, value in get(message).items()]
    one = _single(field)
    if is_repeated(field):
        return lambda message: list(map(one, get(message)))
    if not is_nullable(field):
        return get if one is _same else lambda message: one(get(message))
    name = field.name
    return lambda message: one(get(message)) if message.HasField(name) else None


def _same(value: Any) -> Any:
    return value


def _single(field: FieldDescriptor) -> _Value:
    described: Any = field
    if described.enum_type is not None:
        numbers = described.enum_type.values_by_number
        names = {number: one.name for number, one in numbers.items()}
        # A value that a newer version has added has no name here.
        return lambda number: names.get(number, str(number))
    message: Descriptor | None = described.message_type
    if message is None:
        return _same
    if message.full_name == TIMESTAMP:
        return _microseconds
    if message.full_name in WRAPPERS:
        return attrgetter("value")
    return _struct(message)


def _struct(message: Descriptor) -> _Value:
    members = [(one.name, _value_of(one)) for one in message.fields]
    return lambda value: {name: member(value) for name, member in members}


def _microseconds(value: Any) -> int:
    if value.seconds not in _SECONDS or value.nanos not in _NANOS:
        raise ValueError(f"a Timestamp of {value.seconds} s and {value.nanos} ns, which is no time")
    microseconds: int = value.seconds * 1_000_000 + value.nanos // 1000
    return microseconds
