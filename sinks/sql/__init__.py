"""What sinks into SQL databases share: bookkeeping tables, fence, fitting of values, changes."""

from __future__ import annotations

from onceflow.sinks.sql.bad_rows import BadRows
from onceflow.sinks.sql.bookkeeping import ledger_table, sinks_table
from onceflow.sinks.sql.changes import ChangeBuffer, TableChanges, rows_by_table
from onceflow.sinks.sql.fence import SinkOwner, require_admission
from onceflow.sinks.sql.table_name import TableName
from onceflow.sinks.sql.values import decoded, decoded_rows, fitted, quoted_value, refused_at
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, WriteMode

__all__ = [
    "BadRows",
    "ChangeBuffer",
    "ChangeRules",
    "Classified",
    "SinkOwner",
    "TableChanges",
    "TableName",
    "WriteMode",
    "decoded",
    "decoded_rows",
    "fitted",
    "ledger_table",
    "quoted_value",
    "refused_at",
    "require_admission",
    "rows_by_table",
    "sinks_table",
]
