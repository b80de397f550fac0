"""Postgres: a table is copied, and then its changes are read from a logical replication slot."""

from onceflow.sources.postgres.source import PostgresChanges

__all__ = ["PostgresChanges"]
