"""The connector of Delta tables."""

from __future__ import annotations

from onceflow.core.spi.connector import SinkConnector
from onceflow.sinks.delta.sink import DeltaSink

CONNECTOR = SinkConnector(sink=DeltaSink)
"""The connector that the catalog of connectors loads."""
