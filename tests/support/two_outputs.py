"""A generated source with two outputs, whose rows are known in advance."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from onceflow.core.spi import (
    EndOfInput,
    OutputBatch,
    PolledRows,
    ReaderContext,
    Source,
    SourceReader,
    Split,
)
from onceflow.core.spi.dead_letters import DeadLetter

OUTPUTS: Mapping[str, pa.Schema] = {
    "orders": pa.schema([("id", pa.int64()), ("at", pa.int64()), ("amount", pa.int64())]),
    "customers": pa.schema([("name", pa.string()), ("at", pa.int64())]),
}
EVERY = 4
"""Each number is an order, and every fourth is a customer, too."""


def is_bad(number: int) -> bool:
    """Return True if the number is a bad record of a source that `has_dead_letters`."""
    return number % 25 == 8


@dataclass(frozen=True)
class TwoOutputs(Source):
    """Transactions by number, split by split: an order, and for every fourth number a customer."""

    splits_count: int = 2
    transactions: int = 1_000
    """The number of transactions of a split."""
    batch_transactions: int = 10
    pause_s: float = 0.0
    """The time that a reader waits before each batch."""
    waits_at: int | None = None
    """The number of transactions of a split after which the reader returns nothing more."""
    goes_on_with: str = ""
    """The path of a file. If it exists, the readers go on after `waits_at`."""
    names: tuple[str, ...] = ("orders", "customers")
    schemas: Mapping[str, pa.Schema] = field(default_factory=lambda: OUTPUTS)
    has_dead_letters: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    """True if the readers refuse the numbers that `is_bad`."""
    reader_class: ClassVar[type[TwoOutputsReader]]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([])

    @property
    def outputs(self) -> Mapping[str, pa.Schema]:
        return {name: self.schemas[name] for name in self.names}

    @property
    def bounded(self) -> bool:
        return True

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"0") for number in range(self.splits_count)]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return self.reader_class(self, splits)

    def count_readable(self) -> int:
        """Return the number of transactions of a split that readers may return now."""
        waits = self.waits_at is not None and not Path(self.goes_on_with or "/none").exists()
        return self.waits_at if waits and self.waits_at is not None else self.transactions

    def list_orders(self) -> list[tuple[int, int]]:
        """Return (id, amount) of every order."""
        return [(number, number % 100) for number in self._list_numbers()]

    def list_customers(self) -> list[str]:
        """Return the name of every customer."""
        return [f"customer {number}" for number in self._list_numbers() if number % EVERY == 0]

    def list_bad(self) -> list[int]:
        """Return every number that is a dead letter."""
        return [number for number in self._list_all() if self.refuses(number)]

    def refuses(self, number: int) -> bool:
        """Return True if the number is a dead letter, and neither an order nor a customer."""
        return self.has_dead_letters and is_bad(number)

    def _list_numbers(self) -> list[int]:
        return [number for number in self._list_all() if not self.refuses(number)]

    def _list_all(self) -> range:
        return range(self.splits_count * self.transactions)


class TwoOutputsReader(SourceReader):
    """Reads some transactions of a split at a time, each split in turn."""

    def __init__(self, source: TwoOutputs, splits: Sequence[Split]) -> None:
        self._source = source
        self._rejected: list[DeadLetter] = []
        self._next = {split.id: int(split.position) for split in splits}
        self._runs: list[tuple[str, int]] = []

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        count = self._source.count_readable()
        open_splits = [split_id for split_id, number in self._next.items() if number < count]
        if not open_splits and count < self._source.transactions:
            time.sleep(timeout_s)
            return None
        if not open_splits:
            return EndOfInput()
        if self._source.pause_s:
            time.sleep(self._source.pause_s)
        # In turn, so that all splits have rows in each part of the input.
        split_id = min(open_splits, key=lambda key: self._next[key])
        first = self._next[split_id]
        self._next[split_id] = last = min(count, first + self._source.batch_transactions)
        return self._make_batches(split_id, range(first, last))

    def _make_batches(self, split_id: str, of_split: range) -> PolledRows:
        read = [number * self._source.splits_count + int(split_id) for number in of_split]
        numbers = [number for number in read if not self._source.refuses(number)]
        self._rejected += [
            DeadLetter("a bad number", "shop", int(split_id), number)
            for number in read
            if self._source.refuses(number)
        ]
        orders = [{"id": number, "at": number, "amount": number % 100} for number in numbers]
        named = [number for number in numbers if number % EVERY == 0]
        customers = [{"name": f"customer {number}", "at": number} for number in named]
        batches = tuple(
            OutputBatch(name, pa.RecordBatch.from_pylist(rows, schema=OUTPUTS[name]))
            for name, rows in (("orders", orders), ("customers", customers))
            if rows and name in self._source.names
        )
        self._runs = [(split_id, batch.rows.num_rows) for batch in batches]
        # One batch alone is returned without a tuple: both forms are in the contract.
        return batches[0] if len(batches) == 1 else batches

    def take_rejected(self) -> Sequence[DeadLetter]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._runs

    def snapshot(self) -> Sequence[Split]:
        return [Split(split_id, str(number).encode()) for split_id, number in self._next.items()]

    def list_ended_splits(self) -> Sequence[str]:
        return [
            split_id
            for split_id, number in self._next.items()
            if number >= self._source.transactions
        ]

    def close(self) -> None:
        pass


TwoOutputs.reader_class = TwoOutputsReader
