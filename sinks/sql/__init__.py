"""What sinks into SQL databases share, and what each dialect must give for it.

A dialect gives a `Database` with all that it refers to, in its server's words.
"""

from __future__ import annotations

from onceflow.sinks.sql.bookkeeping import ledger_table, sinks_table
from onceflow.sinks.sql.changes import ChangeBuffer, TableChanges, rows_by_table
from onceflow.sinks.sql.connection import Connection, Endpoint, session_name
from onceflow.sinks.sql.database import Database
from onceflow.sinks.sql.failures import Failures
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.settings import CommitMode, SinkSettings
from onceflow.sinks.sql.table_name import TableName
from onceflow.sinks.sql.tables import ColumnFit, Table, Tables
from onceflow.sinks.sql.targets import Targets
from onceflow.sinks.sql.values import decoded, decoded_rows, fitted, refused_at
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, WriteMode

__all__ = [
    "ChangeBuffer",
    "ChangeRules",
    "Classified",
    "ColumnFit",
    "CommitMode",
    "Connection",
    "Database",
    "Endpoint",
    "Failures",
    "Ledger",
    "RowValidator",
    "SinkSettings",
    "Table",
    "TableChanges",
    "TableName",
    "Tables",
    "Targets",
    "WriteMode",
    "decoded",
    "decoded_rows",
    "fitted",
    "ledger_table",
    "refused_at",
    "rows_by_table",
    "session_name",
    "sinks_table",
]
