"""A source of generated payments: for benchmarks without Kafka, examples and tests.

Split k of s holds the payments numbered k, k+s, k+2s, ….

A payment is a function of its number: record n is the same in every run, batch and order.

id       n
account  "acct-000123", uniform over `accounts`
amount   cents, -5000 to 94999
ts       epoch ms, one a record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.spi import ReaderContext, Source, SourceReader, Split, SplitOffsets
from onceflow.sources.datagen.numbered_records import (
    NumberedReader,
    NumberedSplit,
    check_numbers,
    mix_bits,
    mix_numbers,
)

PAYMENTS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
    ]
)

_KIND = "datagen"
_AMOUNT_MIN = -5_000
_AMOUNT_COUNT = 100_000
_TS_FIRST = 1_700_000_000_000


class GeneratedPayments:
    """A generator of payments from their numbers. It holds the names of all accounts."""

    def __init__(self, *, seed: int, accounts: int) -> None:
        self._seed = seed
        self._accounts = accounts
        self._names = pa.array([f"acct-{index:06d}" for index in range(accounts)], pa.string())

    def batch(self, ids: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the payments with the numbers `ids`, in that order."""
        words = mix_numbers(ids, self._seed)
        accounts = (words % np.uint64(self._accounts)).view(np.int64)
        amounts = (mix_bits(words) % np.uint64(_AMOUNT_COUNT)).view(np.int64) + _AMOUNT_MIN
        return pa.RecordBatch.from_arrays(
            [
                pa.array(ids),
                self._names.take(pa.array(accounts)),
                pa.array(amounts),
                pa.array(ids + _TS_FIRST),
            ],
            schema=PAYMENTS_SCHEMA,
        )


@check_fields
@dataclass(frozen=True)
class DatagenSource(Source):
    """A source that generates `rows` payments, or endlessly many if `rows` is None.

    It has `splits_count` splits. Columns: id, account, amount, ts (see the module docstring). The
    same `seed`, `accounts` and `splits_count` give the same rows in the same splits, from any
    position and in any batches.
    """

    rows: int | None = 1_000_000
    splits_count: int = 1
    seed: int = 0
    accounts: int = 100_000
    rows_per_second: float | None = None
    """The rate of all splits together, from the reader's start. None: as fast as possible."""
    batch_rows: int = 10_000

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 0:
            raise ConfigError(
                f"rows={self.rows} is negative; give 0 or more, or None for rows without end"
            )
        check_numbers(self, ("splits_count", "accounts", "batch_rows"), "rows_per_second")

    @property
    def schema(self) -> pa.Schema:
        """The columns of a payment."""
        return PAYMENTS_SCHEMA

    @property
    def bounded(self) -> bool:
        """True if `rows` was given."""
        return self.rows is not None

    def splits(self) -> Sequence[Split]:
        """Return every split at its first row."""
        count = self.splits_count
        return [
            NumberedSplit(
                _KIND,
                index,
                count,
                0,
                None if self.rows is None else (self.rows - index + count - 1) // count,
            ).to_split()
            for index in range(count)
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
        if self.rows is None:
            return ()
        return [self._parse(split).to_offsets() for split in splits]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`."""
        payments = GeneratedPayments(seed=self.seed, accounts=self.accounts)

        def make(split: int, first: int, count: int) -> pa.RecordBatch:
            numbers = np.arange(first, first + count, dtype=np.int64)
            return payments.batch(numbers * self.splits_count + split)

        rate = self.rows_per_second
        return NumberedReader(
            [self._parse(split) for split in splits],
            make,
            bounded=self.bounded,
            batch_records=self.batch_rows,
            records_per_second=rate and rate * len(splits) / self.splits_count,
        )

    def _parse(self, split: Split) -> NumberedSplit:
        return NumberedSplit.from_split(split, _KIND, self.splits_count)
