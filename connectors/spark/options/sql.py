"""The options for writing databases: which of Spark's JDBC options are refused or ignored.

The other options are declared elsewhere, as fields with `option(…, spark="name")`: in
sinks/sql/sink.py and clients/sql/access.py for all databases, and in the `sink.py` of each
database. `sql_reads` has the options for reading.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeVar

from onceflow.connectors.spark.options.option_table import OptionTable

if TYPE_CHECKING:
    from onceflow.sinks.mysql import MySQLSink
    from onceflow.sinks.postgres import PostgresSink
    from onceflow.sinks.sqlite import SQLiteSink

_Sink = TypeVar("_Sink")

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
        ignored=_IGNORED,
        refused=_REFUSED,
    )
