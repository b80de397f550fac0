"""The driver's requests to the brokers for partitions and offsets to read.

A checkpoint's positions belong to a topic with an id. If the topic is gone or has another id now,
the unread records are lost. That is an error. If the user accepts loss, it is a warning, and
reading starts at the first existing record.

Every request to the brokers has the source's deadline.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

from onceflow.clients.kafka.brokers import ASK_S
from onceflow.clients.kafka.topics import TopicFacts, Topics
from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable, StateIncompatible
from onceflow.sources.kafka.client import open_brokers, open_consumer
from onceflow.sources.kafka.position import PartitionPosition, gap_error
from onceflow.sources.kafka.settings import (
    EARLIEST,
    LATEST,
    AtOffsets,
    AtTime,
    Earliest,
    KafkaSettings,
    Latest,
    Offsets,
)

_Answer = TypeVar("_Answer")

_GONE_S = 3.0
"""The time in seconds for which a known topic must be missing before it counts as gone.

A broker that has just started may not know every topic yet.
"""
_LOOK_AGAIN_S = 0.2


class Catalog:
    """A client that asks the brokers about topics, partitions and offsets; a context manager."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._brokers = open_brokers(settings)
        self._topics = Topics(self._brokers)
        self._consumer: Consumer | None = None
        self._deadline = time.monotonic() + settings.deadline_s

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._consumer is not None:
            self._consumer.close()

    def restart_deadline(self) -> None:
        """Restart the deadline for later requests."""
        self._deadline = time.monotonic() + self._settings.deadline_s

    def list_topics(self, known: AbstractSet[str] = frozenset()) -> dict[str, TopicFacts]:
        """Return by name every topic that the settings name, or that their pattern matches.

        A pattern never matches Kafka's own topics, such as __consumer_offsets. A topic in `known`
        counts as missing only after `_GONE_S`.

        Raises:
            ConfigError: A named topic does not exist, or the user may not see it.
            SourceUnavailable: No broker answered before the deadline.
        """
        settings = self._settings
        if settings.topic_pattern is None:
            topics = self.find_topics(settings.topics)
            # A named topic must exist. A topic that only matches a pattern may disappear, because
            # the user has not named it.
            missing = [topic for topic in settings.topics if topic not in topics]
            if missing:
                raise self._missing_topic_error(missing[0])
            return topics
        gone_at = time.monotonic() + _GONE_S
        while True:
            names = filter(settings.reads, self._topics.list_names(until=self._deadline))
            topics = self._topics.find(names, until=self._deadline)
            # Look again for a while for a known topic that is missing; see `_GONE_S`.
            if known <= topics.keys() or time.monotonic() > gone_at:
                return {name: facts for name, facts in topics.items() if not facts.is_internal}
            time.sleep(_LOOK_AGAIN_S)

    def find_topics(self, topics: Sequence[str]) -> dict[str, TopicFacts]:
        """Return the facts of those `topics` that exist, by name.

        Raises:
            ConfigError: The user may not see a topic, or may not connect at all.
            SourceUnavailable: No broker answered before the deadline.
        """
        return self._topics.find(topics, until=self._deadline)

    def read_watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first existing offset, and the end (exclusive) of the readable records.

        Under read_committed the end is the last stable offset. It excludes records of open
        transactions and all records after them.
        """
        asked = TopicPartition(topic, partition)
        return self._ask_consumer(
            lambda consumer, timeout_s: consumer.get_watermark_offsets(
                asked, timeout=timeout_s, cached=False
            )
        )

    def find_ends(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the end of each of `partitions` that exists, like `read_watermarks`.

        Sends one request to each broker, however many partitions there are.

        Raises:
            ConfigError: The user may not read a topic, or may not connect at all.
            SourceUnavailable: A partition had no leader, or no broker answered, until the deadline.
        """
        committed = self._settings.options.get("isolation.level") != "read_uncommitted"
        return self._topics.find_ends(partitions, committed=committed, until=self._deadline)

    def find_watermarks(
        self, partitions: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the result of `read_watermarks` for many partitions, with few requests.

        Raises:
            ConfigError: The user may not read a topic, or may not connect at all.
            SourceUnavailable: A partition is gone or had no leader, or no broker answered, until
                the deadline.
        """
        starts = self._topics.find_starts(partitions, until=self._deadline)
        ends = self.find_ends(partitions)
        # Ask separately for a partition that has disappeared meanwhile: the error says what
        # happened to it.
        return {
            asked: (starts[asked], ends[asked])
            if asked in starts and asked in ends
            else self.read_watermarks(*asked)
            for asked in partitions
        }

    def find_log_ends(
        self, partitions: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the end of the readable records of each of `partitions`, and the end of its log.

        The two differ under read_committed while a transaction is open.

        Raises:
            ConfigError: The user may not read a topic, or may not connect at all.
            SourceUnavailable: A partition is gone or had no leader, or no broker answered, until
                the deadline.
        """
        # The order matters: if a stable offset that is read later is still before the end, a
        # transaction was open in between.
        ends = self._topics.find_ends(partitions, committed=False, until=self._deadline)
        readable = self.find_ends(partitions)
        log_ends: dict[tuple[str, int], tuple[int, int]] = {}
        for asked in partitions:
            if asked in readable and asked in ends:
                log_ends[asked] = (readable[asked], max(readable[asked], ends[asked]))
            else:
                # Ask separately for a partition that has disappeared meanwhile: the error says what
                # happened to it.
                end = self.read_watermarks(*asked)[1]
                log_ends[asked] = (end, end)
        return log_ends

    def find_offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset at or after `timestamp_ms`, or the end if there is none."""
        asked = [TopicPartition(topic, partition, timestamp_ms)]

        def ask(consumer: Consumer, timeout_s: float) -> int:
            [answer] = consumer.offsets_for_times(asked, timeout=timeout_s)
            if answer.error is not None:
                raise KafkaException(answer.error)
            return answer.offset

        offset = self._ask_consumer(ask)
        # librdkafka returns -1 if no record is that recent.
        return offset if offset >= 0 else self.read_watermarks(topic, partition)[1]

    def resolve_positions(self, facts: TopicFacts) -> list[PartitionPosition]:
        """Return the start of each partition of a topic, and its stop if the source is bounded.

        Raises:
            ConfigError: An explicit offset is missing, or lies beyond the end.
            OffsetOutOfRange: The record at an explicit start was deleted, and data loss is an
                error.
        """
        settings, topic, partitions = self._settings, facts.name, facts.partitions
        _check_named(settings.starting, topic, partitions, setting="starting_offsets")
        if settings.ending is not None:
            _check_named(settings.ending, topic, partitions, setting="ending_offsets")
        positions: list[PartitionPosition] = []
        watermarks = self.find_watermarks([(topic, partition) for partition in partitions])
        for partition in partitions:
            low, high = watermarks[topic, partition]
            start = self._resolve_start(topic, partition, low, high)
            stop = (
                None
                if settings.ending is None
                else max(start, self._resolve_offset(settings.ending, topic, partition, low, high))
            )
            if stop is not None and stop > high:
                raise ConfigError(
                    f"ending_offsets says {topic}-{partition} ends at {stop}, but only the offsets"
                    f" before {high} are there to be read"
                )
            positions.append(_position(facts, partition, start, stop))
        return positions

    def resolve_added_positions(
        self, facts: TopicFacts, *, partitions: Sequence[int]
    ) -> list[PartitionPosition]:
        """Return the first position of each of `partitions`, none of which has been read yet."""
        positions: list[PartitionPosition] = []
        watermarks = self.find_watermarks([(facts.name, partition) for partition in partitions])
        for partition in partitions:
            low, high = watermarks[facts.name, partition]
            # In a bounded source an added partition ends at its current end: `ending_offsets` does
            # not name it.
            stop = None if self._settings.ending is None else high
            positions.append(_position(facts, partition, low, stop))
        return positions

    def _resolve_start(self, topic: str, partition: int, low: int, high: int) -> int:
        start = self._resolve_offset(self._settings.starting, topic, partition, low, high)
        # There is nothing to read beyond the end yet. Such an offset is most likely a mistake, or
        # belongs to another cluster.
        if start > high:
            raise ConfigError(
                f"starting_offsets says {topic}-{partition} starts at {start}, but it ends at"
                f" {high}"
            )
        if start < low:
            if self._settings.fail_on_data_loss:
                raise gap_error(topic, partition, offset_next=start, low=low, high=high)
            return low
        return start

    def _resolve_offset(
        self, offsets: Offsets, topic: str, partition: int, low: int, high: int
    ) -> int:
        match offsets:
            case Earliest():
                return low
            case Latest():
                return high
            case AtTime(timestamp_ms):
                return self.find_offset_at(topic, partition, timestamp_ms)
            case AtOffsets(explicit):
                offset = explicit[topic][partition]
                # As in Spark, -2 and -1 mean the two ends. Any other number is an offset.
                return {EARLIEST: low, LATEST: high}.get(offset, offset)

    def _ask_consumer(self, question: Callable[[Consumer, float], _Answer]) -> _Answer:
        consumer = self._offsets_client()

        def ask(timeout_s: float) -> _Answer:
            try:
                return question(consumer, timeout_s)
            except KafkaException:
                consumer.poll(0)  # serves its error callback
                raise

        return self._brokers.ask(ask, self._settings.where, until=self._deadline)

    def _offsets_client(self) -> Consumer:
        if self._consumer is None:
            self._consumer = open_consumer(
                self._settings,
                self._brokers.troubles,
                group_id=self._settings.group_id or "onceflow-catalog",
                client_id="onceflow-catalog",
            )
        return self._consumer

    def _missing_topic_error(self, topic: str) -> ConfigError:
        try:
            known = self._topics.list_names(until=time.monotonic() + ASK_S)
        except SourceUnavailable:
            known = ()
        close = difflib.get_close_matches(topic, known, n=3)
        alike = f" (there: {', '.join(map(repr, close))})" if close else ""
        return ConfigError(
            f"topic {topic!r} does not exist on Kafka at {self._settings.bootstrap_servers}. If the"
            " job has read it before, it was deleted, and what was not read is gone: take it out of"
            " topic=, or create it anew and read it from its first record by"
            f" fail_on_data_loss=False. If not, correct topic={alike}, or create it"
        )


def describe_hold(
    settings: KafkaSettings, position: PartitionPosition, stable: int, end: int
) -> str:
    """Return for users which open transaction holds a reader at `position`, and what to do."""
    servers = settings.bootstrap_servers
    return (
        f"the end of an open transaction in {position} of Kafka at {servers}: records can be read"
        f" up to the last stable offset {stable} of {end}. Its producer commits or aborts it, or"
        " the broker does after its transaction.timeout.ms. If neither happens, find it by"
        f" kafka-transactions.sh --bootstrap-server {servers} find-hanging --topic"
        f" {position.topic} --partition {position.partition}, and end what that lists by the"
        " command abort"
    )


def _position(facts: TopicFacts, partition: int, start: int, stop: int | None) -> PartitionPosition:
    return PartitionPosition(facts.name, partition, start, stop, facts.topic_id, facts.cluster_id)


def _check_named(offsets: Offsets, topic: str, partitions: Sequence[int], *, setting: str) -> None:
    if not isinstance(offsets, AtOffsets):
        return
    named = offsets.offsets.get(topic, {})
    missing = sorted(set(partitions) - set(named))
    unknown = sorted(set(named) - set(partitions))
    if missing:
        raise ConfigError(
            f"{setting} says nothing about partitions {missing} of topic {topic!r}; give each an"
            " offset, or -2 for earliest or -1 for latest"
        )
    if unknown:
        raise ConfigError(
            f"{setting} names partitions {unknown} of topic {topic!r}, which has"
            f" {len(partitions)} partitions"
        )


_logger = logging.getLogger("onceflow.sources.kafka")


def find_positions(
    settings: KafkaSettings, catalog: Catalog, known: Sequence[PartitionPosition]
) -> list[PartitionPosition]:
    """Return the positions of all partitions to read: those of `known`, and new ones.

    A new partition starts at its first record, whatever `starting_offsets` says. A bounded source
    ignores new partitions, because its end was resolved for the partitions that existed at its
    start.

    Raises:
        OffsetOutOfRange: A topic of `known` is gone or was replaced, and data loss is an error.
        StateIncompatible: `known` has a topic that the source does not name.
        ConfigError: A topic that the source names does not exist.
        SourceUnavailable: The brokers did not answer within `deadline_s`.
    """
    _check_topics_are_read(settings, known)
    topics = catalog.list_topics({position.topic for position in known})
    kept = _keep_positions(settings, topics, known)
    began = {position.topic for position in known}
    read = {(position.topic, position.partition) for position in kept}
    now = list(kept)
    for topic, facts in topics.items():
        # `_keep_positions` has dropped all positions of the topic, because it was deleted and
        # created again.
        begins_anew = topic in began and not any(position.topic == topic for position in kept)
        if settings.ending is None or begins_anew:
            added = [partition for partition in facts.partitions if (topic, partition) not in read]
            now += catalog.resolve_added_positions(facts, partitions=added)
    return now


def _keep_positions(
    settings: KafkaSettings, topics: Mapping[str, TopicFacts], known: Sequence[PartitionPosition]
) -> list[PartitionPosition]:
    """Return the positions of `known` whose topic is the same, and add missing topic ids."""
    kept: list[PartitionPosition] = []
    for position in known:
        facts = topics.get(position.topic)
        if facts is not None and _is_same_topic(position, facts):
            kept.append(with_ids(position, facts))
            continue
        if settings.fail_on_data_loss:
            raise _loss_error(settings, position, facts)
        loss = _describe_loss(settings, position, facts)
        _logger.warning("continuing without the lost records: %s", loss)
    return kept


def check_not_replaced(settings: KafkaSettings, ended: Sequence[PartitionPosition]) -> None:
    """Raise an error if a topic of `ended` has been replaced; `ended` are read to their stops.

    The last records may then belong to the new topic. A topic that is gone is not an error, because
    it was read before.

    Raises:
        OffsetOutOfRange: A topic was replaced.
        SourceUnavailable: The brokers did not answer within `deadline_s`.
    """
    with Catalog(settings) as catalog:
        topics = catalog.find_topics(sorted({position.topic for position in ended}))
    for position in ended:
        facts = topics.get(position.topic)
        if facts is not None and not _is_same_topic(position, facts):
            raise _loss_error(settings, position, facts)


def with_ids(position: PartitionPosition, facts: TopicFacts) -> PartitionPosition:
    """Return `position` with the ids of `facts`. Keep its own id where `facts` has none."""
    return replace(
        position,
        topic_id=facts.topic_id or position.topic_id,
        cluster_id=facts.cluster_id or position.cluster_id,
    )


def _is_same_topic(position: PartitionPosition, facts: TopicFacts) -> bool:
    """Return True if `facts` describe the topic that was read. A missing id equals any id."""
    pairs = ((position.topic_id, facts.topic_id), (position.cluster_id, facts.cluster_id))
    return all(not old or not new or old == new for old, new in pairs) and (
        position.partition in facts.partitions
    )


def _check_topics_are_read(settings: KafkaSettings, known: Sequence[PartitionPosition]) -> None:
    for position in known:
        if not settings.reads(position.topic):
            raise StateIncompatible(
                f"the checkpoint holds offset {position.next} of {position}, and the source reads"
                f" {settings.what}: if the topic were left out now and added later, it would be"
                " read from its first record. Add it to the source; or give the source another"
                " uid, which starts at starting_offsets="
            )


def _loss_error(
    settings: KafkaSettings, position: PartitionPosition, facts: TopicFacts | None
) -> OffsetOutOfRange:
    start = "" if facts is None else ", which continues at its first record"
    return OffsetOutOfRange(
        f"{_describe_loss(settings, position, facts)}. Restore the topic, or start the job anew"
        f" under another name, or accept the loss with fail_on_data_loss=False{start}"
    )


def _describe_loss(
    settings: KafkaSettings, position: PartitionPosition, facts: TopicFacts | None
) -> str:
    where = f"{position}: offset {position.next} was to be read next"
    servers = settings.bootstrap_servers
    if facts is None:
        return f"{where}, and Kafka at {servers} has no such topic any more"
    return (
        f"{where} in topic {_describe_ids(position)}, and what Kafka at {servers} has under that"
        f" name is topic {_describe_ids(facts)} with {len(facts.partitions)} partitions: it was"
        " deleted and created again, or bootstrap_servers= leads to another cluster. It holds"
        " other records"
    )


def _describe_ids(holder: PartitionPosition | TopicFacts) -> str:
    return f"{holder.topic_id or '(id unknown)'} of cluster {holder.cluster_id or '(id unknown)'}"
