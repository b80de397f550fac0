"""The readers of positions, times and sizes of messages, and the handler of bad records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.core.errors import BadRecord
from onceflow.core.printable import escape_controls
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.formats.decoding import describe_position
from onceflow.sources.kafka.fetched import NO_TIME, FetchedRecords

logger = logging.getLogger("onceflow.sources.kafka")

Records: TypeAlias = list[Message] | FetchedRecords
"""The records as the client returned them."""

VALUE: Callable[[Message], bytes | None] = Message.value
KEY: Callable[[Message], bytes | None] = Message.key
TOPIC: Callable[[Message], str | None] = Message.topic
PARTITION: Callable[[Message], int | None] = Message.partition
OFFSET: Callable[[Message], int | None] = Message.offset
TIMESTAMP: Callable[[Message], tuple[int, int]] = Message.timestamp

METADATA_FIELDS = (
    pa.field("_topic", pa.string(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
    pa.field("_timestamp", pa.timestamp("ms", "UTC")),
)

_EXCERPT_BYTES = 64
_SAMPLE_STEP = 64
"""The number of messages for each one that is measured.

The size limits memory, so an estimate is enough.
"""
_TIME_STEP = 250
"""The number of messages for each one whose time is read, for metrics.

Messages of one fetch have similar times.
"""


def messages_of(records: Records) -> list[Message]:
    """Return `records` as objects of the client."""
    return records.messages if isinstance(records, FetchedRecords) else records


def position_columns(messages: Records) -> list[pa.Array]:
    """Return topics, partitions and offsets as columns."""
    if isinstance(messages, FetchedRecords):
        return messages.position_columns()
    return [
        pa.array(list(map(TOPIC, messages)), type=pa.string()),
        pa.array(list(map(PARTITION, messages)), type=pa.int32()),
        pa.array(list(map(OFFSET, messages)), type=pa.int64()),
    ]


SplitRuns: TypeAlias = list[tuple[str, int]]
"""The (split id, number of rows) of each run of consecutive rows from one partition."""


def split_runs_of(messages: Records, topics: Sequence[str]) -> SplitRuns:
    """Return the runs of consecutive messages from one partition, in order.

    If `topics` names only one topic, all messages belong to it, and their topics are not read.
    """
    if isinstance(messages, FetchedRecords):
        return messages.split_runs()
    if not messages:
        return []
    partitions = np.fromiter(map(PARTITION, messages), np.int64, len(messages))
    new = partitions[1:] != partitions[:-1]
    if len(topics) != 1:
        of_topics = list(map(TOPIC, messages))
        pairs = zip(of_topics[1:], of_topics[:-1], strict=True)
        new |= np.fromiter((topic != before for topic, before in pairs), np.bool_, len(new))
    starts = [0, *(np.flatnonzero(new) + 1).tolist()]
    return [
        (f"{messages[at].topic()}-{partitions[at]}", end - at)
        for at, end in zip(starts, [*starts[1:], len(messages)], strict=True)
    ]


def timestamp_column(messages: Records) -> pa.Array:
    """Return the times of `messages` as a column, with null for each record without a time."""
    if isinstance(messages, FetchedRecords):
        return messages.timestamp_column()
    stamps = map(TIMESTAMP, messages)
    return pa.array(
        [stamp if kind and stamp != NO_TIME else None for kind, stamp in stamps],
        type=pa.timestamp("ms", "UTC"),
    )


def leave_out_untimely(
    columns: list[pa.Array], times: pa.Array, chunks: Sequence[Records], refusals: Refusals
) -> tuple[list[pa.Array], Sequence[Records]]:
    """Return `columns` and their `chunks` without the rows whose time Python cannot represent.

    A producer that writes microseconds as milliseconds produces such times.

    Raises:
        BadRecord: A time cannot be represented, and `on_bad_record` is "fail".
    """
    untimely = rows_beyond_python(times)
    if not untimely:
        return columns, chunks
    messages = list(chain.from_iterable(map(messages_of, chunks)))
    for row in untimely:
        stamp = TIMESTAMP(messages[row])[1]
        refusals.refuse(messages[row], f"its time, {stamp} ms since 1970, is {BEYOND_PYTHON}")
    good = sorted(set(range(len(messages))) - set(untimely))
    taken = pa.array(good, pa.int64())
    return [column.take(taken) for column in columns], [[messages[row] for row in good]]


def sample_times(messages: Records) -> list[tuple[int, int]]:
    """Return samples: (milliseconds since 1970, number of messages that the sample represents)."""
    if isinstance(messages, FetchedRecords):
        return messages.sample_times(_TIME_STEP)
    return [
        (stamp, min(_TIME_STEP, len(messages) - _TIME_STEP * number))
        for number, (kind, stamp) in enumerate(map(TIMESTAMP, messages[::_TIME_STEP]))
        if kind and stamp != NO_TIME
    ]


def metadata_columns(messages: Records) -> list[pa.Array]:
    """Return the columns of `METADATA_FIELDS`."""
    return [*position_columns(messages), timestamp_column(messages)]


def estimate_size_bytes(messages: Records) -> int:
    """Estimate the total size of the values, in bytes."""
    if isinstance(messages, FetchedRecords):
        return messages.size_bytes
    return _SAMPLE_STEP * sum(map(len, messages[::_SAMPLE_STEP]))


def bad_record_error(message: Message, fault: str) -> BadRecord:
    """Return the error that names the position of `message` and its `fault`."""
    return BadRecord(
        f"{_describe_bad(message, fault)}."
        " Correct the schema or the producer; or keep such records in a table or topic of their own"
        " with on_bad_record='dead_letter' and read(…, dead_letters=…), or leave them out, counted"
        " and logged, with on_bad_record='drop'"
    )


def _describe_bad(message: Message, fault: str) -> str:
    described, value = f"{describe_position(message)}: {escape_controls(fault)}", message.value()
    return described if value is None else f"{described}. The value starts {_excerpt(value)}"


def _excerpt(value: bytes) -> str:
    """Return the start of `value`, printable and short."""
    shown = repr(value[:_EXCERPT_BYTES])[1:]
    return f"{shown} ({len(value)} bytes)" if len(value) > _EXCERPT_BYTES else shown


class Refusals:
    """The handler of bad records. It raises, drops the record, or keeps it as a dead letter."""

    def __init__(self, on_bad_record: OnBadRow) -> None:
        self._on_bad_record = on_bad_record
        self.dropped_count = 0
        """The number of bad records left out so far."""
        self.letters: list[DeadLetter] = []
        """The dead letters since the last `take_letters`."""

    def refuse(self, message: Message, fault: str) -> None:
        """Leave `message` out, counted; keep it as a dead letter if `on_bad_record` says so.

        Raises:
            BadRecord: `on_bad_record` is "fail".
        """
        if self._on_bad_record is OnBadRow.FAIL:
            raise bad_record_error(message, fault) from None
        if self._on_bad_record is OnBadRow.DEAD_LETTER:
            self.letters.append(
                DeadLetter(
                    fault,
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                )
            )
        self.dropped_count += 1
        # Log only the 1st, 10th, 100th, … record: a topic full of bad records must not fill the
        # disk.
        if str(self.dropped_count).strip("0") == "1":
            logger.warning(
                "%s (%d so far): %s",
                self._on_bad_record.value,
                self.dropped_count,
                _describe_bad(message, fault),
            )

    def take_letters(self) -> list[DeadLetter]:
        """Return the dead letters since the last call, and forget them."""
        letters, self.letters = self.letters, []
        return letters
