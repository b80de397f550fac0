"""The checks of `onceflow doctor` whether brokers, topics and settings suit a job."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from onceflow.clients.kafka import client, fitness
from onceflow.clients.kafka.settings import KafkaCluster
from onceflow.core.spi.connector import Area, Finding, Questions, ServerAccess
from onceflow.sources.kafka.settings import RULES

CONNECT_TIMEOUT_S = 5.0

_GROUP_TRY_S = 1.0
_MAY_PASS = (
    KafkaError._TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
)
_ANY_TOPIC = "__consumer_offsets"
"""The topic of the group's check if the user names no topic; it need not exist."""
_CREATE = "kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions {n}"
_ALLOW = (
    "kafka-acls.sh --bootstrap-server {servers} --add --allow-principal User:<name>"
    " --operation {operation} --{kind} {name}"
)


def questions_of_kafka(access: ServerAccess, topics: Sequence[str], parallelism: int) -> Questions:
    """Return the function that examines the cluster, topics, permissions and settings.

    With the option `group.id` it also checks whether the user may read that group's offsets.

    Raises:
        ConfigError: An option is not for users to set, or the client refuses it.
    """
    return _Examination(access, tuple(topics), parallelism).examine


class _Examination:
    def __init__(self, access: ServerAccess, topics: tuple[str, ...], parallelism: int) -> None:
        options = dict(access.options)
        self._group_id = options.pop("group.id", None)
        self._servers = access.url.removeprefix("kafka://")
        self._cluster = KafkaCluster(
            bootstrap_servers=self._servers,
            deadline_s=access.timeout_s * 0.8,
            options=RULES.accept(options),
        )
        self._topics = topics
        self._parallelism = parallelism
        self._area = Area("kafka")
        self._troubles = client.ClientTroubles(self._cluster)
        self._deadline = time.monotonic() + self._cluster.deadline_s
        defaults = {"socket.connection.setup.timeout.ms": 5_000, "log_level": 0}
        self._config = client.client_config(
            self._cluster, "onceflow-doctor", defaults, self._troubles
        )
        self._admin = cast("Any", client.open_client(AdminClient, self._config, self._cluster))

    def examine(self) -> list[Finding]:
        area, servers = self._area, self._servers
        refusals = [refusal for server in servers.split(",") if (refusal := _refusal(server))]
        # One reachable broker is enough: it names the others.
        if len(refusals) == len(servers.split(",")):
            return [
                area.problem(
                    "; ".join(refusals),
                    "a broker that can be reached from here",
                    "start it; see its address, listeners, advertised.listeners and the firewall",
                )
            ]
        try:
            cluster = self._admin.list_topics(timeout=self._remaining_s())
        except KafkaException as error:
            self._admin.poll(0)  # serves the error callback, which notes the client's own troubles
            reason = self._troubles.last or self._text(error)
            return [
                area.problem(
                    f"{servers} accepts connections and no broker answers: {reason}",
                    "a broker that answers: check protocol and credentials, and that it is"
                    " not paused",
                    "security.protocol, sasl.* and ssl.* go into --kafka-options FILE; see"
                    " advertised.listeners, which clients connect to next",
                )
            ]
        brokers: dict[int, Any] = cluster.brokers
        findings = [area.ok(f"{len(brokers)} broker(s), cluster {cluster.cluster_id}")]
        for topic in self._topics:
            findings += self._examine_topic(topic, cluster.topics.get(topic), len(brokers))
        if self._group_id is not None:
            findings += self._examine_group(self._group_id)
        return [*findings, *self._examine_settings(next(iter(brokers)), len(brokers))]

    def _examine_topic(self, topic: str, description: Any, brokers: int) -> list[Finding]:
        servers, parallelism = self._servers, self._parallelism
        area = Area(f"topic {topic}")
        if description is None or description.error is not None:
            code = description.error.code() if description is not None else None
            if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return [self._make_denial(area, "Describe", "topic", topic)]
            create = _CREATE.format(servers=servers, topic=topic, n=max(parallelism, 1))
            return [area.problem("it does not exist", "the topic", create)]
        partitions: dict[int, Any] = description.partitions
        leaderless = sorted(
            number for number, partition in partitions.items() if partition.leader < 0
        )
        replicas = min(len(partition.replicas) for partition in partitions.values())
        findings = [area.ok(f"{len(partitions)} partitions, {replicas} replica(s)")]
        if leaderless:
            findings.append(
                area.problem(
                    f"partitions {leaderless} have no leader",
                    "a leader for every partition",
                    f"start the brokers that hold them: kafka-topics.sh --bootstrap-server"
                    f" {servers} --describe --topic {topic}",
                )
            )
        if len(partitions) < parallelism:
            findings.append(
                area.warning(
                    f"{len(partitions)} partitions for a parallelism of {parallelism}",
                    "a partition for every slot; otherwise some slots read nothing",
                    f"kafka-topics.sh --bootstrap-server {servers} --alter --topic {topic}"
                    f" --partitions {parallelism}",
                )
            )
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            findings += fitness.topic_findings(area, self._read_config(resource), replicas, brokers)
        except (KafkaException, TimeoutError) as error:
            unread = f"its settings cannot be read: {self._text(error)}"
            findings.append(area.warning(unread, "", ""))
        return [*findings, *self._check_permissions(area, topic)]

    def _check_permissions(self, area: Area, topic: str) -> list[Finding]:
        try:
            futures = self._admin.describe_topics(
                TopicCollection([topic]),
                include_authorized_operations=True,
                request_timeout=self._remaining_s(),
            )
            operations: list[AclOperation] | None = self._await_answer(
                futures[topic]
            ).authorized_operations
        except (KafkaException, TimeoutError) as error:
            return [area.warning(f"permissions cannot be read: {self._text(error)}", "", "")]
        if operations is None:
            return []
        names = {operation.name for operation in operations}
        findings = [
            self._make_denial(area, operation.capitalize(), "topic", topic)
            for operation in ("READ",)
            if operation not in names
        ]
        if not findings:
            both = "read and write" if "WRITE" in names else "read, not write"
            findings.append(area.ok(f"allowed to {both}"))
        return findings

    def _examine_group(self, group: str) -> list[Finding]:
        area = Area(f"group {group}")
        topic = self._topics[0] if self._topics else _ANY_TOPIC
        # Ask in the same way as a source. The admin client's request for a group gives up while the
        # coordinator is starting, and has been seen to end the process.
        consumer = Consumer({**self._config, "group.id": group})
        try:
            error = self._find_offset_refusal(consumer, TopicPartition(topic, 0))
        finally:
            consumer.close()
        match error.code() if error is not None else None:
            # The examination of the topic itself reports whether the user may read it.
            case None | KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return [area.ok("its offsets may be read")]
            case KafkaError.GROUP_AUTHORIZATION_FAILED:
                return [self._make_denial(area, "Read", "group", group)]
            case _:
                return [
                    area.problem(
                        f"its coordinator does not answer: {self._hide_secrets(str(error))}",
                        "a coordinator",
                        "see the topic __consumer_offsets: its replication factor must not be over"
                        " the number of brokers",
                    )
                ]

    def _find_offset_refusal(
        self, consumer: Consumer, partition: TopicPartition
    ) -> KafkaError | None:
        """Return the error that prevents reading a group's offsets, or None if they can be read."""
        # Use half of the time: the later questions need some, too.
        deadline = time.monotonic() + self._remaining_s() / 2
        while True:
            try:
                consumer.committed([partition], timeout=_GROUP_TRY_S)
            except KafkaException as raised:
                error = cast("KafkaError", raised.args[0])
            else:
                return None
            # librdkafka repeats the request for a forbidden group: `committed` only times out, and
            # the refusal arrives as an event.
            reported = message.error() if (message := consumer.poll(0)) is not None else None
            if reported is not None and reported.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                return reported
            if time.monotonic() > deadline or error.code() not in _MAY_PASS:
                return error

    def _examine_settings(self, broker: int, brokers: int) -> list[Finding]:
        resource = ConfigResource(ResourceType.BROKER, str(broker))
        try:
            value = self._read_config(resource)
        except (KafkaException, TimeoutError) as error:
            return [
                self._area.warning(
                    f"the broker's settings cannot be read: {self._text(error)}",
                    "only for this check",
                    _ALLOW.format(
                        servers=self._servers,
                        operation="DescribeConfigs",
                        kind="cluster",
                        name="",
                    ).strip(),
                )
            ]
        return [
            *fitness.as_far_as_known(fitness.broker_findings(self._area, value)),
            *fitness.replication_findings(self._area, value, brokers),
        ]

    def _read_config(self, resource: ConfigResource) -> fitness.KafkaConfig:
        futures = self._admin.describe_configs([resource], request_timeout=self._remaining_s())
        entries: dict[str, Any] = self._await_answer(futures[resource])
        return {name: entry.value for name, entry in entries.items()}

    def _make_denial(self, area: Area, operation: str, kind: str, name: str) -> Finding:
        allow = _ALLOW.format(servers=self._servers, operation=operation, kind=kind, name=name)
        return area.problem(f"{operation} is not allowed", f"{operation} on {kind} {name}", allow)

    def _await_answer(self, future: Future[Any]) -> Any:
        return future.result(timeout=self._remaining_s())

    def _remaining_s(self) -> float:
        return max(0.5, self._deadline - time.monotonic())

    def _text(self, error: BaseException) -> str:
        known = error.args[0] if error.args else error
        return self._hide_secrets(
            known.str() if isinstance(known, KafkaError) else str(error) or "no answer"
        )

    def _hide_secrets(self, text: str) -> str:
        return client.hide_secrets(text, self._cluster.options)


def _refusal(server: str) -> str:
    """Return the reason why host:port cannot be connected to, or an empty string if it can."""
    host, _, port = server.strip().rpartition(":")
    if not host or not port.isdigit():
        return f"{server!r} is not host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"no connection to {server}: {error.strerror or error}"
    return ""
