"""Splits and readers of records that are functions of their numbers.

The position of a split counts the records that were read of it:
    {"split":0,"of":4,"next":1200,"stop":500000}      as UTF-8 JSON, in Split.position
`of` is the number of all splits: it decides which records belong to a split.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.spi import (
    EndOfInput,
    OutputBatch,
    PolledRows,
    SourceReader,
    Split,
    SplitOffsets,
)

Words: TypeAlias = npt.NDArray[np.uint64]
"""Words of 64 bits."""

MakeRecords: TypeAlias = Callable[[int, int, int], PolledRows]
"""A function that returns `count` records of split `split` from its record `first` on."""


def mix_bits(words: Words) -> Words:
    """Mix the bits of each word with SplitMix64's output function, which is a bijection.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        mixed = words + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("Words", mixed ^ (mixed >> np.uint64(31)))


def mix_numbers(numbers: npt.NDArray[np.int64], seed: int) -> Words:
    """Return a word for each number, which depends on the number and on `seed` alone."""
    return mix_bits(numbers.view(np.uint64) ^ mix_bits(np.full(1, seed & (2**64 - 1), np.uint64)))


def check_numbers(source: object, counts: Sequence[str], rate: str) -> None:
    """Raise ConfigError unless the fields `counts` of `source` are 1 or more.

    The field `rate` is None or positive.
    """
    for name in counts:
        if getattr(source, name) < 1:
            raise ConfigError(f"{name}={getattr(source, name)} is not 1 or more")
    per_second = getattr(source, rate)
    if per_second is not None and per_second <= 0:
        raise ConfigError(f"{rate}={per_second} is not positive")


@dataclass(frozen=True, slots=True)
class NumberedSplit:
    """A split with its position: the number of its next record among the records of the split."""

    kind: str
    """The first part of the split's id."""
    split: int
    of: int
    """The number of all splits."""
    next: int
    stop: int | None

    @property
    def id(self) -> str:
        """The id of the split."""
        return f"{self.kind}-{self.split}"

    @property
    def records_left(self) -> int | None:
        """The number of records that are still to be read; None if the split is endless."""
        return None if self.stop is None else self.stop - self.next

    def to_split(self) -> Split:
        """Return the split with its position as JSON."""
        fields = {"split": self.split, "of": self.of, "next": self.next, "stop": self.stop}
        return Split(self.id, json.dumps(fields, separators=(",", ":")).encode())

    @classmethod
    def from_split(cls, split: Split, kind: str, splits_count: int) -> NumberedSplit:
        """Return the split that `to_split` wrote.

        Raises:
            StateIncompatible: Another source wrote it, or the same with another `splits_count`.
        """
        try:
            fields = cast("dict[str, int]", json.loads(split.position))
            position = cls(kind, **{name: fields[name] for name in ("split", "of", "next", "stop")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _of_another_source(split) from error
        if position.id != split.id:
            raise _of_another_source(split)
        if position.of != splits_count:
            raise StateIncompatible(
                f"split {split.id!r} of the checkpoint is one of {position.of}, and the source now"
                f" has splits_count={splits_count}: its splits would hold other records. Start the"
                f" job with splits_count={position.of}; its parallelism may be any other number"
            )
        return position

    def to_offsets(self) -> SplitOffsets:
        """Return the position and the end. The split must have an end."""
        return SplitOffsets(self.id, self.next, self.stop or 0)


def _of_another_source(split: Split) -> StateIncompatible:
    return StateIncompatible(
        f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does not read"
        " as a position in this generated data: it was written by another source. Give this source"
        " another uid, or start the job as it was"
    )


class NumberedReader(SourceReader):
    """A reader that returns one batch of each split in turn."""

    def __init__(
        self,
        splits: Sequence[NumberedSplit],
        make: MakeRecords,
        *,
        bounded: bool,
        batch_records: int,
        records_per_second: float | None,
    ) -> None:
        """`records_per_second` is the rate of this reader; None: as fast as possible."""
        self._splits = list(splits)
        self._make = make
        self._bounded = bounded
        self._batch_records = batch_records
        self._rate = records_per_second
        self._turn = 0
        self._last: list[tuple[str, int]] = []
        self._started_at = time.monotonic()
        self._returned = 0
        self._closed = threading.Event()

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        """Return the next rows of one split, or None if the rate allows none within `timeout_s`."""
        turn = self._next_turn()
        if turn is None:
            if self._bounded:
                return EndOfInput()
            self._closed.wait(timeout_s)
            return None
        allowed = self._wait_for_rate(timeout_s)
        if allowed < 1:
            return None
        split = self._splits[turn]
        left = split.records_left
        count = min(self._batch_records, allowed, allowed if left is None else left)
        polled = self._make(split.split, split.next, count)
        self._splits[turn] = replace(split, next=split.next + count)
        self._returned += count
        self._turn = turn + 1
        self._last = [(split.id, rows) for rows in _count_rows(polled)]
        return polled

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        """Return the split of the rows that `poll` returned last, for each batch."""
        return self._last

    def list_ended_splits(self) -> Sequence[str]:
        """Return the ids of the splits that are read to their end."""
        return [split.id for split in self._splits if split.records_left == 0]

    def snapshot(self) -> Sequence[Split]:
        """Return every split at the record after the last returned record."""
        return [split.to_split() for split in self._splits]

    def close(self) -> None:
        """Wake a waiting `poll`."""
        self._closed.set()

    def _next_turn(self) -> int | None:
        count = len(self._splits)
        for step in range(count):
            turn = (self._turn + step) % count
            if self._splits[turn].records_left != 0:
                return turn
        return None

    def _wait_for_rate(self, timeout_s: float) -> int:
        """Return the number of records that the rate allows; wait up to `timeout_s` for one."""
        if self._rate is None:
            return self._batch_records
        due_at = self._started_at + (self._returned + 1) / self._rate
        wait_s = min(due_at - time.monotonic(), timeout_s)
        if wait_s > 0:
            self._closed.wait(wait_s)
        return int((time.monotonic() - self._started_at) * self._rate) - self._returned


def _count_rows(polled: PolledRows) -> Sequence[int]:
    if isinstance(polled, OutputBatch):
        return [polled.rows.num_rows]
    if isinstance(polled, tuple):
        return [batch.rows.num_rows for batch in polled]
    return [polled.num_rows]
