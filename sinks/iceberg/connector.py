"""The connector of Iceberg tables."""

from __future__ import annotations

from onceflow.core.spi.connector import SinkConnector
from onceflow.sinks.iceberg.sink import IcebergSink

CONNECTOR = SinkConnector(sink=IcebergSink)
"""The connector that the catalog of connectors loads."""
