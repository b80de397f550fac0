"""A database that prepares, as sinks see it: slow at times, and at times without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from tests.simulation_runtime.scheduler import Violation, scheduler
from tests.simulation_runtime.shared import Shared

from onceflow.core.errors import Fenced
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext

Row = tuple[Any, ...]

FAILING_STEPS = 25_000
"""The steps of a schedule in which targets fail. Later every call succeeds, so that a job which
waits for commits in vain is a mistake of the product, and not bad luck."""


@dataclass
class Target:
    """The tables of one target."""

    slowness_s: float = 0.0
    failure_rate: float = 0.0
    rows: list[Row] = field(default_factory=list[Row])
    prepared: dict[TransactionId, list[Row]] = field(default_factory=dict[TransactionId, list[Row]])
    proofs: set[TransactionId] = field(default_factory=set[TransactionId])
    attempt: int = 0
    log_id: str = ""

    def call(self) -> None:
        """Take the time of one call."""
        run = scheduler()
        run.pause()
        if self.slowness_s:
            run.sleep(run.rng.random() * self.slowness_s)

    def fails(self) -> bool:
        """Draw whether the target does not answer."""
        run = scheduler()
        return run.rng.random() < self.failure_rate and run.steps < FAILING_STEPS

    def copy_state(self) -> tuple[Any, ...]:
        """Return a copy of all that is in the tables."""
        return deepcopy((self.rows, self.prepared, self.proofs, self.attempt, self.log_id))

    def put_back(self, state: tuple[Any, ...]) -> None:
        """Become as when `state` was copied."""
        self.rows, self.prepared, self.proofs, self.attempt, self.log_id = deepcopy(state)


class SimulatedSink(Shared, Sink):
    """Writes into a `Target`."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        del schema
        target = self.target
        target.call()
        if target.log_id not in {"", context.log_id}:
            raise Violation(f"the log of {context.sink_id} is another one")
        if context.attempt < target.attempt:
            raise Fenced(f"attempt {context.attempt} of {context.sink_id} is overtaken")
        target.attempt, target.log_id = context.attempt, context.log_id
        scheduler().pause()

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        self.target.call()
        target = self.target
        return to_record(context.sink_id, target.attempt, target.proofs, proofs=target.proofs)

    def writer(self, context: WriterContext) -> SinkWriter:
        return _Writer(self.target, context)

    def committer(self, context: CommitterContext) -> Committer:
        return _Committer(self.target, context)


class _Writer(SinkWriter):
    def __init__(self, target: Target, context: WriterContext) -> None:
        self._target = target
        self._context = context
        self._rows: list[Row] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._target.call()
        columns = [column.to_pylist() for column in batch.columns]
        self._rows += zip(*columns, strict=True)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        rows, self._rows = self._rows, []
        if not rows:
            return ()
        target, transaction = self._target, self._context.transaction(checkpoint)
        target.call()
        if self._context.attempt < target.attempt:
            raise Fenced(f"attempt {self._context.attempt} is overtaken")
        if transaction in target.prepared or transaction in target.proofs:
            raise Violation(f"{transaction} is prepared twice")
        target.prepared[transaction] = rows
        scheduler().pause()
        return (committables.Committable(transaction, len(rows)),)

    def close(self) -> None:
        self._rows = []


class _Committer(Committer):
    def __init__(self, target: Target, context: CommitterContext) -> None:
        self._target = target
        self._context = context

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        run, target, transaction = scheduler(), self._target, committable.transaction
        target.call()
        if target.fails():
            return committables.RetryLater("the target is away")
        rows = target.prepared.pop(transaction, None)
        if rows is None:
            if transaction in target.proofs:
                return committables.AlreadyCommitted()
            return committables.Lost(f"{transaction} is neither prepared nor proven")
        target.rows += rows
        target.proofs.add(transaction)
        run.pause()
        if target.fails():
            return committables.Unknown("the answer was lost")
        return committables.Committed()

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        self._target.call()
        if committable.transaction in self._target.proofs:
            return committables.AlreadyCommitted()
        self._target.prepared.pop(committable.transaction, None)
        scheduler().pause()
        return committables.Aborted()

    def in_doubt(self) -> Sequence[committables.Committable]:
        self._target.call()
        prepared = self._target.prepared.items()
        return [
            committables.Committable(transaction, len(rows))
            for transaction, rows in prepared
            if transaction.sink_id == self._context.sink_id
        ]

    def prune(self, before: CheckpointId) -> None:
        self._target.call()
        proofs = self._target.proofs
        self._target.proofs = {proof for proof in proofs if proof.checkpoint >= before}

    def close(self) -> None:
        pass
