"""Two-phase sinks: what they write survives any crash, and is seen exactly once."""

from __future__ import annotations

from onceflow.sinks.files import FileSink
from onceflow.sinks.kafka import KafkaSink
from onceflow.sinks.mysql import MySQLSink
from onceflow.sinks.postgres import PostgresSink

__all__ = ["FileSink", "KafkaSink", "MySQLSink", "PostgresSink"]
