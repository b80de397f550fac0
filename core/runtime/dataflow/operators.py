"""The operators of a chain as they run.

One instance a subtask, used by the chain's thread alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from onceflow.core.dead_letters import DeadLetter, batch_of_letters
from onceflow.core.errors import UserFunctionError
from onceflow.core.functions import Record
from onceflow.core.graph import (
    FilterRecords,
    FlatMapRecords,
    MapBatches,
    MapRecords,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.elements import Batch
from onceflow.core.runtime.dataflow.user_functions import batch_of, call_user, call_user_on_records
from onceflow.core.state import StateWriter

Emit = Callable[[Batch], None]


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
        self._step = _step_of(work)
        self._schema = schema

    def process(self, batch: Batch) -> None:
        """Emit what the function makes of the batch's records."""
        made = call_user_on_records(self.uid, self._step, batch.rows)
        if isinstance(self._work, FilterRecords):
            self.emit(batch.rows.filter(pa.array(made, pa.bool_())))
        else:
            self.emit(batch_of(made, self._schema, self.uid))


def _step_of(
    work: MapRecords | FlatMapRecords | FilterRecords,
) -> Callable[[Iterator[Record]], list[Any]]:
    match work:
        case FilterRecords(keeps):
            return lambda records: [bool(keeps(record)) for record in records]
        case MapRecords(function):
            return lambda records: [function(record) for record in records]
        case FlatMapRecords(expand):
            return lambda records: [result for record in records for result in expand(record)]
