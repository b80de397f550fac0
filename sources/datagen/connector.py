"""The connectors of generated records."""

from __future__ import annotations

from onceflow.core.spi.connector import SourceConnector
from onceflow.sources.datagen.nexmark import NexmarkSource
from onceflow.sources.datagen.source import DatagenSource

CONNECTOR = SourceConnector(source=DatagenSource)
"""The connector that the catalog finds as `datagen`."""

NEXMARK_CONNECTOR = SourceConnector(source=NexmarkSource)
"""The connector that the catalog finds as `nexmark`."""
