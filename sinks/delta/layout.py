"""A table's features and columns: checked, created and evolved, on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from pyarrow import types as arrow

from onceflow.core.errors import ConfigError
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.lake.columns import TableColumns, to_plain_schema
from onceflow.sinks.lake.errors import describe_error, library_errors

_RULES_OF_FIELDS = ("delta.invariants", "delta.generationExpression", "delta.identity")
_WITH_EMPTY_VALUES = frozenset(
    {
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
    }
)
_KNOWN_FEATURES = frozenset(
    {
        "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
        "domainMetadata", "generatedColumns", "identityColumns", "invariants", "timestampNtz",
        "v2Checkpoint", "vacuumProtocolCheck", "variantType",
    }
)  # fmt: skip
"""Features that ask nothing of appended files, or whose use `check_table` looks for.

deltalake adds `variantType` by itself when it sets properties of a table that lists its features.
"""


def to_arrow_schema(table: DeltaTable) -> pa.Schema:
    """Return the table's columns as pyarrow has them."""
    return pa.schema(table.schema().to_arrow())


def make_columns(name: str, table: DeltaTable, rows: pa.Schema) -> TableColumns:
    """Return how rows of schema `rows` become rows of `table`.

    Raises:
        ConfigError: They cannot; names the column, both types, and what to do.
    """
    schema = to_arrow_schema(table)
    required = [field.name for field in schema if not field.nullable]
    # The protocol reads an empty partition value as null.
    never_empty = [
        column
        for column in table.metadata().partition_columns
        if schema.field(column).type in _WITH_EMPTY_VALUES
    ]
    columns = TableColumns(name, schema.names, required, schema, rows, never_empty)
    for field in to_plain_schema(rows):
        expected = schema.field(field.name).type
        if not _fits(field.type, expected):
            raise ConfigError(
                f"{name}, column {field.name!r}: the table has {expected}, and the rows have"
                f" {field.type}; cast it before the sink"
            )
    return columns


def check_table(location: TableLocation, table: DeltaTable) -> None:
    """Raise ConfigError unless files can be appended to `table` as they are.

    Raises:
        ConfigError: The table has rules for rows that the sink does not check, or a feature that it
            does not know.
    """
    features = set(table.protocol().writer_features or ())
    unknown = sorted(features - _KNOWN_FEATURES)
    if unknown:
        raise ConfigError(f"{location} has features that the sink does not write: {unknown}")
    metadata = table.metadata()
    rules = [name for name in metadata.configuration if name.startswith("delta.constraints.")]
    mapping = metadata.configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        rules.append(f"delta.columnMapping.mode={mapping}")
    if '"type":"variant"' in table.schema().to_json().replace(" ", ""):
        rules.append("columns of type variant")
    for field in table.schema().fields:
        names = [name for name in field.metadata if name.startswith(_RULES_OF_FIELDS)]
        rules += [f"{name} of column {field.name!r}" for name in names]
    if rules:
        raise ConfigError(
            f"{location} has rules that the sink does not check: {', '.join(sorted(rules))}; write"
            " to a table without them, and copy from there"
        )


def check_replaceable(location: TableLocation, table: DeltaTable) -> None:
    """Raise ConfigError unless rows of `table` may be replaced and deleted.

    Raises:
        ConfigError: The table only takes new ones.
    """
    if table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
        raise ConfigError(
            f"{location} has delta.appendOnly=true, and write_mode='upsert' replaces and deletes"
            " rows: remove this property from the table, or append to it"
        )


def check_names(location: TableLocation, rows: pa.Schema) -> None:
    """Raise ConfigError unless a merge can name every column of `rows`.

    Raises:
        ConfigError: One has a quotation mark in its name, with which deltalake's SQL fails.
    """
    quoted = [name for name in rows.names if '"' in name or "`" in name]
    if quoted:
        raise ConfigError(
            f"{location}: write_mode='upsert' cannot name column {quoted[0]!r}, which has a"
            " quotation mark; rename it before the sink"
        )


def create_table(
    location: TableLocation,
    rows: pa.Schema,
    partition_by: Sequence[str],
    properties: Mapping[str, str],
) -> None:
    """Create the table from the schema of the rows, unless it is there.

    Raises:
        ConfigError: A type has no counterpart in Delta.
        SinkError: The storage refused, or did not answer.
    """
    schema = make_schema(location, rows, partition_by)
    options = location.resolve_options()
    with library_errors(f"{location} cannot be created"):
        DeltaTable.create(
            location.url,
            schema,
            # Several drivers may start at once: whoever comes second takes what the first has made.
            mode="ignore",
            partition_by=list(partition_by),
            configuration=dict(properties),
            storage_options=options,
        )


def make_schema(location: TableLocation, rows: pa.Schema, partition_by: Sequence[str]) -> Schema:
    """Return the columns of a table for such rows.

    Raises:
        ConfigError: A type has no counterpart in Delta, or `partition_by` does not fit.
    """
    missing = [name for name in partition_by if name not in rows.names]
    if missing:
        raise ConfigError(f"partition_by names {missing}, and the rows have {rows.names}")
    try:
        return Schema.from_arrow(to_plain_schema(rows))
    except Exception as error:
        raise ConfigError(
            f"{location} cannot be made from columns {rows.names}: {describe_error(error)}"
        ) from error


def evolve_table(location: TableLocation, table: DeltaTable, rows: pa.Schema) -> None:
    """Add the columns of `rows` that the table lacks, as columns that take nulls.

    Raises:
        ConfigError: A type has no counterpart in Delta.
        SinkError: The storage refused, or did not answer, or the table has changed meanwhile.
    """
    added = find_new_columns(table, rows)
    if not added:
        return
    fields = make_schema(location, pa.schema(added), ()).fields
    # The columns were compared with this version: repeated on top of another one, the change could
    # add a column that somebody else has just added with another type.
    once = CommitProperties(max_commit_retries=0)
    with library_errors(f"{location} cannot be evolved"):
        table.alter.add_columns(fields, commit_properties=once)


def find_new_columns(table: DeltaTable, rows: pa.Schema) -> list[pa.Field]:
    """Return the columns of `rows` that the table lacks, as columns that take nulls."""
    names = to_arrow_schema(table).names
    return [field.with_nullable(True) for field in to_plain_schema(rows) if field.name not in names]


def _fits(given: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether values of type `given` go into `expected`.

    Decimals are compared when they are written: a value fits or it does not.
    """
    if given == expected or (arrow.is_decimal(given) and arrow.is_decimal(expected)):
        return True
    try:
        # Texts and bytes have one type in Delta, and several in Arrow.
        (field,) = pa.schema(Schema.from_arrow(pa.schema([("x", given)])).to_arrow())
    except Exception:
        return False
    given = field.type
    if arrow.is_integer(given) and arrow.is_integer(expected):
        # Delta's integers are all signed, so the wider one holds every value of the narrower.
        return given.bit_width <= expected.bit_width
    return given == expected or (arrow.is_float32(given) and arrow.is_float64(expected))
