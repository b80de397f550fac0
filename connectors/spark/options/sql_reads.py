"""The options for reading and writing databases, like those of Spark's JDBC.

The options for writing are declared as fields with `option(…, spark="name")`: in sinks/sql/sink.py
and clients/sql/session.py for all databases, and in the `sink.py` of each database.

The options of connections are declared in clients/sql/session.py, as fields with `option(…,
spark="name")`. Reading and writing share them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from onceflow.clients.sql.session import DatabaseAccess
from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.connectors.spark.readers.sql import Bounds, RowSource
from onceflow.core.errors import ConfigError
from onceflow.core.spi.options import COUNT, option

if TYPE_CHECKING:
    from onceflow.sinks.mysql import MySQLSink
    from onceflow.sinks.postgres import PostgresSink
    from onceflow.sinks.sqlite import SQLiteSink


_Sink = TypeVar("_Sink")

_NO_DRIVER = "no JDBC driver is used"
_WRITES_IGNORE = {
    "driver": _NO_DRIVER,
    "batchsize": "rows are not sent by INSERT statements of that many rows",
    "isolationLevel": "each batch is one decision, whatever the level",
    "truncate": "overwrite never drops the table",
}
_WRITES_REFUSE = {
    "numPartitions": "every partition is a connection; use coalesce(n) on the DataFrame",
    "createTableOptions": "create the table yourself",
    "createTableColumnTypes": "create the table yourself",
    "cascadeTruncate": "a batch is written beside what others refer to, never by TRUNCATE CASCADE",
    "query": "name the table by dbtable",
    "sessionInitStatement": "set it for the user in the database (ALTER ROLE … SET, init_connect)",
    "keytab": "Kerberos is not supported; use a password by reference or a client certificate",
    "principal": "Kerberos is not supported; use a password by reference or a client certificate",
    "connectionProvider": _NO_DRIVER,
    "delivery": "a format is always exactly once",
}

_HELPS = {
    "write_mode": "`insert` adds rows. `upsert` inserts a row, or updates the row with the same"
    " key. `ignore` inserts a row unless its key exists. `update` updates existing rows and never"
    " inserts. All but `insert` need primaryKey, and all rows of a key in one task",
    "commit_mode": "How rows wait for the decision. `two_phase`: in prepared transactions of the"
    " server. `ledger`: staged below stagingLocation, and written in the transaction of the"
    " decision, for servers, users and poolers that cannot prepare. `auto` takes two_phase if it is"
    " possible, and logs its choice and the reason. Each mode writes every row exactly once; they"
    " differ in what a reader sees while a commit is under way",
}


@cache
def describe_postgres_writes() -> OptionTable[PostgresSink]:
    """Return the options for writing `onceflow-postgres`. Imports its sink."""
    from onceflow.sinks.postgres import PostgresSink

    return _describe_writes("onceflow-postgres", PostgresSink)


@cache
def describe_mysql_writes() -> OptionTable[MySQLSink]:
    """Return the options for writing `onceflow-mysql`. Imports its sink."""
    from onceflow.sinks.mysql import MySQLSink

    return _describe_writes("onceflow-mysql", MySQLSink)


@cache
def describe_sqlite_writes() -> OptionTable[SQLiteSink]:
    """Return the options for writing `onceflow-sqlite`. Imports its sink."""
    from onceflow.sinks.sqlite import SQLiteSink

    return _describe_writes("onceflow-sqlite", SQLiteSink)


def _describe_writes(format_name: str, sink: type[_Sink]) -> OptionTable[_Sink]:
    return OptionTable(
        format=format_name,
        direction="write",
        description=sink,
        helps=_HELPS,
        ignored=_WRITES_IGNORE,
        refused=_WRITES_REFUSE,
    )


_SUBQUERY = re.compile(r"\s*\((?P<query>.*)\)\s*(?:as\s+)?[\w\"`]*\s*", re.DOTALL | re.IGNORECASE)
_LOCK_TIMEOUT_S = 60.0
"""The lock timeout of the session. Reading waits for no lock."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SqlRead(DatabaseAccess):
    """The relation to read from a database, and the number of tasks. Opens no connection.

    Raises:
        ConfigError: Options contradict each other.
    """

    table: str | None = field(
        default=None,
        metadata=option(
            "The table, `schema.table` or `table`; or `(SELECT …) t`, as JDBC has it",
            spark="dbtable",
            aliases=("table",),
        ),
    )
    query: str | None = field(
        default=None, metadata=option("Instead of dbtable, a SELECT", spark="query")
    )
    tasks: int = field(
        default=1,
        metadata=option(
            "How many tasks share the rows; each is a connection", COUNT, spark="numPartitions"
        ),
    )
    column: str | None = field(
        default=None,
        metadata=option(
            "A number, date or timestamp whose values cut the rows into strides; unless given,"
            " Postgres is cut by pages, MySQL by a whole-number key",
            spark="partitionColumn",
        ),
    )
    lower: str | None = field(
        default=None,
        metadata=option(
            "Where the strides begin; rows below are in the first task", spark="lowerBound"
        ),
    )
    upper: str | None = field(
        default=None,
        metadata=option(
            "Where the strides end; rows above are in the last task", spark="upperBound"
        ),
    )

    def __post_init__(self) -> None:
        _ = self.source, self.bounds

    @property
    @abstractmethod
    def source(self) -> RowSource:
        """The table or the query."""

    @property
    def bounds(self) -> Bounds | None:
        """The column and bounds that divide the rows, or None."""
        if self.column is None and self.lower is None and self.upper is None:
            return None
        if self.column is None or self.lower is None or self.upper is None:
            raise ConfigError("give all of partitionColumn, lowerBound and upperBound, or none")
        return Bounds(self.column, self.lower, self.upper)


class PostgresRead(SqlRead):
    """The relation to read from Postgres."""

    @property
    @override
    def source(self) -> RowSource:
        # Import it here: a reader of one database needs only the driver of that database.
        from onceflow.clients.postgres.connection import endpoint_of
        from onceflow.connectors.spark.readers.postgres_rows import PostgresRows

        endpoint = endpoint_of(self, lock_timeout_s=_LOCK_TIMEOUT_S)
        return PostgresRows(endpoint, *_parse_relation(self.table, self.query))


class MySQLRead(SqlRead):
    """The relation to read from MySQL or MariaDB."""

    @property
    @override
    def source(self) -> RowSource:
        from onceflow.clients.mysql.endpoint import endpoint_of
        from onceflow.connectors.spark.readers.mysql_rows import MySQLRows

        endpoint = endpoint_of(self, lock_timeout_s=_LOCK_TIMEOUT_S)
        return MySQLRows(endpoint, *_parse_relation(self.table, self.query))


def _parse_relation(table: str | None, query: str | None) -> tuple[TableName | None, str | None]:
    """Return the table or the query to read. As in JDBC, `dbtable` may be `(SELECT …) t`."""
    if (table is None) is (query is None):
        raise ConfigError("give dbtable or query, one of the two")
    if table is None:
        return None, query
    if subquery := _SUBQUERY.fullmatch(table):
        return None, subquery["query"]
    try:
        return TableName.parse(table), None
    except ValueError as error:
        raise ConfigError(
            f"dbtable={table!r}: {error}; a SELECT goes into query, or stands in dbtable in"
            " parentheses with a name behind them"
        ) from None


_IGNORED = {
    "driver": "no JDBC driver is used",
    "fetchsize": "rows are read as a stream of Arrow batches",
    "pushDownPredicate": "spark.sql.python.filterPushdown.enabled says it for all Python formats",
    "preferTimestampNTZ": "a type without zone is read without, one with a zone with it",
}
_REFUSED = {
    "sessionInitStatement": "set it for the user in the database (ALTER ROLE … SET, init_connect)",
    "prepareQuery": "write it into query",
    "customSchema": "give the schema by `.schema(…)`",
}

POSTGRES_READ = OptionTable(
    format="onceflow-postgres",
    direction="read",
    description=PostgresRead,
    ignored=_IGNORED,
    refused=_REFUSED,
)
MYSQL_READ = OptionTable(
    format="onceflow-mysql",
    direction="read",
    description=MySQLRead,
    ignored=_IGNORED,
    refused=_REFUSED,
)
