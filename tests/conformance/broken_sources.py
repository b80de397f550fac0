"""A gallery of sources that are each wrong in one way.

Each is the reference source with one step done wrong, and names the one clause on which it must
fail.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from tests.conformance.reference_source import BATCH_ROWS, ReferenceReader, ReferenceSource

from onceflow.core.errors import SourceUnavailable
from onceflow.core.spi import EndOfInput, ReaderContext, Split


@dataclass(frozen=True)
class BrokenSource(ReferenceSource):
    """Wrong in one way."""

    breaks: ClassVar[str]
    """The clause on which it must fail."""


class _SkipsARow(ReferenceReader):
    def read_lines(self, split_id: str) -> list[int]:
        return super().read_lines(split_id)[1:]


class LeavesOutTheFirstRow(BrokenSource):
    """Takes the first line of a file for a header."""

    breaks = "every-row-is-returned-once"
    reader_class = _SkipsARow


class _KeepsEverything(ReferenceReader):
    def snapshot(self) -> Sequence[Split]:
        return [Split(split_id, b"%100000d" % at) for split_id, at in self.next.items()]


class HasLargePositions(BrokenSource):
    """Has a position that grows with what was read."""

    breaks = "position-fits-the-log"
    reader_class = _KeepsEverything


class _StartsLate(ReferenceReader):
    is_polled = False

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        self.is_polled = True
        return super().poll(timeout_s)

    def snapshot(self) -> Sequence[Split]:
        return super().snapshot() if self.is_polled else ()


class HasNoSplitsBeforeItsFirstPoll(BrokenSource):
    """Takes its splits at its first poll, and a checkpoint may come before."""

    breaks = "snapshot-before-the-first-poll-is-the-start"
    reader_class = _StartsLate


class _Prefetches(ReferenceReader):
    def snapshot(self) -> Sequence[Split]:
        return [
            Split(split_id, b"%d" % min(at + BATCH_ROWS, len(self.read_lines(split_id))))
            if at
            else Split(split_id, b"0")
            for split_id, at in self.next.items()
        ]


class CountsRowsThatItOnlyFetched(BrokenSource):
    """Has positions after the batch that it returns next."""

    breaks = "positions-are-never-ahead-of-the-rows"
    reader_class = _Prefetches


class _IsOneShort(ReferenceReader):
    def snapshot(self) -> Sequence[Split]:
        return [Split(split_id, b"%d" % max(0, at - 1)) for split_id, at in self.next.items()]


class NamesItsLastRowInsteadOfTheNext(BrokenSource):
    """Has the position of the last row that it returned."""

    breaks = "replay-from-each-position"
    reader_class = _IsOneShort


class _ChangesItsPositions(ReferenceReader):
    _numbers = itertools.count(1)

    def snapshot(self) -> Sequence[Split]:
        width = next(self._numbers)
        return [Split(split_id, b"%*d" % (width, at)) for split_id, at in self.next.items()]


class HasOtherPositionsWithoutAPoll(BrokenSource):
    """Writes one position in many forms."""

    breaks = "snapshot-again-changes-nothing"
    reader_class = _ChangesItsPositions


class _KeepsPositionsInMemory(ReferenceReader):
    known: ClassVar[set[tuple[int, Split]]] = set()

    def __init__(
        self, source: ReferenceSource, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        kept = [
            split if (os.getpid(), split) in self.known else Split(split.id, b"0")
            for split in splits
        ]
        super().__init__(source, kept, context)

    def snapshot(self) -> Sequence[Split]:
        splits = super().snapshot()
        self.known.update((os.getpid(), split) for split in splits)
        return splits


class KeepsItsPositionsInMemory(BrokenSource):
    """Begins again in a process that does not have what its positions refer to."""

    breaks = "replay-in-another-process"
    reader_class = _KeepsPositionsInMemory


class _ChoosesItsSplits(ReferenceReader):
    def __init__(
        self, source: ReferenceSource, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        count = context.parallelism
        mine = [
            split for split in splits if zlib.crc32(split.id.encode()) % count == context.subtask
        ]
        super().__init__(source, mine, context)


class ChoosesItsSplits(BrokenSource):
    """Reads the splits that it thinks are its own, instead of those that it was given."""

    breaks = "rescaling-returns-each-row-once"
    reader_class = _ChoosesItsSplits


class _NamesOneSplit(ReferenceReader):
    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return [(min(self.next), sum(count for _, count in self.runs))]


class NamesOneSplitForAllRows(BrokenSource):
    """Has all rows in its first split."""

    breaks = "rows-by-split-are-exact"
    reader_class = _NamesOneSplit


class _EndsOnce(ReferenceReader):
    has_ended = False

    def end(self) -> EndOfInput | None:
        if self.has_ended:
            return None
        self.has_ended = True
        return EndOfInput()


class EndsOnce(BrokenSource):
    """Returns the end of its input once, and None from then on."""

    breaks = "bounded-end"
    reader_class = _EndsOnce


class _EndsAllSplits(ReferenceReader):
    def list_ended_splits(self) -> Sequence[str]:
        return list(self.next) if super().list_ended_splits() else ()


class EndsAllSplitsWithTheFirst(BrokenSource):
    """Names splits as ended that have rows."""

    breaks = "ended-splits-have-no-more-rows"
    reader_class = _EndsAllSplits


class _EndsWithoutSplits(ReferenceReader):
    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        return super().poll(timeout_s) if self.next else EndOfInput()


class EndsWithoutSplits(BrokenSource):
    """Ends a reader that has no splits yet."""

    breaks = "reader-without-splits"
    reader_class = _EndsWithoutSplits


class _WaitsTooLong(ReferenceReader):
    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s or 2.5)


class WaitsLongerThanItMay(BrokenSource):
    """Takes a timeout of 0 for a timeout of its own."""

    breaks = "poll-without-rows-returns-in-time"
    reader_class = _WaitsTooLong


class _SleepsThroughAWake(ReferenceReader):
    def wake(self) -> None:
        pass


class SleepsThroughAWake(BrokenSource):
    """Holds up the checkpoint that has woken it."""

    breaks = "wake-ends-a-waiting-poll"
    reader_class = _SleepsThroughAWake


class _ClosesWithoutAWord(ReferenceReader):
    def close(self) -> None:
        self.is_closed = True


class WaitsThroughItsClose(BrokenSource):
    """Waits to the end of a poll that nobody needs any more."""

    breaks = "close-ends-a-waiting-poll"
    reader_class = _ClosesWithoutAWord


class _ReadsFilesOnce(ReferenceReader):
    def __init__(
        self, source: ReferenceSource, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        super().__init__(source, splits, context)
        self.lines: dict[str, list[int]] = {}

    def read_lines(self, split_id: str) -> list[int]:
        if split_id not in self.lines:
            self.lines[split_id] = super().read_lines(split_id)
        return self.lines[split_id]


class ReadsItsFilesOnce(BrokenSource):
    """Never looks again at a file that it has read."""

    breaks = "rows-that-come-later-are-returned-once"
    reader_class = _ReadsFilesOnce


class BeginsKnownSplitsAgain(BrokenSource):
    """Discovers known splits as if they were new."""

    breaks = "known-splits-keep-their-positions"

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        return self.splits()


class BeginsNewSplitsAtTheirEnd(BrokenSource):
    """Skips the rows that a split got before it was discovered."""

    breaks = "splits-that-appear-are-read-whole"

    def begin(self, split_id: str) -> Split:
        return Split(split_id, b"%d" % len(self.path(split_id).read_text().split()))


class _ReadsNothingOfWhatIsGone(ReferenceReader):
    def miss(self, path: Path) -> list[int]:
        return []


class TakesAMissingSplitForAnEmptyOne(BrokenSource):
    """Returns no rows of a file that is gone, and no error."""

    breaks = "missing-split-is-refused-by-name"
    reader_class = _ReadsNothingOfWhatIsGone


class _AcknowledgesEarly(ReferenceReader):
    def snapshot(self) -> Sequence[Split]:
        splits = super().snapshot()
        self.commit(splits)
        return splits


class AcknowledgesItsSnapshots(BrokenSource):
    """Reports rows as done that no checkpoint has decided yet."""

    breaks = "only-decided-rows-are-acknowledged"
    reader_class = _AcknowledgesEarly


class _GoesBack(ReferenceReader):
    def commit(self, splits: Sequence[Split]) -> None:
        super().commit(splits)
        self.next |= {split.id: int(split.position) for split in splits}


class GoesBackToWhatIsDecided(BrokenSource):
    """Reads on from a position that it was only told about."""

    breaks = "acknowledgement-keeps-later-rows"
    reader_class = _GoesBack


class _LeavesALock(ReferenceReader):
    def __init__(
        self, source: ReferenceSource, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        super().__init__(source, splits, context)
        self.locks = [source.path(split.id).with_suffix(".lock") for split in splits]
        for lock in self.locks:
            owner = lock.read_text() if lock.exists() else ""
            if owner not in ("", str(os.getpid())):
                raise SourceUnavailable(f"process {owner} has locked {lock}")
            lock.write_text(str(os.getpid()))

    def close(self) -> None:
        super().close()
        for lock in self.locks:
            lock.unlink(missing_ok=True)


class LeavesItsLockBehind(BrokenSource):
    """Has a lock that a killed process never releases."""

    breaks = "job-killed-at-each-step"
    reader_class = _LeavesALock


GALLERY: tuple[type[BrokenSource], ...] = tuple(
    kind
    for kind in tuple(vars().values())
    if isinstance(kind, type) and issubclass(kind, BrokenSource) and kind is not BrokenSource
)
