"""The lookup table of a join: small, bounded, and the same in every subtask.

The driver loads it when the pipeline starts, and sends it to the slots with the program. The
columns of a join with a table that changes, which no process loads, are here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa

from onceflow.core.arrow.kinds import cast_table
from onceflow.core.errors import ConfigError, DataFrameFailed
from onceflow.core.plan.dataframe_source import is_dataframe, schema_of_dataframe
from onceflow.core.state.keys.key_columns import check_key_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JoinType = Literal["inner", "left"]
LOOKUP_BYTES_MAX = 64 * 1024 * 1024
"""The default limit of the size in Arrow. Every slot holds one copy for each join and receives it
at each attempt."""
_LOOKUP_ROWS_MAX = 10_000_000
"""The limit of rows that are read from a DataFrame before its size is known."""


@dataclass(frozen=True, slots=True)
class JoinedColumns:
    """The columns of a table that a join adds to a stream."""

    schema: pa.Schema
    """The table's schema, with its keys in the types of the stream's keys."""
    on: tuple[str, ...]
    """The names of the key's columns, in the stream and in the table."""
    how: JoinType

    @classmethod
    def resolve(
        cls, table: pa.Schema, stream: pa.Schema, on: Sequence[str], how: JoinType, verb: str
    ) -> JoinedColumns:
        """Return the columns. `verb` names the operator in errors.

        Raises:
            ConfigError: A key is missing on one side, its types do not match, its type cannot be a
                key, or both sides have another column of the same name.
        """
        return cls(_resolve_schema(table, stream, on, verb), tuple(on), how)

    @property
    def added(self) -> tuple[str, ...]:
        """The names of the columns that are added."""
        return tuple(name for name in self.schema.names if name not in self.on)

    def to_joined_schema(self, stream: pa.Schema) -> pa.Schema:
        """Return the stream's columns, followed by the table's columns without the keys."""
        added = [self.schema.field(name) for name in self.added]
        if self.how == "left":
            added = [column.with_nullable(True) for column in added]
        return pa.schema([*stream, *added])


class LookupTable:
    """The right side of a join. If its rows are loaded, the pickle contains them."""

    def __init__(
        self, table: DataFrame | pa.Table, stream: pa.Schema, on: Sequence[str], bytes_max: int
    ) -> None:
        """Check the columns. Does not evaluate the table.

        Raises:
            ConfigError: A key is missing on one side, its types do not match, its type cannot be a
                key, or both sides have another column of the same name.
        """
        if is_dataframe(table):
            schema = schema_of_dataframe(table, "join(dataframe)")
        elif isinstance(cast("object", table), pa.Table):
            schema = table.schema
        else:
            raise ConfigError(
                f"join({type(table).__name__}): give a bounded Spark DataFrame or a pyarrow.Table"
            )
        self._source: DataFrame | pa.Table | None = table
        self._bytes_max = bytes_max
        self.schema = _resolve_schema(schema, stream, on, "join")
        """The table's schema, with its keys in the types of the stream's keys."""
        self.on = tuple(on)
        self.rows: pa.Table = self.schema.empty_table()
        """The rows. Empty before `load`."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None}

    def to_joined_schema(self, stream: pa.Schema, how: JoinType) -> pa.Schema:
        """Return the stream's columns, followed by the table's columns without the keys."""
        return JoinedColumns(self.schema, self.on, how).to_joined_schema(stream)

    def load(self) -> None:
        """Evaluate the table. Runs on the driver at each start of the pipeline.

        Raises:
            ConfigError: The table is too large.
            DataFrameFailed: Spark could not evaluate the DataFrame.
        """
        source = self._source
        assert source is not None
        table = source if isinstance(source, pa.Table) else _collect(source)
        if table.nbytes > self._bytes_max or table.num_rows > _LOOKUP_ROWS_MAX:
            raise ConfigError(
                f"join(on={list(self.on)}): the table has {table.num_rows} rows in"
                f" {table.nbytes} bytes, and at most {self._bytes_max} bytes and"
                f" {_LOOKUP_ROWS_MAX} rows are sent to every slot: select fewer columns or rows,"
                " or raise join(…, bytes_max=…) when slots have the memory"
            )
        self.rows = cast_table(table.select(self.schema.names), self.schema).combine_chunks()


def _collect(dataframe: DataFrame) -> pa.Table:
    try:
        return dataframe.limit(_LOOKUP_ROWS_MAX + 1).toArrow()
    except Exception as error:
        raise DataFrameFailed(
            f"join(dataframe): Spark could not evaluate it: {type(error).__name__}:"
            f" {str(error)[:2000]}"
        ) from error


def _resolve_schema(table: pa.Schema, stream: pa.Schema, on: Sequence[str], verb: str) -> pa.Schema:
    if not on:
        raise ConfigError(f"{verb}() needs at least one column: on='account'")
    fields: list[pa.Field] = []
    for name in on:
        for side, names in (("stream", stream.names), ("table", table.names)):
            if name not in names:
                raise ConfigError(
                    f"{verb}(on={name!r}): the {side} has no such column; there are"
                    f" {', '.join(names)}"
                )
        check_key_type(stream.field(name).type, name)
    for column in table:
        if column.name in on:
            fields.append(_key_field(column, stream.field(column.name), verb))
        elif column.name in stream.names:
            raise ConfigError(
                f"{verb}(): both stream and table have a column {column.name!r} besides the keys:"
                " rename one"
            )
        else:
            fields.append(column)
    return pa.schema(fields)


def _key_field(table: pa.Field, stream: pa.Field, verb: str) -> pa.Field:
    """Return the table's key in the stream's type."""
    left, right = stream.type, table.type
    text = (pa.types.is_string(left) or pa.types.is_large_string(left)) and (
        pa.types.is_string(right) or pa.types.is_large_string(right)
    )
    numbers = pa.types.is_integer(left) and pa.types.is_integer(right)
    instants = (
        pa.types.is_timestamp(left)
        and pa.types.is_timestamp(right)
        and (left.tz is None) == (right.tz is None)
    )
    if not (left == right or text or numbers or instants):
        raise ConfigError(
            f"{verb}(on={stream.name!r}): the stream's column is {left} and the table's {right}:"
            " cast one of them"
        )
    return table.with_type(left)
