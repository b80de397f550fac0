"""The operators of a chain as they run.

One instance a subtask, used by the chain's thread alone.
"""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from onceflow.core.crash_points import reach
from onceflow.core.dead_letters import DeadLetter, batch_of_letters, letters_of_rows
from onceflow.core.errors import OnceflowError, UserFunctionError
from onceflow.core.functions import Record
from onceflow.core.graph import (
    FilterRecords,
    FlatMapRecords,
    MapBatches,
    MapRecords,
    ProcessKeyed,
    RunAggregates,
    WriteTo,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.runtime.elements import Batch
from onceflow.core.runtime.records import batch_of, keys_of, records_of
from onceflow.core.runtime.sink_meter import SinkMeter
from onceflow.core.spi import SinkWriter
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, StateWriter

Emit = Callable[[Batch], None]

_logger = logging.getLogger("onceflow.runtime")


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """The synchronous part is done; `upload` does the rest on another thread."""

    uid: str
    upload: Callable[[StateWriter], OperatorSnapshot]


class RunningOperator(ABC):
    """One operator of one subtask."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.outputs: list[Emit] = []
        self.dead_letters: list[Emit] = []
        """Where bad records go; nowhere when they fail the job or are dropped."""
        self.records_in = 0
        self.rejected = 0
        """Bad records left out so far."""
        self.takes_dead_letters = False

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

    def reject(self, letters: Sequence[DeadLetter]) -> None:
        """Count `letters` and hand them to the sink of dead letters, if there is one."""
        if not letters:
            return
        self.rejected += len(letters)
        if self.dead_letters:
            batch = Batch(batch_of_letters(self.uid, letters))
            for output in self.dead_letters:
                output(batch)

    @abstractmethod
    def process(self, batch: Batch) -> None:
        """Compute and `emit` what follows from `batch`."""

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot | None:
        """Take the synchronous part of this operator's snapshot; None when it has no state."""
        return None

    def completed(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Hear that `checkpoint` is decided."""

    def aborted(self, checkpoint: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Hear that `checkpoint` will never be."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release everything. Safe to call twice."""


def call_user(uid: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, naming the operator when it raises.

    Raises:
        UserFunctionError: It raised something that is not onceflow's own; the traceback is in the
            message, because the original class may not exist on the driver.
    """
    try:
        return function(*arguments)
    except OnceflowError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-3:])
        raise UserFunctionError(
            f"the function of operator {uid!r} raised {type(error).__name__}: {error}\n{trace}"
        ) from error


class BatchMapper(RunningOperator):
    """Applies a function to whole batches."""

    def __init__(self, uid: str, work: MapBatches, schema: pa.Schema) -> None:
        super().__init__(uid)
        self._function = work.function
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit the function's result."""
        rows = call_user(self.uid, self._function, batch.rows)
        if not isinstance(rows, pa.RecordBatch) or rows.schema.names != self._schema.names:
            got = rows.schema.names if isinstance(rows, pa.RecordBatch) else type(rows).__name__
            raise UserFunctionError(
                f"map_batches of operator {self.uid!r} returned {got}, and its schema says"
                f" {self._schema.names}; pass schema=… if the columns change"
            )
        if rows.schema != self._schema:
            try:
                rows = rows.cast(self._schema)
            except (pa.ArrowException, ValueError) as error:
                raise UserFunctionError(
                    f"map_batches of operator {self.uid!r} returned {rows.schema}, which does not"
                    f" cast to its schema {self._schema}: {error}"
                ) from error
        self.emit(rows)


class RecordMapper(RunningOperator):
    """Applies a per-record function, whichever of the three kinds."""

    def __init__(
        self, uid: str, work: MapRecords | FlatMapRecords | FilterRecords, schema: pa.Schema
    ) -> None:
        super().__init__(uid)
        self._work = work
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of the batch's records."""
        match self._work:
            case FilterRecords(function):
                keep = [bool(kept) for kept in call_user(self.uid, _map, function, batch.rows)]
                self.emit(batch.rows.filter(pa.array(keep, pa.bool_())))
            case MapRecords(function):
                records = call_user(self.uid, _map, function, batch.rows)
                self.emit(batch_of(records, self._schema, self.uid))
            case FlatMapRecords(function):
                records = call_user(self.uid, _flat_map, function, batch.rows)
                self.emit(batch_of(records, self._schema, self.uid))


def _map(function: Callable[[Record], Any], rows: pa.RecordBatch) -> list[Any]:
    return [function(record) for record in records_of(rows)]


def _flat_map(function: Callable[[Record], Iterable[Record]], rows: pa.RecordBatch) -> list[Record]:
    return [result for record in records_of(rows) for result in function(record)]


class KeyedOperator(RunningOperator):
    """An operator with keyed state."""

    def __init__(self, uid: str, store: KeyedStateStore) -> None:
        super().__init__(uid)
        self.store = store

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Freeze the keyed state as of now."""
        pending = self.store.snapshot(checkpoint)
        uid = self.uid

        def upload(writer: StateWriter) -> OperatorSnapshot:
            return OperatorSnapshot(uid, keyed=pending.upload(writer))

        return PendingSnapshot(uid, upload)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Let the backend build on the files of `checkpoint`."""
        self.store.notify_completed(checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Keep the backend from building on the files of `checkpoint`."""
        self.store.notify_aborted(checkpoint)

    def close(self) -> None:
        """Close the state."""
        self.store.close()


class KeyedProcessor(KeyedOperator):
    """Applies a keyed function, one record at a time."""

    def __init__(
        self, uid: str, work: ProcessKeyed, store: KeyedStateStore, schema: pa.Schema
    ) -> None:
        super().__init__(uid, store)
        self._key = work.key
        self._function = work.function
        self._schema = schema
        call_user(uid, self._function.open, store)

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        self.emit(batch_of(call_user(self.uid, self._apply, batch.rows), self._schema, self.uid))

    def _apply(self, rows: pa.RecordBatch) -> list[Record]:
        keys = keys_of(rows, self._key)
        self.store.prefetch(keys)
        set_key = self.store.set_current_key
        process = self._function.process
        results: list[Record] = []
        append, extend = results.append, results.extend
        for key, record in zip(keys, records_of(rows), strict=True):
            set_key(key)
            result = process(record)
            if isinstance(result, dict):
                append(cast("Record", result))
            elif result is not None:
                extend(result)
        return results

    def close(self) -> None:
        """Close the function, then the state."""
        try:
            call_user(self.uid, self._function.close)
        finally:
            super().close()


class AggregateRunner(KeyedOperator):
    """Adds running aggregates as columns, a batch at a time."""

    def __init__(
        self, uid: str, work: RunAggregates, store: KeyedStateStore, input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:  # fmt: skip
        super().__init__(uid, store)
        self._key = work.key
        self._schema = schema
        self._columns = {name: aggregate.column for name, aggregate in work.aggregates.items()}
        self._table = store.accumulators(
            "running",
            [input_schema.field(name).type for name in work.key],
            [
                AccumulatorColumn(name, aggregate.op, aggregate.result_type(input_schema))
                for name, aggregate in work.aggregates.items()
            ],
        )

    def process(self, batch: Batch) -> None:
        """Emit the batch with its aggregate columns."""
        rows = batch.rows
        values = {
            name: rows.column(column)
            for name, column in self._columns.items()
            if column is not None
        }
        keys = [rows.column(name) for name in self._key]
        running = self._table.update(keys, batch.hashes, values)
        arrays = [*rows.columns, *(pa.array(running[name]) for name in self._columns)]
        self.emit(pa.record_batch(arrays, schema=self._schema))


class SinkOperator(RunningOperator):
    """Writes to a sink's writer, and pre-commits at each barrier."""

    def __init__(
        self,
        uid: str,
        work: WriteTo,
        writer: SinkWriter,
        pre_committed: Callable[[CheckpointId, Any], tuple[Any, ...]],
        meter: SinkMeter,
    ) -> None:
        super().__init__(uid)
        self._meter = meter
        self.takes_dead_letters = work.takes_dead_letters
        self._writer = writer
        self._pre_committed = pre_committed
        self._on_bad_row = work.on_bad_row

    def process(self, batch: Batch) -> None:
        """Hand the rows to the writer."""
        self._meter.written()
        self._writer.write(batch.rows)
        self._take_rejected()
        reach("write")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Pre-commit; the ack will list all that is pending, this checkpoint's included."""
        committable = self._writer.pre_commit(checkpoint)
        # Before the sink of dead letters, which comes later in the chain, takes its own snapshot.
        self._take_rejected()
        reach("prepared")
        snapshot = OperatorSnapshot(
            self.uid, committables=self._pre_committed(checkpoint, committable)
        )
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def close(self) -> None:
        """Roll back what is open."""
        self._writer.close()

    def _take_rejected(self) -> None:
        for rejected in self._writer.rejected():
            before = self.rejected
            letters = letters_of_rows(rejected.rows, rejected.reasons)
            self.reject(letters)
            self._meter.rejected(len(letters))
            # At 1, 10, 100 …: a stream of bad rows must not fill the disk with log lines.
            if len(str(before)) < len(str(self.rejected)) or not before:
                _logger.warning(
                    "sink %s leaves out bad rows (%s), %d so far; one of them: %s",
                    self.uid,
                    self._on_bad_row.value,
                    self.rejected,
                    letters[0].reason,
                )
