"""Postgres: rows by binary COPY or by key, exactly once by prepared transactions or a ledger."""

from __future__ import annotations

from onceflow.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
