"""The reader of Kafka for `read`: the records between two positions, as one DataFrame.

Both ends are resolved when Spark plans the read, with one request to each broker, so all tasks
agree. If `ending` is the latest offset, a plan that is run twice may read more the second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.readers import kafka_stream
from onceflow.connectors.spark.readers.kafka_offsets import tasks_of
from onceflow.core.errors import ConfigError
from onceflow.sources.kafka.catalog import Catalog, check_not_replaced
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.ranges import OffsetRange
from onceflow.sources.kafka.settings import KafkaSettings, Latest


class KafkaBatchReader(Speaker, DataSourceReader):
    """A reader of topics from `starting` to `ending`, by default of all records."""

    def __init__(
        self,
        settings: KafkaSettings,
        schema: StructType,
        limits: kafka_stream.BatchLimits | None = None,
    ) -> None:
        """Store the settings. Sends no request yet.

        Raises:
            ConfigError: The settings do not suit Spark, or limits of streams are given.
        """
        kafka_stream.check_for_spark(settings)
        self._settings = (
            settings if settings.ending is not None else replace(settings, ending=Latest())
        )
        self._schema = schema
        self._limits = limits or kafka_stream.BatchLimits()
        if self._limits.offsets_most or self._limits.offsets_least:
            raise ConfigError(
                "maxOffsetsPerTrigger and minOffsetsPerTrigger are for `readStream`: `read` has"
                " no triggers"
            )

    @in_option_words
    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks; if there are no records, one empty task.

        Runs on the driver, once for each plan.

        Raises:
            ConfigError: A topic does not exist, or explicit offsets do not fit its partitions.
            OffsetOutOfRange: The record at an explicit start was deleted, and data loss is an
                error.
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        ranges: list[OffsetRange] = []
        with Catalog(self._settings) as catalog:
            for facts in catalog.list_topics().values():
                for position in catalog.resolve_positions(facts):
                    end = position.next if position.stop is None else position.stop
                    ranges.append(
                        OffsetRange(
                            position.topic,
                            position.partition,
                            position.next,
                            end,
                            position.topic_id,
                        )
                    )
        limits = self._limits
        tasks = tasks_of(
            [offset_range for offset_range in ranges if len(offset_range)],
            least=limits.tasks_least,
            rows_most=limits.task_rows_most,
        )
        return [kafka_stream.KafkaTask(task) for task in tasks or [()]]

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task. Runs on an executor.

        If a topic is deleted and created again after the plan, reading continues at the old
        offsets, and no broker reports it. So the topic's id is checked again after the last record.

        Raises:
            OffsetOutOfRange: Records were deleted before they were read, or their topic was
                replaced, and data loss is an error.
            BadRecord: A record cannot be decoded.
            SourceUnavailable: The brokers sent nothing for `deadline_s`.
        """
        yield from kafka_stream.read_task(self._settings, partition, self._schema)
        # No check is needed if nothing was read, and none is possible if brokers have no ids.
        ranges = partition.ranges if isinstance(partition, kafka_stream.KafkaTask) else ()
        positions = [_to_position(offset_range) for offset_range in ranges if offset_range.topic_id]
        if positions and self._settings.fail_on_data_loss:
            check_not_replaced(self._settings, positions)


def _to_position(offset_range: OffsetRange) -> PartitionPosition:
    return PartitionPosition(
        offset_range.topic,
        offset_range.partition,
        offset_range.end,
        offset_range.end,
        offset_range.topic_id,
    )
