"""Aggregates over the records of a key, and the values that they take from each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.kinds import is_bytes, is_text
from onceflow.core.errors import ConfigError
from onceflow.core.plan.stream_sql import StreamSql, require_condition, select_conditions
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, StateTtlConfig
from onceflow.core.state.api.descriptors import (
    DIGITS_MAX,
    STATE_NAME_BYTES_MAX,
    check_state_name,
)
from onceflow.core.state.api.descriptors import AggregateOp as StateOp
from onceflow.core.state.states.distinct_sets import DistinctSets, describe_set, name_set

AggregateOp: TypeAlias = Literal[
    "sum", "count", "count_distinct", "min", "max", "avg", "first", "last"
]
_STATE_OPS: Mapping[AggregateOp, StateOp] = {"first": "earliest", "last": "latest"}
"""The operations in state of the aggregates whose total is stored under another name."""
_BY_TIME: frozenset[AggregateOp] = frozenset({"first", "last"})
"""The aggregates that depend on the event times of the records."""


@check_fields
@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate over the records of a key: `sum_("amount")`, `count(where="amount > 100")`."""

    op: AggregateOp
    column: str | None
    where: str | None = None
    """A SQL condition: the aggregate skips the records for which it is false or null."""

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Return the type of the aggregate's result over `schema`.

        Raises:
            ConfigError: The column does not exist or cannot be aggregated.
        """
        return self.total("", schema).result_type

    def total(self, name: str, schema: pa.Schema) -> AccumulatorColumn:
        """Return the accumulator column for this aggregate over `schema`, named `name`.

        Raises:
            ConfigError: The column does not exist or cannot be aggregated.
        """
        if self.where is not None:
            require_condition(self.where, schema, owner=str(self))
        op = _STATE_OPS.get(self.op) or cast("StateOp", self.op)
        kind, of_set = self._total_type(schema), ""
        if self.op == "count_distinct" and self.column is not None:
            of_set = describe_set(self.column, schema.field(self.column).type)
        return AccumulatorColumn(name, op, kind, of_set)

    @property
    def argument(self) -> str | None:
        """The values that it takes from records: column and condition. None if it counts all."""
        column = [] if self.column is None else [repr(self.column)]
        where = [] if self.where is None else [f"where {self.where!r}"]
        return " ".join([*column, *where]) or None

    def __str__(self) -> str:
        column = "" if self.column is None else repr(self.column)
        where = [] if self.where is None else [f"where={self.where!r}"]
        return f"{self.op}({', '.join([column] * bool(column) + where)})"

    def _total_type(self, schema: pa.Schema) -> pa.DataType:
        if self.column is None:
            return pa.int64()
        if self.column not in schema.names:
            raise ConfigError(
                f"{self.op}({self.column!r}): no such column; there are {', '.join(schema.names)}"
            )
        column_type = schema.field(self.column).type
        if self.op == "count_distinct":
            self._check_members(self.column, column_type)
            return pa.int64()
        if self.op in ("first", "last"):
            return self._value_type(column_type)
        return self._number_type(column_type)

    def _number_type(self, column_type: pa.DataType) -> pa.DataType:
        """Return the type of a total of numbers, or of a least or greatest value."""
        if self.op in ("min", "max") and (plain := _plain_bytes(column_type)) is not None:
            return plain
        if pa.types.is_integer(column_type):
            return pa.int64()
        if pa.types.is_floating(column_type):
            return pa.float64()
        if pa.types.is_decimal(column_type) and column_type.precision <= DIGITS_MAX:
            digits = DIGITS_MAX if self.op == "sum" else column_type.precision
            return pa.decimal128(digits, column_type.scale)
        if self.op in ("min", "max") and _is_time(column_type):
            return column_type
        times = "" if self.op in ("sum", "avg") else ", text, bytes, dates, times and timestamps"
        raise ConfigError(
            f"{self.op}({self.column!r}): cannot aggregate {column_type}; it takes integers, floats"
            f" and decimals of up to {DIGITS_MAX} digits{times}; for others use process() with a"
            " function of your own"
        )

    def _value_type(self, kind: pa.DataType) -> pa.DataType:
        """Return the type in which a first or last value is kept and emitted."""
        types = pa.types
        if types.is_dictionary(kind):
            return self._value_type(kind.value_type)
        if types.is_large_string(kind) or types.is_large_binary(kind):
            return kind
        if (plain := _plain_bytes(kind)) is not None:
            return plain
        if types.is_decimal(kind) and kind.precision <= DIGITS_MAX:
            return pa.decimal128(kind.precision, kind.scale)
        if types.is_primitive(kind):
            return kind
        raise ConfigError(
            f"{self}: cannot keep a value of type {kind}; it takes numbers, decimals of up to"
            f" {DIGITS_MAX} digits, booleans, text, bytes, dates, times, timestamps and durations;"
            " for others use top_n(1, …) or process()"
        )

    def _check_members(self, column: str, column_type: pa.DataType) -> None:
        try:
            name = name_set(column, column_type)
        except ConfigError as error:
            raise ConfigError(
                f"{self}: values of type {column_type} cannot be compared; it takes numbers,"
                f" decimals of up to {DIGITS_MAX} digits, booleans, text, bytes, dates, times and"
                " timestamps; cast the column before"
            ) from error
        try:
            check_state_name(name)
        except ConfigError as error:
            raise ConfigError(
                f"{self}: the name of the column is too long for the name of its state, of"
                f" {STATE_NAME_BYTES_MAX} bytes at most; rename the column before, with"
                " project('… AS …')"
            ) from error


def _plain_bytes(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of text or bytes for values of `kind`, or None if they are neither."""
    if pa.types.is_dictionary(kind):
        return _plain_bytes(kind.value_type)
    if is_text(kind):
        return pa.string()
    return pa.binary() if is_bytes(kind) else None


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind))


def sum_(column: str, *, where: str | None = None) -> Aggregate:
    """Return the running sum of `column`. Nulls are skipped. Overflow is an error.

    The result is int64 for integers, a decimal of 38 digits and the column's scale for decimals,
    and float64 for floats. `where` is as in `count`.
    """
    return Aggregate("sum", column, where)


def count(*, where: str | None = None) -> Aggregate:
    """Return the running number of records. It is 1 for the first record of a key.

    With `where`, a SQL condition such as `"price >= 10000"`, it is the number of the records for
    which the condition is true.
    """
    return Aggregate("count", None, where)


def count_distinct(column: str, *, where: str | None = None) -> Aggregate:
    """Return the running number of distinct values of `column`. Nulls are skipped.

    NaN equals NaN, and -0.0 equals 0.0. State stores each distinct value of a key, or of a key and
    window. `where` is as in `count`.
    """
    return Aggregate("count_distinct", column, where)


def min_(column: str, *, where: str | None = None) -> Aggregate:
    """Return the smallest value of `column` so far. Nulls are skipped. -0.0 is below 0.0.

    `where` is as in `count`.
    """
    return Aggregate("min", column, where)


def max_(column: str, *, where: str | None = None) -> Aggregate:
    """Return the largest value of `column` so far. Nulls are skipped. 0.0 is above -0.0.

    `where` is as in `count`.
    """
    return Aggregate("max", column, where)


def avg(column: str, *, where: str | None = None) -> Aggregate:
    """Return the average of `column` so far. Nulls are skipped. It is null until the first value.

    For decimals, the result has four more digits, up to 38 in total. The last digit is rounded half
    away from zero. For integers and floats, the result is a float64. `where` is as in `count`.
    """
    return Aggregate("avg", column, where)


def first(column: str, *, where: str | None = None) -> Aggregate:
    """Return the first value of `column` that is not null. It is null until there is a value.

    In windows of event time, it is the value of the record with the lowest event time, in ms. Of
    equal times, and everywhere else, it is the one that arrived first. `where` is as in `count`.
    """
    return Aggregate("first", column, where)


def last(column: str, *, where: str | None = None) -> Aggregate:
    """Return the last value of `column` that is not null. It is null until there is a value.

    In windows of event time, it is the value of the record with the highest event time, in ms. Of
    equal times, and everywhere else, it is the one that arrived last. `where` is as in `count`.
    """
    return Aggregate("last", column, where)


def running_schema(
    schema: pa.Schema, aggregates: Mapping[str, Aggregate], method: str = "running"
) -> pa.Schema:
    """Return `schema` with one more column for each aggregate, in the order given.

    `method` names the user's call in errors.

    Raises:
        ConfigError: A name is in use, or a column cannot be aggregated.
    """
    fields = list(schema)
    for name, aggregate in aggregates.items():
        if name in schema.names:
            raise ConfigError(f"{method}({name}=…): the stream has a column {name!r} already")
        fields.append(pa.field(name, aggregate.result_type(schema)))
    return pa.schema(fields)


def check_running_ttl(ttl: object) -> None:
    """Raise ConfigError if running aggregates cannot have this time to live."""
    if ttl is not None and not isinstance(ttl, StateTtlConfig):
        raise ConfigError(
            f"running(ttl={ttl!r}): give a StateTtlConfig; an aggregate needs another name"
        )
    check_kept_ttl(ttl, "running")


def check_kept_ttl(ttl: StateTtlConfig | None, method: str) -> None:
    """Raise ConfigError if `ttl` allows expired values, which `method` cannot return."""
    if ttl is not None and not ttl.never_returns_expired:
        raise ConfigError(
            f"{method}(ttl=…): visibility={ttl.visibility!r} is not for {method}: a key that has"
            " expired starts again, whether its state is deleted yet or not"
        )


_TIMED = ("time", "value")


class AggregateInputs:
    """The values that aggregates take from the batches of one operator.

    Used by one thread of a slot. The values depend only on each row, never on its batch.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> None:
        self._aggregates = aggregates
        self._schema = schema
        conditions = {a.where for a in aggregates.values() if a.where is not None}
        self._conditions = sorted(conditions)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the aggregates."""
        return tuple(self._aggregates)

    @property
    def count(self) -> int:
        """The number of aggregates."""
        return len(self._aggregates)

    def open_sets(self, store: KeyedStateStore, key: Sequence[str]) -> DistinctSets:
        """Open the sets of the distinct counts, for the columns `key`."""
        counts = {
            name: aggregate.column
            for name, aggregate in self._aggregates.items()
            if aggregate.op == "count_distinct" and aggregate.column is not None
        }
        key_types = [self._schema.field(name).type for name in key]
        return DistinctSets(store, key_types, counts, self._schema)

    @cached_property
    def _sql(self) -> StreamSql:
        return select_conditions(self._conditions, self._schema)

    def replace_counts(
        self, totals: Sequence[pa.Array], counts: Mapping[str, npt.NDArray[np.int64]]
    ) -> list[pa.Array]:
        """Return `totals`, with the distinct counts replaced by `counts`."""
        return [
            pa.array(counts[name]) if name in counts else total
            for name, total in zip(self._aggregates, totals, strict=True)
        ]

    @property
    def needs_times(self) -> bool:
        """True if the event times of the records matter: for first and last values."""
        return any(aggregate.op in _BY_TIME for aggregate in self._aggregates.values())

    def read(
        self, rows: pa.RecordBatch, times: npt.NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Return the values of each aggregate by its name, with a null for each row to skip.

        An aggregate that counts all rows has no values. `times` are the event times by which the
        first and the last value are found; None for the order of arrival.

        Raises:
            Exception: A condition cannot be computed for a row, such as a division by zero.
        """
        met = self._evaluate(rows)
        values: dict[str, Any] = {}
        for name, aggregate in self._aggregates.items():
            column = None if aggregate.column is None else rows.column(aggregate.column)
            if column is not None and pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if aggregate.where is not None:
                chosen = met[aggregate.where]
                kept = pa.scalar(True) if column is None else column
                column = pc.if_else(chosen, kept, pa.scalar(None, kept.type))
            if column is not None and times is not None and aggregate.op in _BY_TIME:
                column = pa.StructArray.from_arrays([pa.array(times), column], _TIMED)
            if column is not None:
                values[name] = column
        return values

    def _evaluate(self, rows: pa.RecordBatch) -> Mapping[str, pa.Array]:
        """Return, for each condition, its value for each row."""
        if not self._conditions:
            return {}
        parts = list(self._sql.apply(rows)) if rows.num_rows else []
        none = pa.array([], pa.bool_())
        return {
            text: pa.concat_arrays([none, *(part.column(at) for part in parts)])
            for at, text in enumerate(self._conditions)
        }
