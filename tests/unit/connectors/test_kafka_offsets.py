"""Offsets of Spark queries over Kafka: what their documents say, and how batches are cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from tests.support.drawn_seeds import draw_random

from onceflow.connectors.spark.readers import kafka_offsets
from onceflow.core.errors import OffsetOutOfRange, StateIncompatible
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.ranges import OffsetRange


def _at(
    offsets: dict[int, int], *, topic_id: str = "A", **began: int
) -> kafka_offsets.StreamOffsets:
    return kafka_offsets.StreamOffsets(
        {
            ("t", partition): PartitionPosition("t", partition, offset, None, topic_id, "C")
            for partition, offset in offsets.items()
        },
        {("t", int(name.removeprefix("p"))): offset for name, offset in began.items()},
    )


def test_a_document_says_what_it_was_made_of() -> None:
    offsets = _at({0: 3, 11: 7}, p11=5)
    assert kafka_offsets.StreamOffsets.of(offsets.document()) == offsets
    assert offsets.document() == {
        "t": {
            "topic_id": "A",
            "cluster_id": "C",
            "offsets": {"0": 3, "11": 7},
            "began": {"11": 5},
        }
    }


@pytest.mark.parametrize("document", [{"t": {"0": 3}}, {"t": 3}, {"logOffset": 0}])
def test_the_offsets_of_another_source_are_refused(document: dict[str, object]) -> None:
    with pytest.raises(StateIncompatible, match="another checkpointLocation"):
        kafka_offsets.StreamOffsets.of(document)


def test_a_batch_begins_where_its_offsets_say_whatever_is_there_when_it_comes_again() -> None:
    ranges = kafka_offsets.ranges_between(_at({0: 3}), _at({0: 5, 1: 9}, p1=4), first_left={})
    assert [(one.partition, one.first, one.end) for one in ranges] == [(0, 3, 5), (1, 4, 9)]


def test_a_batch_over_two_topics_of_one_name_is_refused_unless_it_began_anew() -> None:
    with pytest.raises(OffsetOutOfRange, match="deleted and created again") as refused:
        kafka_offsets.ranges_between(_at({0: 3}), _at({0: 5}, topic_id="B"), first_left={})
    assert _advised_offsets(refused.value) == {"t": {"0": -2}}
    again = kafka_offsets.ranges_between(
        _at({0: 30}), _at({0: 5}, topic_id="B", p0=0), first_left={}
    )
    assert [(one.first, one.end, one.topic_id) for one in again] == [(0, 5, "B")]


def test_a_topic_that_ends_before_what_was_read_is_refused() -> None:
    with pytest.raises(OffsetOutOfRange, match="the next offset to read is 9") as refused:
        start, end = _at({0: 9, 1: 3}), _at({0: 5, 1: 8, 2: 6}, p2=4)
        kafka_offsets.ranges_between(start, end, first_left={})
    assert _advised_offsets(refused.value) == {"t": {"0": 5, "1": 3, "2": 4}}
    # Spark asks for the same batch again in each run, so no option of the source helps.
    assert "ends at 5" in str(refused.value)
    assert "with another checkpointLocation" in str(refused.value)
    assert "fail_on_data_loss" not in str(refused.value)


def _advised_offsets(error: OffsetOutOfRange) -> object:
    """Return the value of startingOffsets in the advice of `error`."""
    found = re.search(r"another checkpointLocation and startingOffsets=(\{.*\}), where", str(error))
    assert found is not None, error
    return json.loads(found[1])


def test_a_limit_is_kept_shared_out_and_always_leaves_something_to_read() -> None:
    draw = draw_random()
    for _ in range(300):
        starts = {("t", number): draw.randrange(100) for number in range(draw.randrange(1, 6))}
        ends = {place: first + draw.choice([0, 1, 7, 1000]) for place, first in starts.items()}
        there = sum(ends.values()) - sum(starts.values())
        most = draw.randrange(1, 1500)
        upto = kafka_offsets.limit_ends(starts, ends, most)
        assert all(starts[place] <= upto[place] <= ends[place] for place in starts)
        assert sum(upto.values()) - sum(starts.values()) == min(most, there)


def test_tasks_cover_every_offset_once() -> None:
    draw = draw_random()
    for _ in range(300):
        ranges = [
            OffsetRange("t", number, first, first + draw.choice([1, 3, 900, 30_000]))
            for number, first in enumerate(draw.choices(range(50), k=draw.randrange(1, 7)))
        ]
        least, most = draw.choice([0, 3, 20]), draw.choice([None, 500])
        tasks = kafka_offsets.tasks_of(ranges, least=least, rows_most=most)
        pieces = [piece for task in tasks for piece in task]
        total = sum(map(len, ranges))
        assert sum(map(len, pieces)) == total
        for one in ranges:
            own = sorted((p.first, p.end) for p in pieces if p.partition == one.partition)
            assert own[0][0] == one.first
            assert own[-1][1] == one.end
            assert all(a[1] == b[0] for a, b in pairwise(own))
        assert len(tasks) >= min(least, total)
        if most:
            assert max(map(len, pieces)) <= most


def test_small_ranges_share_a_task_and_large_ones_do_not() -> None:
    small = [OffsetRange("t", number, 0, kafka_offsets.PACKED_ROWS // 4) for number in range(8)]
    assert [len(task) for task in kafka_offsets.tasks_of(small)] == [4, 4]
    large = [OffsetRange("t", number, 0, kafka_offsets.PACKED_ROWS * 3) for number in range(3)]
    assert [len(task) for task in kafka_offsets.tasks_of(large)] == [1, 1, 1]
