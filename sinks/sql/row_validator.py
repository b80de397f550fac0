"""Takes batches apart: which table, put or delete, and whether every value fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.bad_rows import BadRows
from onceflow.core.errors import BadRow, ConfigError
from onceflow.sinks.sql.changes import rows_by_table
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.tables import ColumnFit, TableName, Target
from onceflow.sinks.sql.values import decoded_rows
from onceflow.sinks.sql.write_mode import Classified

_ALONE = " (row 0 of its batch)"


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table, in the sink's schema, of which every value fits."""

    target: Target
    changes: Classified


class RowValidator:
    """What a writer does with every batch before anything is sent.

    Whatever can be known of a row without the server is known after it: a row that is staged must
    not turn out to be refused when it is decided.
    """

    def __init__(
        self,
        settings: SqlSettings,
        named: Callable[[TableName], Target],
        bad_rows: BadRows,
    ) -> None:
        """Take nothing yet; `named` returns a table and raises ConfigError if it takes no rows."""
        self._settings = settings
        self._rules = settings.rules
        self._named = named
        self._bad_rows = bad_rows
        self._names: dict[str | None, TableName] = {None: settings.table}

    def take(self, batch: pa.RecordBatch) -> Iterator[TableRows]:
        """Yield the rows of `batch` that can be written, table by table.

        Raises:
            BadRow: A row cannot be, and bad rows fail the job.
            ConfigError: A table does not take rows of this schema.
        """
        for name, rows in rows_by_table(_relaxed(batch), self._rules.table_column):
            target = self._target(name, rows)
            if target is None:
                continue
            found = self._rules.classify(rows, self._bad_rows)
            for fit in target.fits:
                found = self._fitted(fit, found)
            if found.rows.num_rows:
                yield TableRows(target, found)

    def _target(self, name: str | None, rows: pa.RecordBatch) -> Target | None:
        """Return the table called `name`; None when there is none and its rows are rejected."""
        try:
            known = self._names.get(name)
            if known is None:
                known = self._names[name] = TableName.parse(name or "")
            return self._named(known)
        except (ValueError, ConfigError) as error:
            if name is None or self._bad_rows.fail:
                raise ConfigError(
                    f"rows for table {name or self._settings.table}: {error}"
                ) from None
            self._bad_rows.reject(rows, [str(error)] * rows.num_rows)
            return None

    def _fitted(self, fit: ColumnFit, found: Classified) -> Classified:
        """Return the rows whose value goes into the column of `fit`."""
        rows, deletes = found.rows, found.deletes
        is_key = fit.name in self._rules.primary_key
        column = rows.column(fit.name)
        if not is_key and pc.any(deletes).as_py() is True:
            # Of a delete only the key counts; the rest may be anything, a null for instance.
            column = _nulled(column, deletes)
            rows = _replaced(rows, fit.name, column)
        if column.null_count and not fit.nullable:
            missing = pc.and_(column.is_null(), pc.invert(deletes))
            why = f"column {fit.name!r} of type {fit.shown} is NOT NULL, and the value is null"
            present = pc.invert(missing)
            rows = self._bad_rows.sift(rows, missing, why)
            column, deletes = column.filter(present), deletes.filter(present)
        becomes_null = self._settings.null_overflow and fit.nullable
        refused = refused_rows(fit, column, every=not self._bad_rows.fail or becomes_null)
        if not refused:
            return Classified(rows, deletes)
        bad = _mask(rows.num_rows, refused)
        if becomes_null and not is_key:
            return Classified(_replaced(rows, fit.name, _nulled(column, bad)), deletes)
        self._bad_rows.reject(rows.filter(bad), list(refused.values()))
        kept = pc.invert(bad)
        return Classified(rows.filter(kept), deletes.filter(kept))


def refused_rows(fit: ColumnFit, column: pa.Array, *, every: bool) -> dict[int, str]:
    """Return the rows whose value does not fit, with the reason; just the first one or `every`."""
    refused: dict[int, str] = {}
    _look_for_refused(fit, column, 0, refused, every=every)
    return refused


def _look_for_refused(
    fit: ColumnFit, column: pa.Array, first: int, refused: dict[int, str], *, every: bool
) -> None:
    """Halve the column until each refused value is alone."""
    try:
        fit.require_fitting(column)
        return
    except BadRow as error:
        if not every:
            refused[first] = str(error)
            return
        if len(column) == 1:
            refused[first] = str(error).replace(_ALONE, "")
            return
    half = len(column) // 2
    for start, count in ((0, half), (half, len(column) - half)):
        part = column.slice(start, count)
        _look_for_refused(fit, part, first + start, refused, every=every)


def _relaxed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with plain columns that may all be null, as some become."""
    rows = decoded_rows(batch)
    return pa.RecordBatch.from_arrays(rows.columns, names=rows.schema.names)


def _mask(count: int, rows: dict[int, str]) -> pa.BooleanArray:
    return pa.array([row in rows for row in range(count)], pa.bool_())


def _nulled(column: pa.Array, where: pa.BooleanArray) -> pa.Array:
    nulled: pa.Array = pc.if_else(where, pa.scalar(None, column.type), column)
    return nulled


def _replaced(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return rows.set_column(rows.schema.get_field_index(name), name, column)
