"""The Kafka source. It reads assigned partitions to Arrow batches, and checkpoints offsets."""

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
