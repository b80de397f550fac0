"""Tables and queries of databases for `read`: planned on the driver, read in tasks as Arrow.

What is read is one SELECT a task, of the columns that the DataFrame has, with the filters that the
database can decide and the task's share of the rows. How a database says its columns' types, cuts a
table and gives rows as Arrow is its `RowSource`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fit, spark_schema
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.readers.sql_filters import (
    Comparable,
    FilterColumn,
    SqlWords,
    push_down,
)
from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.session import SqlEndpoint
from onceflow.sinks.sql.tables import TableName

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """One column of what is read."""

    name: str
    expression: str
    """What is selected, in SQL."""
    type: pa.DataType
    """What its values are in Arrow."""
    kind: Comparable | None = None
    """What filters compare it as, on the server as in Spark."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a column's values cut the rows, in strides of one width, as JDBC's options say it."""

    column: str
    lower: str
    upper: str
    """Bounds of the strides and not of what is read."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What each task reads, and by which snapshot of the database."""

    conditions: tuple[str, ...]
    """A condition a task, in SQL; empty: all rows."""
    snapshot: str = ""
    """Empty: each task sees what is committed when it begins."""


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """One table or query of one database; pickled to tasks, holds no open connection."""

    dialect: ClassVar[Dialect]
    endpoint: SqlEndpoint
    table: TableName | None = None
    query: str | None = None
    """Instead of a table: a SELECT."""

    def __post_init__(self) -> None:
        assert (self.table is None) is not (self.query is None)

    @abstractmethod
    def format_instant(self, text: str) -> str:
        """Return an instant as SQL; `text` is in UTC."""

    @property
    def words(self) -> SqlWords:
        """How values are written."""
        return SqlWords(text=self.dialect.literal, instant=self.format_instant)

    @property
    def relation(self) -> str:
        """What stands behind FROM."""
        if self.table is not None:
            return self.dialect.identifier(self.table)
        return f"({self.query}) AS onceflow_rows"

    @abstractmethod
    def columns(self) -> Sequence[ReadColumn]:
        """Return all columns, as the server says them.

        Raises:
            ConfigError: There is no such table, or the query is none.
            SinkError: The server cannot be asked now.
        """

    @abstractmethod
    def plan(self, columns: Sequence[ReadColumn], bounds: Bounds | None, tasks: int) -> TaskPlan:
        """Return how `tasks` tasks, or fewer, share the rows. Driver, once a plan.

        Raises:
            ConfigError: It cannot be cut so; says what can.
            SinkError: The server cannot be asked now.
        """

    @abstractmethod
    def batches(
        self, statement: str, columns: Sequence[ReadColumn], snapshot: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield what `statement` selects, which are `columns` by their names. Task.

        Raises:
            ConfigError: A value has no form in its column's Arrow type; names the column.
            SinkError: The server refused, broke off, or forgot the snapshot.
        """


class SqlTask(InputPartition):
    """What one task reads."""

    def __init__(self, statement: str, snapshot: str) -> None:
        super().__init__(None)
        self.statement = statement
        self.snapshot = snapshot


def sql_schema(source: RowSource) -> StructType:
    """Return the schema of all that `source` has, for `DataSource.schema`.

    Raises:
        ConfigError: There is no such table, or Spark has no type for a column.
        SinkError: The server cannot be asked now.
    """
    columns = source.columns()
    return spark_schema(pa.schema([pa.field(one.name, one.type) for one in columns]))


class SqlReader(Speaker, DataSourceReader):
    """Reads the columns of `schema`, in the types of `schema`."""

    def __init__(
        self,
        source: RowSource,
        schema: StructType,
        *,
        bounds: Bounds | None = None,
        tasks: int = 1,
    ) -> None:
        """Describe the read; asks nothing yet.

        Raises:
            ConfigError: There are to be no tasks.
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
        """Return the tasks. Driver, once a plan."""
        columns = self._read_columns()
        plan = self._source.plan(self._all_columns(), self._bounds, self._tasks)
        selected = ", ".join(f"{one.expression} AS {self._quote(one.name)}" for one in columns)
        tasks: list[InputPartition] = []
        for condition in plan.conditions:
            conditions = [f"({one})" for one in (*self._conditions, condition) if one]
            where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
            statement = f"SELECT {selected} FROM {self._source.relation}{where}"  # noqa: S608
            tasks.append(SqlTask(statement, plan.snapshot))
        return tasks

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one task's rows. Executor."""
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
        known = {one.name: one for one in self._all_columns()}
        missing = [name for name in self._schema.names if name not in known]
        if missing:
            raise ConfigError(
                f"{self._source.relation} has no column {missing[0]!r}; it has {', '.join(known)}"
            )
        return [known[name] for name in self._schema.names]

    def _quote(self, name: str) -> str:
        return self._source.dialect.quote(name)


class FilteringSqlReader(SqlReader):
    """… and has the database filter what it can decide; where Spark pushes filters down."""

    @in_option_words
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take what the database decides; return what Spark must look at."""
        columns: Mapping[str, FilterColumn] = {
            one.name: FilterColumn(one.expression, one.kind) for one in self._all_columns()
        }
        left: list[Filter] = []
        for one in filters:
            sql_filter = push_down(one, columns, self._source.words)
            if sql_filter is not None:
                self._conditions.append(sql_filter.sql)
            if sql_filter is None or not sql_filter.exact:
                left.append(one)
        return left


def sql_reader(
    source: RowSource, schema: StructType, *, bounds: Bounds | None = None, tasks: int = 1
) -> SqlReader:
    """Return a reader that pushes filters down where Spark asks for it.

    Spark refuses a reader that could while `spark.sql.python.filterPushdown.enabled` is false, and
    where it is true it asks in a worker of another module.
    """
    asks = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    made = FilteringSqlReader if asks else SqlReader
    return made(source, schema, bounds=bounds, tasks=tasks)


def strides(expression: str, bounds: Sequence[Any]) -> tuple[str, ...]:
    """Return conditions that cut rows at `bounds`, texts in SQL, rising; each row is in one.

    Rows without a value are in the first.
    """
    if not bounds:
        return ("",)
    first = f"{expression} < {bounds[0]} OR {expression} IS NULL"
    between = [f"{expression} >= {low} AND {expression} < {high}" for low, high in pairwise(bounds)]
    return (first, *between, f"{expression} >= {bounds[-1]}")
