"""The format, columns and partitions of a table: checked, created and evolved, on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import pyarrow as pa
from pyarrow import types as arrow
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import ResolveError, TableAlreadyExistsError
from pyiceberg.io.pyarrow import (
    _pyarrow_to_schema_without_ids,  # pyright: ignore[reportPrivateUsage]
    pyarrow_to_schema,
)
from pyiceberg.schema import Schema, assign_fresh_schema_ids, promote
from pyiceberg.table import Table
from pyiceberg.types import PrimitiveType

from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import ConfigError
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.data_files import parse_spec
from onceflow.sinks.iceberg.table import IcebergTable
from onceflow.sinks.iceberg.table_rules import (
    FORMAT_VERSION,
    make_columns,
    refuse_format_version,
)
from onceflow.sinks.lake.table import describe_error, library_errors
from onceflow.sinks.lake.writer import to_plain_schema

_PROPERTIES = {
    "format-version": str(FORMAT_VERSION),
    # Each commit reads and rewrites the list of all manifests. Iceberg merges manifests unless the
    # table disables it; pyiceberg merges only if the table enables it.
    "commit.manifest-merge.enabled": "true",
}


def check_rows(address: TableAddress, table: Table, rows: pa.Schema, *, evolve: bool) -> None:
    """Raise ConfigError unless rows of schema `rows` can be appended to `table`.

    Raises:
        ConfigError: They cannot, because of its format, its branches or its columns.
    """
    refusal = refuse_format_version(str(address), table)
    if refusal:
        raise ConfigError(refusal)
    kind = table.properties.get("write.format.default", "parquet")
    if kind.lower() != "parquet":
        raise ConfigError(
            f"{address} has write.format.default={kind}, but the sink writes Parquet. Set this"
            " property of the table to parquet, or write to another table"
        )
    if address.branch != "main" and table.snapshot_by_name(address.branch) is None:
        raise ConfigError(
            f"{address}: the table does not have this branch; create it: ALTER TABLE … CREATE"
            f" BRANCH `{address.branch}`"
        )
    schema = _union(address, table, rows) if evolve else table.schema()
    make_columns(str(address), schema, table.spec(), rows)


def check_new_table(address: TableAddress, rows: pa.Schema, partition_by: Sequence[str]) -> None:
    """Raise ConfigError unless a table can be created from schema `rows`.

    Raises:
        ConfigError: A type has no counterpart, or `partition_by` does not fit.
    """
    parse_spec(partition_by, _new_schema(address, rows))


def create_table(
    address: TableAddress,
    catalog: Catalog,
    rows: pa.Schema,
    partition_by: Sequence[str],
    properties: Mapping[str, str],
) -> None:
    """Create the table and its namespace from the schema of the rows, unless they exist.

    Raises:
        SinkError: The catalog refused, or did not answer.
    """
    with library_errors(f"{address} cannot be created"):
        if catalog.table_exists(address.table):
            return
        schema = _new_schema(address, rows)
        catalog.create_namespace_if_not_exists(address.table[:-1])
        # Another driver may be faster.
        with suppress(TableAlreadyExistsError):
            catalog.create_table(
                address.table,
                schema=schema,
                partition_spec=parse_spec(partition_by, schema),
                properties={**_PROPERTIES, **properties},
            )


def evolve_table(address: TableAddress, table: IcebergTable, rows: pa.Schema) -> None:
    """Add the columns of `rows` that the table lacks, and widen types that Iceberg can widen.

    Raises:
        SinkError: The catalog refused, or did not answer.
    """
    loaded = table.load().table
    changes = _changes(address, loaded.schema(), rows)
    if changes is None:
        return
    with library_errors(f"{address} cannot be evolved"), loaded.update_schema() as update:
        update.union_by_name(changes)


def _union(address: TableAddress, table: Table, rows: pa.Schema) -> Schema:
    """Return the schema that `table` would have after evolution; commit nothing."""
    changes = _changes(address, table.schema(), rows)
    if changes is None:
        return table.schema()
    # The library's own rules determine the new columns. A transaction that is not committed sends
    # nothing.
    transaction = table.transaction()
    try:
        with transaction.update_schema() as update:
            update.union_by_name(changes)
    except Exception as error:
        raise ConfigError(f"{address} cannot be evolved: {describe_error(error)}") from error
    return transaction.table_metadata.schema()


def _changes(address: TableAddress, schema: Schema, rows: pa.Schema) -> pa.Schema | None:
    """Return the columns of `rows` that are new or wider than the table's, or None."""
    names = {field.name: field for field in schema.fields}
    changed: list[pa.Field] = []
    for column in to_plain_schema(rows):
        known = names.get(column.name)
        if known is None:
            # Existing rows have no value for it.
            changed.append(column.with_nullable(True))
            continue
        # Structs, lists and maps are never changed: `make_columns` compares their parts.
        if not isinstance(known.field_type, PrimitiveType):
            continue
        given = pyarrow_to_schema(pa.schema([column]), name_mapping=schema.name_mapping)
        wider = given.fields[0].field_type
        try:
            if wider != known.field_type and promote(known.field_type, wider) == wider:
                changed.append(column.with_nullable(not known.required))
        except ResolveError:
            pass  # `make_columns` says why it does not fit
    return pa.schema(changed) if changed else None


def _new_schema(address: TableAddress, rows: pa.Schema) -> Schema:
    """Return the schema of a table for such rows, with field ids.

    Raises:
        ConfigError: A type has no counterpart in Iceberg.
    """
    for field in rows:
        if holds(field.type, _is_decimal_beyond_parquet):
            raise ConfigError(
                f"{address} cannot be created: column {field.name!r} has type {field.type}, but"
                " decimals of Iceberg have a scale from 0 to their precision; cast it before"
                " the sink"
            )
    try:
        return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(to_plain_schema(rows)))
    except Exception as error:
        raise ConfigError(
            f"{address} cannot be created from columns {rows.names}: {describe_error(error)}"
        ) from error


def _is_decimal_beyond_parquet(kind: pa.DataType) -> bool:
    return arrow.is_decimal(kind) and not 0 <= kind.scale <= kind.precision
