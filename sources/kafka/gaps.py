"""Records that were deleted before they were read: where to go on behind them, or not to."""

from __future__ import annotations

import logging

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onceflow.core.errors import OffsetOutOfRange, SourceUnavailable
from onceflow.sources.kafka.client import error_of
from onceflow.sources.kafka.settings import KafkaSettings
from onceflow.sources.kafka.texts import gap_text

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
        text = gap_text(topic, partition, wanted=wanted, low=low, high=high)
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
