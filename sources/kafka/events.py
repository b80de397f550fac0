"""The handling of the client's other reports: ends of partitions, gaps and passing troubles."""

from __future__ import annotations

import logging
from enum import Enum

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onceflow.clients.kafka import client
from onceflow.clients.kafka.client import error_of
from onceflow.core.errors import SourceError, SourceUnavailable
from onceflow.sources.kafka.position import cut_error, describe_cut, describe_gap, gap_error
from onceflow.sources.kafka.settings import KafkaSettings

_logger = logging.getLogger("onceflow.sources.kafka")

_LOG_TRUNCATION = -139
"""The code of librdkafka for a log whose end was cut off. confluent-kafka has no name for it."""
GAP_CODES = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.OFFSET_OUT_OF_RANGE,
        _LOG_TRUNCATION,
    }
)
"""The codes that the client reports if the requested offset does not exist."""

DAMAGED_CODES = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
"""The codes that the client reports if the offset exists but cannot be read."""


def is_cut(error: KafkaError | None) -> bool:
    """Return True if `error` says that the log's end was cut off before the requested offset.

    librdkafka 2.16 reports this as a reset of the offset, and gives the reason as text.
    """
    if error is None:
        return False
    code = error.code()
    return code == _LOG_TRUNCATION or (
        code == KafkaError._AUTO_OFFSET_RESET and "log truncation" in error.str()
    )


class Event(Enum):
    """A report of the client about one partition."""

    END = "end"
    """The partition has no more records for now."""
    GAP = "gap"
    """The requested offset does not exist."""
    TROUBLE = "trouble"
    """An error after which the client tries again by itself."""
    GROUP_DENIED = "group denied"
    """The user may not publish offsets to the group. Records can still be read."""


def classify_error(
    error: KafkaError,
    settings: KafkaSettings,
    troubles: client.ClientTroubles,
    *,
    topic: str,
    partition: int | None,
    offset_next: int | None,
) -> Event:
    """Return the meaning of `error` for a partition whose next offset is `offset_next`.

    Raises:
        ConfigError: The user may not read the topic.
        SourceError: The log is damaged, or the client cannot go on.
    """
    code = error.code()
    if code == KafkaError._PARTITION_EOF:
        return Event.END
    if code in GAP_CODES:
        return Event.GAP
    if client.is_denied(code):
        raise client.make_access_error(settings, topic)
    # Without a topic, the error is about a broker's answer that was not received completely. The
    # client asks again, and no log is damaged.
    if topic and (error.fatal() or code in DAMAGED_CODES):
        raise SourceError(
            f"{topic}-{partition} cannot be read on from offset {offset_next}: {error.str()}. If"
            " the next attempt fails in the same way, the broker's log is damaged there"
        )
    if error.fatal():
        raise SourceError(f"the client of {settings.where} cannot go on: {error.str()}")
    troubles.note(error)
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return Event.GROUP_DENIED
    return Event.TROUBLE


class Gaps:
    """The gaps of one reader, and the offsets after them at which it continues."""

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
        """Return the offset to continue at if `offset_next` does not exist.

        `was_cut` is true if the broker said that the log's end was cut off before `offset_next`.
        Then this offset may exist again, after records that were never read.

        Raises:
            OffsetOutOfRange: Records are missing, and data loss is an error.
            SourceUnavailable: Kafka does not say what is left, or its answers contradict each
                other.
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
            # The offset is in range again: a replica that lagged behind has caught up. If the same
            # offset fails a second time, the reason is not a lagging replica, and the reader would
            # ask for ever.
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
                f"{topic}-{partition}: offset {offset_next} is out of range, and Kafka does not"
                f" say which offsets are left: {error_of(error).str()}"
            ) from error
