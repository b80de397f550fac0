"""A reader's positions as its consumer group shows them: for lag tools, and never read back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from onceflow.core.spi import Split
from onceflow.sources.kafka.client import ClientTroubles, error_of
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.settings import KafkaSettings


class PublishedOffsets:
    """Asked for by any thread, sent by the one that polls: a client lets no other thread in."""

    def __init__(self, settings: KafkaSettings, troubles: ClientTroubles) -> None:
        self._troubles = troubles
        self._allowed = settings.commit_offsets
        self._newest: deque[list[TopicPartition]] = deque(maxlen=1)

    def ask(self, splits: Sequence[Split]) -> None:
        """Have the positions of `splits` sent, instead of any that are not sent yet."""
        if self._allowed and splits:
            offsets = [
                TopicPartition(position.topic, position.partition, position.next)
                for position in map(PartitionPosition.of, splits)
            ]
            self._newest.append(offsets)

    def send(self, consumer: Consumer) -> None:
        """Send what was asked for, if anything; a failure is told to `troubles`, once."""
        if not self._newest:
            return
        try:
            consumer.commit(offsets=self._newest.popleft(), asynchronous=True)
        except KafkaException as error:
            self._troubles.note(error_of(error))

    def forbid(self) -> None:
        """Send nothing any more: the broker does not allow it."""
        self._allowed = False
        self._newest.clear()
