"""What the broker says about topics: which partitions they have, and where each starts and ends.

Runs on the driver. Every question has the source's deadline.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from types import TracebackType

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable
from onceflow.sources.kafka.client import (
    ClientTroubles,
    access_denied,
    authentication_refused,
    error_of,
    is_denied,
    open_consumer,
)
from onceflow.sources.kafka.offsets import (
    EARLIEST,
    LATEST,
    AtOffsets,
    AtTime,
    Earliest,
    Latest,
    Offsets,
)
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.settings import KafkaSettings
from onceflow.sources.kafka.texts import gap_text

_ATTEMPT_S = 2.0
"""One question to the broker; short, so that a refused password is noticed between two of them."""


class Catalog:
    """A connection to ask with; a context manager."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._troubles = ClientTroubles(settings)
        self._consumer = open_consumer(
            settings,
            self._troubles,
            group_id=settings.group_id or "onceflow-catalog",
            client_id="onceflow-catalog",
        )
        self._deadline = time.monotonic() + settings.deadline_s

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._consumer.close()

    def partitions(self, topic: str) -> Sequence[int]:
        """Return the partitions of `topic`, ascending.

        Raises:
            ConfigError: It does not exist, may not be read, or we are refused altogether.
            SourceUnavailable: No broker answered before the deadline.
        """
        while True:
            try:
                metadata = self._consumer.list_topics(topic, timeout=self._attempt_s()).topics[
                    topic
                ]
            except KafkaException as error:
                self._wait_after(error_of(error))
                continue
            if metadata.error is None:
                return sorted(metadata.partitions)
            if is_denied(metadata.error.code()):
                raise access_denied(self._settings, topic)
            if metadata.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._missing(topic)
            self._wait_after(metadata.error)

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset that is left and the end, exclusive, of what may be read.

        Under read_committed the end is the last stable offset: what open transactions hold, and
        everything behind it, is not counted.
        """
        asked = TopicPartition(topic, partition)
        while True:
            try:
                return self._consumer.get_watermark_offsets(
                    asked, timeout=self._attempt_s(), cached=False
                )
            except KafkaException as error:
                self._wait_after(error_of(error))

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset at or after `timestamp_ms`; the end where there is none."""
        asked = [TopicPartition(topic, partition, timestamp_ms)]
        while True:
            try:
                found = self._consumer.offsets_for_times(asked, timeout=self._attempt_s())[0]
            except KafkaException as error:
                self._wait_after(error_of(error))
                continue
            if found.error is None:
                return found.offset if found.offset >= 0 else self.watermarks(topic, partition)[1]
            self._wait_after(found.error)

    def positions(self, topic: str, *, partitions: Sequence[int]) -> list[PartitionPosition]:
        """Return the resolved start, and stop if bounded, of each of `partitions`.

        Raises:
            ConfigError: An explicit offset is missing, or lies beyond the end.
            OffsetOutOfRange: An explicit start was deleted, and data loss is an error.
        """
        settings = self._settings
        _check_named(settings.starting, topic, partitions, setting="starting_offsets")
        if settings.ending is not None:
            _check_named(settings.ending, topic, partitions, setting="ending_offsets")
        found: list[PartitionPosition] = []
        for partition in partitions:
            low, high = self.watermarks(topic, partition)
            start = self._start(topic, partition, low, high)
            stop = (
                None
                if settings.ending is None
                else max(start, self._offset(settings.ending, topic, partition, low, high))
            )
            if stop is not None and stop > high:
                raise ConfigError(
                    f"ending_offsets says {topic}-{partition} ends at {stop}, but only the offsets"
                    f" before {high} are there to be read"
                )
            found.append(PartitionPosition(topic, partition, start, stop))
        return found

    def added_positions(self, topic: str, *, partitions: Sequence[int]) -> list[PartitionPosition]:
        """Return positions from the earliest record of `partitions`, which were added lately."""
        found: list[PartitionPosition] = []
        for partition in partitions:
            low, high = self.watermarks(topic, partition)
            stop = None if self._settings.ending is None else high
            found.append(PartitionPosition(topic, partition, low, stop))
        return found

    def _start(self, topic: str, partition: int, low: int, high: int) -> int:
        start = self._offset(self._settings.starting, topic, partition, low, high)
        if start > high:
            raise ConfigError(
                f"starting_offsets says {topic}-{partition} starts at {start}, but it ends at"
                f" {high}"
            )
        if start < low:
            if self._settings.fail_on_data_loss:
                raise OffsetOutOfRange(gap_text(topic, partition, wanted=start, low=low, high=high))
            return low
        return start

    def _offset(self, offsets: Offsets, topic: str, partition: int, low: int, high: int) -> int:
        match offsets:
            case Earliest():
                return low
            case Latest():
                return high
            case AtTime(timestamp_ms):
                return self.offset_at(topic, partition, timestamp_ms)
            case AtOffsets(explicit):
                offset = explicit[topic][partition]
                return {EARLIEST: low, LATEST: high}.get(offset, offset)

    def _attempt_s(self) -> float:
        return max(0.1, min(_ATTEMPT_S, self._deadline - time.monotonic()))

    def _wait_after(self, error: KafkaError) -> None:
        """Return when the question may be asked again."""
        if is_denied(error.code()):
            raise access_denied(self._settings, ", ".join(self._settings.topics))
        # Serves the error callback, which alone hears of a refused password.
        self._consumer.poll(0.05)
        if self._troubles.authentication:
            raise authentication_refused(self._settings, self._troubles.authentication)
        if time.monotonic() >= self._deadline:
            raise SourceUnavailable(
                f"Kafka at {self._settings.bootstrap_servers} did not answer for topic"
                f" {', '.join(self._settings.topics)} in {self._settings.deadline_s:g} s:"
                f" {self._troubles.last or error.str()}. Check the address, the network and"
                " security.protocol"
            )

    def _missing(self, topic: str) -> ConfigError:
        try:
            known = list(self._consumer.list_topics(timeout=self._attempt_s()).topics)
        except KafkaException:
            known = []
        close = difflib.get_close_matches(topic, known, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        return ConfigError(
            f"topic {topic!r} does not exist on Kafka at {self._settings.bootstrap_servers}.{hint}"
            " Create it, or correct topic="
        )


def _check_named(offsets: Offsets, topic: str, partitions: Sequence[int], *, setting: str) -> None:
    if not isinstance(offsets, AtOffsets):
        return
    named = offsets.offsets.get(topic, {})
    missing = sorted(set(partitions) - set(named))
    unknown = sorted(set(named) - set(partitions))
    if missing:
        raise ConfigError(
            f"{setting} says nothing about partitions {missing} of topic {topic!r}; give each an"
            " offset, or -2 for earliest or -1 for latest"
        )
    if unknown:
        raise ConfigError(
            f"{setting} names partitions {unknown} of topic {topic!r}, which has"
            f" {len(partitions)} partitions"
        )
