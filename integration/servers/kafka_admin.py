"""What tests and the demo ask of a broker's administration, typed at this edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from onceflow.integration.servers.process import ServerError

if TYPE_CHECKING:
    from confluent_kafka.admin._metadata import ClusterMetadata


_ANSWER_TIMEOUT_S = 2.0
_POLL_S = 0.02
_LATEST = cast("Callable[[], object]", OffsetSpec.latest)


class KafkaAdmin(Protocol):
    """The part of confluent-kafka's AdminClient that is used here.

    Hold the client by a name until its futures are done: one that is collected gives them up.
    """

    def list_topics(self, topic: str | None = ..., *, timeout: float) -> ClusterMetadata:
        """Return brokers, topics and leaders as the broker knows them."""
        ...

    def create_topics(
        self, new_topics: Sequence[NewTopic], *, operation_timeout: float
    ) -> dict[str, Future[None]]:
        """Create topics; one future each."""
        ...

    def delete_topics(
        self, topics: Sequence[str], *, operation_timeout: float
    ) -> dict[str, Future[None]]:
        """Delete topics; one future each."""
        ...

    def list_offsets(
        self,
        topic_partition_offsets: Mapping[TopicPartition, object],
        *,
        request_timeout: float,
    ) -> dict[TopicPartition, Future[object]]:
        """Ask the leader of each partition for an offset; one future each."""
        ...


def admin_client(bootstrap_servers: str) -> KafkaAdmin:
    """Return an admin client that retries fast and prints nothing while the broker is down."""
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap_servers,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "socket.connection.setup.timeout.ms": 2000,
            "log_level": 0,
        }
    )
    return cast("KafkaAdmin", client)


def create_topic(
    bootstrap_servers: str,
    name: str,
    partitions: int,
    *,
    config: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 20.0,
) -> None:
    """Return once the new topic `name` has a leader for each of its partitions.

    Raises:
        ServerError: It exists already, or was not there in time.
    """
    admin = admin_client(bootstrap_servers)
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
    future = admin.create_topics([topic], operation_timeout=timeout_s)[name]
    deadline = time.monotonic() + timeout_s
    _await(future, f"topic {name} could not be created", timeout_s)
    # The controller has answered; the broker learns of its leadership a moment later.
    while not leaders_answer(admin, {name: partitions}):
        if time.monotonic() > deadline:
            raise ServerError(f"topic {name} has no leader {timeout_s:g} s after its creation")
        time.sleep(_POLL_S)


def leaders_answer(admin: KafkaAdmin, partitions: Mapping[str, int]) -> bool:
    """Return whether every partition of `partitions` (topic -> count) is served by its leader."""
    asked = {
        TopicPartition(topic, partition): _LATEST()
        for topic, count in partitions.items()
        for partition in range(count)
    }
    if not asked:
        return True
    answers = admin.list_offsets(asked, request_timeout=_ANSWER_TIMEOUT_S)
    try:
        for answer in answers.values():
            answer.result(_ANSWER_TIMEOUT_S + 1)
    except (KafkaException, TimeoutError):
        return False
    return True


def delete_topics(bootstrap_servers: str, names: Sequence[str], *, timeout_s: float = 20.0) -> None:
    """Return once the broker has taken the deletion of every topic of `names`.

    Raises:
        ServerError: One does not exist, or the broker did not answer in time.
    """
    admin = admin_client(bootstrap_servers)
    for name, future in admin.delete_topics(names, operation_timeout=timeout_s).items():
        _await(future, f"topic {name} could not be deleted", timeout_s)


def _await(future: Future[None], failure: str, timeout_s: float) -> None:
    try:
        future.result(timeout_s)
    except (KafkaException, TimeoutError) as error:
        cause = error.args[0] if error.args else error
        reason = cause.str() if isinstance(cause, KafkaError) else str(cause)
        raise ServerError(f"{failure}: {reason}") from error
