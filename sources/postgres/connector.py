"""The connectors of Postgres: changes, and tables that records are joined with."""

from __future__ import annotations

from onceflow.core.spi.connector import LookupConnector, SourceConnector
from onceflow.sources.postgres.diagnosis import questions_of_changes
from onceflow.sources.postgres.lookup import PostgresTable
from onceflow.sources.postgres.source import PostgresChanges

CONNECTOR = SourceConnector(source=PostgresChanges, examine=questions_of_changes)
"""The connector of changes that the catalog finds."""

LOOKUP_CONNECTOR = LookupConnector(lookup=PostgresTable)
"""The connector of tables that the catalog finds."""
