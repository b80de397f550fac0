"""The operators that have keyed state, as they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.functions import Record
from onceflow.core.graph import ProcessKeyed, RunAggregates
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.elements import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.records import keys_of
from onceflow.core.runtime.dataflow.user_functions import (
    batch_of,
    call_user,
    call_user_on_records,
    user_error,
)
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, StateWriter


class KeyedOperator(RunningOperator):
    """An operator with keyed state."""

    def __init__(self, uid: str, store: KeyedStateStore) -> None:
        super().__init__(uid)
        self.store = store
        self.dropped: tuple[str, ...] = ()
        """What the restored snapshot held and this operator does not take, for people."""

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
        self.dropped = store.opened()

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of each record."""
        keys = keys_of(batch.rows, self._key)
        self.store.prefetch(keys)
        results = call_user_on_records(self.uid, partial(self._apply, keys), batch.rows)
        self.emit(batch_of(results, self._schema, self.uid))

    def _apply(self, keys: Sequence[Any], records: Iterator[Record]) -> list[Record]:
        set_key = self.store.set_current_key
        process = self._function.process
        results: list[Record] = []
        append, extend = results.append, results.extend
        for key, record in zip(keys, records, strict=True):
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
        self.dropped = store.opened()

    def process(self, batch: Batch) -> None:
        """Emit the batch with its aggregate columns."""
        rows = batch.rows
        values = {
            name: rows.column(column)
            for name, column in self._columns.items()
            if column is not None
        }
        keys = [rows.column(name) for name in self._key]
        try:
            running = self._table.update(keys, batch.hashes, values)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        arrays = [*rows.columns, *(pa.array(running[name]) for name in self._columns)]
        self.emit(pa.record_batch(arrays, schema=self._schema))
