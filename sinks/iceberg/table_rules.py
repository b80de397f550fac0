"""The rules for a table: its format version, types that fit, and changes that files survive.

The table may change between the start of a writer and the commit. Readers find columns by their
field ids, so a column may get another name, a wider type or another position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, promote, sanitize_column_names
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DecimalType, IcebergType, ListType, MapType, StructType, UUIDType

from onceflow.core.arrow.nested_rows import TIMES_BEYOND_PYTHON
from onceflow.core.errors import ConfigError
from onceflow.sinks.lake.writer import TableColumns, ValueRule, to_plain_schema

FORMAT_VERSION = 2


def refuse_format_version(address: str, table: Table) -> str:
    """Return why the sink cannot write to `table`, with the remedy; empty if it can.

    If the table has a later version, read its former metadata files, the newest first.
    """
    version = table.metadata.format_version
    if version == FORMAT_VERSION:
        return ""
    refusal = (
        f"{address} has format version {version}, but the sink writes only version"
        f" {FORMAT_VERSION}: "
    )
    if version < FORMAT_VERSION:
        return (
            f"{refusal}version 1 has no sequence numbers. Upgrade the table: ALTER TABLE … SET"
            f" TBLPROPERTIES ('format-version'='{FORMAT_VERSION}')"
        )
    file = _find_last_metadata_file(table)
    if not file:
        return (
            f"{refusal}pyiceberg does not write version {version}, and no metadata file of version"
            f" {FORMAT_VERSION} in the table's log can be read. If storage has one, make it"
            f" readable, and start the job again. Otherwise create another table of version"
            f" {FORMAT_VERSION}, and have a new job write to it. If rows of the former job wait for"
            " their commit, the new job must read them from its sources again"
        )
    return (
        f"{refusal}pyiceberg does not write version {version}. Register the last metadata file of"
        f" version {FORMAT_VERSION} as another table, in Spark by CALL system.register_table(table"
        f" => 'NAMESPACE.NEW_NAME', metadata_file => '{file}'), and start the job with a sink for"
        " that table: it then commits the rows that wait for their commit. Rows that other programs"
        " have written since the upgrade are in the former table alone. The two tables share data"
        " files: drop neither with PURGE, and neither expire snapshots nor remove orphan files of"
        " either"
    )


def _find_last_metadata_file(table: Table) -> str:
    """Return the newest readable metadata file in the sink's format version; empty if none is."""
    for entry in reversed(table.metadata.metadata_log):
        try:
            former = FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))
        except Exception:  # noqa: S112
            # Engines delete metadata files, and stores raise the errors of their clients.
            continue
        if former.format_version == FORMAT_VERSION:
            return entry.metadata_file
    return ""


def make_columns(table: str, schema: Schema, spec: PartitionSpec, rows: pa.Schema) -> TableColumns:
    """Return the conversion of rows of schema `rows` to a table of `schema`, partitioned by `spec`.

    Raises:
        ConfigError: They do not fit; names the column, both types, and the remedy.
    """
    fields = {field.name: field for field in schema.fields}
    required = [name for name, field in fields.items() if field.required]
    target = to_file_schema(schema)
    rules = list(_list_partition_rules(schema, spec))
    columns = TableColumns(table, fields.keys(), required, target, rows, rules)
    try:
        given = pyarrow_to_schema(to_plain_schema(rows), name_mapping=schema.name_mapping)
    except Exception as error:
        raise ConfigError(f"{table} cannot take the rows' columns: {error}") from error
    for field in given.fields:
        refusal = _refuse(fields[field.name].field_type, field.field_type)
        if refusal:
            raise ConfigError(
                f"{table}, column {field.name!r}: {refusal}; cast it before the sink, or change"
                " the table's column"
            )
    return columns


def refuse_uuids(table: str, schema: Schema, spec: PartitionSpec, key: Sequence[str]) -> None:
    """Raise ConfigError if a UUID is part of the key, or its value is a partition's.

    Arrow neither groups nor compares UUIDs, and with such partitions pyiceberg finds no row by its
    UUID.
    """
    uuids = {
        field.field_id: field.name for field in schema.fields if field.field_type == UUIDType()
    }
    for column in uuids.values():
        if column in key:
            raise ConfigError(
                f"{table}, column {column!r}: it has the type uuid and is part of primary_key, but"
                " pyarrow does not compare values of that type; make it fixed[16] or string in"
                " another table"
            )
    for partition in spec.fields:
        if partition.source_id in uuids and isinstance(
            cast("Any", partition).transform, IdentityTransform
        ):
            raise ConfigError(
                f"{table}, column {uuids[partition.source_id]!r}: it has the type uuid and"
                f" partitions the table by its value ({partition.name}), by which pyiceberg does"
                " not find its rows; partition the table by bucket(N, column) instead"
            )


def _list_partition_rules(schema: Schema, spec: PartitionSpec) -> Iterator[ValueRule]:
    """Yield the rules of columns whose dates or times partition the rows."""
    for partition in spec.fields:
        column = find_source_column(schema, partition.source_id)
        yield ValueRule(
            column,
            TIMES_BEYOND_PYTHON,
            "partitions the table, and the row has a date outside the years 1 to 9999, for"
            " which pyiceberg makes no partition",
        )


def find_source_column(schema: Schema, field_id: int) -> str:
    """Return the top-level column that contains, or is, the field `field_id`."""
    for field in schema.fields:
        inner = Schema(field)
        if field_id in inner.field_ids:
            return field.name
    raise ValueError(f"the table has no field {field_id}")


def to_file_schema(schema: Schema) -> pa.Schema:
    """Return the columns of data files, with field ids and with names that Avro allows."""
    target: pa.Schema = schema_to_pyarrow(sanitize_column_names(schema))
    return target


def _refuse(expected: IcebergType, given: IcebergType) -> str:
    """Return why values of type `given` do not fit a column of type `expected`; empty if they do.

    Decimals are compared when they are written: each value fits or not.
    """
    match expected, given:
        case StructType(), StructType():
            return _refuse_struct(expected, given)
        case ListType(), ListType():
            return _refuse(expected.element_type, given.element_type)
        case MapType(), MapType():
            return _refuse(expected.key_type, given.key_type) or _refuse(
                expected.value_type, given.value_type
            )
        case _:
            fits = _is_promoted(expected, given)
            return "" if fits else f"the table has {expected}, but the rows have {given}"


def _is_promoted(expected: IcebergType, given: IcebergType) -> bool:
    if given == expected or (isinstance(given, DecimalType) and isinstance(expected, DecimalType)):
        return True
    try:
        promote(given, expected)
    except ResolveError:
        return False
    return True


def _refuse_struct(expected: StructType, given: StructType) -> str:
    names = [field.name for field in expected.fields]
    if names != [field.name for field in given.fields]:
        return (
            f"the table has the fields {names}, but the rows have {[f.name for f in given.fields]}"
        )
    pairs = zip(expected.fields, given.fields, strict=True)
    refusals = (_refuse(mine.field_type, theirs.field_type) for mine, theirs in pairs)
    return next(filter(None, refusals), "")


def find_broken_requirement(written: Schema, table: Schema, files: Sequence[DataFile]) -> str:
    """Return why `files` would break a required column of `table`; empty if they do not.

    Args:
        written: The schema of the files.
        table: The schema of the table.
        files: The data files.
    """
    known = written.field_ids
    for field_id in _list_required(written, table):
        name = table.find_column_name(field_id)
        if field_id not in known:
            return f"the table now has the required column {name!r}, which the files lack"
        if written.find_field(field_id).required:
            continue
        counts = [(file.null_value_counts or {}).get(field_id) for file in files]
        if any(count != 0 for count in counts):
            return f"column {name!r} is now required, but a data file may have nulls in it"
    return ""


def find_dropped_column(written: Schema, table: Schema) -> tuple[str, bool]:
    """Return the name of a column of `written` that `table` lacks, and True if the name is reused.

    The name is empty if there is no such column.
    """
    for field_id in sorted(written.field_ids - table.field_ids):
        name = written.find_column_name(field_id) or ""
        return name, name in table.column_names
    return "", False


def is_dropped_column(name: str, metadata: TableMetadata) -> bool:
    """Return True if the table had a column `name`, and has none of the columns of that name.

    A renamed column is not dropped: its id is still in the table.
    """
    ids = {
        field.field_id
        for schema in metadata.schemas
        for field in schema.fields
        if field.name == name
    }
    return bool(ids) and ids.isdisjoint(field.field_id for field in metadata.schema().fields)


def _list_required(written: Schema, table: Schema) -> Iterator[int]:
    """Yield the ids of required fields of `table`.

    A column that is not in `written` is null in all its rows, so its inner fields do not count.
    """
    for column in table.fields:
        inner = [column.field_id]
        if column.field_id in written.field_ids:
            inner = sorted(Schema(column).field_ids)
        yield from (field_id for field_id in inner if table.find_field(field_id).required)
