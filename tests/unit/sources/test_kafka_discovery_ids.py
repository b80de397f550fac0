"""Which topic is meant, where brokers do not tell all: those before 2.8 have no topic ids."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest
from typing_extensions import override

from onceflow.clients.kafka.topics import TopicFacts
from onceflow.core.errors import OffsetOutOfRange
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.catalog import Catalog, find_positions
from onceflow.sources.kafka.position import PartitionPosition

SETTINGS = KafkaSource("nowhere:9092", topic="t", format="raw").settings


class _AnsweringCatalog(Catalog):
    """Answers that topic t has one partition, and these ids."""

    def __init__(self, topic_id: str, cluster_id: str) -> None:
        self._facts = TopicFacts("t", (0,), topic_id, cluster_id)

    @override
    def list_topics(self, known: AbstractSet[str] = frozenset()) -> dict[str, TopicFacts]:
        return {"t": self._facts}

    @override
    def resolve_added_positions(
        self, facts: TopicFacts, *, partitions: Sequence[int]
    ) -> list[PartitionPosition]:
        assert list(partitions) == []
        return []


def _at_7(topic_id: str, cluster_id: str) -> PartitionPosition:
    return PartitionPosition("t", 0, 7, None, topic_id, cluster_id)


@pytest.mark.parametrize(
    ("known", "told", "now"),
    [
        (("", ""), ("", ""), ("", "")),
        (("", ""), ("A", "C"), ("A", "C")),
        (("", "C"), ("A", "C"), ("A", "C")),
        (("A", "C"), ("", "C"), ("A", "C")),
        (("A", "C"), ("", ""), ("A", "C")),
    ],
)
def test_id_that_is_not_told_says_nothing_and_one_that_is_told_is_kept(
    known: tuple[str, str], told: tuple[str, str], now: tuple[str, str]
) -> None:
    assert find_positions(SETTINGS, _AnsweringCatalog(*told), [_at_7(*known)]) == [_at_7(*now)]


@pytest.mark.parametrize(
    ("known", "told"), [(("A", "C"), ("B", "C")), (("A", ""), ("B", "")), (("", "C"), ("", "D"))]
)
def test_one_other_id_is_another_topic(known: tuple[str, str], told: tuple[str, str]) -> None:
    with pytest.raises(OffsetOutOfRange, match="offset 7 was to be read next"):
        find_positions(SETTINGS, _AnsweringCatalog(*told), [_at_7(*known)])
