"""What can be seen of the job from outside, asked again and again on a thread beside the run."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType

from confluent_kafka import Consumer, KafkaException, TopicPartition
from typing_extensions import Self

_INTERVAL_S = 0.1
# Asking takes at most this part of the time, so that it does not slow down what it watches.
_SHARE_MAX = 0.1
ANSWER_TIMEOUT_S = 2
_JOIN_TIMEOUT_S = 30.0


class Observer(ABC):
    """The last answer to one question. A server that is down leaves it as it was."""

    def __init__(self, name: str) -> None:
        """Describe it; entering the context begins."""
        self._value = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"demo {name}", daemon=True)

    @property
    def value(self) -> int:
        """The last answer, 0 before the first."""
        return self._value

    @abstractmethod
    def _ask_until_ended(self) -> None:
        """Connect and call `_answered` again and again; called anew when it returns."""

    def _answered(self, value: int, started_at: float) -> bool:
        """Take an answer and rest; return whether to ask again."""
        self._value = value
        elapsed_s = time.monotonic() - started_at
        return not self._ended.wait(max(_INTERVAL_S, elapsed_s / _SHARE_MAX))

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, when no question is open any more."""
        self._ended.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._ask_until_ended()


class CommittedRecords(Observer):
    """Records before the offsets that the job has published for its consumer group.

    They are published after a checkpoint has completed, so all of them are committed for ever.
    """

    def __init__(self, bootstrap_servers: str, group: str, topic: str, partitions: int) -> None:
        """Describe which group's offsets are summed up; the topic must begin at offset 0."""
        super().__init__("offsets")
        self._settings = {"bootstrap.servers": bootstrap_servers, "group.id": group, "log_level": 0}
        self._partitions = [TopicPartition(topic, partition) for partition in range(partitions)]

    def _ask_until_ended(self) -> None:
        consumer = Consumer(self._settings)
        try:
            with contextlib.suppress(KafkaException):
                started_at = time.monotonic()
                while self._answered(self._sum(consumer), started_at):
                    started_at = time.monotonic()
        finally:
            consumer.close()

    def _sum(self, consumer: Consumer) -> int:
        committed = consumer.committed(self._partitions, timeout=ANSWER_TIMEOUT_S)
        # A partition without a committed offset answers a negative one.
        return sum(max(0, partition.offset) for partition in committed)
