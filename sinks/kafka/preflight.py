"""What must hold before rows go to Kafka, and how long Kafka keeps proofs of commits.

`Preflight` runs on the driver; `is_proof_expired` wherever a transaction is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from onceflow.core.errors import ConfigError
from onceflow.sinks.kafka.clients import (
    Admin,
    TopicMetadata,
    Troubles,
    answered,
    described,
    error_of,
    open_admin,
)
from onceflow.sinks.kafka.settings import MESSAGE_BYTES_MAX, KafkaSinkSettings, StaleRows

RETENTION_MINUTES_MIN = 24 * 60
"""What `open` demands of the broker; its default is a week, and was a day before Kafka 2.0."""

_TRUSTED_S = RETENTION_MINUTES_MIN * 60 / 2
"""For how long nobody is asked: half the minimum, which leaves hours for clocks that differ."""
_MARGIN_S = 3600.0
_RETENTION = "offsets.retention.minutes"


def is_proof_expired(settings: KafkaSinkSettings, staged_at_s: float) -> bool:
    """Return whether a commit of rows staged at `staged_at_s` might have been forgotten by now.

    Always false where the user said to produce such rows.

    Raises:
        SinkError: The broker cannot be asked now.
    """
    age_s = time.time() - staged_at_s
    if age_s < _TRUSTED_S or settings.stale_rows is StaleRows.PRODUCE:
        return False
    troubles = Troubles(settings)
    minutes = retention_minutes(settings, open_admin(settings, troubles), troubles)
    return minutes is None or age_s > minutes * 60 - _MARGIN_S


def retention_minutes(
    settings: KafkaSinkSettings, admin: Admin, troubles: Troubles
) -> float | None:
    """Return the broker's offsets.retention.minutes; None when we may not read it.

    Raises:
        SinkError: No broker answered in time.
    """
    cluster = answered(
        settings, troubles, lambda wait_s: admin.list_topics(timeout=wait_s), settings.where
    )
    broker = ConfigResource("BROKER", str(min(cluster.brokers)))
    text = configuration(settings, admin, troubles, broker).get(_RETENTION)
    return None if text is None else float(text)


def configuration(
    settings: KafkaSinkSettings, admin: Admin, troubles: Troubles, resource: ConfigResource
) -> dict[str, str]:
    """Return the settings of a topic or broker; empty when we may not read them.

    Raises:
        SinkError: No broker answered in time.
    """

    def ask(timeout_s: float) -> dict[str, str]:
        future = admin.describe_configs([resource], request_timeout=timeout_s)[resource]
        entries = future.result(timeout_s + 1)
        return {name: entry.value for name, entry in entries.items() if entry.value is not None}

    try:
        return answered(settings, troubles, ask, f"settings of {resource}")
    except ConfigError:
        if troubles.authentication:
            raise
        return {}


_logger = logging.getLogger("onceflow.sinks.kafka")

_T = TypeVar("_T")
_BROKERS_DEFAULT = -1


@dataclass(frozen=True, slots=True)
class NewTopics:
    """How missing topics are created; None is the broker's default."""

    partitions: int | None
    replication_factor: int | None


class Preflight:
    """The checks of one cluster, with one client."""

    def __init__(self, settings: KafkaSinkSettings) -> None:
        """Open the client; waits for no broker.

        Raises:
            ConfigError: librdkafka refuses a setting.
        """
        self._settings = settings
        self._troubles = Troubles(settings)
        self._admin: Admin = open_admin(settings, self._troubles)

    def require_topics(self, create: NewTopics | None) -> None:
        """Return when every topic is there, created if `create` says how.

        Raises:
            ConfigError: One is missing, cannot be created, or is forbidden.
            SinkError: No broker answered in time.
        """
        for topic in self._settings.topics:
            if not self._exists(topic):
                if create is None:
                    raise ConfigError(
                        f"topic {topic!r} does not exist on Kafka at"
                        f" {self._settings.bootstrap_servers}. Create it: kafka-topics.sh"
                        f" --bootstrap-server {self._settings.bootstrap_servers} --create --topic"
                        f" {topic} --partitions <n>; or let the sink do it with create=True"
                    )
                self._create(topic, create)

    def require_capacity(self) -> None:
        """Return when what passes the producer's size limit passes the topics' too.

        Otherwise a row is found too large only after its checkpoint was decided. What we may not
        read is not checked.

        Raises:
            ConfigError: It would not, or a topic can never have as many replicas as it demands.
            SinkError: No broker answered in time.
        """
        limit = self._settings.message_bytes_max
        for topic in self._settings.topics:
            found = self._configuration(ConfigResource("TOPIC", topic))
            accepted = int(found.get("max.message.bytes", limit))
            if accepted < limit:
                raise ConfigError(
                    f"topic {topic!r} takes records of {accepted} bytes (max.message.bytes) and the"
                    f" sink lets {limit} pass: give options={{'{MESSAGE_BYTES_MAX}': {accepted}}},"
                    f" or raise it: kafka-configs.sh --bootstrap-server"
                    f" {self._settings.bootstrap_servers} --alter --topic {topic} --add-config"
                    f" max.message.bytes={limit}"
                )
            self._require_replicas(topic, found)

    def require_retention(self) -> None:
        """Return when the broker keeps proofs of commits for a day at least.

        Raises:
            ConfigError: It does not.
            SinkError: No broker answered in time.
        """
        minutes = retention_minutes(self._settings, self._admin, self._troubles)
        if minutes is not None and minutes < RETENTION_MINUTES_MIN:
            raise ConfigError(
                f"Kafka at {self._settings.bootstrap_servers} forgets offsets, by which commits are"
                f" proven, after {minutes:g} minutes, and the sink needs {RETENTION_MINUTES_MIN}:"
                f" set offsets.retention.minutes={RETENTION_MINUTES_MIN} on the brokers"
            )

    def _require_replicas(self, topic: str, found: Mapping[str, str]) -> None:
        in_sync = int(found.get("min.insync.replicas", 1))
        replicas = self._replicas(topic)
        if replicas < in_sync:
            raise ConfigError(
                f"topic {topic!r} has {replicas} replicas and demands {in_sync} in sync"
                " (min.insync.replicas): it takes no record. Lower the one or raise the other"
            )
        if replicas > 1 and in_sync == 1:
            _logger.warning(
                "topic %r has %d replicas and min.insync.replicas=1: a record that only its leader"
                " has counts as written, and dies with it. Set min.insync.replicas=2",
                topic,
                replicas,
            )

    def _replicas(self, topic: str) -> int:
        partitions = self._metadata(topic).partitions.values()
        return min(len(getattr(partition, "replicas", ())) for partition in partitions)

    def _exists(self, topic: str) -> bool:
        error = self._metadata(topic).error
        if error is None:
            return True
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        raise ConfigError(f"topic {topic!r} at {self._settings.bootstrap_servers}: {error.str()}")

    def _create(self, topic: str, create: NewTopics) -> None:
        new = NewTopic(
            topic,
            num_partitions=create.partitions or _BROKERS_DEFAULT,
            replication_factor=create.replication_factor or _BROKERS_DEFAULT,
        )
        timeout_s = self._settings.deadline_s
        try:
            self._admin.create_topics([new], operation_timeout=timeout_s)[topic].result(timeout_s)
        except KafkaException as error:
            if error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ConfigError(
                    f"topic {topic!r} cannot be created: {described(error, self._settings)}"
                ) from error
        # The controller has answered; the broker learns of it a moment later.
        self._asked(lambda wait_s: self._led(topic, wait_s), f"topic {topic!r}, just created")

    def _led(self, topic: str, wait_s: float) -> bool:
        found = self._admin.list_topics(topic, timeout=wait_s).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        return True

    def _metadata(self, topic: str) -> TopicMetadata:
        def ask(wait_s: float) -> TopicMetadata:
            return self._admin.list_topics(topic, timeout=wait_s).topics[topic]

        return self._asked(ask, f"topic {topic!r}")

    def _configuration(self, resource: ConfigResource) -> dict[str, str]:
        return configuration(self._settings, self._admin, self._troubles, resource)

    def _asked(self, ask: Callable[[float], _T], what: str) -> _T:
        text = f"{what} at {self._settings.bootstrap_servers}"
        return answered(self._settings, self._troubles, ask, text)
