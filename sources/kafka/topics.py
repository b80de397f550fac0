"""What topics there are, how many partitions each has, and which topic of that name it is.

Kafka gives each topic an id that no other topic ever has (KIP-516): one that was deleted and
created again under its name has another. Brokers before 2.8 give none.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from onceflow.sources.kafka.client import ClientTroubles, error_of, open_admin
from onceflow.sources.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from confluent_kafka.admin._cluster import DescribeClusterResult
    from confluent_kafka.admin._metadata import ClusterMetadata
    from confluent_kafka.admin._topic import TopicDescription

_Answer = TypeVar("_Answer")

_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Sixteen zero bytes, as Kafka writes ids: what a client is told by a broker that has none."""
_MARGIN_S = 1.0
"""By how much a request's own deadline, which has the better error, comes before ours."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """One topic as of now."""

    name: str
    partitions: tuple[int, ...]
    """Ascending."""
    topic_id: str = ""
    """Empty when the broker gives none."""
    cluster_id: str = ""
    is_internal: bool = False


class _Admin(Protocol):
    """The part of confluent-kafka's AdminClient that is used here."""

    def list_topics(self, *, timeout: float) -> ClusterMetadata: ...

    def describe_topics(
        self, topics: TopicCollection, *, request_timeout: float
    ) -> Mapping[str, Future[TopicDescription]]: ...

    def describe_cluster(self, *, request_timeout: float) -> Future[DescribeClusterResult]: ...

    def poll(self, timeout: float) -> int: ...


class TopicsClient:
    """A client that asks about topics. One thread; each call is one question to the brokers."""

    def __init__(self, settings: KafkaSettings, troubles: ClientTroubles) -> None:
        self._admin = cast("_Admin", open_admin(settings, troubles, client_id="onceflow-topics"))

    def names(self, timeout_s: float) -> tuple[str, ...]:
        """Return the name of every topic that this client may see.

        Raises:
            KafkaException: No broker answered.
        """
        return tuple(sorted(self._admin.list_topics(timeout=timeout_s).topics))

    def describe(
        self, topics: Iterable[str], timeout_s: float
    ) -> dict[str, TopicFacts | KafkaError]:
        """Return what each of `topics` is, or why the broker does not say.

        Raises:
            KafkaException: No broker answered.
        """
        names = list(topics)
        if not names:
            return {}
        told = self._admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)
        cluster = self._admin.describe_cluster(request_timeout=timeout_s)
        cluster_id = _result(cluster, timeout_s).cluster_id or ""
        found: dict[str, TopicFacts | KafkaError] = {}
        for name, future in told.items():
            try:
                topic = _result(future, timeout_s)
            except KafkaException as error:
                found[name] = error_of(error)
                continue
            topic_id = str(topic.topic_id)
            found[name] = TopicFacts(
                name,
                tuple(sorted(partition.id for partition in topic.partitions)),
                "" if topic_id == _NO_ID else topic_id,
                cluster_id,
                topic.is_internal,
            )
        return found

    def serve(self, timeout_s: float) -> None:
        """Serve the error callback, which alone hears of a refused password."""
        self._admin.poll(timeout_s)


def _result(future: Future[_Answer], timeout_s: float) -> _Answer:
    try:
        return future.result(timeout_s + _MARGIN_S)
    except concurrent.futures.TimeoutError as error:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")) from error
