"""The brokers' information about topics.

Kafka gives each topic a unique id (KIP-516). A topic that was deleted and created again under the
same name has a different id. Brokers before 2.8 give no id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin._listoffsets import OffsetSpec

from onceflow.clients.kafka.brokers import Brokers, await_result
from onceflow.clients.kafka.client import error_of, is_denied, make_access_error

_Key = TypeVar("_Key", str, tuple[str, int])
_Answer = TypeVar("_Answer")

_LATEST = cast("Callable[[], OffsetSpec]", OffsetSpec.latest)
_EARLIEST = cast("Callable[[], OffsetSpec]", OffsetSpec.earliest)
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Sixteen zero bytes in Kafka's encoding of ids. Clients receive it from brokers without topic ids.
"""
_NOT_THERE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION})


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The current facts about one topic."""

    name: str
    partitions: tuple[int, ...]
    """The partition numbers, ascending."""
    topic_id: str = ""
    """The topic's id; empty if the broker gives none."""
    cluster_id: str = ""
    is_internal: bool = False
    replica_count: int = 0
    """The number of replicas of the partition with the fewest."""


class Topics:
    """The questions about topics, for one thread. All calls raise the errors of `Brokers.ask`."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    def list_names(self, *, until: float | None = None) -> tuple[str, ...]:
        """Return the name of every topic that this client may see."""
        admin = self._brokers.admin
        cluster = self._brokers.ask(
            lambda timeout_s: admin.list_topics(timeout=timeout_s),
            self._brokers.settings.where,
            until=until,
        )
        return tuple(sorted(cluster.topics))

    def find(self, topics: Iterable[str], *, until: float | None = None) -> dict[str, TopicFacts]:
        """Return the facts of those `topics` that exist."""
        return self._ask_each(self._describe, list(topics), _NOT_THERE, until)

    def wait_for(self, topics: Iterable[str]) -> dict[str, TopicFacts]:
        """Return the facts of `topics`. Wait for topics that the brokers do not know yet."""
        return self._ask_each(self._describe, list(topics), frozenset(), None)

    def find_ends(
        self,
        partitions: Sequence[tuple[str, int]],
        *,
        committed: bool,
        until: float | None = None,
    ) -> dict[tuple[str, int], int]:
        """Return the end of each of `partitions` that exists, with one request to each broker.

        If `committed`, the end is the last stable offset.
        """
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        question = partial(self._list_offsets, _LATEST, level)
        return self._ask_each(question, partitions, _NOT_THERE, until)

    def find_starts(
        self, partitions: Sequence[tuple[str, int]], *, until: float | None = None
    ) -> dict[tuple[str, int], int]:
        """Return the first offset of each of `partitions` that exists, like `find_ends`."""
        question = partial(self._list_offsets, _EARLIEST, IsolationLevel.READ_UNCOMMITTED)
        return self._ask_each(question, partitions, _NOT_THERE, until)

    def _ask_each(
        self,
        question: Callable[[Sequence[_Key], float], Mapping[_Key, _Answer | KafkaError]],
        keys: Sequence[_Key],
        missing: frozenset[int],
        until: float | None,
    ) -> dict[_Key, _Answer]:
        """Ask about each of `keys` until there is an answer, or an error of a code in `missing`."""
        settings, backoff = self._brokers.settings, self._brokers.begin(until)
        answers: dict[_Key, _Answer] = {}
        while keys:
            failed: dict[_Key, KafkaError] = {}
            replies = self._brokers.ask(partial(question, keys), settings.where, until=until)
            for key, reply in replies.items():
                if not isinstance(reply, KafkaError):
                    answers[key] = reply
                elif is_denied(reply.code()):
                    raise make_access_error(settings, key if isinstance(key, str) else key[0])
                elif reply.code() not in missing:
                    failed[key] = reply
            keys = list(failed)
            if keys:
                self._brokers.pause(KafkaException(failed[keys[0]]), settings.where, backoff)
        return answers

    def _describe(
        self, names: Sequence[str], timeout_s: float
    ) -> dict[str, TopicFacts | KafkaError]:
        admin = self._brokers.admin
        futures = admin.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        cluster = admin.describe_cluster(request_timeout=timeout_s)
        cluster_id = await_result(cluster, timeout_s).cluster_id or ""
        replies: dict[str, TopicFacts | KafkaError] = {}
        for name, future in futures.items():
            try:
                topic = await_result(future, timeout_s)
            except KafkaException as error:
                replies[name] = error_of(error)
                continue
            topic_id = str(topic.topic_id)
            replies[name] = TopicFacts(
                name,
                tuple(sorted(partition.id for partition in topic.partitions)),
                "" if topic_id == _NO_ID else topic_id,
                cluster_id,
                topic.is_internal,
                min((len(partition.replicas) for partition in topic.partitions), default=0),
            )
        return replies

    def _list_offsets(
        self,
        offset_spec: Callable[[], OffsetSpec],
        level: IsolationLevel,
        partitions: Sequence[tuple[str, int]],
        timeout_s: float,
    ) -> dict[tuple[str, int], int | KafkaError]:
        futures = self._brokers.admin.list_offsets(
            {TopicPartition(*partition): offset_spec() for partition in partitions},
            isolation_level=level,
            request_timeout=timeout_s,
        )
        replies: dict[tuple[str, int], int | KafkaError] = {}
        for partition, future in futures.items():
            key = (partition.topic, partition.partition)
            try:
                replies[key] = await_result(future, timeout_s).offset
            except KafkaException as error:
                replies[key] = error_of(error)
        return replies
