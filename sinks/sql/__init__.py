"""What sinks into SQL databases share: the bookkeeping tables, the fence, the fitting of values."""

from __future__ import annotations

from onceflow.sinks.sql.bookkeeping import ledger_table, sinks_table
from onceflow.sinks.sql.fence import SinkOwner, require_admission
from onceflow.sinks.sql.values import fitted, quoted_value, refused_at

__all__ = [
    "SinkOwner",
    "fitted",
    "ledger_table",
    "quoted_value",
    "refused_at",
    "require_admission",
    "sinks_table",
]
