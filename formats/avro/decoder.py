"""The decoder of Avro values with the registry's header. A batch may contain several schemas.

If the columns come from a registered schema, that schema also decides how nested values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from onceflow.clients.kafka.registry import KeptSchema, SchemaKind
from onceflow.core.errors import ConfigError
from onceflow.formats.avro.columns import AvroRecords
from onceflow.formats.avro.cursors import Cursors, Rows
from onceflow.formats.avro.resolution import default_of, find_source, resolve
from onceflow.formats.avro.schema import (
    MISSING,
    AvroType,
    Member,
    Record,
    columns_of,
    parse_avro,
    record_of,
)
from onceflow.formats.decoding import Decoded
from onceflow.formats.fitting import Faults, Fitting
from onceflow.formats.registry_schemas import (
    HEADER_BYTES,
    TOMBSTONE,
    UNFRAMED,
    NoSchema,
    RegistryDecoder,
    SchemaCache,
    schema_id_of,
)


def rows_by_header(values: Sequence[bytes | None], faults: Faults) -> dict[int, Rows]:
    """Return the indices of `values` by schema id. Add to `faults` the values without an id."""
    headers = [None if value is None else value[:HEADER_BYTES] for value in values]
    distinct = set(headers)
    rows_by_id: dict[int, Rows] = {}
    for header in distinct:
        schema_id = None if header is None else schema_id_of(header)
        rows = (
            np.arange(len(values), dtype=np.int64)
            if len(distinct) == 1
            else np.array([at for at, other in enumerate(headers) if other == header], np.int64)
        )
        if schema_id is None:
            why = TOMBSTONE if header is None else UNFRAMED
            for row in rows.tolist():
                faults.setdefault(row, why)
        else:
            rows_by_id[schema_id] = rows
    return rows_by_id


class AvroDecoder(RegistryDecoder):
    """A decoder of Avro values in the registry's wire format."""

    def __init__(
        self,
        columns: pa.Schema,
        reader: Record | None,
        schemas: SchemaCache,
        record: Callable[[KeptSchema], Record] | None = None,
    ) -> None:
        """Decode to `columns`, with the defaults and aliases of `reader`.

        `record` returns the record as which a schema is read. None: the schema itself must be a
        record.
        """
        super().__init__(schemas)
        self._columns = columns
        self._record = record or avro_record
        self._readers: dict[int, _Reader] = {}
        members = [part for part in reader.members if part.name in columns.names] if reader else []
        self._members = {member.name: member for member in members}
        self._aliases = {member.name: member.aliases for member in members}
        self._defaults = defaults_of(members, columns)

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return the columns of `values`, and the faults of those that cannot be read."""
        faults: Faults = {}
        values = self.leave_out_ids_in_headers(values, messages, faults)
        by_id = rows_by_header(values, faults)
        cursors = Cursors([value or b"" for value in values], skip_bytes=HEADER_BYTES)
        cursors.faults = faults
        parts: list[list[pa.Array]] = []
        orders: list[Rows] = []
        for schema_id, rows in by_id.items():
            reader = self._reader(schema_id)
            if isinstance(reader, str):
                faults.update(dict.fromkeys(rows.tolist(), reader))
                continue
            columns = reader.columns(cursors, rows)
            good = np.array([row not in faults for row in rows.tolist()], np.bool_)
            mask = pa.array(good)
            parts.append(columns if good.all() else [column.filter(mask) for column in columns])
            orders.append(rows[good])
        return Decoded(*_merge(parts, orders, self._columns), faults)

    def _reader(self, schema_id: int) -> _Reader | str:
        reader = self._readers.get(schema_id)
        if reader is None:
            schema = self.schemas[schema_id]
            if isinstance(schema, NoSchema):
                return schema.reason
            try:
                resolved = _Resolution(self._record(schema), self._members)
            except ConfigError as error:
                return f"its schema id {schema_id}: {error}"
            except (LookupError, TypeError, ValueError) as error:
                # The registry's content may not be a schema; another attempt would give the same
                # result.
                return f"its schema id {schema_id} has no Avro schema: {error!r}"
            fitting = Fitting(
                resolved.schema, self._columns, aliases=self._aliases, defaults=self._defaults
            )
            reader = self._readers[schema_id] = _Reader(schema_id, resolved, fitting)
        return reader.fault or reader


class _Resolution:
    """The changes from the members of a written schema to the schema that is read."""

    def __init__(self, written: Record, read: Mapping[str, Member]) -> None:
        self.written = written
        old = {member.name: member for member in written.members}
        self._read: dict[str, tuple[Member, Member]] = {}
        """The written and the read member, by the name in the written schema."""
        for member in read.values():
            source = find_source(member, old)
            if source is not None and source.type != member.type:
                self._read[source.name] = source, member
        # Resolve empty arrays: their types are the types of all resolved values.
        empty = {column.name: pa.nulls(0, column.type) for column in columns_of(written)}
        kinds = self.apply(empty, 0, {})
        self.schema = pa.schema(
            [
                pa.field(column.name, kinds[column.name].type, column.nullable)
                for column in columns_of(written)
            ]
        )

    def apply(
        self, members: dict[str, pa.Array], count: int, faults: Faults
    ) -> dict[str, pa.Array]:
        """Return `members` of `count` rows as they are read.

        Add the rows that cannot be read to `faults`.
        """
        owners = np.arange(count, dtype=np.int64)
        for name, (source, member) in self._read.items():
            if name in members:
                inside: Faults = {}
                members[name] = resolve(members[name], source.type, member.type, owners, inside)
                for row, why in inside.items():
                    faults.setdefault(row, f"field {member.name!r}: {why}")
        return members


class _Reader:
    """A reader of one schema's records to columns."""

    def __init__(self, schema_id: int, resolution: _Resolution, fitting: Fitting) -> None:
        self._fitting = fitting
        self._resolution = resolution
        self._records = AvroRecords(resolution.written, fitting.wanted)
        self.fault = (
            None
            if fitting.fault is None
            else f"its schema id {schema_id} cannot be read with schema=: {fitting.fault}"
        )

    def columns(self, cursors: Cursors, rows: Rows) -> list[pa.Array]:
        """Return the columns of `rows`. Add rows that do not fit to the cursors' faults."""
        late: Faults = {}
        members = self._records.columns(cursors, rows)
        members = self._resolution.apply(members, rows.size, late)
        columns = self._fitting.columns(members, rows.size, late)
        for at, why in late.items():
            cursors.faults.setdefault(int(rows[at]), why)
        return columns


def _merge(
    parts: Sequence[Sequence[pa.Array]], orders: Sequence[Rows], columns: pa.Schema
) -> tuple[list[pa.Array], list[int]]:
    """Return the columns of all `parts` in the order of their rows, and the rows."""
    if not parts:
        return [pa.array([], column.type) for column in columns], []
    if len(parts) == 1:
        return list(parts[0]), orders[0].tolist()
    rows = np.concatenate(orders)
    order = np.argsort(rows)
    taken = pa.array(order)
    joined = [pa.concat_arrays(list(arrays)).take(taken) for arrays in zip(*parts, strict=True)]
    return joined, rows[order].tolist()


def avro_record(schema: KeptSchema) -> Record:
    """Return the record that `schema` describes.

    Raises:
        ConfigError: The schema is not Avro, is not a record, or contains itself.
    """
    return record_of(_node(schema), what=f"schema id {schema.id}")


def as_member(schema: KeptSchema, name: str) -> Record:
    """Return a record with one field of the type of `schema`. Both have the same encoding.

    Raises:
        ConfigError: The schema is not Avro, or contains itself.
    """
    return Record(name, (Member(name, _node(schema)),))


def _node(schema: KeptSchema) -> AvroType:
    if schema.kind is not SchemaKind.AVRO:
        raise ConfigError(f"it is {schema.kind.value}, and format='avro' reads Avro")
    return parse_avro(schema.text, [reference.text for reference in schema.references])


def defaults_of(members: Sequence[Member], columns: pa.Schema) -> Mapping[str, pa.Array]:
    """Return the default of each column that has one.

    Raises:
        ConfigError: A default does not fit its field's type.
    """
    return {
        member.name: default_of(member)
        for member in members
        if member.default is not MISSING and columns.get_field_index(member.name) >= 0
    }
