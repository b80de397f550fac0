"""Where records come from: replayable sources whose positions live in checkpoints."""

from onceflow.sources.datagen import DatagenSource
from onceflow.sources.kafka import BadRecords, KafkaSource, ValueFormat

__all__ = ["BadRecords", "DatagenSource", "KafkaSource", "ValueFormat"]
