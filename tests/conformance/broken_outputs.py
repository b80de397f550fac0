"""Sources with two outputs, each of which is wrong in one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tests.support.two_outputs import TwoOutputs, TwoOutputsReader

from onceflow.core.spi import EndOfInput, OutputBatch, PolledRows, Split


@dataclass(frozen=True)
class BrokenOutputs(TwoOutputs):
    """Wrong in one way."""

    breaks: ClassVar[str]
    """The clause on which it must fail."""


class _NamesNoOutput(TwoOutputsReader):
    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        polled = super().poll(timeout_s)
        return polled.rows if isinstance(polled, OutputBatch) else polled


class NamesNoOutputOfABatchAlone(BrokenOutputs):
    """Returns a batch without its output if a poll has rows of one output."""

    breaks = "every-row-is-returned-once"
    reader_class = _NamesNoOutput


class _DividesATransaction(TwoOutputsReader):
    def __init__(self, source: TwoOutputs, splits: Sequence[Split]) -> None:
        super().__init__(source, splits)
        self._later: Sequence[OutputBatch] = ()
        self._runs_later: list[tuple[str, int]] = []

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        if self._later:
            later, self._later = self._later, ()
            self._runs = self._runs_later
            return tuple(later)
        polled = super().poll(timeout_s)
        if not isinstance(polled, tuple):
            return polled
        self._later = polled[1:]
        self._runs, self._runs_later = self._runs[:1], self._runs[1:]
        return polled[0]

    def list_ended_splits(self) -> Sequence[str]:
        return () if self._later else super().list_ended_splits()


class DividesATransaction(BrokenOutputs):
    """Returns the outputs of transactions in two polls, and its position is after both."""

    breaks = "positions-are-never-ahead-of-the-rows"
    reader_class = _DividesATransaction


class _ReturnsCustomersAgain(TwoOutputsReader):
    def __init__(self, source: TwoOutputs, splits: Sequence[Split]) -> None:
        super().__init__(source, splits)
        self._continued = {split.id: int(split.position) for split in splits}

    def _make_batches(self, split_id: str, of_split: range) -> PolledRows:
        first = self._continued.pop(split_id, 0)
        if not first:
            return super()._make_batches(split_id, of_split)
        polled = super()._make_batches(split_id, range(first - 1, of_split.stop))
        batches = (polled,) if isinstance(polled, OutputBatch) else polled
        assert isinstance(batches, tuple)
        return tuple(
            OutputBatch(batch.output, batch.rows.slice(batch.output == "orders"))
            for batch in batches
        )


class ReturnsCustomersAgain(BrokenOutputs):
    """Begins one of the outputs a transaction before its position."""

    breaks = "replay-from-each-position"
    reader_class = _ReturnsCustomersAgain


class _NamesASplitOnce(TwoOutputsReader):
    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        runs = super().rows_by_split()
        return [(runs[0][0], sum(count for _, count in runs))]


class NamesASplitOnceForAllOutputs(BrokenOutputs):
    """Counts the rows of a split over the batches of a poll, instead of in each batch."""

    breaks = "rows-by-split-are-exact"
    reader_class = _NamesASplitOnce


OUTPUTS_GALLERY: tuple[type[BrokenOutputs], ...] = (
    NamesNoOutputOfABatchAlone,
    DividesATransaction,
    ReturnsCustomersAgain,
    NamesASplitOnceForAllOutputs,
)
