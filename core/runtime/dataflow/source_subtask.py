"""A subtask that reads a source and begins every barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from onceflow.core.crash_points import reach
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.protocol.splits import AwaitedSplits, Split
from onceflow.core.runtime.dataflow.channels import InputGate
from onceflow.core.runtime.dataflow.elements import Batch
from onceflow.core.runtime.dataflow.keyed_edge import KeyGroupPartitioner
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.subtask import SlotReports, Subtask
from onceflow.core.spi import EndOfInput, SourceReader

SPLITS = "splits"
"""The name of a source's operator list state."""


def encode_split(split: Split) -> bytes:
    """Return `split` as one element of operator list state."""
    return msgspec.msgpack.encode(split)


def decode_split(element: bytes) -> Split:
    """Return the split that `element` holds."""
    return msgspec.msgpack.decode(element, type=Split)


@dataclass(frozen=True, slots=True)
class SplitsOffered:
    """Mail to a source: these splits have appeared, and are its own."""

    splits: tuple[Split, ...]


class SourceOperator(RunningOperator):
    """The head of a source chain: its state is where its splits stand."""

    def __init__(
        self, uid: str, reader: SourceReader, beside: Callable[[Callable[[], None]], object]
    ) -> None:
        super().__init__(uid)
        self.reader = reader
        self._beside = beside
        self._positions: dict[CheckpointId, Sequence[Split]] = {}
        self._awaited = AwaitedSplits()

    def process(self, batch: Batch) -> None:
        """Pass on what was read."""
        self.emit(batch.rows)

    def offered(self, splits: Sequence[Split]) -> None:
        """Take in splits that are read once a checkpoint that holds them is decided."""
        self._awaited.offered(splits)
        reach("offered")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Record the position of every split."""
        splits = (*self.reader.snapshot(), *self._awaited.snapshot(checkpoint))
        self._positions[checkpoint] = splits
        snapshot = OperatorSnapshot(
            self.uid, lists={SPLITS: tuple(encode_split(split) for split in splits)}
        )
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Begin with the splits that are decided; tell the source how far it is, for lag tools."""
        if decided := self._awaited.completed(checkpoint):
            reach("decided")
            self.reader.add_splits(decided)
        splits = self._positions.get(checkpoint)
        self._positions = {n: kept for n, kept in self._positions.items() if n > checkpoint}
        if splits:
            self._beside(lambda: self.reader.commit(splits))

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Forget the positions of a checkpoint that will never be."""
        self._positions.pop(checkpoint, None)
        self._awaited.aborted(checkpoint)

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()


class SourceSubtask(Subtask):
    """Polls its reader between mails; stops reading at its end and after a stop barrier."""

    def __init__(
        self,
        ref: SubtaskRef,
        source: SourceOperator,
        operators: Sequence[RunningOperator],
        edges: Sequence[KeyGroupPartitioner],
        reports: SlotReports,
        poll_timeout_s: float,
    ) -> None:
        super().__init__(ref, InputGate(0), operators, edges, reports)
        self._source = source
        self._poll_timeout_s = poll_timeout_s
        self._reading = True
        self._last_checkpoint = CheckpointId(0)

    def _step(self) -> None:
        if not self._reading:
            mail = self.gate.take(1.0)
            if mail is not None:
                self._handle(mail)
            return
        while (mail := self.gate.take_mail()) is not None:
            self._handle(mail)
            if not self._reading or self._leaving:
                return
        polled = self._source.reader.poll(self._poll_timeout_s)
        self._source.reject(self._source.reader.rejected())
        match polled:
            case None:
                pass
            case EndOfInput():
                self._reading = False
                self._end_of_stream()
                self._reports.source_exhausted(self.ref)
            case rows:
                self._timed(lambda: self._source.receive(Batch(rows)))

    def _handle(self, mail: object) -> None:
        if isinstance(mail, SplitsOffered):
            self._source.offered(mail.splits)
        else:
            super()._handle(mail)

    def _on_triggered(self, barrier: Barrier) -> None:
        if barrier.checkpoint <= self._last_checkpoint:
            return
        self._last_checkpoint = barrier.checkpoint
        if barrier.kind is CheckpointKind.STOP:
            self._reading = False
        self._snapshot(barrier, alignment_ms=0.0)

    def _on_aborted(self, checkpoint: CheckpointId) -> None:
        self._last_checkpoint = max(self._last_checkpoint, checkpoint)
