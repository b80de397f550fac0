"""Which partitions are read from where, and what a checkpoint's positions mean by what brokers say.

A topic is the one of the checkpoint if it has its id. One of another id, or none, is the loss of
what was to be read: an error by name, or, where loss is accepted, a warning and the first record of
what is there.

Runs on the driver. Every question has the source's deadline.
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

from onceflow.connectors.kafka.brokers import ASK_S
from onceflow.connectors.kafka.topics import TopicFacts, Topics
from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable, StateIncompatible
from onceflow.sources.kafka.client import open_brokers, open_consumer
from onceflow.sources.kafka.position import PartitionPosition, gap_message
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
"""A broker that has just started may not have heard of every topic yet."""
_LOOK_AGAIN_S = 0.2


class Catalog:
    """A connection to ask with; a context manager."""

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
        """Give the brokers the whole deadline again, for what is asked from now on."""
        self._deadline = time.monotonic() + self._settings.deadline_s

    def topics(self, known: AbstractSet[str] = frozenset()) -> dict[str, TopicFacts]:
        """Return every topic that the settings name, or that their pattern matches, by name.

        A pattern matches no topic of Kafka's own, such as __consumer_offsets. One that is `known`
        to have been there is missing only when it has been so for a while.

        Raises:
            ConfigError: One that is named does not exist, or we may not see it.
            SourceUnavailable: No broker answered before the deadline.
        """
        settings = self._settings
        if settings.topic_pattern is None:
            found = self.described(settings.topics)
            missing = [topic for topic in settings.topics if topic not in found]
            if missing:
                raise self._missing(missing[0])
            return found
        gone_at = time.monotonic() + _GONE_S
        while True:
            names = filter(settings.reads, self._topics.list_names(until=self._deadline))
            found = self._topics.find(names, until=self._deadline)
            if known <= found.keys() or time.monotonic() > gone_at:
                return {name: facts for name, facts in found.items() if not facts.is_internal}
            time.sleep(_LOOK_AGAIN_S)

    def described(self, topics: Sequence[str]) -> dict[str, TopicFacts]:
        """Return those of `topics` that exist.

        Raises:
            ConfigError: We may not see one, or are refused altogether.
            SourceUnavailable: No broker answered before the deadline.
        """
        return self._topics.find(topics, until=self._deadline)

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset that is left and the end, exclusive, of what may be read.

        Under read_committed the end is the last stable offset: what open transactions hold, and
        everything behind it, is not counted.
        """
        asked = TopicPartition(topic, partition)
        return self._ask_consumer(
            lambda consumer, timeout_s: consumer.get_watermark_offsets(
                asked, timeout=timeout_s, cached=False
            )
        )

    def ends(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the end of each of `partitions` that exists, as `watermarks` means it.

        One question to each broker, whatever the number of partitions.

        Raises:
            ConfigError: We may not read a topic, or are refused altogether.
            SourceUnavailable: Some had no leader, or no broker answered, before the deadline.
        """
        committed = self._settings.options.get("isolation.level") != "read_uncommitted"
        return self._topics.find_ends(partitions, committed=committed, until=self._deadline)

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset at or after `timestamp_ms`; the end where there is none."""
        asked = [TopicPartition(topic, partition, timestamp_ms)]

        def ask(consumer: Consumer, timeout_s: float) -> int:
            [answer] = consumer.offsets_for_times(asked, timeout=timeout_s)
            if answer.error is not None:
                raise KafkaException(answer.error)
            return answer.offset

        offset = self._ask_consumer(ask)
        return offset if offset >= 0 else self.watermarks(topic, partition)[1]

    def positions(self, facts: TopicFacts) -> list[PartitionPosition]:
        """Return the resolved start, and stop if bounded, of each partition of a topic.

        Raises:
            ConfigError: An explicit offset is missing, or lies beyond the end.
            OffsetOutOfRange: An explicit start was deleted, and data loss is an error.
        """
        settings, topic, partitions = self._settings, facts.name, facts.partitions
        _check_named(settings.starting, topic, partitions, setting="starting_offsets")
        if settings.ending is not None:
            _check_named(settings.ending, topic, partitions, setting="ending_offsets")
        found: list[PartitionPosition] = []
        for partition in partitions:
            low, high = self.watermarks(topic, partition)
            start = self._start(topic, partition, low, high)
            stop = (
                None
                if settings.ending is None
                else max(start, self._offset(settings.ending, topic, partition, low, high))
            )
            if stop is not None and stop > high:
                raise ConfigError(
                    f"ending_offsets says {topic}-{partition} ends at {stop}, but only the offsets"
                    f" before {high} are there to be read"
                )
            found.append(_position(facts, partition, start, stop))
        return found

    def added_positions(
        self, facts: TopicFacts, *, partitions: Sequence[int]
    ) -> list[PartitionPosition]:
        """Return positions from the first record of `partitions`, of which none has been read."""
        found: list[PartitionPosition] = []
        for partition in partitions:
            low, high = self.watermarks(facts.name, partition)
            stop = None if self._settings.ending is None else high
            found.append(_position(facts, partition, low, stop))
        return found

    def _start(self, topic: str, partition: int, low: int, high: int) -> int:
        start = self._offset(self._settings.starting, topic, partition, low, high)
        if start > high:
            raise ConfigError(
                f"starting_offsets says {topic}-{partition} starts at {start}, but it ends at"
                f" {high}"
            )
        if start < low:
            if self._settings.fail_on_data_loss:
                raise OffsetOutOfRange(
                    gap_message(topic, partition, wanted=start, low=low, high=high)
                )
            return low
        return start

    def _offset(self, offsets: Offsets, topic: str, partition: int, low: int, high: int) -> int:
        match offsets:
            case Earliest():
                return low
            case Latest():
                return high
            case AtTime(timestamp_ms):
                return self.offset_at(topic, partition, timestamp_ms)
            case AtOffsets(explicit):
                offset = explicit[topic][partition]
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

    def _missing(self, topic: str) -> ConfigError:
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


def positions_now(
    settings: KafkaSettings, catalog: Catalog, known: Sequence[PartitionPosition]
) -> list[PartitionPosition]:
    """Return the position of every partition to read: those of `known`, and the new ones.

    A new partition stands at its first record, whatever `starting_offsets` says. A bounded source
    takes none: where it ends was resolved for the partitions that there were when it began.

    Raises:
        OffsetOutOfRange: A topic of `known` is gone or another one, and data loss is an error.
        StateIncompatible: `known` has a topic that the source does not name.
        ConfigError: A topic that the source names does not exist.
        SourceUnavailable: The brokers did not answer within `deadline_s`.
    """
    _check_read(settings, known)
    topics = catalog.topics({position.topic for position in known})
    kept = _kept(settings, topics, known)
    began = {position.topic for position in known}
    read = {(position.topic, position.partition) for position in kept}
    now = list(kept)
    for topic, facts in topics.items():
        begins_anew = topic in began and not any(position.topic == topic for position in kept)
        if settings.ending is None or begins_anew:
            added = [partition for partition in facts.partitions if (topic, partition) not in read]
            now += catalog.added_positions(facts, partitions=added)
    return now


def _kept(
    settings: KafkaSettings, topics: Mapping[str, TopicFacts], known: Sequence[PartitionPosition]
) -> list[PartitionPosition]:
    """Return those of `known` that mean what they meant, with the ids that they had not yet."""
    kept: list[PartitionPosition] = []
    for position in known:
        facts = topics.get(position.topic)
        if facts is not None and _is_the_same(position, facts):
            kept.append(with_ids(position, facts))
            continue
        text = _loss_text(settings, position, facts)
        if settings.fail_on_data_loss:
            raise OffsetOutOfRange(text)
        _logger.warning("going on without what was to be read: %s", text)
    return kept


def with_ids(position: PartitionPosition, facts: TopicFacts) -> PartitionPosition:
    """Return `position` as one in the topic of `facts`; ids that are not told are kept."""
    return replace(
        position,
        topic_id=facts.topic_id or position.topic_id,
        cluster_id=facts.cluster_id or position.cluster_id,
    )


def _is_the_same(position: PartitionPosition, facts: TopicFacts) -> bool:
    """Return whether `facts` are of the topic that was read; ids that are not told say nothing."""
    pairs = ((position.topic_id, facts.topic_id), (position.cluster_id, facts.cluster_id))
    return all(not old or not new or old == new for old, new in pairs) and (
        position.partition in facts.partitions
    )


def _check_read(settings: KafkaSettings, known: Sequence[PartitionPosition]) -> None:
    for position in known:
        if not settings.reads(position.topic):
            raise StateIncompatible(
                f"the checkpoint holds offset {position.next} of {position}, and the source reads"
                f" {settings.what}: left out now, the topic would be read from its first record if"
                " it came back. Name it; or give the source another uid, which starts where"
                " starting_offsets= says"
            )


def _loss_text(
    settings: KafkaSettings, position: PartitionPosition, facts: TopicFacts | None
) -> str:
    where = f"{position}: offset {position.next} was to be read next"
    servers = settings.bootstrap_servers
    advice = (
        "Restore the topic, or start the job anew under another name, or accept the loss with"
        " fail_on_data_loss=False"
    )
    if facts is None:
        return f"{where}, and Kafka at {servers} has no such topic any more. {advice}"
    return (
        f"{where} in topic {_ids(position)}, and what Kafka at {servers} has under that name is"
        f" topic {_ids(facts)} with {len(facts.partitions)} partitions: it was deleted and created"
        f" again, or bootstrap_servers= leads elsewhere. What it holds are other records. {advice},"
        " which goes on at its first record"
    )


def _ids(one: PartitionPosition | TopicFacts) -> str:
    return f"{one.topic_id or '(no id told)'} of cluster {one.cluster_id or '(no id told)'}"
