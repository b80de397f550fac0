"""Handles what a client reports besides records: ends of partitions, gaps, passing troubles."""

from __future__ import annotations

import logging
from enum import Enum

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onceflow.connectors.kafka.client import (
    ClientTroubles,
    error_of,
    is_denied,
    make_access_error,
)
from onceflow.core.errors import SourceError, SourceUnavailable
from onceflow.sources.kafka.position import cut_error, describe_cut, describe_gap, gap_error
from onceflow.sources.kafka.settings import KafkaSettings

_logger = logging.getLogger("onceflow.sources.kafka")

_LOG_TRUNCATION = -139
"""librdkafka's code for a log whose end was cut off; confluent-kafka has no name for it."""
GAP_CODES = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.OFFSET_OUT_OF_RANGE,
        _LOG_TRUNCATION,
    }
)
"""What the client reports when the offset that it asked for does not exist."""

DAMAGED_CODES = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
"""What it reports when the offset exists and cannot be read."""


def is_cut(error: KafkaError | None) -> bool:
    """Return whether `error` says that the end of a log was cut off before the offset asked for.

    librdkafka 2.16 reports that as a reset of the offset, and gives the reason as text.
    """
    if error is None:
        return False
    code = error.code()
    return code == _LOG_TRUNCATION or (
        code == KafkaError._AUTO_OFFSET_RESET and "log truncation" in error.str()
    )


class Event(Enum):
    """What the client reports about one partition."""

    END = "end"
    """There are no more records for now."""
    GAP = "gap"
    """The offset that the client asked for does not exist."""
    TROUBLE = "trouble"
    """Something that the client tries again by itself."""
    GROUP_DENIED = "group denied"
    """The user may not publish offsets to the group; records still come."""


def classify_error(
    error: KafkaError,
    settings: KafkaSettings,
    troubles: ClientTroubles,
    *,
    topic: str,
    partition: int | None,
    offset_next: int | None,
) -> Event:
    """Return what `error` means for a partition that is to be read on from `offset_next`.

    Raises:
        ConfigError: The user may not read the topic.
        SourceError: The log is damaged, or the client cannot go on.
    """
    code = error.code()
    if code == KafkaError._PARTITION_EOF:
        return Event.END
    if code in GAP_CODES:
        return Event.GAP
    if is_denied(code):
        raise make_access_error(settings, topic)
    # Without a topic it is about an answer of a broker that was not received whole: the client asks
    # again, and no log is damaged.
    if topic and (error.fatal() or code in DAMAGED_CODES):
        raise SourceError(
            f"{topic}-{partition} cannot be read on from offset {offset_next}: {error.str()}. If"
            " the next attempt fails alike, the broker's log is damaged there"
        )
    if error.fatal():
        raise SourceError(f"the client of {settings.where} cannot go on: {error.str()}")
    troubles.note(error)
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return Event.GROUP_DENIED
    return Event.TROUBLE


class Gaps:
    """Finds where one reader goes on behind its gaps, and remembers them."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._met: dict[tuple[str, int], int] = {}

    def find_resume_offset(
        self,
        consumer: Consumer,
        topic: str,
        partition: int,
        offset_next: int,
        *,
        was_cut: bool = False,
    ) -> int:
        """Return the offset to go on at when `offset_next` does not exist.

        `was_cut` is true if the broker said that the end of the log was cut off before it. Then the
        offset may exist again, behind records that were never read.

        Raises:
            OffsetOutOfRange: Records are missing, and data loss is not accepted.
            SourceUnavailable: Kafka does not say, or contradicts itself about, what is left.
        """
        low, high = self._read_watermarks(consumer, topic, partition, offset_next)
        before, self._met[topic, partition] = self._met.get((topic, partition)), offset_next
        if was_cut and low <= offset_next <= high:
            if self._settings.fail_on_data_loss:
                raise cut_error(topic, partition, offset_next=offset_next, low=low, high=high)
            facts = describe_cut(topic, partition, offset_next=offset_next, low=low, high=high)
            _logger.warning("going on at %d: %s", low, facts)
            return low
        if low <= offset_next <= high:
            # It has come into range since: a replica that lagged behind has caught up.
            # Twice at the same offset: it is no replica that catches up, and asking on would never
            # end.
            if before == offset_next:
                raise SourceUnavailable(
                    f"{topic}-{partition}: fetching offset {offset_next} fails as out of range,"
                    f" though Kafka says that {low} to {high} are there; check the partition's"
                    " replicas"
                )
            return offset_next
        if self._settings.fail_on_data_loss:
            raise gap_error(topic, partition, offset_next=offset_next, low=low, high=high)
        facts = describe_gap(topic, partition, offset_next=offset_next, low=low, high=high)
        _logger.warning("going on at %d: %s", low, facts)
        return low

    def _read_watermarks(
        self, consumer: Consumer, topic: str, partition: int, offset_next: int
    ) -> tuple[int, int]:
        asked = TopicPartition(topic, partition)
        try:
            return consumer.get_watermark_offsets(
                asked, timeout=self._settings.deadline_s, cached=False
            )
        except KafkaException as error:
            raise SourceUnavailable(
                f"{topic}-{partition}: offset {offset_next} is out of range, and Kafka does not say"
                f" what is left: {error_of(error).str()}"
            ) from error
