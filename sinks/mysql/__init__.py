"""MySQL and MariaDB: rows by LOAD DATA or by key, exactly once by XA transactions or a ledger."""

from __future__ import annotations

from onceflow.sinks.mysql.sink import MySQLSink

__all__ = ["MySQLSink"]
