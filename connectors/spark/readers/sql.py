"""The reader of tables and queries of databases for `read`. The driver plans, tasks read Arrow.

Each task runs one SELECT of the DataFrame's columns, with the filters that the database can decide
and the task's share of the rows. A database's `RowSource` describes the columns' types, divides a
table, and returns rows as Arrow.

A table may be divided into strides of equal width of a column, as in JDBC.
"""

from __future__ import annotations

import datetime as dt
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.clients.sql.session import SqlEndpoint
from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.arrow_rows import fit, spark_schema
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.readers import sql_filters
from onceflow.connectors.spark.readers.sql_filters import Comparable, SqlWords
from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.dialect import Dialect

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


_DAY = dt.date(1970, 1, 1)
_TIME = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def stride_conditions(
    columns: Sequence[ReadColumn], bounds: Bounds, tasks: int, words: SqlWords
) -> tuple[str, ...]:
    """Return a condition for each task. Together they cover every row exactly once.

    Raises:
        ConfigError: There is no such column, it has no order here, or a bound is not of its type.
    """
    column = next((candidate for candidate in columns if candidate.name == bounds.column), None)
    if column is None:
        raise ConfigError(
            f"partitionColumn={bounds.column!r} is not among"
            f" {', '.join(candidate.name for candidate in columns)}"
        )
    low, high = (_position(bound, column, bounds) for bound in (bounds.lower, bounds.upper))
    if low >= high:
        raise ConfigError(f"lowerBound={bounds.lower} is not below upperBound={bounds.upper}")
    # For integers there cannot be more strides than numbers.
    count = min(tasks, high - low)
    cuts = [low + (high - low) * index // count for index in range(1, count)]
    return strides(column.expression, [_to_sql(cut, column, words) for cut in cuts])


def _position(text: str, column: ReadColumn, bounds: Bounds) -> int:
    """Return a bound as an integer: the number itself, or days or microseconds since 1970."""
    try:
        match column.kind:
            case Comparable.NUMBER:
                return int(Decimal(text))
            case Comparable.DATE:
                return (dt.date.fromisoformat(text) - _DAY).days
            case Comparable.LOCAL_TIME:
                return (dt.datetime.fromisoformat(text) - _TIME) // _MICROSECOND
            case Comparable.INSTANT:
                given = dt.datetime.fromisoformat(text)
                utc = given if given.tzinfo is None else given.astimezone(dt.timezone.utc)
                return (utc.replace(tzinfo=None) - _TIME) // _MICROSECOND
            case _:
                raise ConfigError(
                    f"partitionColumn={bounds.column!r} is {column.type}; name a column of"
                    " numbers, dates or timestamps"
                )
    except (ValueError, TypeError, InvalidOperation) as error:
        raise ConfigError(
            f"bound {text!r} does not fit partitionColumn={bounds.column!r} of type {column.type}:"
            f" {error}"
        ) from error


def _to_sql(position: int, column: ReadColumn, words: SqlWords) -> str:
    match column.kind:
        case Comparable.DATE:
            return f"DATE '{(_DAY + dt.timedelta(days=position)).isoformat()}'"
        case Comparable.LOCAL_TIME:
            at = _TIME + position * _MICROSECOND
            return f"TIMESTAMP '{at.isoformat(' ', 'microseconds')}'"
        case Comparable.INSTANT:
            at = _TIME + position * _MICROSECOND
            return words.instant(at.isoformat(" ", "microseconds"))
        case _:
            return str(position)


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """A column to read."""

    name: str
    expression: str
    """The SQL expression to select."""
    type: pa.DataType
    """The Arrow type of the values."""
    kind: sql_filters.Comparable | None = None
    """The kind as which filters compare values, both on the server and in Spark; None if they
    cannot.
    """


@dataclass(frozen=True, slots=True)
class Bounds:
    """The column and bounds that divide rows into strides of equal width, as in JDBC's options."""

    column: str
    lower: str
    upper: str
    """The bounds limit the strides, but not the rows that are read."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """The conditions of the tasks, and the database snapshot that they read."""

    conditions: tuple[str, ...]
    """The SQL condition of each task; an empty one selects all rows."""
    snapshot: str = ""
    """The snapshot's name. If it is empty, each task sees the data committed when it begins."""


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """A table or query of a database. It is pickled to tasks, and holds no open connection."""

    dialect: ClassVar[Dialect]
    endpoint: SqlEndpoint
    table: TableName | None = None
    query: str | None = None
    """The SELECT to read instead of a table."""

    def __post_init__(self) -> None:
        assert (self.table is None) is not (self.query is None)

    @abstractmethod
    def format_instant(self, text: str) -> str:
        """Return an instant as SQL; `text` is in UTC."""

    @property
    def words(self) -> sql_filters.SqlWords:
        """The functions that write values as SQL."""
        return sql_filters.SqlWords(text=self.dialect.literal, instant=self.format_instant)

    @property
    def relation(self) -> str:
        """The text after FROM."""
        if self.table is not None:
            return self.dialect.identifier(self.table)
        return f"({self.query}) AS onceflow_rows"

    @abstractmethod
    def columns(self) -> Sequence[ReadColumn]:
        """Return all columns, as the server describes them.

        Raises:
            ConfigError: There is no such table, or the query is not valid.
            SinkError: The server does not answer now.
        """

    @abstractmethod
    def plan(self, columns: Sequence[ReadColumn], bounds: Bounds | None, tasks: int) -> TaskPlan:
        """Return the division of the rows into at most `tasks` tasks.

        Runs on the driver, once per plan.

        Raises:
            ConfigError: The rows cannot be divided in this way. The message says which way is
                possible.
            SinkError: The server does not answer now.
        """

    @abstractmethod
    def batches(
        self, statement: str, columns: Sequence[ReadColumn], snapshot: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that `statement` selects, with `columns` by their names. Runs in a task.

        Raises:
            ConfigError: A value does not fit its column's Arrow type. The message names the column.
            SinkError: The server refused the query, the connection broke, or the snapshot is gone.
        """


class SqlTask(InputPartition):
    """A task with the statement that it runs, and its snapshot."""

    def __init__(self, statement: str, snapshot: str) -> None:
        super().__init__(None)
        self.statement = statement
        self.snapshot = snapshot


def sql_schema(source: RowSource) -> StructType:
    """Return the schema of all columns of `source`, for `DataSource.schema`.

    Raises:
        ConfigError: There is no such table, or Spark has no type for a column.
        SinkError: The server does not answer now.
    """
    columns = source.columns()
    return spark_schema(pa.schema([pa.field(column.name, column.type) for column in columns]))


class SqlReader(Speaker, DataSourceReader):
    """A reader of the columns of `schema`, in the types of `schema`."""

    def __init__(
        self,
        source: RowSource,
        schema: StructType,
        *,
        bounds: Bounds | None = None,
        tasks: int = 1,
    ) -> None:
        """Store the read. Sends no request yet.

        Raises:
            ConfigError: `tasks` is below 1.
        """
        if tasks < 1:
            raise ConfigError(f"numPartitions={tasks} is not positive")
        self._source = source
        self._schema = schema
        self._bounds = bounds
        self._tasks = tasks
        self._conditions: list[str] = []
        self._columns: tuple[ReadColumn, ...] | None = None

    @in_option_words
    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks. Runs on the driver, once for each plan."""
        columns = self._read_columns()
        plan = self._source.plan(self._all_columns(), self._bounds, self._tasks)
        selected = ", ".join(
            f"{column.expression} AS {self._quote(column.name)}" for column in columns
        )
        tasks: list[InputPartition] = []
        for condition in plan.conditions:
            conditions = [f"({clause})" for clause in (*self._conditions, condition) if clause]
            where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
            statement = f"SELECT {selected} FROM {self._source.relation}{where}"  # noqa: S608
            tasks.append(SqlTask(statement, plan.snapshot))
        return tasks

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task. Runs on an executor."""
        if not isinstance(partition, SqlTask):
            return iter(())
        columns = self._read_columns()
        batches = self._source.batches(partition.statement, columns, partition.snapshot)
        return fit(batches, self._schema)

    def _all_columns(self) -> tuple[ReadColumn, ...]:
        if self._columns is None:
            self._columns = tuple(self._source.columns())
        return self._columns

    def _read_columns(self) -> list[ReadColumn]:
        known = {column.name: column for column in self._all_columns()}
        missing = [name for name in self._schema.names if name not in known]
        if missing:
            raise ConfigError(
                f"{self._source.relation} has no column {missing[0]!r}; it has {', '.join(known)}"
            )
        return [known[name] for name in self._schema.names]

    def _quote(self, name: str) -> str:
        return self._source.dialect.quote(name)


class FilteringSqlReader(SqlReader):
    """An `SqlReader` whose database applies the filters that Spark pushes down to it."""

    @in_option_words
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Keep the filters that the database can decide. Return those that Spark must apply."""
        columns: Mapping[str, sql_filters.FilterColumn] = {
            column.name: sql_filters.FilterColumn(column.expression, column.kind)
            for column in self._all_columns()
        }
        left: list[Filter] = []
        for spark_filter in filters:
            sql_filter = sql_filters.push_down(spark_filter, columns, self._source.words)
            if sql_filter is not None:
                self._conditions.append(sql_filter.sql)
            if sql_filter is None or not sql_filter.exact:
                left.append(spark_filter)
        return left


def sql_reader(
    source: RowSource, schema: StructType, *, bounds: Bounds | None = None, tasks: int = 1
) -> SqlReader:
    """Return a reader that pushes filters down if Spark asks for it.

    While `spark.sql.python.filterPushdown.enabled` is false, Spark refuses a reader with that
    method. If it is true, Spark asks in a worker of another module.
    """
    asks = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    made = FilteringSqlReader if asks else SqlReader
    return made(source, schema, bounds=bounds, tasks=tasks)


def strides(expression: str, bounds: Sequence[Any]) -> tuple[str, ...]:
    """Return conditions that divide rows at `bounds`, rising SQL texts. Each row fits exactly one.

    Rows without a value are in the first condition.
    """
    if not bounds:
        return ("",)
    first = f"{expression} < {bounds[0]} OR {expression} IS NULL"
    between = [f"{expression} >= {low} AND {expression} < {high}" for low, high in pairwise(bounds)]
    return (first, *between, f"{expression} >= {bounds[-1]}")
