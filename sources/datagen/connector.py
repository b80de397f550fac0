"""The connector of generated records."""

from __future__ import annotations

from onceflow.core.spi.connector import SourceConnector
from onceflow.sources.datagen.source import DatagenSource

CONNECTOR = SourceConnector(source=DatagenSource)
"""The connector that the catalog finds."""
