"""The position of a reader in one partition, and its encoding in a split.

`next` is the offset to read next. `stop` is exclusive, and next <= stop if there is a stop.

    {"topic":"payments","partition":0,"next":42,"stop":null,"topic_id":"…","cluster_id":"…",
     "leader_epoch":3}

This is UTF-8 JSON in Split.position. The ids distinguish the topic from another topic of the same
name. They are empty or absent if the brokers gave none. The leader epoch distinguishes the records
before `next` from records that were written at the same offsets after the log's end was cut off. It
is null or absent if the broker gave none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from onceflow.core.errors import OffsetOutOfRange, StateIncompatible
from onceflow.core.spi import Split


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """A partition, the next offset to read, and the offset at which reading ends, if any."""

    topic: str
    partition: int
    next: int
    stop: int | None = None
    topic_id: str = ""
    cluster_id: str = ""
    leader_epoch: int | None = None
    """The leader epoch of the record before `next`, or None if it is not known."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def to_split(self) -> Split:
        """Return the split that holds this position."""
        position = json.dumps(
            {
                "topic": self.topic,
                "partition": self.partition,
                "next": self.next,
                "stop": self.stop,
                "topic_id": self.topic_id,
                "cluster_id": self.cluster_id,
                "leader_epoch": self.leader_epoch,
            },
            separators=(",", ":"),
        )
        return Split(str(self), position.encode())

    @classmethod
    def from_split(cls, split: Split) -> PartitionPosition:
        """Return the position that `split` holds.

        Raises:
            StateIncompatible: The split does not belong to a Kafka source.
        """
        try:
            fields = cast("dict[str, object]", json.loads(split.position))
            topic, partition = fields["topic"], fields["partition"]
            following, stop = fields["next"], fields["stop"]
            topic_id, cluster_id = fields.get("topic_id", ""), fields.get("cluster_id", "")
            leader_epoch = fields.get("leader_epoch")
        except (ValueError, KeyError, TypeError) as error:
            raise StateIncompatible(_not_ours(split)) from error
        if (
            isinstance(topic, str)
            and isinstance(partition, int)
            and isinstance(following, int)
            and (stop is None or isinstance(stop, int))
            and isinstance(topic_id, str)
            and isinstance(cluster_id, str)
            and (leader_epoch is None or isinstance(leader_epoch, int))
        ):
            return cls(topic, partition, following, stop, topic_id, cluster_id, leader_epoch)
        raise StateIncompatible(_not_ours(split))


def _not_ours(split: Split) -> str:
    return (
        f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does not read"
        " as a position in a Kafka topic: it was written by another source. Give this source"
        " another uid, or start the job as it was"
    )


def describe_gap(topic: str, partition: int, *, offset_next: int, low: int, high: int) -> str:
    """Return a description of the records of `topic` and `partition` that are gone."""
    where = f"{topic}-{partition}: offset {offset_next} was to be read next"
    if offset_next < low:
        return (
            f"{where}, but the earliest one left is {low}: {low - offset_next} offsets"
            f" ({offset_next} to {low - 1}) were deleted before they were read, by retention or by"
            " hand"
        )
    return (
        f"{where}, but the topic ends at {high}: it was deleted and created again, or an unclean"
        f" leader election cut off its end. What it holds now ({low} to {high - 1}) are other"
        " records than those read before"
    )


def describe_cut(topic: str, partition: int, *, offset_next: int, low: int, high: int) -> str:
    """Return a description of a partition whose log was cut off and has grown again."""
    return (
        f"{topic}-{partition}: offset {offset_next} was to be read next, but the end of the log was"
        " cut off before it, by an unclean leader election or by a broker that lost records, and"
        f" was written anew. Some of the offsets before {offset_next} hold other records now than"
        f" those that were read; the topic has {low} to {high - 1}"
    )


def cut_error(
    topic: str, partition: int, *, offset_next: int, low: int, high: int
) -> OffsetOutOfRange:
    """Return the error for replaced records, with advice."""
    facts = describe_cut(topic, partition, offset_next=offset_next, low=low, high=high)
    return OffsetOutOfRange(f"{facts}. {advise_on_other_records(low)}")


def gap_error(
    topic: str, partition: int, *, offset_next: int, low: int, high: int
) -> OffsetOutOfRange:
    """Return the error for lost records, with advice."""
    facts = describe_gap(topic, partition, offset_next=offset_next, low=low, high=high)
    if offset_next < low:
        advice = (
            "Restore them and raise the topic's retention, or accept the loss with"
            f" fail_on_data_loss=False, which goes on at {low}"
        )
    else:
        advice = advise_on_other_records(low)
    return OffsetOutOfRange(f"{facts}. {advice}")


def advise_on_other_records(low: int) -> str:
    """Return the advice for records that may have been replaced after they were read.

    `low` is the first offset of the partition.
    """
    return (
        f"With fail_on_data_loss=False the job goes on at {low} and reads again what is still there"
        f" from that offset on. First delete the rows from the target that came from offset {low}"
        " on, or they are there twice. State that counts records counts them twice"
    )
