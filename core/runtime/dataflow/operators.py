"""The running operators of a chain.

There is one instance per subtask, used only by the chain's thread. Sources and sinks have their own
modules: `source_operator` and `sink_operator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.functions import Record
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.work import (
    FilterRecords,
    FlatMapRecords,
    MapBatches,
    MapRecords,
    SelectSql,
)
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import Wait
from onceflow.core.protocol.record_times import RecordTimes
from onceflow.core.runtime.dataflow.batch_iterators import (
    BatchIteratorCalls,
    BatchIteratorFunction,
)
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_metrics import FunctionMetrics
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    as_schema,
    call_user,
    call_user_on_records,
)
from onceflow.core.spi.dead_letters import (
    DEAD_LETTERS,
    DEAD_LETTERS_TAG,
    DeadLetter,
    batch_of_letters,
)
from onceflow.core.state import StateWriter

Emit = Callable[[Batch], None]


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A snapshot whose synchronous part is done. `upload` does the other part on another thread."""

    uid: str
    upload: Callable[[StateWriter], OperatorSnapshot]
    discard: Callable[[], None] = lambda: None
    """Releases the data that `upload` would have read. `upload` is not called afterwards."""


class RunningOperator(ABC):
    """An operator of one subtask.

    These members tell an operator how far its input has come, in this order. A stop by the user
    is no end of the input: it calls neither `flush` nor `end_input`.

        on_watermark    No record at or before this event time is expected any more. Called any
                        number of times, only if a source has watermarks.
        on_watermark(MAX_WATERMARK)
                        Every input with watermarks has ended; if there is none, every input has
                        ended. Rows of other inputs may follow. Not called in a source's chain.
        flush           Every input has ended. Emit results that wait for more rows. The last rows
                        of earlier functions may still follow, and then a second call.
        end_input       No rows follow. Called once, and only before a barrier that ends the input:
                        all rows are decided, or in the savepoint of that barrier.
        emission_ended  Set after the barrier of a savepoint that stops the job. From then on the
                        operator must emit nothing; it still takes the snapshot of the last
                        checkpoint.
        close           The subtask ends, for whatever reason.

    So results that wait for event time belong in `on_watermark`, results that wait for the end of a
    bounded input in `flush`, and the results of a user's `on_end` in `end_input`.
    """

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.outputs: list[Emit] = []
        self.side_schemas: dict[str, pa.Schema] = {DEAD_LETTERS_TAG: DEAD_LETTERS}
        """The tags and row schemas of its side outputs, which `emit_to` accepts."""
        self._aside: dict[str, list[Emit]] = {}
        self.records_in = 0
        self.rejected = 0
        """The number of bad records left out so far."""
        self.function_metrics = FunctionMetrics(uid)
        self.takes_dead_letters = False
        self.emission_ended = False
        """True after a stop savepoint has been taken: the operator must emit no more rows."""

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each input's batches."""
        return (self.receive,)

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the external servers for which the operator waits. Any thread."""
        return ()

    def outlet(self, feed: Feed) -> list[Emit]:
        """Return the list of receivers of `feed`, which leaves this operator.

        The caller adds to it.

        Raises:
            ConfigError: It has no such side output, or the schemas differ.
        """
        if feed.tag is None:
            return self.outputs
        schema = self.side_schemas.get(feed.tag)
        if schema is None:
            raise ConfigError(
                f"side output {feed.tag!r} of operator {self.uid!r} is used, but the operator has"
                " no side output of that name. Its function must create it in open(), with"
                " side_output(tag)"
            )
        if schema != feed.schema:
            raise ConfigError(
                f"side output {feed.tag!r} of operator {self.uid!r} is used with columns"
                f" {feed.schema}, but its function emits {schema}: use one OutputTag for both"
            )
        return self._aside.setdefault(feed.tag, [])

    def receive(self, batch: Batch) -> None:
        """Process a batch from the preceding operator."""
        self.records_in += batch.rows.num_rows
        self.process(batch)

    def emit(self, rows: pa.RecordBatch) -> None:
        """Send `rows` to every operator and edge that follows."""
        if rows.num_rows:
            batch = Batch(rows)
            for output in self.outputs:
                output(batch)

    def emit_to(self, tag: str, rows: pa.RecordBatch) -> None:
        """Send `rows` to the receivers of side output `tag`. Without a receiver they are dropped.

        `side_schemas` must contain the tag before the first row, and `rows` must have its schema.
        """
        outputs = self._aside.get(tag)
        if outputs and rows.num_rows:
            batch = Batch(rows)
            for output in outputs:
                output(batch)

    def reject(self, letters: Sequence[DeadLetter]) -> None:
        """Count `letters` and send them to the sink of dead letters, if there is one."""
        if not letters:
            return
        self.rejected += len(letters)
        if DEAD_LETTERS_TAG in self._aside:
            self.emit_to(DEAD_LETTERS_TAG, batch_of_letters(self.uid, letters))

    def attach(  # noqa: B027 - optional hook
        self, wake: Callable[[], None], forward: Callable[[int], None]
    ) -> None:
        """Set callbacks, if this is the first operator of its chain.

        `wake` lets the subtask call `on_time`, and may be called on any thread. `forward` passes a
        held watermark on, to the other operators of the chain and to all outputs.
        """

    @property
    def holds_watermarks(self) -> bool:
        """True if the operator, the first one of its chain, gets `hold_watermark` for watermarks.

        It then gets no `on_watermark`, and passes each watermark on itself.
        """
        return False

    def hold_watermark(self, watermark: int) -> None:  # noqa: B027 - optional hook
        """Pass `watermark` on after the results of the rows before it."""

    @property
    def is_full(self) -> bool:
        """True if the subtask must not take further rows for now."""
        return False

    @property
    def absorbs_rows(self) -> bool:
        """True if it takes the rows before a barrier even if it is full, and emits none for them.

        The rows become part of the snapshot. Only the first operator of a chain is asked.
        """
        return False

    def outstanding(self) -> Batch | None:
        """Return a batch without rows, with the columns of the input, if results are outstanding.

        Return None if the operator has emitted all results. Only the first operator is asked.
        """
        return None

    @abstractmethod
    def process(self, batch: Batch) -> None:
        """Compute the results of `batch` and `emit` them."""

    @property
    def cpu_beside_s(self) -> float:
        """The CPU seconds that the operator has used on threads other than the chain's."""
        return 0.0

    @property
    def due_in_s(self) -> float | None:
        """The seconds until `on_time` has work to do; None if it has none."""
        return None

    def on_time(self) -> None:  # noqa: B027 - optional hook
        """Emit the results that are due by the clock."""

    def on_watermark(self, watermark: int) -> None:  # noqa: B027 - optional hook
        """Emit the results that are due at event time `watermark`, before it is forwarded.

        Rows that the operator emits later may be late for the operators that follow.
        """

    def flush(self) -> None:  # noqa: B027 - optional hook
        """Emit results that wait for more rows, because the input has ended."""

    def end_input(self) -> None:  # noqa: B027 - optional hook
        """Emit the function's results for the end of its input. Called once, before a barrier.

        All rows of the input are decided, or in the savepoint whose barrier comes next.
        """

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Take the synchronous part of this operator's snapshot; None if it has no state.

        Rows that it emits meanwhile belong to `checkpoint`: later operators take theirs afterwards.
        """
        return None

    def savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Do the same as `snapshot`, in a self-contained form that every backend restores."""
        return self.snapshot(checkpoint)

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Do the same as `snapshot`, in a self-contained form that the same backend restores."""
        return self.savepoint(checkpoint)

    def take_record_times(self) -> RecordTimes | None:
        """Return the times of the records since the last call; None if they are unknown."""
        return None

    def on_completed(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Handle the decision of `checkpoint`."""

    def on_aborted(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Handle the abort of `checkpoint`."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources. Idempotent."""


class BatchMapper(RunningOperator):
    """An operator that applies a function to whole batches."""

    def __init__(self, uid: str, work: MapBatches, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._function = work.function
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit the function's result."""
        made = call_user(self.uid, self._function, batch.rows)
        self.emit(as_schema(made, self._schema, self.uid))


class SqlMapper(RunningOperator):
    """An operator that applies a query to whole batches."""

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
    """An operator that applies a function of an iterator of batches; see `batch_iterators`."""

    def __init__(self, uid: str, function: BatchIteratorFunction) -> None:
        super().__init__(uid)
        self._calls = BatchIteratorCalls(uid, function)

    @property
    def cpu_beside_s(self) -> float:
        """The CPU time of the function's own thread."""
        return self._calls.cpu_s

    def process(self, batch: Batch) -> None:
        """Emit the results that the function yields before it asks for more."""
        for rows in self._calls.feed(batch.rows):
            self.emit(rows)

    def on_watermark(self, watermark: int) -> None:
        """End the call: its results belong before the watermark."""
        self.flush()

    def flush(self) -> None:
        """End the call, and emit the results that it has held back."""
        for rows in self._calls.finish():
            self.emit(rows)

    def snapshot(self, checkpoint: CheckpointId) -> None:
        """Keep nothing: all results of batches before the barrier are emitted before it."""
        self.flush()

    def close(self) -> None:
        """Abandon the current call."""
        self._calls.close()


class RecordMapper(RunningOperator):
    """An operator that applies a function from a record to one or several records."""

    def __init__(self, uid: str, work: MapRecords | FlatMapRecords, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._results = ResultRows(uid, schema)
        self._step = _make_step(work, self._results.take_record)

    def process(self, batch: Batch) -> None:
        """Emit the function's results for the batch's records."""
        pieces = call_user_on_records(self.uid, self._step, BatchRecords(batch.rows))
        self.emit(self._results.batch_of_pieces(pieces))


def _make_step(
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
    """An operator that keeps the records for which a function returns a true value."""

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
