"""The connector of Postgres changes."""

from __future__ import annotations

from onceflow.core.spi.connector import SourceConnector
from onceflow.sources.postgres.diagnosis import questions_of_changes
from onceflow.sources.postgres.source import PostgresChanges

CONNECTOR = SourceConnector(source=PostgresChanges, examine=questions_of_changes)
"""The connector that the catalog finds."""
