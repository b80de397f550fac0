"""The subtasks of one keyed operator side by side, without the rest of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa
from tests.conformance.state_job import MAX_PARALLELISM, Job

from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.state import KeyedStateStore, hash_keys, key_group_of

Record = dict[str, Any]
OperatorT = TypeVar("OperatorT", bound=KeyedOperator)


class KeyedRun(Generic[OperatorT]):
    """Operators that share the keys of one stream, and the records that they emit."""

    def __init__(
        self,
        job: Job,
        make: Callable[[KeyedStateStore], OperatorT],
        schema: pa.Schema,
        *,
        key: str,
        parallelism: int,
        restored: Sequence[OperatorSnapshot] = (),
        allow_non_restored_state: bool = False,
    ) -> None:
        """`make` returns the operator of one subtask, and `restored` has the state of all."""
        handles = [handle for snapshot in restored for handle in snapshot.keyed]
        self._job, self._schema, self._key = job, schema, key
        self._batches: list[pa.RecordBatch] = []
        self._groups: list[range] = []
        self.stores: list[KeyedStateStore] = []
        self.operators: list[OperatorT] = []
        for index in range(parallelism):
            store = job.open(
                handles,
                index=index,
                parallelism=parallelism,
                allow_non_restored_state=allow_non_restored_state,
            )
            operator = make(store)
            operator.outputs.append(lambda batch: self._batches.append(batch.rows))
            self._groups.append(job.context(index, parallelism).key_groups)
            self.stores.append(store)
            self.operators.append(operator)

    def take(self, records: Sequence[Record]) -> list[Record]:
        """Give each operator the records of its keys, and return what was emitted."""
        for groups, operator in zip(self._groups, self.operators, strict=True):
            mine = [r for r in records if key_group_of(r[self._key], MAX_PARALLELISM) in groups]
            batch = pa.RecordBatch.from_pylist(mine, self._schema)
            operator.receive(Batch(batch, hash_keys([batch.column(self._key)])))
        return self.take_emitted()

    def take_emitted(self) -> list[Record]:
        """Return the records that were emitted since the last call."""
        batches, self._batches[:] = list(self._batches), []
        return [record for batch in batches for record in batch.to_pylist()]

    def snapshot(self, *, savepoint: bool) -> list[OperatorSnapshot]:
        """Return the snapshots of all operators at the next checkpoint, or a savepoint."""
        checkpoint = self._job.next_checkpoint()
        snapshots: list[OperatorSnapshot] = []
        for operator in self.operators:
            take = operator.savepoint if savepoint else operator.snapshot
            snapshots.append(take(checkpoint).upload(self._job.storage))
            operator.on_completed(checkpoint)
        return snapshots
