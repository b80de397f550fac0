"""Options by which databases are read: those of Spark's JDBC reader."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onceflow.connectors.spark.options.tables import COUNT, DURATION, OptionTable, SparkOption
from onceflow.connectors.spark.readers.mysql_rows import MySQLRows
from onceflow.connectors.spark.readers.postgres_rows import PostgresRows
from onceflow.connectors.spark.readers.sql import Bounds, RowSource
from onceflow.core.errors import ConfigError
from onceflow.sinks.mysql.endpoint import endpoint_of as mysql_endpoint_of
from onceflow.sinks.postgres.connection import endpoint_of as postgres_endpoint_of
from onceflow.sinks.sql.tables import TableName

_SUBQUERY = re.compile(r"\s*\((?P<query>.*)\)\s*(?:as\s+)?[\w\"`]*\s*", re.DOTALL | re.IGNORECASE)
_LOCK_TIMEOUT_S = 60.0
"""Of statements that wait for locks; reading waits for none."""


@dataclass(frozen=True, slots=True)
class SqlReading:
    """What `readers.sql` is made of."""

    source: RowSource
    bounds: Bounds | None
    tasks: int


def postgres_reading(
    url: str,
    *,
    table: str | None = None,
    query: str | None = None,
    user: str | None = None,
    password: str | None = None,
    column: str | None = None,
    lower: str | None = None,
    upper: str | None = None,
    tasks: int = 1,
    connect_timeout_s: float = 10.0,
    statement_timeout_s: float = 120.0,
) -> SqlReading:
    """Return what is read of Postgres; connects to nothing.

    Raises:
        ConfigError: Options contradict each other.
    """
    endpoint = postgres_endpoint_of(
        url,
        user=user,
        password=password,
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=statement_timeout_s,
        lock_timeout_s=_LOCK_TIMEOUT_S,
    )
    source = PostgresRows(endpoint, *_relation(table, query))
    return SqlReading(source, _bounds(column, lower, upper), tasks)


def mysql_reading(
    url: str,
    *,
    table: str | None = None,
    query: str | None = None,
    user: str | None = None,
    password: str | None = None,
    column: str | None = None,
    lower: str | None = None,
    upper: str | None = None,
    tasks: int = 1,
    connect_timeout_s: float = 10.0,
    statement_timeout_s: float = 120.0,
) -> SqlReading:
    """Return what is read of MySQL or MariaDB; connects to nothing.

    Raises:
        ConfigError: Options contradict each other.
    """
    endpoint = mysql_endpoint_of(
        url,
        user=user,
        password=password,
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=statement_timeout_s,
        lock_timeout_s=_LOCK_TIMEOUT_S,
    )
    source = MySQLRows(endpoint, *_relation(table, query))
    return SqlReading(source, _bounds(column, lower, upper), tasks)


def _relation(table: str | None, query: str | None) -> tuple[TableName | None, str | None]:
    """Return the table or the query that is read: as for JDBC, `dbtable` may be `(SELECT …) t`."""
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


def _bounds(column: str | None, lower: str | None, upper: str | None) -> Bounds | None:
    if column is None and lower is None and upper is None:
        return None
    if column is None or lower is None or upper is None:
        raise ConfigError("give all of partitionColumn, lowerBound and upperBound, or none")
    return Bounds(column, lower, upper)


_TABLE = SparkOption(
    "dbtable",
    "table",
    "The table, `schema.table` or `table`; or `(SELECT …) t`, as JDBC has it",
    aliases=("table",),
)
_QUERY = SparkOption("query", "query", "Instead of dbtable, a SELECT")
_PLACE = (
    SparkOption(
        "url", "url", "Where the database is; its JDBC URL (`jdbc:…`) will do", secret=True
    ),
    SparkOption("user", "user", "Over what the url says"),
    SparkOption(
        "password",
        "password",
        "Over what the url says; `${env:NAME}` or `${file:/path}` refers to it",
        secret=True,
    ),
)
_SHARES = (
    SparkOption(
        "numPartitions", "tasks", "How many tasks share the rows; each is a connection", COUNT
    ),
    SparkOption(
        "partitionColumn",
        "column",
        "A number, date or timestamp whose values cut the rows into"
        " strides; unless given, Postgres is cut by pages, MySQL by a whole-number key",
    ),
    SparkOption("lowerBound", "lower", "Where the strides begin; rows below are in the first task"),
    SparkOption("upperBound", "upper", "Where the strides end; rows above are in the last task"),
)
_WAITING = (
    SparkOption(
        "connectTimeout", "connect_timeout_s", "How long one connection may take", DURATION
    ),
    SparkOption(
        "statementTimeout",
        "statement_timeout_s",
        "How long the server may be silent",
        DURATION,
        aliases=("queryTimeout",),
    ),
)
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
    target=postgres_reading,
    options=(*_PLACE, _TABLE, _QUERY, *_SHARES, *_WAITING),
    ignored=_IGNORED,
    refused=_REFUSED,
)
MYSQL_READ = OptionTable(
    format="onceflow-mysql",
    direction="read",
    target=mysql_reading,
    options=(*_PLACE, _TABLE, _QUERY, *_SHARES, *_WAITING),
    ignored=_IGNORED,
    refused=_REFUSED,
)
