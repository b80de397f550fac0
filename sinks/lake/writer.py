"""The writers of one subtask: they fit rows to the table, and write files or stage changes by key.

    write        rows → data files that no version names, or changes on their way into storage
    pre_commit   files ended and durable → their description in checkpoint storage; or all changes
                 sealed under one transaction

A crash before the description is staged leaves data files that nothing refers to. The writer of
changes leaves no file in the table's directories before the driver commits.

A writer reads the columns of its table once. Another program may change a column later, for example
so that refused rows fit. The writer therefore reads the columns again before it refuses rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from onceflow.core.arrow import kinds
from onceflow.core.arrow.kinds import to_plain_rows
from onceflow.core.arrow.nested_rows import ValueTrait, find_rows
from onceflow.core.arrow.required_parts import complete_column, hide_values, to_optional_parts
from onceflow.core.crash_points import reach
from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.bad_rows import BadRows, quote_value
from onceflow.core.spi.staging import make_staged_committable, require_staging
from onceflow.sinks.lake.table import DELETES, ChangesLabel, DataFiles
from onceflow.sinks.sql.write_mode import ChangeRules


@dataclass(frozen=True)
class ValueRule:
    """A rule for values of one column that the table cannot hold."""

    column: str
    trait: ValueTrait
    why: str
    """The reason, as error messages show it after the column's name."""

    def find_bad_rows(self, column: pa.Array) -> pa.BooleanArray:
        """Return for each row of `column` True if its value breaks the rule."""
        return pa.array(find_rows(column, self.trait))


class TableColumns:
    """A conversion of rows of one schema to rows of one table. The caller checks the types."""

    def __init__(
        self,
        table: str,
        names: Collection[str],
        required: Collection[str],
        target: pa.Schema,
        rows: pa.Schema,
        rules: Sequence[ValueRule] = (),
    ) -> None:
        """Check that rows of schema `rows` have the right columns.

        Args:
            table: The table, for errors.
            names: Its columns, in its order.
            required: The columns that accept no null.
            target: The written schema: a field for each of `names`, maybe under another name.
            rows: The schema of the rows.
            rules: Further values that the table cannot hold. Rules of columns that the rows lack
                are ignored.

        Raises:
            ConfigError: The columns are wrong; names the column and the remedy.
        """
        _require_columns(table, names, required, rows)
        self._target = target
        self.names = tuple(names)
        """The table's columns, in its order."""
        self._names = [name if name in rows.names else None for name in names]
        self._required = [name for name in names if name in required]
        self._rules = [rule for rule in rules if rule.column in rows.names]

    def convert(self, rows: pa.RecordBatch, bad_rows: BadRows) -> pa.RecordBatch:
        """Return `rows` in the table's form; rows that it can never accept are rejected.

        Raises:
            BadRow: There is such a row, and bad rows fail the job.
        """
        rows = self._sift_values(kinds.to_plain_rows(rows), bad_rows, None)
        try:
            return self.cast(rows)
        except pa.ArrowInvalid:
            return self.cast(bad_rows.without(rows, dict(self._find_misfits(rows))))

    def find_change(self, newer: TableColumns) -> str:
        """Return a change of the accepted rows between these columns and `newer`; empty if none.

        Both must be made for the same rows. Columns that the rows lack are not compared.
        """
        old, new = self._list_facts(), newer._list_facts()
        for name in [*old, *new]:
            if old.get(name) != new.get(name):
                return f"column {name!r} takes other values now"
        return ""

    def _list_facts(self) -> dict[str, object]:
        """Return the type and the rules of each column of the rows, by name."""
        return {
            name: (field.type, name in self._required, self._list_reasons(name))
            for name, field in zip(self._names, self._target, strict=True)
            if name is not None
        }

    def _list_reasons(self, column: str) -> Sequence[str]:
        return [rule.why for rule in self._rules if rule.column == column]

    def sift(
        self, rows: pa.RecordBatch, bad_rows: BadRows, *, exempt: pa.BooleanArray
    ) -> pa.RecordBatch:
        """Return those of `rows` that the table can accept, unconverted; others are rejected.

        Rows that `exempt` marks may have nulls anywhere.

        Raises:
            BadRow: There is a row that the table cannot accept, and bad rows fail the job.
        """
        rows = self._sift_values(rows, bad_rows, exempt)
        try:
            self.cast(rows)
        except pa.ArrowInvalid:
            return bad_rows.without(rows, dict(self._find_misfits(rows)))
        return rows

    def _sift_values(
        self, rows: pa.RecordBatch, bad_rows: BadRows, exempt: pa.BooleanArray | None
    ) -> pa.RecordBatch:
        for name, find_bad, why in self._list_rules():
            bad = find_bad(rows.column(name))
            if not bad.true_count:
                continue
            if exempt is not None:
                bad = pc.and_not(bad, exempt)
                exempt = exempt.filter(pc.invert(bad))
            rows = bad_rows.sift(rows, bad, why)
        return rows

    def _list_rules(self) -> Iterator[tuple[str, Callable[[pa.Array], pa.BooleanArray], str]]:
        for name in self._required:
            why = f"column {name!r} is required in the table, and the row has a null in it"
            yield name, pa.Array.is_null, why
        for rule in self._rules:
            yield rule.column, rule.find_bad_rows, f"column {rule.column!r} {rule.why}"

    def cast(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return `rows` with the table's columns.

        Raises:
            ArrowInvalid: A value does not fit.
        """
        columns = [
            to_type(pa.nulls(rows.num_rows) if name is None else rows.column(name), field.type)
            for name, field in zip(self._names, self._target, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._target)

    def _find_misfits(self, rows: pa.RecordBatch) -> Iterator[tuple[int, str]]:
        for name, field in zip(self._names, self._target, strict=True):
            if name is None:
                continue
            column = rows.column(name)
            for row in range(rows.num_rows):
                try:
                    to_type(column.slice(row, 1), field.type)
                except pa.ArrowInvalid:
                    value = quote_value(column, row)
                    yield row, f"column {name!r} is {field.type} in the table, and {value} is not"


def to_plain_schema(rows: pa.Schema) -> pa.Schema:
    """Return `rows` without dictionaries, run ends and extensions."""
    return pa.schema([field.with_type(kinds.to_plain_type(field.type)) for field in rows])


def to_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values of `column` as type `kind`, in the form that Parquet writers accept.

    Raises:
        ArrowInvalid: A value does not fit, or a required part of it is null.
    """
    column = kinds.to_plain_column(column)
    if column.type != kind:
        # A cast to the same type costs only its call.
        optional = to_optional_parts(kind, column.type)
        try:
            column = kinds.cast_rows(column, optional)
        except pa.ArrowInvalid:
            column = kinds.cast_rows(hide_values(column), optional)
    return complete_column(column, kind)


def _require_columns(
    table: str, names: Collection[str], required: Collection[str], rows: pa.Schema
) -> None:
    doubled = sorted({name for name in rows.names if rows.names.count(name) > 1})
    if doubled:
        raise ConfigError(f"the rows have several columns called {', '.join(doubled)}; rename them")
    unknown = [name for name in rows.names if name not in names]
    if unknown:
        raise ConfigError(
            f"{table} has no column {', '.join(map(repr, unknown))}; its columns are"
            f" {', '.join(names)}. Say evolve=True to add what is missing, or drop it before the"
            " sink"
        )
    lacking = [name for name in names if name in required and name not in rows.names]
    if lacking:
        raise ConfigError(
            f"{table} requires column {', '.join(map(repr, lacking))}, and the rows have"
            f" {', '.join(rows.names)}; add it before the sink"
        )


_ADVICE = "No row is dropped: the next attempt reads the columns again"


class RefusedRows:
    """The rows that one writer refuses, with the columns that it refuses them for. One thread."""

    def __init__(
        self, bad_rows: BadRows, columns: TableColumns, read_columns: Callable[[], TableColumns]
    ) -> None:
        """Begin with no refused rows.

        Args:
            bad_rows: The bad rows of the writer.
            columns: The columns that the writer has read.
            read_columns: Reads the columns of the newest version of the table.
        """
        self.bad_rows = bad_rows
        """Takes the rows that are refused."""
        self.columns = columns
        """The columns that decide which rows are refused."""
        self._read_columns = read_columns
        self._any_taken = False

    def take(self) -> Sequence[RejectedRows]:
        """Return the rows that were refused since the last call."""
        rejected = self.bad_rows.take()
        self._any_taken = self._any_taken or bool(rejected)
        return rejected

    @contextmanager
    def check_failure(self) -> Generator[None, None, None]:
        """Replace a `BadRow` with another error if the columns have changed.

        Raises:
            SinkError: The columns have changed, or the table cannot be read.
        """
        try:
            yield
        except BadRow as error:
            self._require_same_columns(error)
            raise

    def check_checkpoint(self) -> None:
        """Check the columns if rows were refused since the last call.

        Raises:
            SinkError: The columns have changed, or the table cannot be read.
        """
        any_refused = self._any_taken or self.bad_rows.any
        self._any_taken = False
        if any_refused:
            self._require_same_columns(None)

    def _require_same_columns(self, cause: BadRow | None) -> None:
        try:
            change = self.columns.find_change(self._read_columns())
        except ConfigError as error:
            # A secret's file may be missing while it is replaced.
            raise SinkError(
                "rows were refused, and by now the table cannot be read, or does not take the job's"
                f" rows: {error}. {_ADVICE}"
            ) from error
        if change:
            raise SinkError(
                f"the table was changed under the job: {change}. Rows were refused for the former"
                f" columns. {_ADVICE}"
            ) from cause


class LakeWriter(SinkWriter):
    """A writer that uses `files`, which refuses rows that the table never accepts."""

    def __init__(self, context: WriterContext, files: DataFiles, refused: RefusedRows) -> None:
        """Begin with no rows."""
        self._context, self._files, self._refused = context, files, refused
        self._staging = require_staging(
            context.staging, context.sink_id, "the description of data files waits"
        )
        self._rows = 0

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        with self._refused.check_failure():
            self._rows += self._files.write(batch)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        transaction = self._context.transaction(checkpoint)
        try:
            self._refused.check_checkpoint()
        except SinkError as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        rows, self._rows = self._rows, 0
        if not rows:
            return ()
        staged = self._staging.open()
        try:
            description = self._files.end(checkpoint)
            reach("flushed")
            staged.write(description)
            staged.seal(transaction)
        except (SinkError, StorageError) as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        finally:
            staged.close()
        return (make_staged_committable(transaction, rows),)

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._refused.take()

    @override
    def close(self) -> None:
        self._files.drop()


class LakeChangeWriter(SinkWriter):
    """A writer that stages the changes of one subtask, in the order in which they arrive."""

    def __init__(
        self,
        context: WriterContext,
        rules: ChangeRules,
        table_id: str,
        refused: RefusedRows,
    ) -> None:
        """Begin with no rows."""
        self._context, self._rules, self._refused = context, rules, refused
        self._columns, self._bad_rows = refused.columns, refused.bad_rows
        self._part = ChangesLabel(table_id, rules.primary_key).to_part()
        self._staging = require_staging(
            context.staging, context.sink_id, "changes of rows wait for their commit"
        )
        self._staged = self._staging.open()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        with self._refused.check_failure():
            self._stage(batch)

    def _stage(self, batch: pa.RecordBatch) -> None:
        classified = self._rules.classify(to_plain_rows(batch), self._bad_rows)
        rows = self._empty_deletes(classified.rows, classified.deletes)
        rows = self._columns.sift(rows, self._bad_rows, exempt=classified.deletes)
        if not rows.num_rows:
            return
        # Classify the remaining rows again: emptied rows still delete.
        deletes = self._rules.classify(rows, self._bad_rows).deletes
        converted = self._columns.cast(rows)
        names = [*self._columns.names, DELETES]
        marked = pa.RecordBatch.from_arrays([*converted.columns, deletes], names=names)
        self._staged.write(marked, part=self._part)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        transaction = self._context.transaction(checkpoint)
        try:
            self._refused.check_checkpoint()
            rows = self._staged.rows
            if not rows:
                return ()
            reach("flushed")
            self._staged.seal(transaction)
            self._staged.close()
            self._staged = self._staging.open()
        except (SinkError, StorageError) as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        return (make_staged_committable(transaction, rows),)

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._refused.take()

    @override
    def close(self) -> None:
        self._staged.close()

    def _empty_deletes(self, rows: pa.RecordBatch, deletes: pa.BooleanArray) -> pa.RecordBatch:
        """Return `rows` with nulls in rows that delete: their values need not fit the table."""
        if not deletes.true_count:
            return rows
        kept = {*self._rules.primary_key, self._rules.operation_column}
        columns = [
            column if name in kept else _set_null(column, deletes)
            for name, column in zip(rows.schema.names, rows.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _set_null(column: pa.Array, deletes: pa.BooleanArray) -> pa.Array:
    emptied: pa.Array = pc.if_else(deletes, pa.scalar(None, column.type), column)
    return emptied
