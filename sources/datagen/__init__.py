"""Generated records, the same ones every time, without any server."""

from onceflow.sources.datagen.payments import GeneratedPayments
from onceflow.sources.datagen.source import DatagenReader, DatagenSource

__all__ = ["DatagenReader", "DatagenSource", "GeneratedPayments"]
