"""The validation of batches: split by table, tell puts from deletes, convert every value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from onceflow.clients.sql.tables import ColumnFit, TableName, Target
from onceflow.core.arrow.kinds import to_plain_column, to_plain_rows
from onceflow.core.arrow.nested_rows import filter_batch, filter_rows
from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.unchanged import WHOLE, Numbers, UnchangedSets
from onceflow.sinks.sql.write_mode import Classified, StagedOperation

_ALONE = " (row 0 of its batch)"
# A column name of a database cannot contain NUL.
GIVEN = "\0"
"""The beginning of the name of a column that holds values as they were given."""


@dataclass(frozen=True, slots=True)
class ValidRows:
    """Rows of one table, converted to the types of its columns."""

    target: Target
    rows: pa.RecordBatch
    """The written columns, in the order of the table's fits. Unless bad rows fail the job, further
    columns follow that restore a row as it was given: see `as_given`."""
    deletes: pa.BooleanArray
    """True for rows that delete their key. Only their key columns are not null."""
    unchanged: Numbers | None = None
    """The set of columns that each row lacks, by its number; None if no row lacks any."""


class RowValidator:
    """The validation of a writer's batches, once per batch, before rows are kept or sent.

    It makes all checks that need no server: a staged row must not be refused only when it is
    decided.
    """

    def __init__(
        self,
        settings: SqlSettings,
        named: Callable[[TableName], Target],
        bad_rows: BadRows,
    ) -> None:
        """Create an empty validator.

        `named` returns a table, or raises ConfigError if the table takes no rows.
        """
        self._settings = settings
        self._rules = settings.rules
        self._named = named
        self._bad_rows = bad_rows
        self._names: dict[str | None, TableName] = {None: settings.table}
        self._refusing: dict[TableName, Target] = {}
        self.unchanged_sets = UnchangedSets()
        """The sets of columns that rows lack."""

    def take_refusing(self) -> Sequence[Target]:
        """Return the tables, as then known, whose columns refused a value since the last call."""
        refusing, self._refusing = tuple(self._refusing.values()), {}
        return refusing

    def take(self, batch: pa.RecordBatch) -> Iterator[ValidRows]:
        """Yield the rows of `batch` that can be written, converted, table by table.

        Raises:
            BadRow: A row cannot be written, and bad rows fail the job.
            ConfigError: A table does not take rows of this schema.
            SinkError: The batch has other columns or types than announced.
        """
        for target, rows in self._split_by_table(_to_nullable(batch)):
            valid = self._convert(target, self._rules.classify(rows, self._bad_rows))
            if valid.rows.num_rows:
                yield valid

    def _split_by_table(self, rows: pa.RecordBatch) -> Iterator[tuple[Target, pa.RecordBatch]]:
        """Yield the rows of each table in their order, under whatever name the rows give it.

        A table has several names: with its schema, without it, and null for the default table.
        Changes of one key under two names must keep their order.
        """
        names, codes = _encode_tables(rows, self._rules.table_column)
        codes_by_table: dict[TableName, list[int]] = {}
        targets: dict[TableName, Target] = {}
        for code, name in enumerate(names):
            target = self._target(name, partial(_select, rows, codes, [code]))
            if target is not None:
                targets[target.name] = target
                codes_by_table.setdefault(target.name, []).append(code)
        for table, its_codes in codes_by_table.items():
            every = len(its_codes) == len(names)
            yield targets[table], rows if every else _select(rows, codes, its_codes)

    def _target(self, name: str | None, select: Callable[[], pa.RecordBatch]) -> Target | None:
        """Return the table called `name`, or None if there is none and its rows are rejected."""
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
            rows = select()
            self._bad_rows.reject(rows, [str(error)] * rows.num_rows)
            return None

    def _convert(self, target: Target, classified: Classified) -> ValidRows:
        _require_columns(target.fits, classified.rows)
        part = self._find_unchanged(target, _Part(classified.rows, classified.deletes))
        has_deletes = pc.any(part.deletes).as_py() is True
        # Convert column by column: a row that is bad in one column is removed before the next
        # column.
        for fit in target.fits:
            column = part.rows.column(fit.name)
            if has_deletes and fit.name not in self._rules.primary_key:
                # For a delete only the key counts; the other columns may hold any value, for
                # example a null.
                column = _set_null(column, part.deletes)
            given = pc.invert(part.deletes)
            if part.unchanged is not None:
                lacks = pa.array(self.unchanged_sets.lack(part.unchanged, fit.name))
                column = _set_null(column, lacks)
                given = pc.and_not(given, lacks)
            if column.null_count and not fit.nullable:
                missing = pc.and_(column.is_null(), given)
                if pc.any(missing).as_py():
                    self._refusing[target.name] = target
                why = f"column {fit.name!r} of type {fit.shown} is NOT NULL, and the value is null"
                self._bad_rows.sift(part.rows, missing, why)
                column = part.without(missing, column)
            try:
                column = fit.convert(column)
            except BadRow as error:
                self._refusing[target.name] = target
                column = self._convert_fitting(fit, part, column, error)
            part.converted.append(column)
        return ValidRows(
            target, self._join_columns(target.fits, part), part.deletes, part.unchanged
        )

    def _find_unchanged(self, target: Target, part: _Part) -> _Part:
        """Note the sets of columns that rows lack. A set of other columns makes a bad row."""
        name = self._rules.unchanged_column
        if name is None:
            return part
        sets = self.unchanged_sets
        numbers = sets.encode(part.rows.column(name))
        # Only the key of a delete counts.
        numbers[part.deletes.to_numpy(zero_copy_only=False)] = WHOLE
        part.unchanged = numbers
        written = {fit.name for fit in target.fits} - set(self._rules.primary_key)
        for column in sets.list_columns(numbers):
            if column not in written:
                lacking = pa.array(sets.lack(part.unchanged, column))
                self._bad_rows.sift(
                    part.rows,
                    lacking,
                    f"unchanged_column {name!r} names {column!r}, which is not among the columns"
                    f" that are written outside the key: {', '.join(sorted(written))}",
                )
                part.without(lacking, part.rows.column(name))
        return part

    def _convert_fitting(
        self, fit: ColumnFit, part: _Part, column: pa.Array, error: BadRow
    ) -> pa.Array:
        """Return `column` converted, with unfit values set to null or their rows removed."""
        becomes_null = self._settings.null_overflow and fit.nullable
        if self._bad_rows.fail and not becomes_null:
            self._bad_rows.reject(part.rows, [str(error)])
        # Search for single rows only now: it takes many conversions, and most batches have no bad
        # row.
        refused = find_refused_rows(fit, column)
        bad = pa.array([row in refused for row in range(len(column))], pa.bool_())
        if becomes_null and fit.name not in self._rules.primary_key:
            return fit.convert(_set_null(column, bad))
        self._bad_rows.reject(filter_batch(part.rows, bad), list(refused.values()))
        return fit.convert(part.without(bad, column))

    def _join_columns(self, fits: Sequence[ColumnFit], part: _Part) -> pa.RecordBatch:
        names, columns = [fit.name for fit in fits], list(part.converted)
        if not self._bad_rows.fail:
            types = {name: array.type for name, array in zip(names, columns, strict=True)}
            for name, column in zip(part.rows.schema.names, part.rows.columns, strict=True):
                # A column that conversion did not change is not kept twice.
                if types.get(name) != column.type:
                    names.append(GIVEN + name)
                    columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=names)


@dataclass(slots=True)
class _Part:
    """The rows of one table while their columns are converted one after the other."""

    rows: pa.RecordBatch
    deletes: pa.BooleanArray
    unchanged: Numbers | None = None
    converted: list[pa.Array] = field(default_factory=list[pa.Array])

    def without(self, bad: pa.BooleanArray, column: pa.Array) -> pa.Array:
        """Remove the rows that are `bad`; return the remaining values of `column`."""
        kept = pc.invert(bad)
        self.rows, self.deletes = filter_batch(self.rows, kept), self.deletes.filter(kept)
        if self.unchanged is not None:
            self.unchanged = self.unchanged[kept.to_numpy(zero_copy_only=False)]
        self.converted = [filter_rows(array, kept) for array in self.converted]
        return filter_rows(column, kept)


def as_given(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return valid rows as they were before conversion, with plain columns of `schema`.

    For rows that the server refuses. Values that were set to null stay null.
    """
    names = frozenset(rows.schema.names)
    columns = [
        rows.column(GIVEN + name if GIVEN + name in names else name) for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def convert_staged(
    fits: Sequence[ColumnFit], operation: StagedOperation, rows: pa.RecordBatch
) -> pa.RecordBatch:
    """Convert staged rows to the table's present types; they change only if the table was altered.

    Raises:
        BadRow: The table does not take a value any more; names column and value.
    """
    if operation.types == tuple(fit.shown for fit in fits) and rows.schema.types == [
        fit.wire for fit in fits
    ]:
        return rows
    columns = [fit.convert(rows.column(fit.name)) for fit in fits]
    return pa.RecordBatch.from_arrays(columns, names=[fit.name for fit in fits])


def find_refused_rows(fit: ColumnFit, column: pa.Array) -> dict[int, str]:
    """Return the index and the reason of each value of `column` that does not fit."""
    refused: dict[int, str] = {}
    _look_for_refused(fit, column, 0, refused)
    return refused


def _look_for_refused(
    fit: ColumnFit, column: pa.Array, first: int, refused: dict[int, str]
) -> None:
    """Halve the column until each refused value is alone, and record its reason."""
    try:
        fit.convert(column)
        return
    except BadRow as error:
        if len(column) == 1:
            refused[first] = str(error).replace(_ALONE, "")
            return
    half = len(column) // 2
    for start, count in ((0, half), (half, len(column) - half)):
        _look_for_refused(fit, column.slice(start, count), first + start, refused)


def _require_columns(fits: Sequence[ColumnFit], rows: pa.RecordBatch) -> None:
    names = rows.schema.names
    if not {fit.name for fit in fits} <= set(names):
        raise SinkError(
            f"a batch has the columns {names}, and {[fit.name for fit in fits]} were announced"
        )


def _to_nullable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with plain, nullable columns, because validation sets some values to null."""
    rows = to_plain_rows(batch)
    return pa.RecordBatch.from_arrays(rows.columns, names=rows.schema.names)


def _encode_tables(
    batch: pa.RecordBatch, table_column: str | None
) -> tuple[Sequence[str | None], NDArray[np.int64]]:
    """Return the table names in `table_column`, and for each row the index of its name.

    None stands for the default table: for rows with a null, and for all rows if there is no column.
    """
    if table_column is None:
        return [None], np.zeros(batch.num_rows, np.int64)
    encoded = to_plain_column(batch.column(table_column)).dictionary_encode(null_encoding="encode")
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _select(
    rows: pa.RecordBatch, codes: NDArray[np.int64], chosen: Sequence[int]
) -> pa.RecordBatch:
    """Return the rows whose code is one of `chosen`, in their order."""
    return filter_batch(rows, pa.array(np.isin(codes, chosen)))


def _set_null(column: pa.Array, where: pa.BooleanArray) -> pa.Array:
    nulled: pa.Array = pc.if_else(where, pa.scalar(None, column.type), column)
    return nulled
