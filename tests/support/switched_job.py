"""A job whose trouble is switched on and off: each file in a directory is one trouble.

unread      the source reads nothing, while records arrive at the same pace
unreadable  the source leaves out a bad record with each batch
grown       state of every key is 200 times larger
refused     the sink refuses the first row of each batch
held        pre-commits wait, so no checkpoint completes
shut        commits wait, so what is prepared stays in doubt
barred      commits are refused until a person helps
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import KeyedFunction, Record, StateAccess, ValueStateDescriptor
from onceflow.core import spi
from onceflow.core.protocol.committables import CommitOutcome, Committable, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi.dead_letters import DeadLetter

KEYS = 20
STATE_LENGTH = 50


@dataclass(frozen=True)
class Switches:
    """The troubles of one job; its processes look at the same directory."""

    directory: str

    def turn_on(self, trouble: str) -> None:
        Path(self.directory, trouble).touch()

    def turn_off(self, trouble: str) -> None:
        Path(self.directory, trouble).unlink()

    def is_on(self, trouble: str) -> bool:
        return Path(self.directory, trouble).exists()


@dataclass(frozen=True, kw_only=True)
class SwitchedSource(CountingSource):
    """Records arrive from `began_s` on, `per_second` in each split, read or not."""

    switches: Switches
    began_s: float
    per_second: int

    def latest_offsets(self, splits: Sequence[spi.Split]) -> Sequence[spi.SplitOffsets]:
        return [spi.SplitOffsets(split.id, int(split.position), self.end) for split in splits]

    def reader(self, splits: Sequence[spi.Split], context: spi.ReaderContext) -> spi.SourceReader:
        return _Reader(self, super().reader(splits, context))

    @property
    def end(self) -> int:
        """Return the number of records that have arrived in each split."""
        return int((time.time() - self.began_s) * self.per_second)


class _Reader(spi.SourceReader):
    def __init__(self, source: SwitchedSource, inner: spi.SourceReader) -> None:
        self._source = source
        self._inner = inner
        self._letters: list[DeadLetter] = []

    def poll(self, timeout_s: float) -> spi.PolledRows | spi.EndOfInput | None:
        newest = max(int(split.position) for split in self._inner.snapshot())
        has_more = newest + self._source.batch_rows <= self._source.end
        if self._source.switches.is_on("unread") or not has_more:
            time.sleep(timeout_s)
            return None
        if self._source.switches.is_on("unreadable"):
            self._letters.append(DeadLetter("no such record"))
        return self._inner.poll(timeout_s)

    def take_rejected(self) -> Sequence[DeadLetter]:
        letters, self._letters = self._letters, []
        return letters

    def snapshot(self) -> Sequence[spi.Split]:
        return self._inner.snapshot()

    def close(self) -> None:
        self._inner.close()


class SwitchedState(KeyedFunction):
    """Passes records on, and keeps a text by key."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._text = state.value_state(ValueStateDescriptor("text", str))

    def process(self, record: Record) -> Record:
        length = STATE_LENGTH * (200 if self._switches.is_on("grown") else 1)
        if len(self._text.get() or "") != length:
            # Of random digits: a text of one letter would be stored as next to nothing.
            self._text.set(secrets.token_hex(length // 2))
        return record


@dataclass(frozen=True, kw_only=True)
class SwitchedSink(DirectorySink):
    """Refuses rows, or waits with pre-commits or commits, while it is told so."""

    switches: Switches

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        return _Writer(self.switches, super().writer(context))

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        committer = super().committer(context)
        commit = committer.commit

        def commit_unless_hindered(committable: Committable) -> CommitOutcome:
            if self.switches.is_on("shut"):
                return RetryLater("the target is shut")
            if self.switches.is_on("barred"):
                return RetryLater("a row is in the way", until_fixed=True)
            return commit(committable)

        committer.commit = commit_unless_hindered  # type: ignore[method-assign]
        return committer


class _Writer(spi.SinkWriter):
    def __init__(self, switches: Switches, inner: spi.SinkWriter) -> None:
        self._switches = switches
        self._inner = inner
        self._rejected: list[spi.RejectedRows] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if self._switches.is_on("refused"):
            self._rejected.append(spi.RejectedRows(batch.slice(0, 1), ["refused"]))
            batch = batch.slice(1)
        self._inner.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        while self._switches.is_on("held"):
            time.sleep(0.05)
        return self._inner.pre_commit(checkpoint)

    def take_rejected(self) -> Sequence[spi.RejectedRows]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def close(self) -> None:
        self._inner.close()
