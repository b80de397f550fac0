"""The SQLite sink: a file of this machine as an exactly-once target, in ledger mode."""

from __future__ import annotations

from onceflow.sinks.sqlite.sink import SQLiteSink

__all__ = ["SQLiteSink"]
