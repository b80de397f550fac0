"""The reader of MySQL and MariaDB rows: the server sends one column of CSV, which Arrow parses.

Rows are read from the connection as they arrive, in the form of `clients.mysql.rows`.

A task reads the data that is committed when it begins, because MySQL cannot share a snapshot
between connections. If rows change meanwhile, none of the tasks or two tasks may read them. A
single task reads a consistent state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.mysql import catalog
from onceflow.clients.mysql.catalog import quote
from onceflow.clients.mysql.connection import ResultColumn, own
from onceflow.clients.mysql.endpoint import MySQLEndpoint
from onceflow.clients.mysql.rows import is_whole_number, parse_rows, plan_column, select_rows
from onceflow.clients.sql.session import Session, SqlError
from onceflow.clients.sql.tables import Table, TableColumn, TableName
from onceflow.connectors.spark.readers.sql import (
    Bounds,
    ReadColumn,
    RowSource,
    TaskPlan,
    stride_conditions,
)
from onceflow.connectors.spark.readers.sql_filters import Comparable
from onceflow.core.errors import ConfigError, SinkError
from onceflow.sinks.mysql.dialect import MYSQL
from onceflow.sinks.sql.dialect import Dialect

_CHUNK_BYTES = 4 * 1024 * 1024
_COMPARED: dict[str, Comparable] = {
    "decimal": Comparable.NUMBER,
    "double": Comparable.NUMBER,
    "date": Comparable.DATE,
    "datetime": Comparable.LOCAL_TIME,
    "timestamp": Comparable.INSTANT,
    **dict.fromkeys(catalog.TEXTS, Comparable.TEXT),
}
"""The types besides integers whose values filters compare."""


@dataclass(frozen=True, slots=True)
class MySQLRows(RowSource):
    """A table or a query of MySQL or MariaDB."""

    dialect: ClassVar[Dialect] = MYSQL
    endpoint: MySQLEndpoint

    @override
    def format_instant(self, text: str) -> str:
        # Sessions of onceflow are in UTC.
        return f"TIMESTAMP '{text}'"

    @override
    def columns(self) -> Sequence[ReadColumn]:
        """Return all columns, as the server describes them.

        Raises:
            ConfigError: There is no such table, or no right to read it.
            SinkError: The server does not answer now, or the query is not valid.
        """
        with self.endpoint.connect("onceflow read") as session:
            if self.table is not None:
                return [_column(column) for column in self._describe(session, self.table).columns]
            try:
                columns = own(session).describe(f"SELECT * FROM {self.relation} LIMIT 0")  # noqa: S608
            except SqlError as error:
                raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error
            return [_read(column.name, _format_type(column)) for column in columns]

    @override
    def plan(self, columns: Sequence[ReadColumn], bounds: Bounds | None, tasks: int) -> TaskPlan:
        """Return the division of rows into tasks: by a column's strides, else by an integer key.

        Raises:
            ConfigError: There is no suitable key, and no column was named.
            SinkError: The server does not answer now.
        """
        if tasks == 1:
            return TaskPlan(("",))
        if bounds is None:
            bounds = self._key_bounds(columns, tasks)
        if bounds is None:
            return TaskPlan(("",))
        return TaskPlan(stride_conditions(columns, bounds, tasks, self.words))

    @override
    def batches(
        self, statement: str, columns: Sequence[ReadColumn], snapshot: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that `statement` selects, from one consistent read.

        Raises:
            ConfigError: A value does not fit its column's Arrow type. The message names the column.
            SinkError: The server refused the query, or the connection broke.
        """
        del snapshot
        schema = pa.schema([(column.name, column.type) for column in columns])
        rows = select_rows(statement, schema)
        with self.endpoint.connect("onceflow read") as session:
            try:
                for chunk in own(session).single_texts(rows, _CHUNK_BYTES):
                    yield parse_rows(chunk, schema)
            except SqlError as error:
                raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error
            except pa.ArrowException as error:
                listed = ", ".join(f"{column.name}: {column.type}" for column in columns)
                raise ConfigError(
                    f"a value does not fit the type as which its column is read ({listed}):"
                    f" {error}. Give a schema without this column"
                ) from error

    def _describe(self, session: Session, name: TableName) -> Table:
        try:
            table = catalog.find_table(session, name)
        except SqlError as error:
            raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error
        if table is None:
            raise catalog.explain_missing_table(session, name, str(self.endpoint))
        return table

    def _key_bounds(self, columns: Sequence[ReadColumn], tasks: int) -> Bounds | None:
        """Return the first and last value of a key of one integer, or None if there are no rows."""
        if self.table is None:
            raise ConfigError(
                f"numPartitions={tasks} of a query needs partitionColumn, lowerBound and upperBound"
            )
        whole = {
            column.name
            for column in columns
            if column.kind is Comparable.NUMBER
            and (pa.types.is_integer(column.type) or column.type == pa.decimal128(20, 0))
        }
        with self.endpoint.connect("onceflow read") as session:
            keys = [
                key for _, key in self._describe(session, self.table).unique_keys if len(key) == 1
            ]
            key = next(
                (name for key_columns in keys for name in key_columns if name in whole), None
            )
            if key is None:
                raise ConfigError(
                    f"numPartitions={tasks}: {self.table} has no unique key of one whole number;"
                    " give partitionColumn, lowerBound and upperBound"
                )
            ends = f"SELECT MIN({quote(key)}), MAX({quote(key)}) FROM {self.relation}"  # noqa: S608
            ((low, high),) = session.query(ends)
        # The end of strides is exclusive.
        return None if low is None else Bounds(key, str(low), str(int(high) + 1))


def _column(column: TableColumn) -> ReadColumn:
    assert isinstance(column.type, catalog.MySQLType), column.type
    return _read(column.name, column.type)


def _format_type(column: ResultColumn) -> catalog.MySQLType:
    """Return the type of a query's column in the form of a table's column."""
    name = column.type
    # The length includes the decimal point and the sign.
    precision = column.length - (column.scale > 0) - (not column.is_unsigned)
    shown = f"{name}({column.length})" if name == "tinyint" else name
    return catalog.MySQLType(
        name,
        f"{shown} unsigned" if column.is_unsigned else shown,
        precision=max(precision, 1),
        scale=column.scale,
    )


def _read(column: str, kind: catalog.MySQLType) -> ReadColumn:
    expression, arrow = plan_column(column, kind)
    compared = Comparable.NUMBER if is_whole_number(kind) else _COMPARED.get(kind.name)
    return ReadColumn(column, expression, arrow, compared)
