"""The Iceberg sink: a table of a lake as an exactly-once target, one snapshot a checkpoint."""

from __future__ import annotations

from onceflow.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
