"""What a client says besides records: ends of partitions, gaps, and troubles that may pass."""

from __future__ import annotations

import logging
from enum import Enum

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onceflow.connectors.kafka.client import (
    ClientTroubles,
    access_denied,
    error_of,
    is_denied,
)
from onceflow.core.errors import OffsetOutOfRange, SourceError, SourceUnavailable
from onceflow.sources.kafka.position import gap_message
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
"""What the client says where the offset that it asked for is not there."""

DAMAGED_CODES = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
"""… and where it is there and cannot be read."""


class Event(Enum):
    """What the client tells of one partition."""

    END = "end"
    """Nothing more is there for now."""
    GAP = "gap"
    """The offset that was asked for is not there."""
    TROUBLE = "trouble"
    """It goes on trying by itself."""
    GROUP_DENIED = "group denied"
    """… and offsets may not be published."""


def judged(
    error: KafkaError,
    settings: KafkaSettings,
    troubles: ClientTroubles,
    *,
    topic: str,
    partition: int | None,
    wanted: int | None,
) -> Event:
    """Return what `error` tells of a partition of which `wanted` is to be read next.

    Raises:
        ConfigError: We may not read the topic.
        SourceError: The log is damaged, or the client cannot go on.
    """
    code = error.code()
    if code == KafkaError._PARTITION_EOF:
        return Event.END
    if code in GAP_CODES:
        return Event.GAP
    if is_denied(code):
        raise access_denied(settings, topic)
    if error.fatal() or code in DAMAGED_CODES:
        raise SourceError(
            f"{topic}-{partition} cannot be read on from offset {wanted}: {error.str()}. If the"
            " next attempt fails alike, the broker's log is damaged there"
        )
    troubles.note(error)
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return Event.GROUP_DENIED
    return Event.TROUBLE


class Gaps:
    """The gaps that one reader has met."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._met: dict[tuple[str, int], int] = {}

    def resume_at(self, consumer: Consumer, topic: str, partition: int, wanted: int) -> int:
        """Return the offset to go on at, when `wanted` was not there.

        Raises:
            OffsetOutOfRange: Records are missing, and data loss is not accepted.
            SourceUnavailable: Kafka does not say, or contradicts itself about, what is left.
        """
        low, high = self._watermarks(consumer, topic, partition, wanted)
        before, self._met[topic, partition] = self._met.get((topic, partition)), wanted
        if low <= wanted <= high:
            # It has come into range since: a replica that lagged behind has caught up.
            if before == wanted:
                raise SourceUnavailable(
                    f"{topic}-{partition}: fetching offset {wanted} fails as out of range, though"
                    f" Kafka says that {low} to {high} are there; check the partition's replicas"
                )
            return wanted
        text = gap_message(topic, partition, wanted=wanted, low=low, high=high)
        if self._settings.fail_on_data_loss:
            raise OffsetOutOfRange(text)
        _logger.warning("going on at %d: %s", low, text)
        return low

    def _watermarks(
        self, consumer: Consumer, topic: str, partition: int, wanted: int
    ) -> tuple[int, int]:
        asked = TopicPartition(topic, partition)
        try:
            return consumer.get_watermark_offsets(
                asked, timeout=self._settings.deadline_s, cached=False
            )
        except KafkaException as error:
            raise SourceUnavailable(
                f"{topic}-{partition}: offset {wanted} is out of range, and Kafka does not say what"
                f" is left: {error_of(error).str()}"
            ) from error
