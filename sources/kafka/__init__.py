"""Kafka as a source: assigned partitions, checkpointed offsets, Arrow batches."""

from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.settings import EARLIEST, LATEST, OffsetsLike, ValueFormat
from onceflow.sources.kafka.source import KafkaSource

__all__ = [
    "EARLIEST",
    "LATEST",
    "KafkaReader",
    "KafkaSource",
    "OffsetsLike",
    "ValueFormat",
]
