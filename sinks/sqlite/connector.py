"""The connector of SQLite files. Its resource manager knows owners and applied transactions.

Rows wait in checkpoint storage, and only the sink itself knows their table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import LogFacts
from onceflow.core.spi.connector import Questions, ResourceManager, ServerAccess, SinkConnector
from onceflow.sinks.sql.connector import SqlResourceManager
from onceflow.sinks.sql.diagnosis import SqlDiagnosis
from onceflow.sinks.sqlite.sink import NO_TABLE, SQLiteSink


class SQLiteResourceManager(SqlResourceManager):
    """A resource manager of one file, for each sink id that has claimed it."""

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return ()


def _sink_of_tools(access: ServerAccess, timeout_s: float) -> SQLiteSink:
    """Return a sink that describes how a tool reaches the file; it must exist.

    Raises:
        ConfigError: The URL is not valid, or there is no such file.
    """
    sink = SQLiteSink(
        access.url,
        table=NO_TABLE,
        password=access.password,
        connect_timeout_s=timeout_s,
        lock_timeout_s=timeout_s,
    )
    if not Path(sink.endpoint.path).exists():
        raise ConfigError(f"{sink.endpoint} does not exist; a job creates it at its first start")
    return sink


def _resource_manager(access: ServerAccess) -> ResourceManager:
    return SQLiteResourceManager(_sink_of_tools(access, access.timeout_s))


def _diagnosis(access: ServerAccess, names: Sequence[str], parallelism: int, /) -> Questions:
    ask = SqlDiagnosis(_sink_of_tools, lambda sink, error: (("", "its path"),), "its path")
    return ask(access, names, parallelism)


CONNECTOR = SinkConnector(sink=SQLiteSink, resource_manager=_resource_manager, diagnosis=_diagnosis)
"""The connector that the catalog of connectors loads."""
