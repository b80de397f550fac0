"""The records that the native reader returns: a few buffers, without an object for each record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.errors import require

NO_TIME = -1
"""The time of a record without a time, in Kafka's protocol."""


@dataclass(frozen=True)
class FetchedRecords:
    """The records of some partitions, in the order in which the client had them.

    The text of record `i` is `values[value_ends[i] : value_ends[i + 1]]`, its separator included.
    """

    partitions: Sequence[tuple[str, int]]
    """The (topic, partition) of each index in `indices`."""
    separator: bytes
    """The separator after each value: one byte or none."""
    values: bytes
    value_ends: npt.NDArray[np.int32]
    has_value: npt.NDArray[np.bool_] | None
    """True for each record with a value, false for a tombstone. None if all have values."""
    keys: bytes
    key_ends: npt.NDArray[np.int32]
    has_key: npt.NDArray[np.bool_] | None
    indices: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    """The times in milliseconds since 1970."""
    time_kinds: npt.NDArray[np.int8]
    """The clock of each time, in librdkafka's numbers: 0 none, 1 the producer's, 2 the broker's."""
    are_objects: bool
    """True if each value begins with `{` and ends with `}`."""

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the values."""
        return len(self.values)

    @cached_property
    def messages(self) -> list[Message]:
        """The records as objects of the client, for the few steps that need them."""
        return [self._message(row) for row in range(len(self))]

    def _message(self, row: int) -> Message:
        topic, partition = self.partitions[int(self.indices[row])]
        value = key = None
        if self.has_value is None or self.has_value[row]:
            end = self.value_ends[row + 1] - len(self.separator)
            value = self.values[self.value_ends[row] : end]
        if self.has_key is None or self.has_key[row]:
            key = self.keys[self.key_ends[row] : self.key_ends[row + 1]]
        return Message(
            topic=topic,
            partition=partition,
            offset=int(self.offsets[row]),
            key=key,
            value=value,
            timestamp=(int(self.time_kinds[row]), int(self.times[row])),
        )

    def find_bounds(self, partition: tuple[str, int]) -> tuple[int, int] | None:
        """Return the first and last offset; None unless all are of `partition`, in rising order."""
        index = int(self.indices[0])
        if self.partitions[index] != partition or not (self.indices == index).all():
            return None
        if not (self.offsets[1:] > self.offsets[:-1]).all():
            return None
        return int(self.offsets[0]), int(self.offsets[-1])

    def value_column(self) -> pa.Array:
        """Return the values as a column. Call it only if there is no separator."""
        return _binary_column(self.values, self.value_ends, self.has_value)

    def key_column(self) -> pa.Array:
        """Return the keys as a column."""
        return _binary_column(self.keys, self.key_ends, self.has_key)

    def position_columns(self) -> list[pa.Array]:
        """Return topics, partitions and offsets as columns."""
        topics = pa.array([topic for topic, _ in self.partitions], pa.string())
        numbers = pa.array([number for _, number in self.partitions], pa.int32())
        indices = pa.array(self.indices)
        return [topics.take(indices), numbers.take(indices), pa.array(self.offsets)]

    def timestamp_column(self) -> pa.Array:
        """Return the times as a column, with null for each record without a time."""
        absent = (self.time_kinds == 0) | (self.times == NO_TIME)
        return pa.array(self.times, mask=absent).cast(pa.timestamp("ms", "UTC"))

    def time_kind_column(self) -> pa.Array:
        """Return the clocks of the times as a column, in Spark's numbers."""
        return pa.array(self.time_kinds.astype(np.int32) - 1)

    def split_runs(self) -> list[tuple[str, int]]:
        """Return (split id, number of rows) of each run of rows from one partition, in order."""
        starts = np.flatnonzero(np.diff(self.indices, prepend=-1))
        counts = np.diff(starts, append=len(self))
        return [
            ("%s-%d" % self.partitions[int(index)], int(count))  # noqa: UP031 - a pair
            for index, count in zip(self.indices[starts], counts, strict=True)
        ]

    def sample_times(self, step: int) -> list[tuple[int, int]]:
        """Return (time, number of records that it represents) for one in `step` records."""
        rows = range(0, len(self), step)
        return [
            (int(self.times[row]), min(step, len(self) - row))
            for row in rows
            if self.time_kinds[row] and self.times[row] != NO_TIME
        ]


def wrap_records(
    read: tuple[Any, ...], partitions: Sequence[tuple[str, int]], separator: bytes
) -> FetchedRecords:
    """Return the result of a native `read` as records. The buffers are not copied."""
    values, value_ends, has_value, keys, key_ends, has_key = read[:6]
    partition_indices, offsets, times, kinds, are_objects = read[6:]
    indices = np.frombuffer(partition_indices, np.int32)
    require(int(indices.min(initial=0)) >= 0, "a record of a partition that was not asked for")
    return FetchedRecords(
        partitions=partitions,
        separator=separator,
        values=values,
        value_ends=np.frombuffer(value_ends, np.int32),
        has_value=None if has_value is None else np.frombuffer(has_value, np.bool_),
        keys=keys,
        key_ends=np.frombuffer(key_ends, np.int32),
        has_key=None if has_key is None else np.frombuffer(has_key, np.bool_),
        indices=indices,
        offsets=np.frombuffer(offsets, np.int64),
        times=np.frombuffer(times, np.int64),
        time_kinds=np.frombuffer(kinds, np.int8),
        are_objects=are_objects,
    )


def _binary_column(
    texts: bytes, ends: npt.NDArray[np.int32], present: npt.NDArray[np.bool_] | None
) -> pa.Array:
    valid = None if present is None else pa.array(present).buffers()[1]
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(texts)]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)
