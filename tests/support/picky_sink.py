"""A directory sink with two habits of database sinks: it refuses rows and routes them by a key.

A row whose amount is `REFUSED_AMOUNT` is refused at once; one whose account is null is refused at
the barrier, as a server's constraint would. Each row is written with the subtask that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from tests.support.directory_sink import DirectorySink

from onceflow.core.errors import BadRow
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter, WriterContext

REFUSED_AMOUNT = -493


@dataclass(frozen=True)
class PickySink(DirectorySink):
    """Refuses some rows; brings rows together by `key`."""

    key: tuple[str, ...] = ()

    def routing_key(self) -> tuple[str, ...]:
        return self.key

    def writer(self, context: WriterContext) -> SinkWriter:
        return _PickyWriter(super().writer(context), context)


class _PickyWriter(SinkWriter):
    def __init__(self, inner: SinkWriter, context: WriterContext) -> None:
        self._inner = inner
        self._context = context
        self._held: list[pa.RecordBatch] = []
        self._rejected: list[RejectedRows] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._held.append(self._without(batch, pc.equal(batch["amount"], REFUSED_AMOUNT), "amount"))

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        for held in self._held:
            batch = self._without(held, pc.is_null(held["account"]), "no account")
            subtask = pa.array([self._context.subtask] * batch.num_rows, pa.int32())
            if batch.num_rows:
                self._inner.write(batch.append_column("subtask", subtask))
        self._held.clear()
        return self._inner.pre_commit(checkpoint)

    def take_rejected(self) -> Sequence[RejectedRows]:
        rejected, self._rejected = self._rejected, []
        return rejected

    def close(self) -> None:
        self._inner.close()

    def _without(self, batch: pa.RecordBatch, bad: pa.Array, why: str) -> pa.RecordBatch:
        if pc.any(bad).as_py():
            refused = batch.filter(bad)
            if self._context.on_bad_row is OnBadRow.FAIL:
                raise BadRow(f"refused: {why} in {refused.to_pylist()[0]}")
            self._rejected.append(RejectedRows(refused, [f"refused: {why}"] * refused.num_rows))
        return batch.filter(pc.invert(bad))
