"""The head operator of a source chain, and the layout of its state: the positions of its splits.

There is one instance per subtask, used only by the chain's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

import msgspec
import pyarrow as pa

from onceflow.core.crash_points import reach
from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import Wait
from onceflow.core.protocol.record_times import RecordTimes, RecordTimesCounter
from onceflow.core.protocol.splits import AwaitedSplits, Split, SplitState
from onceflow.core.protocol.watermarks import SplitWatermarks
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.reader_failures import ReaderFailures
from onceflow.core.spi import EndOfInput, OutputBatch, PolledRows, SourceReader
from onceflow.core.traces import NO_TRACE, Trace, TraceStep

SPLITS = "splits"
"""The name of a source's operator list state."""


@dataclass(frozen=True, slots=True)
class _StoredSplit:
    """The layout of an element of a source's list state.

    It must not change: checkpoints contain it.
    """

    id: str
    position: bytes
    event_time_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _StoredSplitOfOutputs(_StoredSplit):
    """The layout of an element if outputs of the source have event times. It must not change."""

    output_times_ms: dict[str, int] = field(default_factory=dict[str, int])


_STORED_SPLITS = msgpack_decoder(_StoredSplitOfOutputs)


def encode_split(state: SplitState) -> bytes:
    """Encode `state` as an element of operator list state."""
    split = state.split
    plain = _StoredSplit(split.id, split.position, state.event_time_ms)
    if not state.output_times_ms:
        return msgspec.msgpack.encode(plain)
    times_ms = dict(state.output_times_ms)
    return msgspec.msgpack.encode(
        _StoredSplitOfOutputs(plain.id, plain.position, plain.event_time_ms, times_ms)
    )


def decode_split(element: bytes) -> SplitState:
    """Decode an element of operator list state."""
    stored = _STORED_SPLITS.decode(element)
    output_times_ms = tuple(sorted(stored.output_times_ms.items()))
    return SplitState(Split(stored.id, stored.position), stored.event_time_ms, output_times_ms)


def to_positions(splits: Iterable[Split]) -> Iterator[tuple[str, str]]:
    """Yield the id and the position of each split, as text for a trace."""
    for split in splits:
        yield split.id, split.position.decode("utf-8", "backslashreplace")


class SourceOperator(RunningOperator):
    """The head operator of a source chain. Its state is the positions of its splits."""

    def __init__(
        self,
        uid: str,
        reader: SourceReader,
        beside: Callable[[Callable[[], None]], object],
        strategies: Mapping[str | None, WatermarkStrategy] = MappingProxyType({}),
        splits: Sequence[SplitState] = (),
        outputs: Mapping[str, pa.Schema] = MappingProxyType({}),
        attempt: int = 0,
        trace: Trace = NO_TRACE,
    ) -> None:
        """Create the operator.

        `strategies` has each output's watermark strategy (`ReadFrom.watermarks`). `outputs` are
        the outputs of the source.
        """
        super().__init__(uid)
        self.reader = reader
        self._outputs = outputs
        self.side_schemas.update(outputs)
        self._strategies = strategies
        self._watermarks: SplitWatermarks | None = None
        if strategies:
            rules = {output: strategy.rule for output, strategy in strategies.items()}
            self._watermarks = SplitWatermarks(splits, rules)
        self._failures = ReaderFailures(
            uid, type(reader).__name__, attempt, [state.split for state in splits]
        )
        self._beside = beside
        self._trace = trace
        self._positions: dict[CheckpointId, Sequence[Split]] = {}
        self._awaited = AwaitedSplits()
        self._times = RecordTimesCounter()

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the server that the reader waits for, if any."""
        outage = self.reader.find_outage()
        return () if outage is None else (Wait(self.uid, outage.what, outage.lasted_s),)

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        """Return the reader's next rows, and reject the bad records that it has left out.

        Raises:
            SourceError: The reader raised an error that is not onceflow's.
        """
        with self._failures.during("poll"):
            polled = self.reader.poll(timeout_s)
        # Before the rows of the same poll: both are in the same checkpoint, in a fixed order.
        with self._failures.during("take_rejected"):
            rejected = self.reader.take_rejected()
        self.reject(rejected)
        return polled

    def receive_rows(self, rows: PolledRows) -> None:
        """Emit the rows of one poll.

        Raises:
            ConfigError: The reader returned other outputs than its source has, or a value that the
                contract of `SourceReader.poll` does not allow.
        """
        match rows:
            case pa.RecordBatch():
                self.receive(Batch(rows))
            case OutputBatch():
                self._receive_outputs((rows,))
            case tuple():
                self._receive_outputs(rows)
            case _:
                # Readers of other authors may return anything.
                raise self._refuse_rows(rows)

    def process(self, batch: Batch) -> None:
        """Emit the rows that were read.

        Raises:
            ConfigError: The source has several outputs, and the reader does not name one.
        """
        if self._outputs:
            raise ConfigError(
                f"source {self.uid!r} has the outputs {', '.join(self._outputs)}, and poll of"
                f" {type(self.reader).__name__} returned a RecordBatch: return an OutputBatch,"
                " which names the output of its rows"
            )
        self._count_record_times()
        if self._watermarks is not None:
            self._see(self._watermarks, [(None, batch.rows)])
        self.emit(batch.rows)

    def _receive_outputs(self, batches: Sequence[OutputBatch]) -> None:
        for batch in batches:
            if type(batch) is not OutputBatch:
                raise self._refuse_rows(batches)
            if batch.output not in self._outputs:
                raise ConfigError(
                    f"source {self.uid!r} has the outputs {', '.join(self._outputs) or 'none'}, and"
                    f" poll of {type(self.reader).__name__} returned rows of output"
                    f" {batch.output!r}: add it to Source.outputs"
                )
        self.records_in += sum(batch.rows.num_rows for batch in batches)
        self._count_record_times()
        if self._watermarks is not None:
            self._see(self._watermarks, [(batch.output, batch.rows) for batch in batches])
        for batch in batches:
            self.emit_to(batch.output, batch.rows)

    def _refuse_rows(self, returned: object) -> ConfigError:
        name = type(returned).__name__
        if isinstance(returned, tuple):
            elements = cast("tuple[object, ...]", returned)
            name += f" of {', '.join(sorted({type(element).__name__ for element in elements}))}"
        return ConfigError(
            f"source {self.uid!r}: poll of {type(self.reader).__name__} returned a {name}: return"
            " a RecordBatch, an OutputBatch, a tuple of OutputBatch, EndOfInput() or None"
        )

    def _count_record_times(self) -> None:
        if times := self.reader.take_record_times():
            self._times.add(times, int(time.time() * 1000))

    @property
    def has_watermarks(self) -> bool:
        """True if the source emits watermarks."""
        return self._watermarks is not None

    def next_watermark(self) -> int | None:
        """Return the watermark to emit now, or None. Returns each watermark once."""
        if self._watermarks is None:
            return None
        # Remove ended splits, which would hold event time back for ever.
        for split_id in self.reader.list_ended_splits():
            self._watermarks.on_ended(split_id)
        return self._watermarks.next(time.monotonic())

    def _see(
        self, watermarks: SplitWatermarks, batches: Sequence[tuple[str | None, pa.RecordBatch]]
    ) -> None:
        """Update the watermarks with the event times of the rows of one poll, by output.

        Raises:
            ConfigError: The reader does not return the split of each row.
        """
        runs = self.reader.rows_by_split()
        if runs is None:
            only = self._only_split()
            runs = [(only, rows.num_rows) for _, rows in batches]
        left = iter(runs)
        for output, rows in batches:
            strategy = self._strategies.get(output)
            start = 0
            while start < rows.num_rows:
                run = next(left, None)
                if run is None:
                    raise ConfigError(
                        f"source {self.uid!r}: rows_by_split of {type(self.reader).__name__}"
                        f" returned {list(runs)}, but the batches of the last poll have"
                        f" {[rows.num_rows for _, rows in batches]} rows: return a (split id,"
                        " number of rows) for each split that has rows in a batch"
                    )
                split_id, count = run
                of_split = rows.slice(start, count)
                start += count
                latest_ms = None if strategy is None else strategy.latest_ms(of_split)
                if latest_ms is not None:
                    watermarks.on_rows(split_id, latest_ms, time.monotonic(), output)

    def _only_split(self) -> str:
        """Return the only split of a reader that does not report the split of each row.

        Raises:
            ConfigError: There are several splits: one split would make records of the others late.
        """
        splits = self.reader.snapshot()
        if len(splits) != 1:
            raise ConfigError(
                f"source {self.uid!r} has watermarks, which are kept for each split, but"
                f" {type(self.reader).__name__} with {len(splits)} splits does not return the"
                " split of each row. Implement SourceReader.rows_by_split, or read the source"
                " without watermarks="
            )
        return splits[0].id

    def take_offer(self, splits: Sequence[Split]) -> None:
        """Accept splits that will be read once a checkpoint that contains them is decided."""
        self._awaited.add_offer(splits)
        reach("offered")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Record the position of every split."""
        with self._failures.during("snapshot"):
            read = self.reader.snapshot()
        splits = (*read, *self._awaited.snapshot(checkpoint))
        self._positions[checkpoint] = splits
        self._record("read", checkpoint, splits)
        if self._watermarks is None:
            states = tuple(map(SplitState, splits))
        else:
            # Store the event time of each split with its position. Without it, late rows would
            # count as in time after a restart.
            states = self._watermarks.with_event_times(splits)
        snapshot = OperatorSnapshot(self.uid, lists={SPLITS: tuple(map(encode_split, states))})
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def take_record_times(self) -> RecordTimes | None:
        """Return the times of the records that were passed on since the last call."""
        return self._times.take()

    def on_completed(self, checkpoint: CheckpointId) -> None:
        """Start reading decided splits; commit the positions to the source, for lag tools."""
        if decided := self._awaited.take_decided(checkpoint):
            reach("decided")
            with self._failures.during("add_splits"):
                self.reader.add_splits(decided)
            if self._watermarks is not None:
                self._watermarks.add(map(SplitState, decided))
        splits = self._positions.get(checkpoint)
        # A newer decision covers older checkpoints, whose notification may never arrive.
        self._positions = {n: kept for n, kept in self._positions.items() if n > checkpoint}
        if splits:
            self._failures.record_decision(splits)
            # On another thread: this serves only lag tools, and a slow broker must not delay rows.
            self._record("acknowledged", checkpoint, splits)
            self._beside(lambda: self.reader.commit(splits))

    def _record(self, step: TraceStep, checkpoint: CheckpointId, splits: Sequence[Split]) -> None:
        positions = to_positions(splits)
        self._trace.record(step, source=self.uid, checkpoint=checkpoint, positions=positions)

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        """Forget the positions of an aborted checkpoint."""
        self._positions.pop(checkpoint, None)
        self._awaited.drop_snapshot(checkpoint)

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()
