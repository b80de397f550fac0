"""A correct source, and those of our own that need no server, keep every clause of the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from tests.conformance.reference_source import ReferenceInput
from tests.support.two_outputs import EVERY, TwoOutputs

from onceflow.core.spi import Source
from onceflow.integration.conformance import SourceConformance, SourceInput
from onceflow.sources import DatagenSource, NexmarkSource

_FIRST_TIME_MS = 1_436_918_400_000
"""The time of the first event of Nexmark: 2015-07-15 00:00 UTC."""


class TestReferenceSource(SourceConformance):
    @pytest.fixture
    def source_input(self, tmp_path: Path) -> SourceInput:
        return ReferenceInput(tmp_path)


class DatagenInput(SourceInput):
    """Generated payments: split k of 3 has the numbers k, k + 3, k + 6, …."""

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        self._rows = rows
        return {f"datagen-{split}": range(split, 3 * rows, 3) for split in range(3)}

    def source(self) -> Source:
        return DatagenSource(rows=3 * self._rows, splits_count=3, accounts=7, batch_rows=5)


class TestDatagenSource(SourceConformance):
    def make_input(self) -> SourceInput:
        return DatagenInput()


class NexmarkInput(SourceInput):
    """Events of Nexmark: split k of 2 has the epochs k, k + 2, k + 4, … of 50 events each."""

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        epochs = rows // 50 + 1
        self._events = 2 * epochs * 50
        kinds = ["person", *["auction"] * 3, *["bid"] * 46]
        return {
            f"nexmark-{split}": [
                (kinds[offset], 50 * epoch + offset)
                for epoch in range(split, 2 * epochs, 2)
                for offset in range(50)
            ]
            for split in range(2)
        }

    def source(self) -> Source:
        return NexmarkSource(
            events=self._events, splits_count=2, batch_events=15, event_interval_us=1_000
        )

    def keys(self, batch: pa.RecordBatch) -> Sequence[object]:
        """Return the numbers of the events: there is one each millisecond."""
        times_ms = batch.column("date_time").cast(pa.int64()).to_numpy()
        return list(map(int, times_ms - _FIRST_TIME_MS))


@pytest.mark.servers
class TestNexmarkSource(SourceConformance):
    def make_input(self) -> SourceInput:
        return NexmarkInput()


class TwoOutputsInput(SourceInput):
    """Generated transactions: split k of 2 has the numbers k, k + 2, k + 4, …."""

    def __init__(self, source_class: type[TwoOutputs] = TwoOutputs) -> None:
        self._source_class = source_class

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        self._transactions = rows
        return {str(split): list(_list_keys(range(split, 2 * rows, 2))) for split in range(2)}

    def source(self) -> Source:
        return self._source_class(transactions=self._transactions, batch_transactions=3)


def _list_keys(numbers: range) -> Iterator[object]:
    yield from (("orders", number) for number in numbers)
    yield from (("customers", f"customer {number}") for number in numbers if number % EVERY == 0)


@pytest.mark.servers
class TestSourceWithOutputs(SourceConformance):
    def make_input(self) -> SourceInput:
        return TwoOutputsInput()
