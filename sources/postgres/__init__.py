"""Postgres: tables are copied and followed by a logical replication slot, or looked up by key."""

from onceflow.sources.postgres.lookup import PostgresTable
from onceflow.sources.postgres.source import PostgresChanges

__all__ = ["PostgresChanges", "PostgresTable"]
