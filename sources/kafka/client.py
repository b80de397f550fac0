"""The functions that open and close Kafka clients, and a thread that checks the brokers.

A client that has lost its brokers reports nothing, like a client of an idle topic. So the thread of
`LivenessWatch` asks every few seconds for the leaders of the topic's partitions. It asks each
leader for the end of one partition.

The thread uses a client of its own for two reasons. First, confluent-kafka admits one thread at a
time, and a thread that polls in a loop never admits another one (seen with 2.16: `commit` and
`list_topics` wait for ever). Second, a broker answers the requests of one connection in order, so
each answer would wait up to fetch.wait.max.ms for the reader's fetch.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from typing_extensions import override

from onceflow.clients.kafka import client
from onceflow.clients.kafka.brokers import Brokers
from onceflow.core.errors import ConfigError, OnceflowError, SourceUnavailable
from onceflow.core.spi import Outage
from onceflow.core.spi.options import OptionValue
from onceflow.sources.kafka.settings import TUNED_DEFAULTS, KafkaSettings

logger = logging.getLogger("onceflow.sources.kafka")

CLOSE_S = 5.0
"""The maximum time in seconds to wait for a client to close; see `close_in_time`."""


_OVERSIZED = re.compile(r"Invalid response size (\d+) \(0\.\.(\d+)\).* in state UP\)")
"""The error that the client reports before it drops a working connection.

In another state of the connection the number may not be a size, because the peer may not be a
broker.
"""
_RECEIVE_BYTES_MAX = 2**31 - 1
"""The largest `receive.message.max.bytes` that librdkafka accepts."""


class LoggedTroubles(client.ClientTroubles):
    """The troubles of a client, each logged once rather than at every reconnection attempt."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._oversized: tuple[int, int] | None = None
        """The size of the answer that the client dropped, and the limit that it exceeded."""

    @override
    def note(self, error: KafkaError) -> None:
        match = _OVERSIZED.search(error.str())
        if match is not None:
            self._oversized = int(match[1]), int(match[2])
        if self.remember(error):
            logger.warning("Kafka client of %s: %s", self._settings.what, self.latest)

    def check_answers_received(self) -> None:
        """Raise if the client has dropped a broker's answer because of its size.

        The client repeats the request for ever and gets the same answer. All brokers answer
        meanwhile, so this is not an outage.

        Raises:
            ConfigError: A record does not fit into `receive.message.max.bytes`. No restart helps.
        """
        if self._oversized is None:
            return
        size, limit = self._oversized
        # An answer holds at most fetch.max.bytes, which is below the limit, plus one record.
        advised = min(2 * size, _RECEIVE_BYTES_MAX)
        raise ConfigError(
            f"{self._settings.where} holds a record that the client may not receive: a broker sent"
            f" an answer of {size:,} bytes, and the setting is receive.message.max.bytes={limit}."
            f" Give options={{'receive.message.max.bytes': {advised}}}"
        )


def open_consumer(
    settings: KafkaSettings,
    troubles: client.ClientTroubles,
    *,
    group_id: str,
    client_id: str,
    defaults: Mapping[str, OptionValue] = TUNED_DEFAULTS,
) -> Consumer:
    """Return a consumer without an assignment. Do not wait for any broker.

    `defaults` are client options that the user's options override.

    Raises:
        ConfigError: librdkafka refuses a setting; the message names it.
    """
    config = {
        **client.client_config(settings, client_id, defaults, troubles),
        "group.id": group_id,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "on_commit": _OffsetCommits(group_id),
    }
    return client.open_client(Consumer, config, settings)


def open_brokers(settings: KafkaSettings) -> Brokers:
    """Return a client that asks the brokers about topics. Do not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; the message names it.
    """
    troubles = LoggedTroubles(settings)
    config = client.client_config(settings, "onceflow-topics", TUNED_DEFAULTS, troubles)
    return Brokers(settings, config, troubles, SourceUnavailable)


def close_in_time(consumer: Consumer) -> None:
    """Close `consumer`, and return after at most `CLOSE_S` seconds.

    librdkafka waits for pending offset commits; without a broker this lasts as long as a request
    timeout. If the close takes longer than `CLOSE_S`, it continues in the background. Nothing else
    depends on it.
    """
    closing = threading.Thread(target=consumer.close, name="onceflow-kafka-close", daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        logger.warning("a Kafka client is still closing after %g s and is abandoned", CLOSE_S)


class _OffsetCommits:
    """A callback that logs a failed offset commit once. Only lag tools read these offsets."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        self._failing = False

    def __call__(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        failed = error or next((item.error for item in offsets if item.error), None)
        if failed is None:
            self._failing = False
        elif not self._failing:
            self._failing = True
            logger.warning(
                "offsets cannot be committed to Kafka group %s: %s. Checkpoints are not affected;"
                " only lag tools see old numbers",
                self._group_id,
                failed,
            )


def group_id_of(settings: KafkaSettings, *, job: str, uid: str) -> str:
    """Return the group to which offsets are committed: the user's, or one named after the job."""
    return settings.group_id or f"onceflow-{job}-{uid}"


_INTERVAL_S_MAX = 5.0
_INTERVAL_WHEN_DOWN_S = 1.0
"""The pauses between two checks of the brokers: the maximum, and the pause after a failed check."""
_ANSWER_S = 1.0
"""The timeout in seconds of one request. `stop` may have to wait this long, too."""


class LivenessWatch:
    """A thread that checks the brokers of some partitions, from `start` to `stop`."""

    def __init__(
        self,
        settings: KafkaSettings,
        open_partitions: Callable[[], Sequence[tuple[str, int]]],
        *,
        group_id: str,
        client_id: str,
    ) -> None:
        self._settings = settings
        self._open_partitions = open_partitions
        self._group_id = group_id
        self._client_id = client_id
        self._troubles = LoggedTroubles(settings)
        self._stopped = threading.Event()
        self._failure: OnceflowError | None = None
        self._outage: tuple[str, float] | None = None
        """The current fault, and the `time.monotonic` at which it began."""
        self._thread = threading.Thread(target=self._watch, name=client_id, daemon=True)

    def find_outage(self) -> Outage | None:
        """Return the current outage and its duration, or None if all brokers answer.

        Any thread may call.
        """
        if (outage := self._outage) is None:
            return None
        reason, began_at = outage
        what = f"Kafka at {self._settings.bootstrap_servers} ({reason})"
        return Outage(what, round(time.monotonic() - began_at, 3))

    @property
    def failure(self) -> OnceflowError | None:
        """The error that ends reading after an outage of more than `deadline_s`, or None."""
        return self._failure

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch. The thread closes its client afterwards. A second call does nothing."""
        self._stopped.set()

    def _watch(self) -> None:
        # Check several times within the deadline, so that one late answer does not end the job.
        interval_s = min(_INTERVAL_S_MAX, self._settings.deadline_s / 4)
        # Most readers of tests and batch jobs end before the first check.
        if self._stopped.wait(interval_s):
            return
        consumer = open_consumer(
            self._settings, self._troubles, group_id=self._group_id, client_id=self._client_id
        )
        down_since: float | None = None
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            asked_at = time.monotonic()
            reason = self._find_outage(consumer)
            # Serves the error callback.
            consumer.poll(0)
            if reason is None:
                self._troubles.clear()
                self._outage = None
                down_since, pause_s = None, interval_s
                continue
            pause_s = min(interval_s, _INTERVAL_WHEN_DOWN_S)
            # The outage began at the request: a missing answer may have taken a second to time out.
            down_since = down_since or asked_at
            self._outage = reason, down_since
            down_s = time.monotonic() - down_since
            if down_s > self._settings.deadline_s:
                self._failure = self._outage_error(reason, down_s)
                break
        close_in_time(consumer)

    def _find_outage(self, consumer: Consumer) -> str | None:
        """Return the fault, or None if every leader answers."""
        partitions = self._open_partitions()
        try:
            leaders: dict[int, tuple[str, int]] = {}
            for topic in sorted({topic for topic, _ in partitions}):
                if self._stopped.is_set():
                    return None
                metadata = consumer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
                if metadata.error is not None:
                    return f"topic {topic}: {metadata.error.str()}"
                for partition in (number for name, number in partitions if name == topic):
                    known = metadata.partitions.get(partition)
                    if known is None or known.leader < 0:
                        return f"{topic}-{partition} has no leader"
                    # The check asks only whether a broker answers, so one partition of each leader
                    # is enough.
                    leaders.setdefault(known.leader, (topic, partition))
            for topic, partition in leaders.values():
                if self._stopped.is_set():
                    return None
                consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), timeout=_ANSWER_S, cached=False
                )
        except KafkaException as error:
            return client.error_of(error).str()
        return None

    def _outage_error(self, reason: str, down_s: float) -> OnceflowError:
        if self._troubles.authentication:
            return client.make_login_error(self._settings, self._troubles.authentication)
        last = self._troubles.last
        return SourceUnavailable(
            f"Kafka at {self._settings.bootstrap_servers} has not served {self._settings.what}"
            f" for {down_s:.0f} s (deadline_s={self._settings.deadline_s:g}):"
            f" {reason}{f'; {last}' if last else ''}. Nothing is lost: the next attempt continues"
            " from the last checkpoint"
        )
