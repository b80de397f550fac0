"""The schemas of a registry: their ids before values, their cache, and their rules for columns.

The registry's wire format: a zero byte and the schema's id precede each value.

In Protobuf, the index of the message within the schema follows.

A fetched schema is kept as long as the reader. So a registry that goes down later is noticed only
when a record has a new id. An id is requested until the source's deadline. If the registry is down,
the attempt ends. If the registry does not know the id, its records are bad records.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from onceflow.clients.kafka.registry import (
    KeptSchema,
    RegistryDown,
    RegistryRefusal,
    RegistrySettings,
    SchemaRegistry,
)
from onceflow.core.arrow.kinds import IsKind, find_kind
from onceflow.core.errors import ConfigError, SourceUnavailable
from onceflow.formats.decoding import describe_position, read_headers
from onceflow.formats.fitting import Faults

if TYPE_CHECKING:  # schemas are compiled where no client of Kafka is installed, too
    from confluent_kafka import Message

MAGIC = 0
"""The first byte of every value."""
HEADER_BYTES = 5
"""The length of the header: the magic byte, and the id in four bytes, big-endian."""
_NUMBER_BITS_MAX = 28
"""The maximum shift of a variable-length number. No schema has so many messages."""
TOMBSTONE = "it has no value (a tombstone)"
UNFRAMED = (
    "it does not begin with a zero byte and a schema id, so it was not written by a serializer"
    " of a schema registry"
)
VALUE_SCHEMA_ID = "__value_schema_id"
KEY_SCHEMA_ID = "__key_schema_id"
"""The record headers in which newer serializers can write a schema's id."""


def describe_id_in_headers(header: str) -> str:
    """Return why a record is bad whose schema id is in the record header `header`."""
    return (
        f"its schema id is in the record's header {header}, and not before the value: set its"
        " producer to the serializer of schema ids that writes them there (prefix), which is the"
        " default"
    )


def schema_id_of(header: bytes) -> int | None:
    """Return the id in the first bytes of a value, or None if they contain none."""
    if len(header) < HEADER_BYTES or header[0] != MAGIC:
        return None
    return int.from_bytes(header[1:HEADER_BYTES], "big")


def header_of(schema_id: int) -> bytes:
    """Return the first bytes of values that were written with `schema_id`."""
    return bytes([MAGIC]) + schema_id.to_bytes(HEADER_BYTES - 1, "big")


def message_indexes(value: bytes) -> tuple[tuple[int, ...], int]:
    """Return the path of a Protobuf value's message in its schema, and the message's start.

    After the header come the count of indexes and the indexes, each as a zigzag number of variable
    length. A single zero means the first message.

    Raises:
        ValueError: The indexes are cut off.
    """
    count, at = _number(value, HEADER_BYTES)
    if count == 0:
        return (0,), at
    indexes: list[int] = []
    for _ in range(count):
        index, at = _number(value, at)
        indexes.append(index)
    return tuple(indexes), at


def indexes_of(path: tuple[int, ...]) -> bytes:
    """Return the encoded message indexes of `path`, which follow the header of a value."""
    if path == (0,):
        return b"\0"
    return b"".join(map(_number_bytes, (len(path), *path)))


def _number(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(value) or shift > _NUMBER_BITS_MAX:
            raise ValueError("the message indexes at its start are cut short")
        byte = value[at]
        at += 1
        # Each byte holds seven bits, the lowest first. The eighth bit says that another byte
        # follows.
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            # Zigzag: 0, -1, 1, -2, … are written as 0, 1, 2, 3, …
            return (number >> 1) ^ -(number & 1), at


def _number_bytes(number: int) -> bytes:
    # This is the zigzag encoding of an index or a count, which is never negative.
    remaining = number << 1
    encoded = bytearray()
    while remaining > 0x7F:
        encoded.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    return bytes([*encoded, remaining])


_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def to_schema_name(subject: str) -> str:
    """Return a valid schema name for `subject`: letters, digits and _."""
    return re.sub(r"[^A-Za-z0-9_]", "_", subject)


def check_field_name(name: str, language: str, path: str) -> None:
    """Raise ConfigError if a field may not be called `name`. Errors show `path` before the name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"column {path + name!r} has a name that {language} does not allow: letters, digits"
            " and _, beginning with a letter or _; rename it before the sink"
        )


def require_kind(
    kind: pa.DataType, table: Iterable[tuple[IsKind, _T]], column: str, language: str
) -> _T:
    """Return the entry in `table` for `kind`.

    Raises:
        ConfigError: There is no entry.
    """
    entry = find_kind(kind, table)
    if entry is None:
        raise ConfigError(f"column {column!r} is {kind}, which {language} does not have: cast it")
    return entry


def check_fields(
    columns: Collection[str], fields: Collection[str], required: Collection[str], what: str
) -> None:
    """Raise ConfigError unless `columns` are among `fields` and include all `required` ones.

    Errors name `what`, the owner of the fields.
    """
    lost = sorted(set(columns) - set(fields))
    if lost:
        raise ConfigError(
            f"{what} has no fields for columns {lost}: drop them before the sink, or register a"
            " version that has them"
        )
    missing = sorted(set(required) - set(columns))
    if missing:
        raise ConfigError(
            f"{what} requires fields {missing}, which the rows do not have: add the columns, or"
            " register a version that does not require them"
        )


@dataclass(frozen=True, slots=True)
class NoSchema:
    """An answer for an id that the registry does not know."""

    reason: str


@dataclass(slots=True)
class _Asked:
    position: str
    """The position of the first record with this id."""
    subject: str
    answer: KeptSchema | NoSchema | SourceUnavailable | ConfigError | None = None


class SchemaCache:
    """The schemas that one reader has met. Only the reader's thread uses it."""

    def __init__(
        self, settings: RegistrySettings, deadline_s: float, header: str, subject: str | None
    ) -> None:
        """Prepare without sending a request. Later, each id is requested for at most `deadline_s`.

        Args:
            settings: The registry.
            deadline_s: The time for which the registry is asked for one id.
            header: The name of the record header that may hold the id instead of the value.
            subject: The subject of the records. None: the subject of the first record's topic.

        Raises:
            ConfigError: The registry's client refuses an option, or is not installed.
        """
        SchemaRegistry(settings).close()
        self._settings = settings
        self._deadline_s = deadline_s
        self.header = header
        self._subject = subject
        self._asked: dict[int, _Asked] = {}
        self._expected: set[bytes] = set()
        """The headers of values whose schemas were requested."""
        self._one_at_a_time = threading.Lock()

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Request the missing schemas of `values`, which are the values of `messages`."""
        headers = [
            b"" if value is None or self.has_id_in_headers(message) else value[:HEADER_BYTES]
            for value, message in zip(values, messages, strict=True)
        ]
        for header in sorted(set(headers) - self._expected):
            schema_id = schema_id_of(header)
            if schema_id is not None:
                self._ask(schema_id, messages[headers.index(header)])
                self._expected.add(header)

    def has_id_in_headers(self, message: Message) -> bool:
        """Return True if the schema's id is in a record header rather than in the value."""
        try:
            headers = read_headers(message)
        except ValueError:
            # Other clients write such header names, and nothing else in the record depends on them.
            return False
        return headers is not None and any(name == self.header for name, _ in headers)

    def _ask(self, schema_id: int, message: Message) -> None:
        """Request the schema unless it is known; `message` is the first record with its id."""
        if schema_id in self._asked:
            return
        ending = "-key" if self.header == KEY_SCHEMA_ID else "-value"
        subject = self._subject or f"{message.topic()}{ending}"
        asked = self._asked[schema_id] = _Asked(describe_position(message), subject)
        # Use a separate thread: the reader's thread must not wait, and calls `ready` repeatedly.
        thread = threading.Thread(
            target=self._fetch, args=(schema_id, asked), name="onceflow-schema", daemon=True
        )
        thread.start()

    def ready(self) -> bool:
        """Return True if every requested schema has arrived, or is known not to exist.

        Raises:
            SourceUnavailable: The registry did not answer within the deadline.
            ConfigError: The registry refuses the user.
        """
        answers = [asked.answer for asked in self._asked.values()]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return None not in answers

    def await_ready(self) -> None:
        """Wait until `ready` returns true. Raises what `ready` raises."""
        while not self.ready():
            time.sleep(0.005)

    def __getitem__(self, schema_id: int) -> KeptSchema | NoSchema:
        """Return the registry's answer for an id that is `ready`."""
        answer = self._asked[schema_id].answer
        if isinstance(answer, KeptSchema | NoSchema):
            return answer
        raise answer or KeyError(schema_id)

    def _fetch(self, schema_id: int, asked: _Asked) -> None:
        # The deadline includes the wait for other ids: a registry that is down costs one deadline,
        # not one for each id.
        until = time.monotonic() + self._deadline_s
        where = f"{asked.position} needs schema id {schema_id}"
        with self._one_at_a_time:
            try:
                # Open a new connection: new ids are rare, and secrets may be rotated.
                with contextlib.closing(SchemaRegistry(self._settings)) as registry:
                    asked.answer = registry.schema(schema_id, asked.subject, until=until)
            except RegistryDown as error:
                asked.answer = SourceUnavailable(
                    f"{where}, but the registry did not answer for {self._deadline_s:g} s:"
                    f" {error}. Start it, or correct schema_registry="
                )
            except RegistryRefusal as error:
                asked.answer = (
                    NoSchema(
                        f"its schema id {schema_id} is not known to the registry, even after"
                        f" {self._deadline_s:g} s of tries ({error})"
                    )
                    if error.unknown
                    else ConfigError(f"{where}: {error}")
                )
            except Exception as error:
                asked.answer = SourceUnavailable(f"{where}: {type(error).__name__}: {error}")


class RegistryDecoder:
    """A decoder that needs the schemas named in the headers of values."""

    def __init__(self, schemas: SchemaCache) -> None:
        self.schemas = schemas

    def expect(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> None:
        """Request the schemas of `values`."""
        self.schemas.expect(values, messages)

    def leave_out_ids_in_headers(
        self, values: Sequence[bytes | None], messages: Sequence[Message], faults: Faults
    ) -> Sequence[bytes | None]:
        """Return `values` with None, and a fault, for those whose schema id is in a header."""
        has_id = list(map(self.schemas.has_id_in_headers, messages))
        if not any(has_id):
            return values
        why = describe_id_in_headers(self.schemas.header)
        faults.update({at: why for at, is_there in enumerate(has_id) if is_there})
        pairs = zip(values, has_id, strict=True)
        return [None if is_there else value for value, is_there in pairs]

    def ready(self) -> bool:
        """Return True if the schemas have arrived. Raises the errors of `SchemaCache.ready`."""
        return self.schemas.ready()
