"""The Delta Lake sink: a table as an exactly-once target, one version a checkpoint."""

from __future__ import annotations

from onceflow.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
