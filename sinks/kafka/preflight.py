"""The checks before rows go to Kafka, and the time for which Kafka keeps proofs of commits.

`Preflight` runs on the driver; `is_proof_expired` runs wherever a transaction is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from onceflow.clients.kafka import fitness
from onceflow.clients.kafka.brokers import Brokers, await_result
from onceflow.clients.kafka.client import describe_error, error_of
from onceflow.clients.kafka.topics import Topics
from onceflow.core.errors import ConfigError
from onceflow.core.spi.connector import Area, require
from onceflow.sinks.kafka.clients import open_brokers
from onceflow.sinks.kafka.record_keys import find_null_key
from onceflow.sinks.kafka.settings import MESSAGE_BYTES_MAX, KafkaSinkSettings

_TRUSTED_S = fitness.RETENTION_MINUTES_MIN * 60 / 2
"""The age up to which a proof is trusted without a query: half of the minimum retention. The other
half leaves hours for clocks that differ."""
_MARGIN_S = 3600.0
"""A proof counts as expired an hour early, because clocks of machines and brokers differ."""


def is_proof_expired(settings: KafkaSinkSettings, staged_at_s: float) -> bool:
    """Return True if Kafka may have forgotten the commit of rows staged at `staged_at_s`.

    Raises:
        SinkError: The broker cannot be asked now.
    """
    age_s = time.time() - staged_at_s
    # Check before asking the broker: every broker that passed the checks keeps young proofs.
    if age_s < _TRUSTED_S:
        return False
    minutes = retention_minutes(open_brokers(settings))
    # A broker that does not tell may have any retention; then the user must decide.
    return minutes is None or age_s > minutes * 60 - _MARGIN_S


def retention_minutes(brokers: Brokers) -> float | None:
    """Return the broker's offsets.retention.minutes, or None if the user may not read it.

    Raises:
        SinkError: No broker replied in time.
    """
    text = broker_configuration(brokers).get(fitness.RETENTION)
    return None if text is None else float(text)


def broker_configuration(brokers: Brokers) -> dict[str, str]:
    """Return the settings of one broker; empty if the user may not read them.

    Raises:
        SinkError: No broker replied in time.
    """
    return configuration(brokers, ConfigResource("BROKER", str(min(_broker_ids(brokers)))))


def _broker_ids(brokers: Brokers) -> Collection[int]:
    return brokers.ask(
        lambda timeout_s: brokers.admin.list_topics(timeout=timeout_s).brokers,
        brokers.settings.where,
    )


def configuration(brokers: Brokers, resource: ConfigResource) -> dict[str, str]:
    """Return the settings of a topic or broker; empty if the user may not read them.

    Raises:
        SinkError: No broker replied in time.
    """

    def ask(timeout_s: float) -> dict[str, str]:
        future = brokers.admin.describe_configs([resource], request_timeout=timeout_s)[resource]
        entries = await_result(future, timeout_s)
        return {name: entry.value for name, entry in entries.items() if entry.value is not None}

    try:
        return brokers.ask(ask, f"settings of {resource}")
    except ConfigError:
        # Users often may not read settings; then checks are left out. A refused password is an
        # error.
        if brokers.troubles.authentication:
            raise
        return {}


def find_compacted_topics(settings: KafkaSinkSettings) -> frozenset[str]:
    """Return the topics that are compacted, without those whose settings the user may not read.

    Raises:
        ConfigError: The broker refuses the user or the password.
        SinkError: No broker replied in time.
    """
    brokers = open_brokers(settings)
    return frozenset(
        topic
        for topic in settings.topics
        if fitness.is_compacted(configuration(brokers, ConfigResource("TOPIC", topic)))
    )


_logger = logging.getLogger("onceflow.sinks.kafka")

_BROKERS_DEFAULT = -1


@dataclass(frozen=True, slots=True)
class NewTopics:
    """The settings of topics to create; None is the broker's default."""

    partitions: int | None
    replication_factor: int | None


class Preflight:
    """The checks of one cluster, with one client."""

    def __init__(self, settings: KafkaSinkSettings) -> None:
        """Open the client; wait for no broker.

        Raises:
            ConfigError: librdkafka refuses a setting.
        """
        self._settings = settings
        self._brokers = open_brokers(settings)
        self._topics = Topics(self._brokers)

    def require_topics(self, create: NewTopics | None) -> None:
        """Check that every topic exists; create a missing one if `create` is given.

        Raises:
            ConfigError: A topic is missing, cannot be created, or is forbidden.
            SinkError: No broker replied in time.
        """
        servers, topics = self._settings.bootstrap_servers, self._settings.topics
        there = self._topics.find(topics)
        for topic in topics:
            if topic in there:
                continue
            if create is None:
                raise ConfigError(
                    f"topic {topic!r} does not exist on Kafka at {servers}. Create it:"
                    f" kafka-topics.sh --bootstrap-server {servers} --create --topic {topic}"
                    " --partitions <n>; or let the sink do it with create=True"
                )
            self._create(topic, create)

    def require_topics_fit(self, schema: pa.Schema) -> None:
        """Check that topics accept and keep records within the producer's size limit.

        A compacted topic accepts only records with keys, which rows of `schema` must then have.
        Settings that the user may not read are not checked.

        Raises:
            ConfigError: A topic does not, or can never have as many replicas as it requires.
            SinkError: No broker replied in time.
        """
        settings, broker_count = self._settings, len(_broker_ids(self._brokers))
        for topic, facts in self._topics.wait_for(settings.topics).items():
            config = configuration(self._brokers, ConfigResource("TOPIC", topic))
            area, limit = Area(f"topic {topic}"), settings.message_bytes_max
            about = f"topic {topic!r} at {settings.bootstrap_servers}"
            findings = [fitness.record_size_finding(area, config, limit, MESSAGE_BYTES_MAX)]
            if config:
                keys = find_null_key(settings, schema)
                findings.append(fitness.compaction_finding(area, config, keys))
                findings += fitness.topic_findings(area, config, facts.replica_count, broker_count)
            require(findings, about, _logger)

    def require_brokers_fit(self) -> None:
        """Check that brokers support transactions, and keep proofs of commits for a day.

        Raises:
            ConfigError: They do not.
            SinkError: No broker replied in time.
        """
        config = broker_configuration(self._brokers)
        if config:
            findings = fitness.broker_findings(Area("kafka"), config)
            require(findings, f"Kafka at {self._settings.bootstrap_servers}", _logger)

    def _create(self, topic: str, create: NewTopics) -> None:
        new = NewTopic(
            topic,
            num_partitions=create.partitions or _BROKERS_DEFAULT,
            replication_factor=create.replication_factor or _BROKERS_DEFAULT,
        )
        timeout_s = self._settings.deadline_s
        admin = self._brokers.admin
        try:
            admin.create_topics([new], operation_timeout=timeout_s)[topic].result(timeout_s)
        except KafkaException as error:
            # Another driver, or another sink of this job, may have been faster.
            if error_of(error).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise ConfigError(
                    f"topic {topic!r} cannot be created: {describe_error(error, self._settings)}"
                ) from error
        # The controller has replied; the broker receives the topic a moment later.
        self._topics.wait_for([topic])
