"""Options of the formats of databases: JDBC's names as Spark has them, and ours."""

from __future__ import annotations

from onceflow.connectors.spark.options.tables import OptionTable
from onceflow.sinks.mysql import MySQLSink
from onceflow.sinks.postgres import PostgresSink
from onceflow.sinks.sqlite import SQLiteSink

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


POSTGRES_WRITE = OptionTable(
    format="onceflow-postgres",
    direction="write",
    description=PostgresSink,
    ignored=_IGNORED,
    refused=_REFUSED,
)
MYSQL_WRITE = OptionTable(
    format="onceflow-mysql",
    direction="write",
    description=MySQLSink,
    ignored=_IGNORED,
    refused=_REFUSED,
)
SQLITE_WRITE = OptionTable(
    format="onceflow-sqlite",
    direction="write",
    description=SQLiteSink,
    ignored=_IGNORED,
    refused=_REFUSED,
)
