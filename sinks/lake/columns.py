"""The conversion of the stream's rows to rows of a table: columns by name, values by type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow import kinds
from onceflow.core.arrow.nested_rows import ValueTrait, find_rows
from onceflow.core.arrow.required_parts import complete_column, hide_values, to_optional_parts
from onceflow.core.errors import ConfigError
from onceflow.core.spi.bad_rows import BadRows, quote_value


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
        """Return how `newer` takes other rows than these columns; empty if it takes the same.

        Both must be made for the same rows. Columns that the rows lack are not compared.
        """
        old, new = self._list_facts(), newer._list_facts()
        for name in [*old, *new]:
            if old.get(name) != new.get(name):
                return f"column {name!r} takes other values now"
        return ""

    def _list_facts(self) -> dict[str, object]:
        """Return what decides whether a value fits, by column of the rows."""
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
