"""Kafka as a source: assigned partitions, checkpointed offsets, Arrow batches."""

from onceflow.sources.kafka.offsets import EARLIEST, LATEST, OffsetsLike
from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.settings import BadRecords, ValueFormat
from onceflow.sources.kafka.source import KafkaSource
from onceflow.sources.kafka.spark_options import source_of_spark_options

__all__ = [
    "EARLIEST",
    "LATEST",
    "BadRecords",
    "KafkaReader",
    "KafkaSource",
    "OffsetsLike",
    "ValueFormat",
    "source_of_spark_options",
]
