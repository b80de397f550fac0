"""A collector of messages whose format is decoded one whole batch at a time."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.formats.decoding import BatchDecoder, Decoded
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
    """Return `decoded` without the rows whose dates or times Python cannot represent."""
    faults: dict[int, str] = {}
    for name, column in zip(schema.names, decoded.columns, strict=False):
        for row in rows_beyond_python(column):
            faults.setdefault(row, f"column {name!r} ({column.type}) holds {BEYOND_PYTHON}")
    return decoded.drop_rows(faults)


class Rows(Protocol):
    """A collector of the rows of one batch after another."""

    refusals: Refusals
    """The handler of bad records, for all batches."""
    runs: SplitRuns
    """The runs of the rows that `take` returned last; empty without `by_split`."""

    @property
    def size_bytes(self) -> int:
        """The approximate number of bytes of the collected values."""
        ...

    def __len__(self) -> int:
        """Return the number of collected rows."""
        ...

    def add(self, messages: Records) -> None:
        """Collect `messages`, which must not contain events."""
        ...

    def ready(self) -> bool:
        """Return True if `take` can run without waiting, for instance for a schema.

        Raises:
            SourceUnavailable: A schema did not arrive within the deadline.
        """
        ...

    def take(self) -> pa.RecordBatch:
        """Return the collected rows as one batch, and start the next batch."""
        ...


class DecodedRows:
    """A collector that decodes its messages when the batch is taken."""

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
        """Return True if every schema that the rows need has arrived.

        Raises:
            SourceUnavailable: A schema did not arrive within the deadline.
            ConfigError: The registry refuses the user.
        """
        return self._decoder.ready()

    def take(self) -> pa.RecordBatch:
        """Return the collected rows as one batch. The batch is empty if all records were bad.

        Raises:
            BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
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
