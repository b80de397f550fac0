"""Collects messages whose format is decoded a whole batch at a time."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

import pyarrow as pa
from confluent_kafka import Message

from onceflow.connectors.kafka.decoding import BatchDecoder, Decoded
from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.sources.kafka.messages import (
    VALUE,
    Records,
    Refusals,
    SplitRuns,
    estimate_size_bytes,
    leave_out_untimely,
    messages_of,
    metadata_columns,
    split_runs_of,
)
from onceflow.sources.kafka.settings import KafkaSettings


def drop_beyond_python(decoded: Decoded, schema: pa.Schema) -> Decoded:
    """Return `decoded` without rows that hold dates or times that Python does not have."""
    faults: dict[int, str] = {}
    for name, column in zip(schema.names, decoded.columns, strict=False):
        for row in rows_beyond_python(column):
            faults.setdefault(row, f"column {name!r} ({column.type}) holds {BEYOND_PYTHON}")
    return decoded.drop_rows(faults)


class Rows(Protocol):
    """Collects the rows of one batch."""

    refusals: Refusals
    """Bad records, over all batches."""
    runs: SplitRuns
    """The partitions of the rows that were taken last; empty without `by_split`."""

    @property
    def size_bytes(self) -> int:
        """About how many bytes of values are collected."""
        ...

    def __len__(self) -> int:
        """Return how many rows are collected."""
        ...

    def add(self, messages: Records) -> None:
        """Collect `messages`, none of which is an event."""
        ...

    def ready(self) -> bool:
        """Return whether `take` can run at once, without waiting for a schema for instance.

        Raises:
            SourceUnavailable: What it waits for did not come within the deadline.
        """
        ...

    def take(self) -> pa.RecordBatch:
        """Return the rows collected as one batch, and start the next one."""
        ...


class DecodedRows:
    """Collects messages and decodes them when the batch is taken."""

    def __init__(
        self,
        settings: KafkaSettings,
        schema: pa.Schema,
        decoder: BatchDecoder,
        *,
        by_split: bool = False,
    ) -> None:
        self.size_bytes = 0
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = settings.topics
        self.refusals = Refusals(settings.on_bad_record)
        self._schema = schema
        self._include_metadata = settings.include_metadata
        self._keep_messages = (
            settings.include_metadata or settings.key_format is not None or by_split
        )
        self.kept: list[Message] = []
        self._decoder = decoder
        self._messages: list[Message] = []
        self._values: list[bytes | None] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: Records) -> None:
        """Collect `messages`."""
        messages = messages_of(messages)
        values = list(map(VALUE, messages))
        self._decoder.expect(values, messages)
        self._messages += messages
        self._values += values
        self.size_bytes += estimate_size_bytes(messages)

    def ready(self) -> bool:
        """Return whether every schema that the rows need is there.

        Raises:
            SourceUnavailable: One did not come within the deadline.
            ConfigError: The registry refuses us.
        """
        return self._decoder.ready()

    def take(self) -> pa.RecordBatch:
        """Return the rows collected as one batch; none may be left of it.

        Raises:
            BadRecord: A record cannot be decoded, and such are not to be left out.
        """
        messages, self._messages, self.size_bytes = self._messages, [], 0
        values, self._values = self._values, []
        decoded = drop_beyond_python(self._decoder.decode(values, messages), self._schema)
        for index in sorted(decoded.faults):
            self.refusals.refuse(messages[index], decoded.faults[index])
        columns = list(decoded.columns)
        if self._keep_messages:
            self.kept = [messages[index] for index in decoded.kept]
        if self._include_metadata:
            columns += metadata_columns(self.kept)
            columns, chunks = leave_out_untimely(columns, columns[-1], [self.kept], self.refusals)
            self.kept = list(chain.from_iterable(map(messages_of, chunks)))
        if self._by_split:
            self.runs = split_runs_of(self.kept, self._topics)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
