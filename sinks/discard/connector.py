"""The connector of the sink that writes nothing."""

from __future__ import annotations

from onceflow.core.spi.connector import SinkConnector
from onceflow.sinks.discard.sink import DiscardSink

CONNECTOR = SinkConnector(sink=DiscardSink)
"""The connector that the catalog of connectors loads."""
