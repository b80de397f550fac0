"""A source of the events of Nexmark, the benchmark of stream engines: persons, auctions, bids.

Split k of s holds the epochs k, k+s, k+2s, … of 50 events each, in their order. So all splits have
all kinds of events, and their event times advance together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.spi import (
    OutputBatch,
    ReaderContext,
    Source,
    SourceReader,
    Split,
    SplitOffsets,
)
from onceflow.sources.datagen.nexmark_tables import EPOCH_EVENTS, TABLES, NexmarkTables
from onceflow.sources.datagen.numbered_records import (
    NumberedReader,
    NumberedSplit,
    check_numbers,
)

_KIND = "nexmark"
_EVENTS_MAX = 1 << 40
"""The number of events up to which times and ids are far from the bounds of 64 bits."""


@check_fields
@dataclass(frozen=True)
class NexmarkSource(Source):
    """A source of `events` events of Nexmark, or of events without end if `events` is None.

    Its outputs are the tables `person`, `auction` and `bid`: of 50 events, one is a person, three
    are auctions, and 46 are bids. Read it with `Pipeline.read_outputs`.

    Event n is a function of n, of `seed` and of `event_interval_us`. The same settings give the
    same rows in the same splits, from any position and in any batches.
    """

    events: int | None = 1_000_000
    splits_count: int = 1
    seed: int = 0
    event_interval_us: int = 100
    """The event time between two events, in microseconds. 100: 10,000 events a second."""
    events_per_second: float | None = None
    """The rate of all splits together, from the reader's start. None: as fast as possible."""
    batch_events: int = 20_000

    def __post_init__(self) -> None:
        if self.events is not None and not 0 <= self.events <= _EVENTS_MAX:
            raise ConfigError(
                f"events={self.events} is not from 0 to {_EVENTS_MAX}; give None for events without"
                " end"
            )
        counts = "splits_count", "event_interval_us", "batch_events"
        check_numbers(self, counts, "events_per_second")

    @property
    def schema(self) -> pa.Schema:
        """An empty schema: the outputs have the columns."""
        return pa.schema([])

    @property
    def outputs(self) -> Mapping[str, pa.Schema]:
        """The tables `person`, `auction` and `bid`."""
        return TABLES

    @property
    def bounded(self) -> bool:
        """True if `events` was given."""
        return self.events is not None

    def splits(self) -> Sequence[Split]:
        """Return every split at its first event."""
        return [
            NumberedSplit(_KIND, split, self.splits_count, 0, self._stop(split)).to_split()
            for split in range(self.splits_count)
        ]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return `known`.

        Raises:
            StateIncompatible: `known` belongs to another source, or to another `splits_count`.
        """
        for split in known:
            self._parse(split)
        return known

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Return the position and end of each of `splits`; empty if they are endless."""
        if self.events is None:
            return ()
        return [self._parse(split).to_offsets() for split in splits]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`."""
        tables = NexmarkTables(seed=self.seed, interval_us=self.event_interval_us)

        def make(split: int, first: int, count: int) -> tuple[OutputBatch, ...]:
            return self._make(tables, split, first, count)

        rate = self.events_per_second
        return NumberedReader(
            [self._parse(split) for split in splits],
            make,
            bounded=self.bounded,
            batch_records=self.batch_events,
            records_per_second=rate and rate * len(splits) / self.splits_count,
        )

    def _parse(self, split: Split) -> NumberedSplit:
        return NumberedSplit.from_split(split, _KIND, self.splits_count)

    def _stop(self, split: int) -> int | None:
        """Return the number of events of a split."""
        if self.events is None:
            return None
        epochs, events_left = divmod(self.events, EPOCH_EVENTS)
        whole = (epochs - split + self.splits_count - 1) // self.splits_count
        return whole * EPOCH_EVENTS + (events_left if epochs % self.splits_count == split else 0)

    def _make(
        self, tables: NexmarkTables, split: int, first: int, count: int
    ) -> tuple[OutputBatch, ...]:
        """Return the rows of `count` events of a split. Tables without a row are left out."""
        numbers_in_split = np.arange(first, first + count, dtype=np.int64)
        epochs, offsets = np.divmod(numbers_in_split, EPOCH_EVENTS)
        numbers = (epochs * self.splits_count + split) * EPOCH_EVENTS + offsets
        kinds = (
            ("person", tables.persons, offsets == 0),
            ("auction", tables.auctions, (offsets > 0) & (offsets < 4)),
            ("bid", tables.bids, offsets > 3),
        )
        return tuple(
            OutputBatch(name, rows(numbers[chosen])) for name, rows, chosen in kinds if chosen.any()
        )
