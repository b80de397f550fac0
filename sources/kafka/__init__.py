"""Kafka as a source: assigned partitions, checkpointed offsets, Arrow batches."""

from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.settings import EARLIEST, LATEST, BadRecords, OffsetsLike, ValueFormat
from onceflow.sources.kafka.source import KafkaSource

__all__ = [
    "EARLIEST",
    "LATEST",
    "BadRecords",
    "KafkaReader",
    "KafkaSource",
    "OffsetsLike",
    "ValueFormat",
]
