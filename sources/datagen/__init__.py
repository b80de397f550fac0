"""Generated records, the same ones every time, without any server."""

from onceflow.sources.datagen.source import DatagenReader, DatagenSource, GeneratedPayments

__all__ = ["DatagenReader", "DatagenSource", "GeneratedPayments"]
