"""The resource manager of SQLite files: the owners of sink ids and the applied transactions.

Rows wait in checkpoint storage, and only the sink itself knows their table.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.core.commit.logged_decisions import LogFacts
from onceflow.sinks.sql.connector import SqlResourceManager


class SQLiteResourceManager(SqlResourceManager):
    """A resource manager of one file, for each sink id that has claimed it."""

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return ()
