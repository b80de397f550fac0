"""A source of generated payments: for benchmarks without Kafka, examples and tests.

Split k of s holds the payments numbered k, k+s, k+2s, …; its position counts those it has read.
    {"split":0,"next":1200,"stop":500000}      as UTF-8 JSON, in Split.position

A payment is a function of its number: record n is the same in every run, batch and order.

id       n
account  "acct-000123", uniform over `accounts`
amount   cents, -5000 to 94999
ts       epoch ms, one a record
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split, SplitOffsets

PAYMENTS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
    ]
)

_AMOUNT_MIN = -5_000
_AMOUNT_COUNT = 100_000
_TS_FIRST = 1_700_000_000_000

_Words: TypeAlias = npt.NDArray[np.uint64]


class GeneratedPayments:
    """A generator of payments from their numbers. It holds the names of all accounts."""

    def __init__(self, *, seed: int, accounts: int) -> None:
        self._seed = np.uint64(seed & (2**64 - 1))
        self._accounts = accounts
        self._names = pa.array([f"acct-{index:06d}" for index in range(accounts)], pa.string())

    def batch(self, ids: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the payments with the numbers `ids`, in that order."""
        words = _mix(ids.view(np.uint64) ^ _mix(np.full(1, self._seed, np.uint64)))
        accounts = (words % np.uint64(self._accounts)).view(np.int64)
        amounts = (_mix(words) % np.uint64(_AMOUNT_COUNT)).view(np.int64) + _AMOUNT_MIN
        return pa.RecordBatch.from_arrays(
            [
                pa.array(ids),
                self._names.take(pa.array(accounts)),
                pa.array(amounts),
                pa.array(ids + _TS_FIRST),
            ],
            schema=PAYMENTS_SCHEMA,
        )


def _mix(words: _Words) -> _Words:
    """Mix the bits of each word with SplitMix64's output function, which is a bijection.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        mixed = words + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("_Words", mixed ^ (mixed >> np.uint64(31)))


@dataclass(frozen=True, slots=True)
class _Position:
    split: int
    next: int
    stop: int | None

    @property
    def rows_left(self) -> int | None:
        return None if self.stop is None else self.stop - self.next

    def to_split(self) -> Split:
        text = json.dumps(
            {"split": self.split, "next": self.next, "stop": self.stop}, separators=(",", ":")
        )
        return Split(f"datagen-{self.split}", text.encode())

    @classmethod
    def from_split(cls, split: Split) -> _Position:
        try:
            fields = cast("dict[str, int]", json.loads(split.position))
            return cls(fields["split"], fields["next"], fields["stop"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateIncompatible(
                f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does"
                " not read as a position in generated data: it was written by another source. Give"
                " this source another uid, or start the job as it was"
            ) from error


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
        for name in ("splits_count", "accounts", "batch_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not 1 or more")
        if self.rows_per_second is not None and self.rows_per_second <= 0:
            raise ConfigError(f"rows_per_second={self.rows_per_second} is not positive")

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
            _Position(
                index, 0, None if self.rows is None else (self.rows - index + count - 1) // count
            ).to_split()
            for index in range(count)
        ]

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Return the position and end of each of `splits`; empty if they are endless."""
        if self.rows is None:
            return ()
        positions = [(split.id, _Position.from_split(split)) for split in splits]
        return [SplitOffsets(name, at.next, at.stop or 0) for name, at in positions]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`."""
        return DatagenReader(self, [_Position.from_split(split) for split in splits])


class DatagenReader(SourceReader):
    """A reader that returns one batch of each split in turn."""

    def __init__(self, source: DatagenSource, positions: Sequence[_Position]) -> None:
        self._source = source
        self._payments = GeneratedPayments(seed=source.seed, accounts=source.accounts)
        self._positions = list(positions)
        self._turn = 0
        self._last: list[tuple[str, int]] = []
        self._started_at = time.monotonic()
        self._returned = 0
        self._closed = threading.Event()

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        """Return the next rows of one split, or None if the rate allows none within `timeout_s`."""
        turn = self._next_turn()
        if turn is None:
            if self._source.bounded:
                return EndOfInput()
            self._closed.wait(timeout_s)
            return None
        allowed = self._wait_for_rate(timeout_s)
        if allowed < 1:
            return None
        position = self._positions[turn]
        left = position.rows_left
        count = min(self._source.batch_rows, allowed, allowed if left is None else left)
        numbers = np.arange(position.next, position.next + count, dtype=np.int64)
        batch = self._payments.batch(numbers * self._source.splits_count + position.split)
        self._positions[turn] = replace(position, next=position.next + count)
        self._returned += count
        self._turn = turn + 1
        self._last = [(position.to_split().id, count)]
        return batch

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        """Return the split of the rows that `poll` returned last."""
        return self._last

    def list_ended_splits(self) -> Sequence[str]:
        """Return the ids of the splits that are read to their end."""
        return [position.to_split().id for position in self._positions if position.rows_left == 0]

    def snapshot(self) -> Sequence[Split]:
        """Return every split at the row after the last returned row."""
        return [position.to_split() for position in self._positions]

    def close(self) -> None:
        """Wake a waiting `poll`."""
        self._closed.set()

    def _next_turn(self) -> int | None:
        count = len(self._positions)
        for step in range(count):
            turn = (self._turn + step) % count
            if self._positions[turn].rows_left != 0:
                return turn
        return None

    def _wait_for_rate(self, timeout_s: float) -> int:
        """Return the number of rows that the rate allows; wait up to `timeout_s` for the first."""
        rate = self._source.rows_per_second
        if rate is None:
            return self._source.batch_rows
        share = rate * len(self._positions) / self._source.splits_count
        due_at = self._started_at + (self._returned + 1) / share
        wait_s = min(due_at - time.monotonic(), timeout_s)
        if wait_s > 0:
            self._closed.wait(wait_s)
        return int((time.monotonic() - self._started_at) * share) - self._returned
