"""The reader of Kafka for `readStream`: offsets on the driver, Arrow batches from executors.

Spark keeps one reader in a Python process of the driver as long as the query runs. It asks this
reader for the end of the next batch, for the tasks, and tells it which batch is done. `read` runs
in the tasks, on a copy without clients.

Before a batch with new records, the reader asks for each topic's id. So it notices a topic that was
deleted and created again before it reads the first record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fit
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.connectors.spark.readers.kafka_offsets import (
    Document,
    StreamOffsets,
    limit_ends,
    ranges_between,
    tasks_of,
)
from onceflow.connectors.spark.versions import SparkInterface, has, require
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.options import COUNT, DURATION, option
from onceflow.sources.kafka.catalog import Catalog, find_positions
from onceflow.sources.kafka.client import LoggedTroubles, close_in_time, open_consumer
from onceflow.sources.kafka.position import PartitionPosition, describe_gap, gap_error
from onceflow.sources.kafka.ranges import OffsetRange, read_ranges
from onceflow.sources.kafka.reader import PublishedOffsets
from onceflow.sources.kafka.settings import KafkaSettings

if TYPE_CHECKING or has(SparkInterface.READ_LIMITS):
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:

    class SupportsTriggerAvailableNow:
        """A placeholder for a class that this version of Spark does not have."""


_logger = logging.getLogger("onceflow.connectors.spark")

_Place = tuple[str, int]
_DISCOVERY_INTERVAL_S = 10.0
"""The interval in seconds at which an idle query asks for new partitions and topics."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The size of a micro-batch, and the number of its tasks, as in Spark's own source."""

    offsets_most: int | None = field(
        default=None,
        metadata=option(
            "Maximum number of records in a micro-batch", COUNT, spark="maxOffsetsPerTrigger"
        ),
    )
    offsets_least: int | None = field(
        default=None,
        metadata=option(
            "A micro-batch waits until so many records are there, but no longer than"
            " maxTriggerDelay",
            COUNT,
            spark="minOffsetsPerTrigger",
        ),
    )
    delay_most_s: float = field(
        default=900.0,
        metadata=option(
            "How long a micro-batch waits for minOffsetsPerTrigger",
            DURATION,
            spark="maxTriggerDelay",
        ),
    )
    tasks_least: int = field(
        default=0,
        metadata=option(
            "Minimum number of tasks that share the records", COUNT, spark="minPartitions"
        ),
    )
    task_rows_most: int | None = field(
        default=None,
        metadata=option(
            "Maximum number of records that one task reads", COUNT, spark="maxRecordsPerPartition"
        ),
    )

    def __post_init__(self) -> None:
        given = {
            "maxOffsetsPerTrigger": self.offsets_most,
            "minOffsetsPerTrigger": self.offsets_least,
            "maxRecordsPerPartition": self.task_rows_most,
        }
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is not positive")
        if self.tasks_least < 0:
            raise ConfigError(f"minPartitions={self.tasks_least} is negative")
        if (
            self.offsets_least is not None
            and self.offsets_most is not None
            and self.offsets_least > self.offsets_most
        ):
            raise ConfigError(
                f"minOffsetsPerTrigger={self.offsets_least} is over"
                f" maxOffsetsPerTrigger={self.offsets_most}"
            )


class KafkaTask(InputPartition):
    """A task with the ranges that it reads."""

    def __init__(self, ranges: tuple[OffsetRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


def check_for_spark(settings: KafkaSettings) -> None:
    """Raise ConfigError if a Spark source does not support the `settings`.

    Raises:
        ConfigError: Dead letters are requested.
    """
    if settings.on_bad_record is OnBadRow.DEAD_LETTER:
        raise ConfigError(
            "onBadRecord=dead_letter: a Spark source cannot write dead letters. Read with"
            " valueFormat=raw, and write the records that cannot be decoded with"
            " connectors.foreach_batch; or choose fail or drop"
        )


class KafkaStreamReader(Speaker, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of topics for a Spark query. It pickles without its clients and known offsets."""

    def __init__(
        self, settings: KafkaSettings, schema: StructType, limits: BatchLimits | None = None
    ) -> None:
        """Store the settings. Sends no request yet.

        Raises:
            ConfigError: Limits need a newer Spark, or the settings do not suit Spark.
        """
        self._settings = settings
        self._schema = schema
        self._limits = limits or BatchLimits()
        check_for_spark(settings)
        if settings.ending is not None:
            raise ConfigError("endingOffsets is for `read`: a stream has no end")
        if self._limits.offsets_most or self._limits.offsets_least:
            require(SparkInterface.READ_LIMITS, "maxOffsetsPerTrigger and minOffsetsPerTrigger")
        self._forget()

    def _forget(self) -> None:
        self._catalog: Catalog | None = None
        self._publisher: Consumer | None = None
        self._published: PublishedOffsets | None = None
        self._known: StreamOffsets | None = None
        """The last offsets that Spark passed or received.

        Versions before 4.2 do not pass them again.
        """
        self._target: Mapping[_Place, int] | None = None
        """The ends of Trigger.AvailableNow, or None."""
        self._ends: StreamOffsets | None = None
        self._looked_at = float("-inf")
        self._batch_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        # Clients do not pickle. Remembered offsets belong to this process; another process asks for
        # them again.
        kept = {"settings": self._settings, "schema": self._schema, "limits": self._limits}
        return {**kept, "words": self.words}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings, self._schema = state["settings"], state["schema"]
        self._limits, self.words = state["limits"], state["words"]
        self._forget()

    @in_option_words
    def initialOffset(self) -> Document:  # noqa: N802 - Spark's name
        """Return the start of a new query, resolved by the brokers.

        Runs on the driver, once per query.
        """
        catalog = self._fresh_catalog()
        positions = [
            position
            for facts in catalog.list_topics().values()
            for position in catalog.resolve_positions(facts)
        ]
        if not positions:
            _logger.warning(
                "Kafka at %s has no %s yet; topics that are created later will be read",
                self._settings.bootstrap_servers,
                self._settings.what,
            )
        self._known = StreamOffsets(
            {(position.topic, position.partition): position for position in positions}
        )
        return self._known.document()

    @in_option_words
    def latestOffset(  # noqa: N802 - Spark's name
        self, start: Document | None = None, limit: object = None
    ) -> Document:
        """Return the end of the next batch, or `start` itself if there is nothing to read.

        Raises:
            OffsetOutOfRange: Unread records are gone, and data loss is an error.
            ConfigError: A named topic is gone, or may not be read.
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        if start is not None:
            at = StreamOffsets.of(start)
        elif self._known is not None:
            at = self._known
        else:
            # Spark before 4.2 asks for the end without the start, and no offsets are known yet.
            self._known = self._all_ends()
            return self._known.document()
        ends = self._new_ends(at)
        bounded = None if ends is None else self._bound(at, ends, limit)
        if bounded is None:
            # Return the same document that Spark has. Spark compares texts, and a different text
            # for the same offsets would be a batch without rows.
            return at.document() if start is None else start
        self._batch_at = time.monotonic()
        self._known = bounded
        return bounded.document()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return the limit of `maxOffsetsPerTrigger` or `minOffsetsPerTrigger`."""
        if self._limits.offsets_most is not None:
            return ReadMaxRows(self._limits.offsets_most)
        if self._limits.offsets_least is not None:
            return ReadMinRows(self._limits.offsets_least)
        return ReadAllAvailable()

    @in_option_words
    def reportLatestOffset(self) -> Document | None:  # noqa: N802 - Spark's name
        """Return the last known ends of all partitions, for the query's progress."""
        return None if self._ends is None else self._ends.document()

    @in_option_words
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of Trigger.AvailableNow: the current ends of the current partitions."""
        catalog = self._fresh_catalog()
        partitions = [
            (facts.name, partition)
            for facts in catalog.list_topics().values()
            for partition in facts.partitions
        ]
        self._target = catalog.find_ends(partitions)

    @in_option_words
    def partitions(self, start: Document, end: Document) -> Sequence[InputPartition]:
        """Return the tasks of the batch from `start` to `end`. They are the same in a replay.

        Raises:
            OffsetOutOfRange: A topic was replaced between `start` and `end`.
        """
        before, after = StreamOffsets.of(start), StreamOffsets.of(end)
        unsaid = [
            partition
            for partition in after.positions
            if partition not in before.positions and partition not in after.began
        ]
        first_left = {
            partition: self._fresh_catalog().read_watermarks(*partition)[0] for partition in unsaid
        }
        ranges = ranges_between(before, after, first_left=first_left)
        self._known = after
        limits = self._limits
        tasks = tasks_of(ranges, least=limits.tasks_least, rows_most=limits.task_rows_most)
        return [KafkaTask(task) for task in tasks]

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task.

        Runs on an executor. Its client is kept for the next batch.

        Raises:
            OffsetOutOfRange: Records were deleted before they were read.
            BadRecord: A record cannot be decoded.
            SourceUnavailable: The brokers sent nothing for `deadline_s`.
        """
        return read_task(self._settings, partition, self._schema)

    @in_option_words
    def commit(self, end: Document) -> None:
        """Publish `end` to the consumer group, if one is named. The sink has committed these rows.

        Spark calls this while it plans the next batch. So the group lags by one batch, and by the
        last batch as long as no new records arrive. Only lag tools depend on it.
        """
        settings = self._settings
        if settings.group_id is None or not settings.commit_offsets:
            return
        if self._published is None or self._publisher is None:
            troubles = LoggedTroubles(settings)
            self._published = PublishedOffsets(settings, troubles)
            self._publisher = open_consumer(
                settings, troubles, group_id=settings.group_id, client_id="onceflow-spark-publisher"
            )
        positions = StreamOffsets.of(end).positions.values()
        self._published.ask([position.to_split() for position in positions])
        self._published.send(self._publisher)
        # This runs the callback that reports whether the last offsets arrived.
        self._publisher.poll(0)

    def stop(self) -> None:
        """Close the clients. A second call does nothing."""
        publisher, catalog = self._publisher, self._catalog
        self._publisher = self._published = self._catalog = None
        if publisher is not None:
            close_in_time(publisher)
        if catalog is not None:
            catalog.__exit__(None, None, None)

    def _fresh_catalog(self) -> Catalog:
        """Return the catalog with its deadline restarted."""
        if self._catalog is None:
            self._catalog = Catalog(self._settings)
        self._catalog.restart_deadline()
        return self._catalog

    def _all_ends(self) -> StreamOffsets:
        """Return the ends of all partitions, for a Spark that does not pass the batch's start."""
        catalog = self._fresh_catalog()
        facts = catalog.list_topics().values()
        ends = catalog.find_ends(
            [(topic.name, partition) for topic in facts for partition in topic.partitions]
        )
        return StreamOffsets(
            {
                (topic.name, partition): PartitionPosition(
                    topic.name,
                    partition,
                    ends[topic.name, partition],
                    topic_id=topic.topic_id,
                    cluster_id=topic.cluster_id,
                )
                for topic in facts
                for partition in topic.partitions
            }
        )

    def _new_ends(self, at: StreamOffsets) -> StreamOffsets | None:
        """Return the ends of all partitions and the starts of new ones; None if nothing is new."""
        catalog = self._fresh_catalog()
        ends = catalog.find_ends(list(at.positions))
        idle = all(
            ends.get(partition) == position.next for partition, position in at.positions.items()
        )
        now = time.monotonic()
        # An idle query asks only for ends. It asks for topics and partitions every few seconds.
        if idle and now - self._looked_at < _DISCOVERY_INTERVAL_S:
            return None
        self._looked_at = now
        current = find_positions(self._settings, catalog, list(at.positions.values()))
        began = {
            (position.topic, position.partition): position.next
            for position in current
            if not _is_known(position, at)
        }
        ends.update(catalog.find_ends(list(began)))
        positions: dict[_Place, PartitionPosition] = {}
        for position in current:
            partition = (position.topic, position.partition)
            end = ends.get(partition, position.next)
            # The partition ends before the query's position: its end was cut off, or the topic was
            # replaced.
            if end < position.next:
                began[partition] = self._cut_off(position, end)
            positions[partition] = replace(position, next=end)
        self._ends = StreamOffsets(positions, began)
        if idle and not began and positions.keys() == at.positions.keys():
            return None
        return self._ends

    def _cut_off(self, position: PartitionPosition, end: int) -> int:
        """Return the offset to continue at in a partition that ends before the query's position."""
        low, high = self._fresh_catalog().read_watermarks(position.topic, position.partition)
        topic, partition = position.topic, position.partition
        if self._settings.fail_on_data_loss:
            raise gap_error(topic, partition, offset_next=position.next, low=low, high=high)
        facts = describe_gap(topic, partition, offset_next=position.next, low=low, high=high)
        _logger.warning("going on at %d: %s", low, facts)
        return min(low, end)

    def _bound(self, at: StreamOffsets, ends: StreamOffsets, limit: object) -> StreamOffsets | None:
        """Return the end of a batch from `at`, at most `ends`, or None if it is too small yet."""
        starts = {
            partition: ends.began[partition]
            if partition in ends.began
            else at.positions[partition].next
            for partition in ends.positions
        }
        upto = {partition: position.next for partition, position in ends.positions.items()}
        if self._target is not None:
            upto = {
                partition: max(
                    starts[partition], min(end, self._target.get(partition, starts[partition]))
                )
                for partition, end in upto.items()
            }
        most, least = self._limit(limit)
        if least is not None and self._target is None:
            count = sum(end - starts[partition] for partition, end in upto.items())
            waited_s = time.monotonic() - self._batch_at
            # New partitions do not wait: a batch's offsets must contain their beginning.
            if count < least and waited_s < self._limits.delay_most_s and not ends.began:
                return None
        if most is not None:
            upto = limit_ends(starts, upto, most)
        if all(upto[partition] == starts[partition] for partition in upto) and not ends.began:
            return None
        return StreamOffsets(
            {
                partition: replace(position, next=upto[partition])
                for partition, position in ends.positions.items()
            },
            ends.began,
        )

    def _limit(self, limit: object) -> tuple[int | None, int | None]:
        """Return the maximum and minimum number of offsets in a batch, for Spark's `limit`."""
        # Compare by name, because versions of Spark without read limits do not have the class.
        if limit is None or type(limit).__name__ == "ReadAllAvailable":
            return None, None
        return getattr(limit, "max_rows", None), self._limits.offsets_least


def _is_known(position: PartitionPosition, at: StreamOffsets) -> bool:
    """Return True if `at` contains the same partition of the same topic."""
    before = at.positions.get((position.topic, position.partition))
    if before is None:
        return False
    return not before.topic_id or before.topic_id == position.topic_id


def read_task(
    settings: KafkaSettings, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a `KafkaTask` in the types of `schema`. Runs on an executor."""
    if not isinstance(partition, KafkaTask):
        return iter(())
    batches = read_ranges(settings, partition.ranges, client_id="onceflow-spark")
    return fit(batches, schema)
