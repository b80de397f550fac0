"""The two-phase sinks: their rows survive any crash, and readers see them exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

if TYPE_CHECKING:
    from onceflow.sinks.delta import DeltaSink
    from onceflow.sinks.discard import DiscardSink
    from onceflow.sinks.files import FileSink, PublishedFiles, list_committed_files
    from onceflow.sinks.iceberg import IcebergSink
    from onceflow.sinks.kafka import KafkaSink
    from onceflow.sinks.mysql import MySQLSink
    from onceflow.sinks.postgres import PostgresSink
    from onceflow.sinks.sqlite import SQLiteSink
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.sinks.delta": "DeltaSink",
            "onceflow.sinks.discard": "DiscardSink",
            "onceflow.sinks.files": "FileSink PublishedFiles list_committed_files",
            "onceflow.sinks.iceberg": "IcebergSink",
            "onceflow.sinks.kafka": "KafkaSink",
            "onceflow.sinks.mysql": "MySQLSink",
            "onceflow.sinks.postgres": "PostgresSink",
            "onceflow.sinks.sqlite": "SQLiteSink",
        },
    )

__all__ = [
    "DeltaSink",
    "DiscardSink",
    "FileSink",
    "IcebergSink",
    "KafkaSink",
    "MySQLSink",
    "PostgresSink",
    "PublishedFiles",
    "SQLiteSink",
    "list_committed_files",
]
