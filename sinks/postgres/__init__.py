"""Postgres: rows by binary COPY, exactly once by prepared transactions."""

from __future__ import annotations

from onceflow.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
