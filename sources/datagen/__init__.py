"""A source of generated records. They are the same every time, and need no server."""

from onceflow.sources.datagen.source import DatagenReader, DatagenSource, GeneratedPayments

__all__ = ["DatagenReader", "DatagenSource", "GeneratedPayments"]
