"""The sink that counts rows and writes nothing."""

from __future__ import annotations

from onceflow.sinks.discard.sink import DiscardSink

__all__ = ["DiscardSink"]
