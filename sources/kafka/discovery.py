"""From the positions of a checkpoint to those that are read from now on.

A topic is the one of the checkpoint if it has its id. One of another id, or none, is the loss of
what was to be read: an error by name, or, where loss is accepted, a warning and the first record of
what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onceflow.core.errors import OffsetOutOfRange, StateIncompatible
from onceflow.sources.kafka.catalog import Catalog, TopicFacts
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.settings import KafkaSettings

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
    _check_named(settings, known)
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


def _check_named(settings: KafkaSettings, known: Sequence[PartitionPosition]) -> None:
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
