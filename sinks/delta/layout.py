"""The features and columns of a table: checked, created, evolved, and compared with written rows.

An overwrite with another schema gives a table other columns and other partitions, under the same
id. Delta finds columns by name, and uses a file's partition values without reading the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Field, Schema
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import cast_table, holds, is_bytes, is_text
from onceflow.core.arrow.nested_rows import TIMES_BEYOND_PYTHON, Rows, ValueTrait, to_numpy
from onceflow.core.errors import ConfigError
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.lake.table import DELETES, describe_error, library_errors
from onceflow.sinks.lake.writer import TableColumns, ValueRule, to_plain_schema

_RULES_OF_FIELDS = ("delta.invariants", "delta.generationExpression", "delta.identity")
_NAME_LENGTH_MAX_BYTES = 255
"""The longest name in a directory, on the usual file systems."""
_NULL_DIRECTORY = "__HIVE_DEFAULT_PARTITION__"
_KNOWN_FEATURES = frozenset(
    {
        "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
        "domainMetadata", "generatedColumns", "identityColumns", "invariants", "timestampNtz",
        "v2Checkpoint", "vacuumProtocolCheck", "variantType",
    }
)  # fmt: skip
"""The features that require nothing of appended files, or whose use `check_table` detects.
deltalake adds `variantType` by itself when it sets properties of a table that lists its
features."""


def to_arrow_schema(table: DeltaTable) -> pa.Schema:
    """Return the table's columns as a pyarrow schema."""
    return pa.schema(table.schema().to_arrow())


def make_columns(
    name: str, table: DeltaTable, rows: pa.Schema, rules: Sequence[ValueRule] = ()
) -> TableColumns:
    """Return the conversion of rows of schema `rows` to `table`.

    `rules` are the rules of the write mode.

    Raises:
        ConfigError: They do not fit; names the column, both types, and the remedy.
    """
    schema = to_arrow_schema(table)
    required = [field.name for field in schema if not field.nullable]
    partitions = [schema.field(column) for column in table.metadata().partition_columns]
    _check_partitions(name, partitions)
    all_rules = (*_list_partition_rules(partitions), *rules)
    columns = TableColumns(name, schema.names, required, schema, rows, all_rules)
    for field in to_plain_schema(rows):
        expected = schema.field(field.name).type
        if not fits(field.type, expected):
            raise ConfigError(
                f"{name}, column {field.name!r}: the table has {expected}, but the rows have"
                f" {field.type}; cast it before the sink"
            )
    return columns


def list_merge_rules(table: DeltaTable) -> Iterator[ValueRule]:
    """Yield the rules for rows that a merge writes. There deltalake itself writes the log."""
    schema = to_arrow_schema(table)
    yield from map(_make_time_rule, schema.names)
    for column in table.metadata().partition_columns:
        yield ValueRule(
            column,
            _make_trait(partial(_is_long, column)),
            "is a partition column, and the row's value makes a directory name of more than"
            f" {_NAME_LENGTH_MAX_BYTES} bytes",
        )
        yield ValueRule(
            column,
            _make_trait(_is_default_name),
            f"is a partition column, and the row has the text {_NULL_DIRECTORY!r}, which a merge"
            " would read as null",
        )
        kind = schema.field(column).type
        if _is_fraction(kind):
            yield ValueRule(
                column,
                _make_trait(_is_negative),
                f"is a partition column of type {kind}, and the row has a negative value, which"
                " a merge would write into the log as text that no reader can parse",
            )


def _check_partitions(name: str, partitions: Sequence[pa.Field]) -> None:
    for field in partitions:
        if is_bytes(field.type):
            raise ConfigError(
                f"{name}, column {field.name!r}: it is a partition column of bytes, which each"
                " library writes into the log in its own way; partition by another column"
            )


def _list_partition_rules(partitions: Sequence[pa.Field]) -> Iterator[ValueRule]:
    for field in partitions:
        yield _make_time_rule(field.name)
        if is_text(field.type):
            # The protocol reads an empty partition value as null.
            yield ValueRule(
                field.name,
                _make_trait(_is_empty),
                "is a partition column, and the row has an empty value, which the table would"
                " store as null",
            )


def _is_fraction(kind: pa.DataType) -> bool:
    return arrow.is_decimal(kind) and kind.scale > 0


def _make_trait(is_so: Callable[[Any], bool]) -> ValueTrait:
    """Return the trait of values for which `is_so` is True; it checks each distinct value once."""

    def find(column: pa.Array) -> Rows:
        encoded = column.dictionary_encode()
        marked = [value is not None and is_so(value) for value in encoded.dictionary.to_pylist()]
        return to_numpy(pa.array(marked, pa.bool_()).take(encoded.indices).fill_null(False))

    return ValueTrait(_is_any, find)


def _is_any(kind: pa.DataType) -> bool:
    del kind
    return True


def _is_empty(value: str) -> bool:
    return not value


def _is_negative(value: Decimal) -> bool:
    return value < 0


def _is_default_name(value: object) -> bool:
    return value == _NULL_DIRECTORY


def _is_long(name: str, value: object) -> bool:
    return _measure_directory(name, value) > _NAME_LENGTH_MAX_BYTES


def _measure_directory(name: str, value: object) -> int:
    """Return the length of the directory name that a merge gives to a partition."""
    text = format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)
    return len(f"{quote(name, safe='')}={quote(text, safe='')}")


def _make_time_rule(column: str) -> ValueRule:
    return ValueRule(
        column,
        TIMES_BEYOND_PYTHON,
        "has a date outside the years 1 to 9999, which deltalake can write into no partition"
        " and no bound",
    )


def check_table(location: TableLocation, table: DeltaTable) -> None:
    """Raise ConfigError unless files can be appended to `table` unchanged.

    Raises:
        ConfigError: The table has rules for rows that the sink does not check, or an unknown
            feature.
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
        ConfigError: The table only accepts new rows, or has partitions that a merge would damage.
    """
    if table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
        raise ConfigError(
            f"{location} has delta.appendOnly=true, but write_mode='upsert' replaces and deletes"
            " rows: remove this property from the table, or append to it"
        )
    harmful = _find_harmful_partition(table)
    if harmful:
        raise ConfigError(
            f"{location} has the partition {harmful}, which deltalake writes as another value when"
            " write_mode='upsert' rewrites its files: append to the table, or partition it by"
            " another column"
        )


def _find_harmful_partition(table: DeltaTable) -> str:
    """Return the partition whose value a merge would change; empty if there is none."""
    schema = to_arrow_schema(table)
    for column in table.metadata().partition_columns:
        kind = schema.field(column).type
        if not (_is_fraction(kind) or is_text(kind)):
            continue
        for partition in table.partitions():
            value = str(partition.get(column) or "")
            if value == _NULL_DIRECTORY or (_is_fraction(kind) and value.startswith("-")):
                return f"{column}={value}"
    return ""


def check_names(location: TableLocation, rows: pa.Schema) -> None:
    """Raise ConfigError unless a merge can name every column of `rows`.

    Raises:
        ConfigError: A name contains a quotation mark, with which deltalake's SQL fails.
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
    """Create the table from the schema of the rows, unless it exists.

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
            # Several drivers may start at once: the second one uses the table that the first one
            # has created.
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
        raise ConfigError(f"partition_by names {missing}, but the rows have {rows.names}")
    for field in rows:
        if holds(field.type, _is_beyond_delta):
            raise ConfigError(
                f"{location} cannot be created: column {field.name!r} has type {field.type},"
                " which the sink does not write into Delta tables; cast it before the sink"
            )
    plain = to_plain_schema(rows)
    _check_partitions(str(location), [plain.field(name) for name in partition_by])
    try:
        schema = Schema.from_arrow(plain)
        _probe_naive_times(plain)
    except Exception as error:
        raise ConfigError(
            f"{location} cannot be created from columns {rows.names}: {describe_error(error)}"
        ) from error
    return schema


def _probe_naive_times(rows: pa.Schema) -> None:
    """Raise deltalake's error if it cannot create a table with a nested column of timestamps.

    Its check of a schema misses a timestamp without a zone at two levels of nesting; only creating
    a table reports it.
    """
    for field in rows:
        if arrow.is_nested(field.type) and holds(field.type, arrow.is_timestamp):
            with TemporaryDirectory() as directory:
                DeltaTable.create(directory, Schema.from_arrow(pa.schema([field])))


def _is_beyond_delta(kind: pa.DataType) -> bool:
    """Return True if deltalake accepts `kind` but other readers, or this sink, do not.

    For nanoseconds it uses a feature of its own, `timestampNanos`, and it has a type of only nulls.
    """
    return arrow.is_null(kind) or (arrow.is_timestamp(kind) and kind.unit == "ns")


def evolve_table(location: TableLocation, table: DeltaTable, rows: pa.Schema) -> None:
    """Add the columns of `rows` that the table lacks, as nullable columns.

    Raises:
        ConfigError: A type has no counterpart in Delta, or a name differs only in case.
        SinkError: The storage refused, or did not answer, or the table has changed meanwhile.
    """
    added = find_new_columns(location, table, rows)
    if not added:
        return
    fields = make_schema(location, pa.schema(added), ()).fields
    # The columns were compared with this version. A retry on top of another version could add a
    # column that another process has just added with another type.
    once = CommitProperties(max_commit_retries=0)
    with library_errors(f"{location} cannot be evolved"):
        table.alter.add_columns(fields, commit_properties=once)


def find_new_columns(location: TableLocation, table: DeltaTable, rows: pa.Schema) -> list[pa.Field]:
    """Return the columns of `rows` that the table lacks, as nullable columns.

    Raises:
        ConfigError: A name differs from that of a column of the table only in upper and lower case.
    """
    names = to_arrow_schema(table).names
    known = {name.lower(): name for name in names}
    new = [field.with_nullable(True) for field in to_plain_schema(rows) if field.name not in names]
    for field in new:
        same = known.get(field.name.lower())
        if same is not None:
            raise ConfigError(
                f"{location} has column {same!r}, but the rows have {field.name!r}. Delta does"
                " not distinguish names by upper and lower case: rename the column of the rows"
                f" to {same!r}"
            )
    return new


def fits(given: pa.DataType, expected: pa.DataType) -> bool:
    """Return True if values of type `given` go into `expected`.

    Decimals are compared when they are written: each value fits or not.
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
        # Delta's integers are all signed, so the wider type holds every value of the narrower one.
        return given.bit_width <= expected.bit_width
    return given == expected or (arrow.is_float32(given) and arrow.is_float64(expected))


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns and partition columns of a table."""

    columns: Schema
    partition_by: Sequence[str]


def read_layout(table: DeltaTable) -> TableLayout:
    """Return the layout of `table`."""
    return TableLayout(table.schema(), list(table.metadata().partition_columns))


def find_misfit(written: TableLayout, table: TableLayout, statistics: Sequence[str]) -> str:
    """Return why files of layout `written` cannot be added to a table of layout `table`.

    Empty if they can.

    Args:
        written: The layout of the files.
        table: The layout of the table.
        statistics: The statistics of each file, as JSON.
    """
    if written.partition_by != table.partition_by:
        return (
            f"it is now partitioned by {table.partition_by}, but the files were written for"
            f" partitions by {written.partition_by}"
        )
    old = {field.name: field for field in written.columns.fields}
    new = {field.name: field for field in table.columns.fields}
    for name, field in old.items():
        if name not in new:
            return f"it no longer has the column {name!r}"
        if new[name].type != field.type:
            return f"column {name!r} now has type {new[name].type}, but {field.type} in the files"
    for name, field in new.items():
        if field.nullable:
            continue
        if name not in old or (old[name].nullable and _may_have_nulls(old[name], statistics)):
            return f"column {name!r} no longer takes null, but the files may have nulls in it"
    return ""


def find_change_misfit(rows: pa.Table, table: DeltaTable) -> str:
    """Return why staged changes `rows` cannot be merged into `table`; empty if they can."""
    schema = to_arrow_schema(table)
    for field in rows.schema:
        if field.name == DELETES:
            continue
        if field.name not in schema.names:
            return f"it no longer has the column {field.name!r}"
        kind = schema.field(field.name).type
        if not fits(field.type, kind):
            return f"column {field.name!r} now has type {kind}, but {field.type} in the rows"
    puts = rows.filter(pc.invert(rows[DELETES]))
    for field in schema:
        if field.nullable or not puts.num_rows:
            continue
        if field.name not in rows.column_names or puts[field.name].null_count:
            return f"column {field.name!r} no longer takes null, but a row has a null in it"
    return ""


def cast_changes(rows: pa.Table, table: DeltaTable) -> pa.Table:
    """Return staged changes `rows` in the types that `table` has now.

    Raises:
        ArrowInvalid: A value does not fit.
    """
    schema = to_arrow_schema(table)
    fields = [
        field.with_type(schema.field(field.name).type) if field.name != DELETES else field
        for field in rows.schema
    ]
    return rows if fields == list(rows.schema) else cast_table(rows, pa.schema(fields))


def _may_have_nulls(column: Field, statistics: Sequence[str]) -> bool:
    return any(json.loads(text).get("nullCount", {}).get(column.name) != 0 for text in statistics)
