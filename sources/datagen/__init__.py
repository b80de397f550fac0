"""Sources of generated records. They are the same every time, and need no server."""

from onceflow.sources.datagen.nexmark import NexmarkSource
from onceflow.sources.datagen.source import DatagenSource, GeneratedPayments

__all__ = ["DatagenSource", "GeneratedPayments", "NexmarkSource"]
