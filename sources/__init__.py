"""The sources of records. They can be replayed, and checkpoints hold their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

if TYPE_CHECKING:
    from onceflow.sources.datagen import DatagenSource, GeneratedPayments, NexmarkSource
    from onceflow.sources.kafka import KafkaSource, ValueFormat
    from onceflow.sources.mysql import MySQLTable
    from onceflow.sources.postgres import PostgresChanges, PostgresTable
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.sources.datagen": "DatagenSource GeneratedPayments NexmarkSource",
            "onceflow.sources.kafka": "KafkaSource ValueFormat",
            "onceflow.sources.mysql": "MySQLTable",
            "onceflow.sources.postgres": "PostgresChanges PostgresTable",
        },
    )

__all__ = [
    "DatagenSource",
    "GeneratedPayments",
    "KafkaSource",
    "MySQLTable",
    "NexmarkSource",
    "PostgresChanges",
    "PostgresTable",
    "ValueFormat",
]
