"""The operators of a chain as they run.

One instance a subtask, used by the chain's thread alone. The state of a source is where its splits
stand; that of a sink is in doubt until a checkpoint decides it, and `SinkMetricGroup` counts how it
goes: open -> prepared -> committed.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import msgspec
import pyarrow as pa

from onceflow.core.api.event_time import WatermarkStrategy
from onceflow.core.api.functions import Record
from onceflow.core.api.graph import (
    Feed,
    FilterRecords,
    FlatMapRecords,
    MapBatches,
    MapRecords,
    SelectSql,
    WriteTo,
)
from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError
from onceflow.core.msgspec_decoders import msgpack_decoder
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.messages import SinkMetrics, Wait
from onceflow.core.protocol.record_times import RecordTimes, RecordTimesCounter
from onceflow.core.protocol.splits import AwaitedSplits, Split, SplitState
from onceflow.core.protocol.watermarks import SplitWatermarks
from onceflow.core.runtime.dataflow.batch_iterators import (
    BatchIteratorCalls,
    BatchIteratorFunction,
)
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_metrics import FunctionMetrics
from onceflow.core.runtime.dataflow.outside_calls import OutsideCalls
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.runtime.dataflow.sink_refusals import SinkRefusals
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    as_schema,
    call_user,
    call_user_on_records,
)
from onceflow.core.spi import SinkWriter, SourceReader, WriterContext
from onceflow.core.spi.dead_letters import (
    DEAD_LETTERS,
    DEAD_LETTERS_TAG,
    DeadLetter,
    batch_of_letters,
    letters_of_rows,
)
from onceflow.core.state import StateWriter

Emit = Callable[[Batch], None]


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """The synchronous part is done; `upload` does the rest on another thread."""

    uid: str
    upload: Callable[[StateWriter], OperatorSnapshot]
    discard: Callable[[], None] = lambda: None
    """Releases what `upload`, which is not called then, would have read."""


class RunningOperator(ABC):
    """One operator of one subtask."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.outputs: list[Emit] = []
        self.side_schemas: dict[str, pa.Schema] = {DEAD_LETTERS_TAG: DEAD_LETTERS}
        """What `emit_to` may be called with: the tags of its side outputs, and their rows'."""
        self._aside: dict[str, list[Emit]] = {}
        self.records_in = 0
        self.rejected = 0
        """Bad records left out so far."""
        self.function_metrics = FunctionMetrics(uid)
        self.takes_dead_letters = False
        self.emission_ended = False
        """Whether the job stops with a savepoint that is taken: what follows may emit no row."""

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """What takes the batches of each input."""
        return (self.receive,)

    def list_waits(self) -> tuple[Wait, ...]:
        """Return which servers outside it waits for. Any thread."""
        return ()

    def outlet(self, feed: Feed) -> list[Emit]:
        """Return who gets the rows of `feed`, which leaves this operator; to be added to.

        Raises:
            ConfigError: It has no such side output, or one of another schema.
        """
        if feed.tag is None:
            return self.outputs
        schema = self.side_schemas.get(feed.tag)
        if schema is None:
            raise ConfigError(
                f"side output {feed.tag!r} of operator {self.uid!r} is used, and the operator has"
                " none of that name: its function asks for it in open(), by side_output(tag)"
            )
        if schema != feed.schema:
            raise ConfigError(
                f"side output {feed.tag!r} of operator {self.uid!r} is used with columns"
                f" {feed.schema}, and its function emits {schema}: use one OutputTag for both"
            )
        return self._aside.setdefault(feed.tag, [])

    def receive(self, batch: Batch) -> None:
        """Take a batch from the operator before."""
        self.records_in += batch.rows.num_rows
        self.process(batch)

    def emit(self, rows: pa.RecordBatch) -> None:
        """Hand `rows` to every operator and edge that follows."""
        if rows.num_rows:
            batch = Batch(rows)
            for output in self.outputs:
                output(batch)

    def emit_to(self, tag: str, rows: pa.RecordBatch) -> None:
        """Hand `rows` to whoever takes the side output `tag`; they are dropped where nobody does.

        `side_schemas` has the tag since before the first row, and `rows` are of its schema.
        """
        outputs = self._aside.get(tag)
        if outputs and rows.num_rows:
            batch = Batch(rows)
            for output in outputs:
                output(batch)

    def reject(self, letters: Sequence[DeadLetter]) -> None:
        """Count `letters` and hand them to the sink of dead letters, if there is one."""
        if not letters:
            return
        self.rejected += len(letters)
        if DEAD_LETTERS_TAG in self._aside:
            self.emit_to(DEAD_LETTERS_TAG, batch_of_letters(self.uid, letters))

    @abstractmethod
    def process(self, batch: Batch) -> None:
        """Compute and `emit` what follows from `batch`."""

    @property
    def cpu_beside_s(self) -> float:
        """Seconds of CPU that the operator has used on other threads than the chain's."""
        return 0.0

    @property
    def due_in_s(self) -> float | None:
        """Seconds until `on_time` has something to do; None when it has not."""
        return None

    def on_time(self) -> None:  # noqa: B027 - optional hook
        """Emit what follows now that its time has come."""

    def on_watermark(self, watermark: int) -> None:
        """Emit what follows now that event time is `watermark`, before that is told below."""
        self.flush()

    def flush(self) -> None:  # noqa: B027 - optional hook
        """Emit what is held back: the end of the input comes next."""

    def end_input(self) -> None:  # noqa: B027 - optional hook
        """Emit what the function makes of the end of its input. Called once, with a barrier next.

        All rows of the input are decided, or in the savepoint whose barrier comes next.
        """

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Take the synchronous part of this operator's snapshot; None when it has no state.

        What it emits belongs to `checkpoint`: operators that follow take theirs later.
        """
        return None

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Do what `snapshot` does, in a self-contained form that every backend restores."""
        return self.snapshot(checkpoint)

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Do what `snapshot` does, in a self-contained form that the same backend restores."""
        return self.savepoint(checkpoint)

    def take_record_times(self) -> RecordTimes | None:
        """Return the times of the records that came since the last call; None: nobody knows."""
        return None

    def on_completed(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Called when `checkpoint` is decided."""

    def on_aborted(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Called when `checkpoint` is given up."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release everything. Safe to call twice."""


class BatchMapper(RunningOperator):
    """Applies a function to whole batches."""

    def __init__(self, uid: str, work: MapBatches, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._function = work.function
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit the function's result."""
        made = call_user(self.uid, self._function, batch.rows)
        self.emit(as_schema(made, self._schema, self.uid))


class SqlMapper(RunningOperator):
    """Applies a query to whole batches."""

    def __init__(self, uid: str, work: SelectSql, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._sql = work.sql
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit the query's result."""
        made = call_user(self.uid, lambda: list(self._sql.apply(batch.rows)))
        for rows in made:
            self.emit(as_schema(rows, self._schema, self.uid))


class BatchIteratorMapper(RunningOperator):
    """Applies a function of an iterator of batches; see `batch_iterators`."""

    def __init__(self, uid: str, function: BatchIteratorFunction) -> None:
        super().__init__(uid)
        self._calls = BatchIteratorCalls(uid, function)

    @property
    def cpu_beside_s(self) -> float:
        """Processor time of the function's own thread."""
        return self._calls.cpu_s

    def process(self, batch: Batch) -> None:
        """Emit what comes out before the function asks for more."""
        for rows in self._calls.feed(batch.rows):
            self.emit(rows)

    def flush(self) -> None:
        """End the call, and emit what it has held back."""
        for rows in self._calls.finish():
            self.emit(rows)

    def snapshot(self, checkpoint: CheckpointId) -> None:
        """Keep nothing: what the function was given before the barrier has come out before it."""
        self.flush()

    def close(self) -> None:
        """Give the current call up."""
        self._calls.close()


class RecordMapper(RunningOperator):
    """Applies a function from a record to one, or to several."""

    def __init__(self, uid: str, work: MapRecords | FlatMapRecords, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._results = ResultRows(uid, schema)
        self._step = _step_of(work, self._results.take_record)

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of the batch's records."""
        pieces = call_user_on_records(self.uid, self._step, BatchRecords(batch.rows))
        self.emit(self._results.batch_of_pieces(pieces))


def _step_of(
    work: MapRecords | FlatMapRecords, take_record: Callable[[Record], None]
) -> Callable[[Iterator[Record]], None]:
    def map_records(function: Callable[[Record], Record], records: Iterator[Record]) -> None:
        for record in records:
            take_record(function(record))

    def flat_map_records(
        expand: Callable[[Record], Iterable[Record]], records: Iterator[Record]
    ) -> None:
        for record in records:
            for result in expand(record):
                take_record(result)

    match work:
        case MapRecords(function):
            return partial(map_records, function)
        case FlatMapRecords(expand):
            return partial(flat_map_records, expand)


class RecordFilter(RunningOperator):
    """Keeps the records for which a function returns something true."""

    def __init__(self, uid: str, work: FilterRecords) -> None:
        super().__init__(uid)
        self._keeps = work.function

    def process(self, batch: Batch) -> None:
        """Emit the rows that are kept."""
        pieces = call_user_on_records(self.uid, self._evaluate_filter, BatchRecords(batch.rows))
        kept = list(chain.from_iterable(pieces))
        self.emit(batch.rows.filter(pa.array(kept, pa.bool_())))

    def _evaluate_filter(self, records: Iterator[Record]) -> list[bool]:
        keeps = self._keeps
        return [bool(keeps(record)) for record in records]


SPLITS = "splits"
"""The name of a source's operator list state."""


@dataclass(frozen=True, slots=True)
class _StoredSplit:
    """The layout of an element of a source's list state. Never changed: checkpoints hold it."""

    id: str
    position: bytes
    event_time_ms: int | None = None


_STORED_SPLITS = msgpack_decoder(_StoredSplit)


def encode_split(state: SplitState) -> bytes:
    """Return `state` as one element of operator list state."""
    split = state.split
    return msgspec.msgpack.encode(_StoredSplit(split.id, split.position, state.event_time_ms))


def decode_split(element: bytes) -> SplitState:
    """Return the state of the split that `element` holds."""
    stored = _STORED_SPLITS.decode(element)
    return SplitState(Split(stored.id, stored.position), stored.event_time_ms)


class SourceOperator(RunningOperator):
    """The head of a source chain: its state is where its splits stand."""

    def __init__(
        self,
        uid: str,
        reader: SourceReader,
        beside: Callable[[Callable[[], None]], object],
        watermarks: WatermarkStrategy | None = None,
        splits: Sequence[SplitState] = (),
    ) -> None:
        super().__init__(uid)
        self.reader = reader
        self._strategy = watermarks
        self._watermarks: SplitWatermarks | None = None
        if watermarks is not None:
            delay_ms, idle_after_s = watermarks.delay_ms, watermarks.idle_after_s
            self._watermarks = SplitWatermarks(splits, delay_ms, idle_after_s)
        self._beside = beside
        self._positions: dict[CheckpointId, Sequence[Split]] = {}
        self._awaited = AwaitedSplits()
        self._times = RecordTimesCounter()

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the server that the reader waits for, if any."""
        outage = self.reader.find_outage()
        return () if outage is None else (Wait(self.uid, outage.what, outage.lasted_s),)

    def process(self, batch: Batch) -> None:
        """Pass on what was read."""
        if times := self.reader.take_record_times():
            self._times.add(times, int(time.time() * 1000))
        if self._strategy is not None:
            self._see(self._strategy, batch.rows)
        self.emit(batch.rows)

    @property
    def has_watermarks(self) -> bool:
        """Whether `next_watermark` ever returns one."""
        return self._watermarks is not None

    def next_watermark(self) -> int | None:
        """Return what is to be told below now, once."""
        if self._watermarks is None:
            return None
        # An ended split would hold event time back for ever.
        for split_id in self.reader.list_ended_splits():
            self._watermarks.on_ended(split_id)
        return self._watermarks.next(time.monotonic())

    def _see(self, strategy: WatermarkStrategy, rows: pa.RecordBatch) -> None:
        """Take in the event times of rows that were just read."""
        assert self._watermarks is not None
        runs = self.reader.rows_by_split()
        if runs is None:
            runs = [(self._only_split(), rows.num_rows)]
        start = 0
        for split_id, count in runs:
            latest_ms = strategy.latest_ms(rows.slice(start, count))
            start += count
            if latest_ms is not None:
                self._watermarks.on_rows(split_id, latest_ms, time.monotonic())

    def _only_split(self) -> str:
        """Return the split of a reader that does not tell whose its rows are.

        Raises:
            ConfigError: It has several: one of them would make records of the others late.
        """
        splits = self.reader.snapshot()
        if len(splits) != 1:
            raise ConfigError(
                f"source {self.uid!r} has watermarks, which are kept for each split, and a"
                f" {type(self.reader).__name__} with {len(splits)} splits does not tell whose its"
                " rows are: implement SourceReader.rows_by_split, or read it without watermarks="
            )
        return splits[0].id

    def take_offer(self, splits: Sequence[Split]) -> None:
        """Take in splits that are read once a checkpoint that holds them is decided."""
        self._awaited.add_offer(splits)
        reach("offered")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Record the position of every split."""
        splits = (*self.reader.snapshot(), *self._awaited.snapshot(checkpoint))
        self._positions[checkpoint] = splits
        if self._watermarks is None:
            states = tuple(map(SplitState, splits))
        else:
            # How far event time was goes along with each position: a restart does not turn late
            # rows into rows in time.
            states = self._watermarks.with_event_times(splits)
        snapshot = OperatorSnapshot(self.uid, lists={SPLITS: tuple(map(encode_split, states))})
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def take_record_times(self) -> RecordTimes | None:
        """Return the times of the records that were passed on since the last call."""
        return self._times.take()

    def on_completed(self, checkpoint: CheckpointId) -> None:
        """Begin with the splits that are decided; tell the source how far it is, for lag tools."""
        if decided := self._awaited.take_decided(checkpoint):
            reach("decided")
            self.reader.add_splits(decided)
            if self._watermarks is not None:
                self._watermarks.add(map(SplitState, decided))
        splits = self._positions.get(checkpoint)
        # A newer decision covers older checkpoints, whose completion may never be heard.
        self._positions = {n: kept for n, kept in self._positions.items() if n > checkpoint}
        if splits:
            # On another thread: this is for lag tools, and a slow broker must not hold up rows.
            self._beside(lambda: self.reader.commit(splits))

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        """Forget the positions of a checkpoint that will never be."""
        self._positions.pop(checkpoint, None)
        self._awaited.drop_snapshot(checkpoint)

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()


class SinkMetricGroup:
    """Told by the writing thread and by the committing one, read by the heartbeat's."""

    def __init__(self, uid: str, sink_id: str, subtask: int, target: str = "") -> None:
        self._uid = uid
        self.sink_id = sink_id
        self.calls = OutsideCalls(uid, target)
        self._subtask = subtask
        self._lock = threading.Lock()
        self._open = False
        self._prepared_at: dict[TransactionId, float] = {}
        self._decided_at: dict[TransactionId, float] = {}
        self._committed = 0
        self._retried = 0
        self._rows = 0
        self._rejected = 0
        self._commit_ms = 0.0
        self._refusal = ""
        self._is_stuck = False

    def note_written(self) -> None:
        """Remember that rows are in the writer, and no pre-commit has taken them yet."""
        self._open = True

    def note_rejected(self, rows: int) -> None:
        """Count `rows` bad rows that the writer left out."""
        self._rejected += rows

    def pre_committed(self, committables: Sequence[Committable]) -> None:
        """Everything written is prepared, if there was anything."""
        with self._lock:
            self._open = False
            for committable in committables:
                self._prepared_at[committable.transaction] = time.monotonic()

    def note_decided(self, checkpoint: CheckpointId) -> None:
        """Note that all up to `checkpoint` is to be committed. A repeated call changes nothing."""
        now = time.monotonic()
        with self._lock:
            for transaction in self._prepared_at:
                if transaction.checkpoint <= checkpoint:
                    # The first decision counts: a later checkpoint lists what is still pending
                    # again.
                    self._decided_at.setdefault(transaction, now)

    def note_committed(self, committable: Committable) -> None:
        """Note that the target has committed `committable`: its rows are visible."""
        now = time.monotonic()
        with self._lock:
            self._prepared_at.pop(committable.transaction, None)
            decided_at = self._decided_at.pop(committable.transaction, now)
            self._commit_ms = round((now - decided_at) * 1000, 3)
            self._committed += 1
            self._rows += committable.rows
            self._refusal, self._is_stuck = "", False

    def note_retry(self, refusal: str, *, is_stuck: bool) -> None:
        """Count a commit that did not succeed and is tried again; `refusal` says why, to people."""
        with self._lock:
            self._retried += 1
            self._refusal, self._is_stuck = refusal, is_stuck

    def read(self) -> SinkMetrics:
        """Return the counts as of now."""
        with self._lock:
            oldest = min(self._prepared_at.values(), default=None)
            return SinkMetrics(
                uid=self._uid,
                sink_id=self.sink_id,
                subtask=self._subtask,
                open=int(self._open),
                prepared=len(self._prepared_at),
                committed=self._committed,
                retried=self._retried,
                rows_committed=self._rows,
                rows_rejected=self._rejected,
                oldest_prepared_s=(0.0 if oldest is None else round(time.monotonic() - oldest, 3)),
                last_commit_ms=self._commit_ms,
                commit_refusal=self._refusal,
                commit_stuck=self._is_stuck,
            )


_logger = logging.getLogger("onceflow.runtime")


class CommitsOfSink(Protocol):
    """What a sink's operator asks of whoever commits what it prepares."""

    metrics: SinkMetricGroup

    def await_commits(self) -> None:
        """Wait, before a pre-commit, while too many earlier ones are not committed."""
        ...

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all that the ack of `checkpoint` must list."""
        ...

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` is given up: what it has pre-committed waits for a later one."""
        ...


class SinkOperator(RunningOperator):
    """Writes to a sink's writer, and pre-commits at each barrier."""

    def __init__(
        self,
        uid: str,
        work: WriteTo,
        writer: SinkWriter,
        commits: CommitsOfSink,
        context: WriterContext,
    ) -> None:
        super().__init__(uid)
        self._context = context
        self._metrics = commits.metrics
        self._refusals = SinkRefusals(uid, context.attempt)
        self.takes_dead_letters = work.takes_dead_letters
        self._writer = writer
        self._commits = commits
        self._on_bad_row = work.on_bad_row

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the calls to the target that last for long, commits among them."""
        return self._metrics.calls.list_waits()

    def process(self, batch: Batch) -> None:
        """Hand the rows to the writer."""
        self._metrics.note_written()
        taking = self._metrics.calls.during("to take rows")
        with taking, self._refusals.name_refusal("rows were not written"):
            self._writer.write(batch.rows)
        self._take_rejected()
        reach("write")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Pre-commit; the ack will list all that is pending, this checkpoint's included."""
        self._commits.await_commits()
        # After this the rows survive a crash, and stay invisible until the decision.
        refusal = self._refusals.name_refusal(f"checkpoint {checkpoint} was not pre-committed")
        with self._metrics.calls.during("to pre-commit"), refusal:
            committables = self._writer.pre_commit(checkpoint)
        self._require_own_names(committables)
        # Before the sink of dead letters, which comes later in the chain, takes its own snapshot.
        self._take_rejected()
        reach("prepared")
        self._refusals.record_pre_commit(checkpoint, committables)
        snapshot = OperatorSnapshot(
            self.uid, committables=self._commits.record_pre_commit(checkpoint, committables)
        )
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def on_completed(self, checkpoint: CheckpointId) -> None:
        """Record that the rows up to `checkpoint` are decided."""
        self._refusals.record_decision(checkpoint)

    def _require_own_names(self, committables: Sequence[Committable]) -> None:
        """Raise ConfigError unless each of `committables` is named for this very subtask.

        A decision with the name of another sink id or subtask would be committed now, and found by
        no recovery: after a crash its rows would be lost.
        """
        for committable in committables:
            named = committable.transaction
            own = self._context.transaction(CheckpointId(named.checkpoint), named.sequence)
            if named != own:
                raise ConfigError(
                    f"sink {self.uid!r}: pre_commit of {type(self._writer).__name__} returned"
                    f" transaction {named}, and what this subtask pre-commits is named {own}. Take"
                    " each name from WriterContext.transaction or TransactionNamer; nothing of"
                    " this checkpoint is committed"
                )

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        """Tell the committer, which may have begun a commit."""
        self._commits.record_abort(checkpoint)

    def close(self) -> None:
        """Roll back what is open."""
        self._writer.close()

    def _take_rejected(self) -> None:
        for rejected in self._writer.take_rejected():
            before = self.rejected
            letters = letters_of_rows(rejected.rows, rejected.reasons)
            self.reject(letters)
            self._metrics.note_rejected(len(letters))
            # At 1, 10, 100 …: a stream of bad rows must not fill the disk with log lines.
            if len(str(before)) < len(str(self.rejected)) or not before:
                _logger.warning(
                    "sink %s leaves out bad rows (%s), %d so far; one of them: %s",
                    self.uid,
                    self._on_bad_row.value,
                    self.rejected,
                    letters[0].reason,
                )
