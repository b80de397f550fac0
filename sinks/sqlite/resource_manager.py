"""What a SQLite file knows of transactions in doubt: whose its sink ids are, and what is applied.

Rows wait in checkpoint storage, and only the sink itself knows into which table they go.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.core.commit.logged_decisions import LogFacts
from onceflow.sinks.sql.connector import SqlResourceManager


class SQLiteResourceManager(SqlResourceManager):
    """One file, for every sink id that has claimed it."""

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return ()
