"""The batches of a table's rows, copied ones and changes, from the values that Postgres sends."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from onceflow.clients.postgres.binary_rows import Binary, BinaryColumn
from onceflow.clients.postgres.pgoutput import Value
from onceflow.core.errors import BadRecord
from onceflow.formats.debezium.changes import schema_of_changes
from onceflow.sources.postgres.columns import Convert, ValueRefused, converter_of
from onceflow.sources.postgres.queued_changes import ChangedRows
from onceflow.sources.postgres.table import SourceTable

_COPIED = "r"


class RowBuilder:
    """A builder of batches from the values of rows."""

    def __init__(self, table: SourceTable) -> None:
        self._table = table
        self._schema = schema_of_changes(table.schema)
        self._converters: list[Convert] = []
        for column in table.columns:
            convert = converter_of(column.source, column.arrow)
            assert convert is not None, column
            self._converters.append(convert)

    def build(
        self, rows: Sequence[Sequence[Value]], operations: Sequence[str] | str
    ) -> pa.RecordBatch:
        """Return the batch of `rows`. If `operations` is a str, all rows have this operation.

        Raises:
            BadRecord: A value has no exact form in its column.
        """
        columns = [
            self._convert(at, [row[at] for row in rows]) for at in range(len(self._converters))
        ]
        if isinstance(operations, str):
            operations = [operations] * len(rows)
        columns.append(pa.array(operations, pa.string()))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def build_copied(self, columns: Sequence[BinaryColumn], count: int) -> pa.RecordBatch:
        """Return the batch of `columns`, `count` copied rows. Raises the errors of `build`."""
        return self._build_columns(columns, pa.repeat(pa.scalar(_COPIED), count))

    def _build_columns(
        self, columns: Sequence[BinaryColumn], operations: pa.Array
    ) -> pa.RecordBatch:
        arrays = [self._convert_binary(at, values) for at, values in enumerate(columns)]
        return pa.RecordBatch.from_arrays([*arrays, operations], schema=self._schema)

    def build_changes(self, changed: ChangedRows) -> pa.RecordBatch:
        """Return the batch of `changed`. Raises the errors of `build`."""
        if changed.columns:
            return self._build_columns(changed.columns, pa.array(changed.operations, pa.string()))
        return self.build(changed.rows, changed.operations)

    def _convert(self, at: int, values: list[Value]) -> pa.Array:
        column = self._table.columns[at]
        plain: list[bytes | None] = []
        for value in values:
            assert value is None or isinstance(value, bytes), column
            plain.append(value)
        return self._convert_binary(at, plain)

    def _convert_binary(self, at: int, values: Sequence[Binary]) -> pa.Array:
        column = self._table.columns[at]
        try:
            return self._converters[at](values)
        except ValueRefused as error:
            raise BadRecord(
                f"column {column.name!r} of table {self._table.name}: the value {error.shown} of"
                f" type {column.source.shown} does not fit the column's type {column.arrow}:"
                f" {error.why}. Change the value and its column's limits, or give schema= with"
                " string for the column, which reads its text, or without the column"
            ) from None
