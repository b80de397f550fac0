"""The offsets of a Spark query over Kafka in its checkpoint, and the division of batches.

    {"payments": {"topic_id": "…", "cluster_id": "…", "offsets": {"0": 42, "1": 17}}}

`offsets` has the next offset to read. A partition may begin in the batch that ends at these
offsets: a partition that was added, or one of a topic that was deleted and created again. Its first
offset is in "began", so that a repeated batch is the same. The ids identify the topic among topics
of the same name. They are empty if the brokers gave none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, cast

from onceflow.core.errors import OffsetOutOfRange, StateIncompatible
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.ranges import OffsetRange

Document: TypeAlias = "dict[str, Any]"
"""A value that Spark stores as JSON: a dictionary of texts, numbers, lists and dictionaries."""

_Place = tuple[str, int]

_EARLIEST = -2
"""The offset that stands for the first record in the option startingOffsets."""


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """The positions of a query in all partitions."""

    positions: Mapping[_Place, PartitionPosition] = field(
        default_factory=dict[_Place, PartitionPosition]
    )
    began: Mapping[_Place, int] = field(default_factory=dict[_Place, int])
    """The first offset of each partition that begins in the batch which ends here."""

    def document(self) -> Document:
        """Return the document that Spark stores. Equal offsets give equal texts."""
        document: Document = {}
        # Sort, because Spark compares offsets by their text.
        for (topic, partition), position in sorted(self.positions.items()):
            entry = document.setdefault(
                topic,
                {
                    "topic_id": position.topic_id,
                    "cluster_id": position.cluster_id,
                    "offsets": {},
                },
            )
            entry["offsets"][str(partition)] = position.next
            if (topic, partition) in self.began:
                entry.setdefault("began", {})[str(partition)] = self.began[topic, partition]
        return document

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> StreamOffsets:
        """Return the offsets in `document`.

        Raises:
            StateIncompatible: The document was not written by this format.
        """
        positions: dict[_Place, PartitionPosition] = {}
        began: dict[_Place, int] = {}
        try:
            for topic, entry in document.items():
                for partition, offset in cast("Mapping[str, int]", entry["offsets"]).items():
                    partition_id = (topic, int(partition))
                    positions[partition_id] = PartitionPosition(
                        topic,
                        int(partition),
                        int(offset),
                        topic_id=str(entry["topic_id"]),
                        cluster_id=str(entry["cluster_id"]),
                    )
                began.update(
                    {(topic, int(number)): int(at) for number, at in entry.get("began", {}).items()}
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateIncompatible(
                f"the checkpoint's offsets {str(document)[:200]!r} are not those of"
                " onceflow-kafka: the query read another source before. Give it another"
                " checkpointLocation"
            ) from error
        return cls(positions, began)

    def __bool__(self) -> bool:
        return bool(self.positions)


def ranges_between(
    start: StreamOffsets, end: StreamOffsets, *, first_left: Mapping[_Place, int]
) -> list[OffsetRange]:
    """Return the ranges that the batch from `start` to `end` reads.

    They are the same in every call.

    `first_left` has the first offsets of partitions that are not in `start`, and whose beginning is
    not in `end`. They occur only with versions of Spark that ask for a batch's end without its
    start.

    Raises:
        OffsetOutOfRange: A topic was replaced since `start`, or ends before it.
    """
    ranges: list[OffsetRange] = []
    for partition, position in sorted(end.positions.items()):
        before = start.positions.get(partition)
        if partition in end.began:
            first = end.began[partition]
        elif before is None:
            first = first_left[partition]
        else:
            first = before.next
            if not _same_topic(before, position):
                raise OffsetOutOfRange(
                    f"{position}: the next offset to read is {first} of topic {before.topic_id}"
                    f" in cluster {before.cluster_id}, but the topic of that name is now"
                    f" {position.topic_id} in cluster {position.cluster_id}: it was deleted and"
                    f" created again. {_advise_restart(start, end)}"
                )
        if position.next < first:
            # Spark has stored the batch and asks for it again in each run: `fail_on_data_loss`
            # does not help.
            raise OffsetOutOfRange(
                f"{position}: the next offset to read is {first}, but the topic ends at"
                f" {position.next}: it was deleted and created again, or an unclean leader"
                f" election cut off its end. {_advise_restart(start, end)}"
            )
        ranges.append(OffsetRange(*partition, first, position.next, position.topic_id))
    return [offset_range for offset_range in ranges if len(offset_range)]


def _advise_restart(start: StreamOffsets, end: StreamOffsets) -> str:
    """Return the advice for a query that cannot repeat the batch from `start` to `end`.

    A new query without `startingOffsets` would begin at the end of each topic.
    """
    offsets: dict[str, dict[str, int]] = {}
    for partition, position in sorted(end.positions.items()):
        before = start.positions.get(partition)
        if before is None or not _same_topic(before, position):
            first = end.began.get(partition, _EARLIEST)
        else:
            first = min(before.next, position.next)
        topic, number = partition
        offsets.setdefault(topic, {})[str(number)] = first
    return (
        "Restore it. If it is lost, delete the rows of this batch from the target, if it has any,"
        " and start the query with another checkpointLocation and"
        f" startingOffsets={json.dumps(offsets, separators=(',', ':'))}, where the batch begins"
    )


def _same_topic(position: PartitionPosition, other: PartitionPosition) -> bool:
    pairs = ((position.topic_id, other.topic_id), (position.cluster_id, other.cluster_id))
    return all(not old or not new or old == new for old, new in pairs)


def limit_ends(
    starts: Mapping[_Place, int], ends: Mapping[_Place, int], most: int
) -> dict[_Place, int]:
    """Return an end for each partition, so that one to `most` offsets are read.

    Each partition gets a share in proportion to its size, so no partition is starved.
    """
    sizes = {partition: max(0, end - starts[partition]) for partition, end in ends.items()}
    total = sum(sizes.values())
    if total <= most:
        return dict(ends)
    # Round down, so that the sum stays within the limit. The remainder is distributed below.
    shares = {partition: most * size // total for partition, size in sizes.items()}
    left = max(1, most) - sum(shares.values())
    # Distribute the remainder to the longest partitions first, one offset each.
    for partition in sorted(sizes, key=lambda candidate: (-sizes[candidate], candidate)):
        if left > 0 and shares[partition] < sizes[partition]:
            shares[partition] += 1
            left -= 1
    return {partition: starts[partition] + share for partition, share in shares.items()}


PACKED_ROWS = 2_000
"""The size of a range below which ranges share a task.

A task costs as much as reading some thousand records.
"""


def tasks_of(
    ranges: Sequence[OffsetRange], *, least: int = 0, rows_most: int | None = None
) -> list[tuple[OffsetRange, ...]]:
    """Return the ranges of each task: a partition's range, pieces of it, or several small ranges.

    There are at least `least` tasks, if there are as many offsets. Pieces have at most `rows_most`
    offsets. The order within a partition is kept only within a task.
    """
    pieces: list[OffsetRange] = []
    total = sum(map(len, ranges))
    for offset_range in ranges:
        count = 1
        if least > len(ranges):
            # Divide in proportion and round up: one task too many is better than one too few.
            count = -(-least * len(offset_range) // total)
        if rows_most:
            count = max(count, -(-len(offset_range) // rows_most))
        pieces += _cut(offset_range, min(count, len(offset_range)))
    if least or rows_most:
        return [(piece,) for piece in pieces]
    return _pack_tasks(pieces)


def _cut(offset_range: OffsetRange, count: int) -> list[OffsetRange]:
    # Integer arithmetic from one end: the sizes differ by at most one, and there is no gap.
    bounds = [offset_range.first + len(offset_range) * index // count for index in range(count + 1)]
    return [
        OffsetRange(offset_range.topic, offset_range.partition, first, end, offset_range.topic_id)
        for first, end in pairwise(bounds)
    ]


def _pack_tasks(ranges: Sequence[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
    tasks: list[list[OffsetRange]] = []
    room = 0
    for offset_range in ranges:
        if tasks and len(offset_range) <= room:
            tasks[-1].append(offset_range)
            room -= len(offset_range)
        else:
            tasks.append([offset_range])
            room = PACKED_ROWS - len(offset_range)
    return [tuple(task) for task in tasks]
