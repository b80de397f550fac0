"""Takes batches apart: which table, put or delete, and whether every value fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadRow, ConfigError
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.targets import Target, Targets
from onceflow.sinks.sql import BadRows, Classified, TableName, decoded_rows, rows_by_table

_ALONE = " (row 0 of its batch)"


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table, in the sink's schema, of which every value fits."""

    target: Target
    changes: Classified


class Intake:
    """What a writer does with every batch before anything is sent."""

    def __init__(self, settings: SinkSettings, targets: Targets, bad_rows: BadRows) -> None:
        self._settings = settings
        self._rules = settings.rules
        self._targets = targets
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
            found = self._fitted(target, self._rules.classify(rows, self._bad_rows))
            if found.rows.num_rows:
                yield TableRows(target, found)

    def _target(self, name: str | None, rows: pa.RecordBatch) -> Target | None:
        """Return the table called `name`; None when there is none and its rows are rejected."""
        try:
            known = self._names.get(name)
            if known is None:
                known = self._names[name] = TableName.parse(name or "")
            return self._targets.named(known)
        except (ValueError, ConfigError) as error:
            if name is None or self._bad_rows.fail:
                raise ConfigError(
                    f"rows for table {name or self._settings.table}: {error}"
                ) from None
            self._bad_rows.reject(rows, [str(error)] * rows.num_rows)
            return None

    def _fitted(self, target: Target, found: Classified) -> Classified:
        deletes = found.deletes
        rows, any_deletes = found.rows, pc.any(deletes).as_py() is True
        for fit in target.fits:
            is_key = fit.name in self._rules.primary_key
            column = rows.column(fit.name)
            if any_deletes and not is_key:
                # Of a delete only the key counts; the rest may be anything, a null for instance.
                column = _nulled(column, deletes)
                rows = _replaced(rows, fit.name, column)
            if column.null_count and not fit.column.nullable:
                missing = pc.and_(column.is_null(), pc.invert(deletes))
                why = f"column {fit.name!r} of type {fit.shown} is NOT NULL, and the value is null"
                present = pc.invert(missing)
                rows = self._bad_rows.sift(rows, missing, why)
                column, deletes = column.filter(present), deletes.filter(present)
            lenient = fit.taking_nulls()
            refused = refused_rows(
                lenient, column, every=not self._bad_rows.fail or self._nulls(fit)
            )
            if not refused:
                continue
            bad = _mask(rows.num_rows, refused)
            if self._nulls(fit) and not is_key:
                rows = _replaced(rows, fit.name, _nulled(column, bad))
                continue
            self._bad_rows.reject(rows.filter(bad), list(refused.values()))
            kept = pc.invert(bad)
            rows, deletes = rows.filter(kept), deletes.filter(kept)
        return Classified(rows, deletes)

    def _nulls(self, fit: ColumnFit) -> bool:
        return self._settings.null_overflow and fit.column.nullable


def refused_rows(fit: ColumnFit, column: pa.Array, *, every: bool) -> dict[int, str]:
    """Return the rows whose value does not fit, with the reason; just the first one or `every`."""
    refused: dict[int, str] = {}
    _look_for_refused(fit.apply, column, 0, refused, every=every)
    return refused


def _look_for_refused(
    apply: Callable[[pa.Array], pa.Array],
    column: pa.Array,
    first: int,
    refused: dict[int, str],
    *,
    every: bool,
) -> None:
    """Halve the column until each refused value is alone."""
    try:
        apply(column)
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
        _look_for_refused(apply, part, first + start, refused, every=every)


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
