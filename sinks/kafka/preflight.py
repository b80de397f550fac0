"""What must hold before rows go to Kafka, and how long Kafka keeps proofs of commits.

`Preflight` runs on the driver; `is_proof_expired` wherever a transaction is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from onceflow.connectors.kafka.fitness import (
    RETENTION,
    RETENTION_MINUTES_MIN,
    broker_findings,
    record_size_finding,
    topic_findings,
)
from onceflow.core.errors import ConfigError
from onceflow.core.spi.connector import Area, require
from onceflow.sinks.kafka.clients import (
    Admin,
    TopicMetadata,
    Troubles,
    answered,
    described,
    error_of,
    open_admin,
)
from onceflow.sinks.kafka.settings import MESSAGE_BYTES_MAX, KafkaSinkSettings

_TRUSTED_S = RETENTION_MINUTES_MIN * 60 / 2
"""For how long nobody is asked: half the minimum, which leaves hours for clocks that differ."""
_MARGIN_S = 3600.0


def is_proof_expired(settings: KafkaSinkSettings, staged_at_s: float) -> bool:
    """Return whether a commit of rows staged at `staged_at_s` might have been forgotten by now.

    Raises:
        SinkError: The broker cannot be asked now.
    """
    age_s = time.time() - staged_at_s
    if age_s < _TRUSTED_S:
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
    text = broker_configuration(settings, admin, troubles).get(RETENTION)
    return None if text is None else float(text)


def broker_configuration(
    settings: KafkaSinkSettings, admin: Admin, troubles: Troubles
) -> dict[str, str]:
    """Return the settings of one broker; empty when we may not read them.

    Raises:
        SinkError: No broker answered in time.
    """
    cluster = answered(
        settings, troubles, lambda wait_s: admin.list_topics(timeout=wait_s), settings.where
    )
    broker = ConfigResource("BROKER", str(min(cluster.brokers)))
    return configuration(settings, admin, troubles, broker)


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
        """Check that every topic is there; create it if `create` says how.

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

    def require_topics_fit(self) -> None:
        """Check that topics take what passes the producer's size limit, and keep it.

        What we may not read is not checked.

        Raises:
            ConfigError: They do not, or can never have as many replicas as they demand.
            SinkError: No broker answered in time.
        """
        settings, brokers = self._settings, self._brokers()
        for topic in settings.topics:
            found = self._configuration(ConfigResource("TOPIC", topic))
            area, limit = Area(f"topic {topic}"), settings.message_bytes_max
            about = f"topic {topic!r} at {settings.bootstrap_servers}"
            findings = [record_size_finding(area, found, limit, MESSAGE_BYTES_MAX)]
            if found:
                findings += topic_findings(area, found, self._replicas(topic), brokers)
            require(findings, about, _logger)

    def require_brokers_fit(self) -> None:
        """Check that brokers carry transactions, and keep proofs of commits for a day.

        Raises:
            ConfigError: They do not.
            SinkError: No broker answered in time.
        """
        settings = self._settings
        found = broker_configuration(settings, self._admin, self._troubles)
        if found:
            findings = broker_findings(Area("kafka"), found)
            require(findings, f"Kafka at {settings.bootstrap_servers}", _logger)

    def _brokers(self) -> int:
        def ask(wait_s: float) -> int:
            return len(self._admin.list_topics(timeout=wait_s).brokers)

        return self._asked(ask, "its brokers")

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
