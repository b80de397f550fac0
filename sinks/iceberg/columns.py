"""Rows of the stream as rows of a table: columns by name, with the table's types and field ids."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.schema import Schema, promote, sanitize_column_names
from pyiceberg.types import (
    DecimalType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    StructType,
)

from onceflow.core.arrow.kinds import to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.core.spi.bad_rows import BadRows, quote_value


class TableColumns:
    """How rows of one schema become rows of one table."""

    def __init__(self, table: str, schema: Schema, rows: pa.Schema) -> None:
        """Check that rows of schema `rows` can go into a table of `schema`.

        Raises:
            ConfigError: They cannot; names the column, both types, and what to do.
        """
        self._fields = {field.name: field for field in schema.fields}
        _require_columns(table, self._fields, rows)
        plain = pa.schema([field.with_type(to_plain_type(field.type)) for field in rows])
        try:
            given = pyarrow_to_schema(plain, name_mapping=schema.name_mapping)
        except Exception as error:
            raise ConfigError(f"{table} cannot take the rows' columns: {error}") from error
        for field in given.fields:
            refusal = _refuse(self._fields[field.name].field_type, field.field_type)
            if refusal:
                raise ConfigError(
                    f"{table}, column {field.name!r}: {refusal}; cast it before the sink, or change"
                    " the table's column"
                )
        # The order of the rows' columns in `rows`, and the table's own order and names in files.
        self._file_schema: pa.Schema = schema_to_pyarrow(sanitize_column_names(schema))
        self._names = [field.name if field.name in rows.names else None for field in schema.fields]

    def convert(self, rows: pa.RecordBatch, bad_rows: BadRows) -> pa.RecordBatch:
        """Return `rows` as the table has them; rows that it can never take are rejected.

        Raises:
            BadRow: There is such a row, and bad rows fail the job.
        """
        for name, field in self._fields.items():
            if field.required and rows.column(name).null_count:
                why = f"column {name!r} is required in the table, and the row has a null in it"
                rows = bad_rows.sift(rows, rows.column(name).is_null(), why)
        try:
            return self._cast(rows)
        except pa.ArrowInvalid:
            rows = bad_rows.without(rows, dict(self._find_misfits(rows)))
            return self._cast(rows)

    def _cast(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            pa.nulls(rows.num_rows, field.type)
            if name is None
            else _to_type(rows.column(name), field.type)
            for name, field in zip(self._names, self._file_schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._file_schema)

    def _find_misfits(self, rows: pa.RecordBatch) -> Iterator[tuple[int, str]]:
        for name, field in zip(self._names, self._file_schema, strict=True):
            if name is None:
                continue
            column = rows.column(name)
            for row in range(rows.num_rows):
                try:
                    _to_type(column.slice(row, 1), field.type)
                except pa.ArrowInvalid:
                    value = quote_value(column, row)
                    yield row, f"column {name!r} is {field.type} in the table, and {value} is not"


def _to_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    plain = to_plain_type(column.type)
    return (column if column.type == plain else column.cast(plain)).cast(kind)


def _require_columns(table: str, fields: dict[str, NestedField], rows: pa.Schema) -> None:
    doubled = sorted({name for name in rows.names if rows.names.count(name) > 1})
    if doubled:
        raise ConfigError(f"the rows have several columns called {', '.join(doubled)}; rename them")
    unknown = [name for name in rows.names if name not in fields]
    if unknown:
        raise ConfigError(
            f"{table} has no column {', '.join(map(repr, unknown))}; its columns are"
            f" {', '.join(fields)}. Say evolve=True to add what is missing, or drop it before the"
            " sink"
        )
    lacking = [name for name, one in fields.items() if one.required and name not in rows.names]
    if lacking:
        raise ConfigError(
            f"{table} requires column {', '.join(map(repr, lacking))}, and the rows have"
            f" {', '.join(rows.names)}; add it before the sink"
        )


def _refuse(expected: IcebergType, given: IcebergType) -> str:
    """Return why values of type `given` do not fit a column of type `expected`; empty: they do.

    Decimals are compared when they are written: a value fits or it does not.
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
            return "" if fits else f"the table has {expected}, and the rows have {given}"


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
        return f"the table has the fields {names}, and the rows {[f.name for f in given.fields]}"
    pairs = zip(expected.fields, given.fields, strict=True)
    refusals = (_refuse(mine.field_type, theirs.field_type) for mine, theirs in pairs)
    return next(filter(None, refusals), "")
