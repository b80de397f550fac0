"""Options of the formats of databases: JDBC's names as Spark has them, and ours."""

from __future__ import annotations

from collections.abc import Callable

from onceflow.connectors.spark.options.tables import (
    BOOLEAN,
    DURATION,
    NAMES,
    OptionTable,
    SparkOption,
    choice,
)
from onceflow.sinks.mysql import MySQLSink
from onceflow.sinks.postgres import PostgresSink
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.sink import SqlSink
from onceflow.sinks.sql.write_mode import WriteMode
from onceflow.sinks.sqlite import SQLiteSink

_TABLE = (
    SparkOption(
        "url", "url", "Where the database is; its JDBC URL (`jdbc:…`) will do", secret=True
    ),
    SparkOption("dbtable", "table", "The table, `schema.table` or `table`", aliases=("table",)),
)
_LOGIN = (
    SparkOption("user", "user", "Over what the url says"),
    SparkOption(
        "password",
        "password",
        "Over what the url says; `${env:NAME}` or `${file:/path}` refers to it",
        secret=True,
    ),
)
_ROWS = (
    SparkOption(
        "writeMode",
        "write_mode",
        "`insert`; `upsert`, `ignore` and `update` find rows by primaryKey",
        choice(WriteMode),
    ),
    SparkOption("primaryKey", "primary_key", "Columns with commas between them", NAMES),
    SparkOption("createTable", "create", "Whether to create a table that is missing", BOOLEAN),
    SparkOption("evolveTable", "evolve", "Whether to add columns that the table lacks", BOOLEAN),
    SparkOption(
        "tombstones",
        "tombstones",
        "Whether a row whose columns outside the key are all null deletes its key",
        BOOLEAN,
    ),
    SparkOption(
        "operationColumn", "operation_column", "A text column that says whether a row is a delete"
    ),
    SparkOption("tableColumn", "table_column", "A text column that names the row's table"),
    SparkOption(
        "overflow",
        "overflow",
        "A value that does not fit its column is an error, or null",
        choice("error", "null"),
    ),
)
_SERVER = (
    SparkOption(
        "commitMode",
        "commit_mode",
        "How rows wait for the decision: prepared in the database, or staged",
        choice("auto", CommitMode),
    ),
    SparkOption("ledgerSchema", "ledger_schema", "Where onceflow's own tables are"),
    SparkOption(
        "statementTimeout",
        "statement_timeout_s",
        "How long the server may be silent",
        DURATION,
        aliases=("queryTimeout",),
    ),
)
_WAITING = (
    SparkOption(
        "connectTimeout", "connect_timeout_s", "How long one connection may take", DURATION
    ),
    SparkOption("lockTimeout", "lock_timeout_s", "How long to wait for others' locks", DURATION),
)

_NO_DRIVER = "no JDBC driver is used"
_IGNORED = {
    "driver": _NO_DRIVER,
    "batchsize": "rows are not sent by INSERT statements of that many rows",
    "isolationLevel": "each batch is one decision, whatever the level",
    "truncate": "overwrite never drops the table",
}
_REFUSED = {
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


def _write_table(
    name: str, sink: Callable[..., SqlSink], *options: SparkOption
) -> OptionTable[SqlSink]:
    return OptionTable(
        format=name,
        direction="write",
        target=sink,
        options=options,
        ignored=_IGNORED,
        refused=_REFUSED,
    )


POSTGRES_WRITE = _write_table(
    "onceflow-postgres", PostgresSink, *_TABLE, *_LOGIN, *_ROWS, *_SERVER, *_WAITING
)
MYSQL_WRITE = _write_table(
    "onceflow-mysql", MySQLSink, *_TABLE, *_LOGIN, *_ROWS, *_SERVER, *_WAITING
)
SQLITE_WRITE = _write_table("onceflow-sqlite", SQLiteSink, *_TABLE, *_ROWS, *_WAITING)
